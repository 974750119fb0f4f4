"""A server's queue of requests as hints: who is how far from its start, learnt from the starts before."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Self

from prefetch import telling
from tierstore.types import require_finite, require_time, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tierstore.store import TierStore
    from tierstore.types import PageKey

_LEARN = 0.25
"""Share of the newest interval in the pace."""
_MOVED = 0.25
"""A request is hinted anew once its expected start has moved by this share of the time that is left."""
_MOVED_S = 0.05
_PATIENCE_S = 600.0
"""How long beyond its expected start a request is still waited for, should nothing in the queue move meanwhile."""


@dataclass(slots=True)
class _Request:
    keys: tuple[PageKey, ...]
    priority: int
    not_before: float
    came: float
    told: float | None = None


class Waiting:
    """The requests that wait, in the order in which they will start. Hints are its only effect: it holds no page.

    A request at place n is expected n times the pace from now; the pace is an average of the intervals between starts
    of requests that waited, ``pace_s`` until there was one. The first ``most`` are hinted, the others when they come
    up. For one thread at a time; harmless on a store without a prefetcher, or closed.
    """

    def __init__(
        self,
        store: TierStore,
        *,
        name: str = "queue",
        pace_s: float = 1.0,
        most: int = 32,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        require_finite("pace_s", pace_s)
        self.pace_s = pace_s
        """Seconds between starts, as far as is known."""
        self._store = store
        self._name = name
        self._most = whole("most", most)
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._last_start: float | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self, request_id: str, keys: Sequence[PageKey], *, priority: int = 0, starts_in_s: float = 0.0
    ) -> None:
        """The request waits at the end of the queue. ``starts_in_s``: it will not start sooner than that.

        ValueError for one that waits already, or a time that is none.
        """
        require_time("starts_in_s", starts_in_s)
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} waits already")
        now = self._clock()
        self._requests[request_id] = _Request(tuple(keys), priority, now + starts_in_s, now)
        self._tell(now)

    def started(self, request_id: str) -> None:
        """The request has its lease, or needs none: nothing is kept for it any more, and the others move up.

        KeyError for one that does not wait.
        """
        now = self._clock()
        request = self._leave(request_id)
        if self._last_start is not None and request.came <= self._last_start:
            self.pace_s += _LEARN * (now - self._last_start - self.pace_s)
        self._last_start = now
        self._tell(now)

    def withdraw(self, request_id: str) -> None:
        """The request will not start: no copy starts for it from now on. KeyError for one that does not wait."""
        self._leave(request_id)
        self._tell(self._clock())

    def close(self) -> None:
        """Withdraws all requests. Idempotent."""
        for request_id in list(self._requests):
            self._leave(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leave(self, request_id: str) -> _Request:
        request = self._requests.pop(request_id)
        if request.told is not None:
            telling.end(self._store, self._label(request_id))
        return request

    def _tell(self, now: float) -> None:
        """In the order of the queue, whatever the pace does: an earlier one is never expected after a later one."""
        times = self._times(now)
        moved = any(
            request.told is not None and abs(max(request.told, now) - at) > max(_MOVED_S, _MOVED * (at - now))
            for (_, request), at in times
        )
        last = now
        for (request_id, request), at in times:
            if request.told is None or moved:
                at = max(at, last)
                label = self._label(request_id)
                ttl_s = at - now + _PATIENCE_S
                taken = bool(request.keys) and telling.expect(
                    self._store, label, request.keys, at - now, priority=request.priority, ttl_s=ttl_s
                )
                request.told = at if taken else None
            last = max(last, request.told or last)

    def _times(self, now: float) -> list[tuple[tuple[str, _Request], float]]:
        """The first requests, and when each will start as far as is known."""
        found, at = [], now
        for place, item in zip(range(self._most), self._requests.items(), strict=False):
            at = max(at, item[1].not_before, now + place * self.pace_s)
            found.append((item, at))
        return found

    def _label(self, request_id: str) -> str:
        return f"{self._name} {request_id}"
