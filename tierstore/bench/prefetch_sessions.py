"""What the simulated prefetcher learns of the requests themselves: who comes back, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefetch.pauses import Pauses

if TYPE_CHECKING:
    from tierstore.replay.traces import Request
    from tierstore.types import PageKey


class Sessions:
    """Which requests continue which, told by the pages alone, and when the next turn is to be expected."""

    def __init__(self) -> None:
        self._last: dict[PageKey, int] = {}
        self._ends: dict[int, float] = {}
        self._pauses: dict[int, Pauses] = {}

    def arrived(self, request: Request, at: float) -> int:
        """The session that the request goes on with, or a new one."""
        # The first page is what many sessions begin with, whoever ended with it.
        session = next((self._last.pop(k) for k in reversed(request.keys[1:]) if k in self._last), None)
        if session is None:
            session = len(self._ends)
            self._ends[session] = at
        else:
            self._pauses.setdefault(session, Pauses()).note(at - self._ends[session])
        return session

    def answered(self, session: int, request: Request, at: float) -> float | None:
        """When the next turn is expected; None while nothing is known of this session."""
        if request.keys:
            self._last[request.keys[-1]] = session
        self._ends[session] = at
        pauses = self._pauses.get(session)
        pause = None if pauses is None else pauses.expected_s
        return None if pause is None else at + pause
