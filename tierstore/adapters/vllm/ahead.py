"""Pages of queued requests brought from disk to host memory before vLLM asks for them: a few each step, in their order.

A request is seen when it is queued, long before it may run. What is brought displaces no page that a load needs, and is
not pinned: a prediction that fails costs reads, nothing else.
"""

from __future__ import annotations

from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.vllm.hints import NOTHING
from tierstore.types import Hint, HintResult, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.adapters.vllm.hints import Told
    from tierstore.store import TierStore
    from tierstore.types import PageKey

_A_CALL = 32
_A_STEP = 128
"""Pages that are started in one step at most: the scheduler's time is the engine's."""

_MOST_BEHIND = 4
"""Requests for whose pages nobody waits, at once: the newest."""


class _Wanted(NamedTuple):
    """``due``: when the request is expected to start, inf: it has, without them. ``done``: pages that are there or on
    their way.
    """

    hint: Hint
    due: float
    done: int

    @property
    def order(self) -> tuple[float, int]:
        return (self.due, -self.hint.priority)


class Ahead:
    """The queue of requests whose pages are wanted. ``most``: pages under way at once; ``room``: all that host memory
    holds."""

    def __init__(
        self, store: TierStore, most: int, room: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._store = store
        self._most = most
        self._room = room
        self._clock = clock
        self._revisions = count(1)
        self._queue: dict[str, _Wanted] = {}
        self._store.take_hints()  # from now on the store knows that somebody acts on them

    def want(self, request_id: str, keys: Sequence[PageKey], local: int, told: Told = NOTHING) -> None:
        """A request was queued; the engine itself holds its first ``local`` pages now.

        It is expected to start now, and so after all that came before, unless ``told`` says something else. What
        host memory has no room for besides its other pages is not waited for: it never comes.
        """
        found = self._store.match(keys[local:])
        end = local + min(found.num_pages, self._room)
        if Tier.NVME not in found.tiers[: self._room]:
            return
        hint = Hint(
            request_id,
            next(self._revisions),
            tuple(keys[:end]),
            deadline_s=told.starts_in_s or None,
            priority=told.priority,
        )
        if self._store.hint(hint) is HintResult.DEFERRED:
            self._queue[request_id] = _Wanted(hint, self._clock() + told.starts_in_s, local)

    def over(self, request_id: str) -> None:
        """The request loads its pages now, or has gone."""
        if self._queue.pop(request_id, None) is not None:
            self._store.hint(Hint(request_id, next(self._revisions), ()))

    def behind(self, request_id: str) -> None:
        """The request computes its pages itself: they come up after all that are waited for, for whoever asks next."""
        wanted = self._queue.get(request_id)
        if wanted is not None:
            self._queue[request_id] = wanted._replace(due=inf)
            late = [name for name, each in self._queue.items() if each.due == inf]
            for name in late[:-_MOST_BEHIND]:
                self.over(name)

    @property
    def waits(self) -> bool:
        """Whether pages are still to come up for which no request waits."""
        return any(wanted.due == inf for wanted in self._queue.values())

    def coming(self, request_id: str) -> bool:
        """Whether pages of the request are still on their way up."""
        if request_id not in self._queue:
            return False
        hint, _, done = self._queue[request_id]
        return done < len(hint.keys) or Tier.NVME in self._store.match(hint.keys[-_A_CALL:]).tiers

    def advance(self) -> None:
        """Starts what there is room for, for who is needed soonest first."""
        if not self._queue:
            return
        self._store.take_hints()
        left = _A_STEP
        for request_id, wanted in sorted(self._queue.items(), key=lambda each: each[1].order):
            hint, _, done = wanted
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
            self._queue[request_id] = wanted._replace(done=done)
            if wanted.due == inf and done >= len(hint.keys):
                self.over(request_id)
            if left <= 0:
                return

    def _gone(self, key: PageKey) -> bool:
        """Whether a page can be read nowhere: what follows it is of no use."""
        return not self._store.match([key]).num_pages
