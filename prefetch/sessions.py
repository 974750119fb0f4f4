"""Sessions as hints: a next turn is expected after the usual pause, and its pages are there by then."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from prefetch import telling
from prefetch.pauses import OVERDUE_S, Pauses
from tierstore.types import require_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey

MOST_SESSIONS = 65536


@dataclass(slots=True)
class _Session:
    pauses: Pauses = field(default_factory=Pauses)
    ended: float | None = None


class Sessions:
    """When sessions go on, learnt from the pauses between their turns. Hints are its only effect: it holds no page.

    A guess takes three pauses of the same session, whose median it is. Any thread; bounded: of more than 65,536
    sessions the one heard of longest ago is forgotten.
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
        """A turn of the session begins: its pause is over."""
        with self._lock:
            session = self._known(session_id)
            if session.ended is not None:
                session.pauses.note(self._clock() - session.ended)
                session.ended = None

    def ended(self, session_id: str, keys: Sequence[PageKey], ttl_s: float) -> float:
        """A turn has ended; ``keys``: what the next one begins with. For how many seconds to retain its pages.

        That is ``ttl_s``; where a next turn before that is expected, and a prefetcher has it in hand from now on, until
        2 s after that turn's time. May be called again for the same turn. TypeError or ValueError for a ``ttl_s`` that
        is no duration.
        """
        require_seconds("ttl_s", ttl_s)
        with self._lock:
            session = self._known(session_id)
            session.ended = self._clock()
            pause = session.pauses.expected_s
        if pause is None or pause >= ttl_s or not keys:
            return ttl_s
        until = min(ttl_s, pause + OVERDUE_S)
        taken = telling.expect(self._store, self._label(session_id), keys, pause, ttl_s=until)
        return until if taken else ttl_s

    def expected_s(self, session_id: str) -> float | None:
        """Seconds from the end of a turn to the next, as far as can be guessed; None: not yet."""
        with self._lock:
            session = self._sessions.get(session_id)
            return None if session is None else session.pauses.expected_s

    def forget(self, session_id: str) -> None:
        """The session is over: nothing is brought up for it any more. Idempotent."""
        with self._lock:
            known = self._sessions.pop(session_id, None)
        if known is not None:
            telling.end(self._store, self._label(session_id))

    def _known(self, session_id: str) -> _Session:
        session = self._sessions.setdefault(session_id, _Session())
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def _label(self, session_id: str) -> str:
        return f"{self._name} {session_id}"
