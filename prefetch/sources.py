"""Helpers that give hints for many requests: a queue, a list of documents, or the turns of sessions.

``Waiting`` gives hints for the requests of a queue, which start one after another. ``ahead`` gives hints for
the next documents of a batch. ``Sessions`` gives a hint for the next turn of each session, after the
session's usual pause. The name of a hint is its ``request_id``. Each hint has a higher revision than the previous
hint of the same name. If the store is closed, hints have no effect and raise no exception.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from statistics import median
from threading import Lock
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Self, TypeVar

from tierstore.errors import StoreClosed
from tierstore.types import Hint, HintResult, require_finite, require_seconds, require_time, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from tierstore.store import TierStore
    from tierstore.types import PageKey


def expect(
    store: TierStore,
    name: str,
    keys: Sequence[PageKey],
    in_s: float,
    *,
    priority: int = 0,
    ttl_s: float | None = None,
) -> bool:
    """Give a ``will_need`` hint for pages that are needed in ``in_s`` seconds.

    Returns:
        Whether the hint was queued for a prefetcher.
    """
    # The revision is a time in ns, so that it exceeds that of any earlier hint with this name.
    hint = Hint(name, monotonic_ns(), tuple(keys), deadline_s=max(0.0, in_s), priority=priority, ttl_s=ttl_s)
    with suppress(StoreClosed):
        return store.hint(hint) is HintResult.DEFERRED
    return False


def end(store: TierStore, name: str) -> None:
    """Withdraw the hint with this name."""
    with suppress(StoreClosed):
        store.hint(Hint(name, monotonic_ns(), ()))


KNOWN = 3
"""Number of pauses that must be known before the next turn of a session is predicted.

With fewer pauses, most predictions would be wrong.
"""

OVERDUE_S = 2.0
"""Time in seconds, after the predicted start of a turn, for which the turn is still expected."""

_LAST = 32


class Pauses:
    """The last 32 pauses between the turns of one session, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LAST)

    def note(self, seconds: float) -> None:
        """Add a pause. A negative pause, which results from overlapping turns, counts as 0."""
        self._seconds.append(max(0.0, seconds))

    @property
    def expected_s(self) -> float | None:
        """The median of the pauses, or None if there are fewer than ``KNOWN``."""
        return median(self._seconds) if len(self._seconds) >= KNOWN else None


MOST_SESSIONS = 65536


@dataclass(slots=True)
class _Session:
    pauses: Pauses = field(default_factory=Pauses)
    ended: float | None = None


class Sessions:
    """A source of hints for chat sessions: predicts each session's next turn from its earlier pauses.

    The expected pause is the median of the session's last 32 pauses. At least three pauses must be known. Pages are
    never pinned. If there are more than 65,536 sessions, the session without a turn for the longest time is
    forgotten. Thread-safe.

    Args:
        store: The store to give hints to.
        name: Prefix of the hint names. A space and the session ID follow it.
        clock: Returns the time in seconds. Tests replace it.
    """

    def __init__(
        self, store: TierStore, *, name: str = "next turn of", clock: Callable[[], float] = monotonic
    ) -> None:
        self._store = store
        self._name = name
        self._clock = clock
        self._lock = Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def began(self, session_id: str) -> None:
        """Record that a turn of the session has started, which ends the pause."""
        with self._lock:
            session = self._known(session_id)
            if session.ended is not None:
                session.pauses.note(self._clock() - session.ended)
                session.ended = None

    def ended(self, session_id: str, keys: Sequence[PageKey], ttl_s: float) -> float:
        """Record that a turn has ended, and predict the next one. May be called again for the same turn.

        Args:
            session_id: ID of the session.
            keys: The pages that the next turn starts with.
            ttl_s: Number of seconds for which to retain the pages if the next turn cannot be predicted.

        Returns:
            The number of seconds for which to retain the pages. If a prefetcher has accepted a hint for the next
                turn, this is the time until 2 s after the predicted start of that turn, but at most ``ttl_s``.
                Otherwise, it is ``ttl_s``. The caller gives the ``retain`` hint itself.

        Raises:
            TypeError, ValueError: ``ttl_s`` is not a duration.
        """
        require_seconds("ttl_s", ttl_s)
        with self._lock:
            session = self._known(session_id)
            session.ended = self._clock()
            pause = session.pauses.expected_s
        if pause is None or pause >= ttl_s or not keys:
            return ttl_s
        until = min(ttl_s, pause + OVERDUE_S)
        taken = expect(self._store, self._label(session_id), keys, pause, ttl_s=until)
        return until if taken else ttl_s

    def expected_s(self, session_id: str) -> float | None:
        """Return the expected pause in seconds before the session's next turn, or None if it is unknown."""
        with self._lock:
            session = self._sessions.get(session_id)
            return None if session is None else session.pauses.expected_s

    def forget(self, session_id: str) -> None:
        """Forget a session that is over, and withdraw its hint, so that no more promotions start for it.

        Idempotent.
        """
        with self._lock:
            known = self._sessions.pop(session_id, None)
        if known is not None:
            end(self._store, self._label(session_id))

    def _known(self, session_id: str) -> _Session:
        session = self._sessions.setdefault(session_id, _Session())
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def _label(self, session_id: str) -> str:
        return f"{self._name} {session_id}"


_LEARN = 0.25
"""Weight of the latest interval between two starts in the pace, which is a moving average."""
_MOVED = 0.25
"""Fraction of the time until an expected start. If the expected start changes by more than that, hints are renewed."""
_MOVED_S = 0.05
_PATIENCE_S = 600.0
"""Time in seconds for which a request's hint stays active after the expected start if no request starts."""


@dataclass(slots=True)
class _Request:
    keys: tuple[PageKey, ...]
    priority: int
    not_before: float
    came: float
    told: float | None = None


class Waiting:
    """A source of hints for a queue of requests, in the order in which they will start.

    The request at position n, counted from 0, is expected to start after n times the pace. The pace is a
    moving average of the intervals between starts. Only the first ``most`` requests have hints; the others get hints
    when they move up. Pages are never pinned. On a closed store or without a prefetcher, hints have no effect. Not
    thread-safe.

    Args:
        store: The store to give hints to.
        name: Prefix of the hint names. A space and the request ID follow it.
        pace_s: Initial value of the pace, in seconds.
        most: Number of requests at the head of the queue that have hints.
        clock: Returns the time in seconds. Tests replace it.
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
        """The pace: expected number of seconds between starts."""
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
        """Append a request to the queue. It gets a hint now if it is among the first ``most`` requests.

        Args:
            request_id: ID of the request.
            keys: The keys of the pages that it needs.
            priority: Priority of its hint.
            starts_in_s: Minimum time until the request starts, in seconds.

        Raises:
            ValueError: The request is already waiting, or ``starts_in_s`` is not a time.
        """
        require_time("starts_in_s", starts_in_s)
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already waiting")
        now = self._clock()
        self._requests[request_id] = _Request(tuple(keys), priority, now + starts_in_s, now)
        self._tell(now)

    def started(self, request_id: str) -> None:
        """Remove a request that has its lease, or that needs no lease. Its hint ends, and later requests move up.

        Raises:
            KeyError: The request is not waiting.
        """
        now = self._clock()
        request = self._leave(request_id)
        if self._last_start is not None and request.came <= self._last_start:
            self.pace_s += _LEARN * (now - self._last_start - self.pace_s)
        self._last_start = now
        self._tell(now)

    def withdraw(self, request_id: str) -> None:
        """Remove a request that will not start, and end its hint.

        Raises:
            KeyError: The request is not waiting.
        """
        self._leave(request_id)
        self._tell(self._clock())

    def close(self) -> None:
        """Withdraw all requests. Idempotent."""
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
            end(self._store, self._label(request_id))
        return request

    def _tell(self, now: float) -> None:
        """Give hints for new requests, and renew all hints if expected starts have changed.

        Even if the pace changes, no request is expected before a request that is ahead of it in the queue.
        """
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
                taken = bool(request.keys) and expect(
                    self._store, label, request.keys, at - now, priority=request.priority, ttl_s=ttl_s
                )
                request.told = at if taken else None
            last = max(last, request.told or last)

    def _times(self, now: float) -> list[tuple[tuple[str, _Request], float]]:
        """Return the first ``most`` requests of the queue, each with the time at which it is expected to start."""
        found, at = [], now
        for place, item in zip(range(self._most), self._requests.items(), strict=False):
            at = max(at, item[1].not_before, now + place * self.pace_s)
            found.append((item, at))
        return found

    def _label(self, request_id: str) -> str:
        return f"{self._name} {request_id}"


_Document = TypeVar("_Document")


def ahead(
    store: TierStore,
    documents: Iterable[_Document],
    keys_of: Callable[[_Document], Sequence[PageKey]],
    *,
    window: int = 4,
    name: str = "batch",
    clock: Callable[[], float] = monotonic,
) -> Iterator[_Document]:
    """Yield the documents one by one, and give hints for the next ``window`` documents.

    The current document keeps its hint until the next one is requested, so acquire its lease before that.
    When the iterator ends or is closed, all hints end.

    Args:
        store: The store to give hints to.
        documents: The documents. The iterable is not read beyond the window.
        keys_of: Returns the page keys of a document. Called once per document, when it enters the window.
        window: Number of documents after the current one for which to give hints, at least 1.
        name: Prefix of the hint names. Concurrent batches need different prefixes.
        clock: Returns the time in seconds. Tests replace it.

    Returns:
        An iterator over ``documents``, in the same order.

    Raises:
        ValueError: ``window`` is less than 1.
    """
    pages = whole("window", window, 1)
    return _ahead(documents, keys_of, pages, Waiting(store, name=name, most=pages + 1, clock=clock))


def _ahead(
    documents: Iterable[_Document],
    keys_of: Callable[[_Document], Sequence[PageKey]],
    window: int,
    waiting: Waiting,
) -> Iterator[_Document]:
    source, numbers = iter(documents), count()
    coming: deque[tuple[str, _Document]] = deque()
    with waiting:
        while True:
            for document in islice(source, window + 1 - len(coming)):
                coming.append((str(next(numbers)), document))
                waiting.add(coming[-1][0], keys_of(document))
            if not coming:
                return
            yield coming[0][1]
            waiting.started(coming.popleft()[0])
