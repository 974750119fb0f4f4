"""Pages of queued requests brought from disk to host memory before vLLM asks for them: a few each step, oldest first.

A request is seen when it is queued, long before it may run. What is brought displaces no page that a load needs, and is
not pinned: a prediction that fails costs reads, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Hint, HintResult, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey

_A_CALL = 32
_A_STEP = 128
"""Pages that are started in one step at most: the scheduler's time is the engine's."""


class Ahead:
    """The queue of requests whose pages are wanted. ``most``: pages under way at once."""

    def __init__(self, store: TierStore, most: int) -> None:
        self._store = store
        self._most = most
        self._queue: dict[str, tuple[Hint, int]] = {}
        """By request its hint, and how many of its pages are there or on their way."""
        self._store.take_hints()  # from now on the store knows that somebody acts on them

    def want(self, request_id: str, keys: Sequence[PageKey], local: int) -> None:
        """A request was queued; the engine itself holds its first ``local`` pages now."""
        found = self._store.match(keys)
        if Tier.NVME not in found.tiers[local:]:
            return
        hint = Hint(request_id, 1, tuple(keys[: found.num_pages]))
        if self._store.hint(hint) is HintResult.DEFERRED:
            self._queue[request_id] = (hint, local)

    def over(self, request_id: str) -> None:
        """The request loads its pages now, or has gone."""
        if self._queue.pop(request_id, None) is not None:
            self._store.hint(Hint(request_id, 2, ()))

    def coming(self, request_id: str) -> bool:
        """Whether pages of the request are still on their way up."""
        if request_id not in self._queue:
            return False
        hint, done = self._queue[request_id]
        return done < len(hint.keys) or Tier.NVME in self._store.match(hint.keys[-_A_CALL:]).tiers

    def advance(self) -> None:
        """Starts what there is room for."""
        if not self._queue:
            return
        self._store.take_hints()
        left = _A_STEP
        for request_id, (hint, done) in list(self._queue.items()):
            while left > 0 and done < len(hint.keys):
                chunk = hint.keys[done : done + min(_A_CALL, left, self._most)]
                promoted = self._store.promote(hint, chunk, Tier.HOST)
                done += promoted.covered
                left -= len(promoted.keys)
                short = promoted.covered < len(chunk)
                if not promoted.in_force or (short and self._gone(hint.keys[done])):
                    done = len(hint.keys)  # it makes no other request wait
                elif short or promoted.in_flight >= self._most:
                    left = 0
            self._queue[request_id] = (hint, done)
            if left <= 0:
                return

    def _gone(self, key: PageKey) -> bool:
        """Whether a page can be read nowhere: what follows it is of no use."""
        return not self._store.match([key]).num_pages
