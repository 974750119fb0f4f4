"""Who starts next: requests in the order they came. Those that wait are hints, so that their pages come up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Event as Flag

from prefetch import Waiting
from tierstore.serve.request import Ask, Event
from tierstore.store import TierStore
from tierstore.types import PageKey

_numbers = count()


@dataclass(slots=True, eq=False)
class Asked:
    """A request that waits or is under way. ``pages``: HBM slots that it may need at once, at most.

    ``ended``: set once the engine holds nothing of it any more.
    """

    ask: Ask
    tell: Callable[[Event], None]
    keys: Sequence[PageKey]
    pages: int
    asked_at: float
    """By ``monotonic``."""
    cancelled: Flag = field(default_factory=Flag)
    ended: Flag = field(default_factory=Flag)
    name: str = field(default_factory=lambda: f"{next(_numbers)}")


class Line:
    """The requests that wait. Hints tell an attached prefetcher who is how far from its start. One thread at a time."""

    def __init__(self, store: TierStore) -> None:
        self._line: deque[Asked] = deque()
        self._hints = Waiting(store, name="serve")

    def __len__(self) -> int:
        return len(self._line)

    def add(self, asked: Asked) -> None:
        """At the end."""
        self._line.append(asked)
        self._hints.add(asked.name, asked.keys)

    def take(self, room: int) -> Asked | None:
        """Who starts now, no longer waiting: the first, if ``room`` HBM pages are enough for it. Nobody passes it."""
        if not self._line or self._line[0].pages > room:
            return None
        asked = self._line.popleft()
        self._hints.started(asked.name)
        return asked

    def drop_cancelled(self) -> list[Asked]:
        """Those that were cancelled, no longer waiting."""
        found = [asked for asked in self._line if asked.cancelled.is_set()]
        for asked in found:
            self._line.remove(asked)
            self._hints.withdraw(asked.name)
            asked.ended.set()
        return found

    def drop_all(self) -> list[Asked]:
        """All of them, no longer waiting."""
        found = list(self._line)
        self._line.clear()
        self._hints.close()
        return found
