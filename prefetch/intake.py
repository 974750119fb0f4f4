"""The requests that are expected: of each the newest hint, until it is withdrawn or its time has run out. No clock."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tierstore.directory.hints import lifetime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.types import Hint

MOST_REQUESTS = 4096


class Expected(NamedTuple):
    """A ``will_need`` hint in force. ``deadline``, ``ends``: seconds on the clock of ``now``; inf: no deadline."""

    hint: Hint
    deadline: float
    ends: float

    @property
    def order(self) -> tuple[float, int]:
        """Who is needed sooner comes first; of equals the higher priority."""
        return (self.deadline, -self.hint.priority)


class Intake:
    """Bounded: with ``most`` requests in it, of those and a new one the one needed last is turned away."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.turned_away = 0
        self._most = most
        self._expected: dict[str, Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def take(self, hints: Iterable[Hint], now: float) -> None:
        """A newer hint replaces that of its request, or ends it: without keys, or if it needs nothing brought up."""
        for hint in hints:
            known = self._expected.get(hint.request_id)
            if known is not None and hint.revision <= known.hint.revision:
                continue
            self._expected.pop(hint.request_id, None)
            if hint.keys and hint.need == "will_need":
                deadline = inf if hint.deadline_s is None else now + hint.deadline_s
                self._expected[hint.request_id] = Expected(hint, deadline, now + lifetime(hint))
            if len(self._expected) > self._most:
                last = max(self._expected.values(), key=lambda each: each.order)
                del self._expected[last.hint.request_id]
                self.turned_away += 1

    def drop(self, hint: Hint) -> None:
        """The store says that the hint is in force no more."""
        known = self._expected.get(hint.request_id)
        if known is not None and known.hint.revision == hint.revision:
            del self._expected[hint.request_id]

    def expire(self, now: float) -> None:
        """Ends what has run out of time."""
        for request_id in [name for name, each in self._expected.items() if each.ends <= now]:
            del self._expected[request_id]

    def in_order(self) -> list[Expected]:
        """Who is needed sooner first."""
        return sorted(self._expected.values(), key=lambda each: each.order)
