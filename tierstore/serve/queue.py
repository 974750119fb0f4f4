"""Who starts next: requests in the order they came, while pages from disk come up for those that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from threading import Event as Flag
from time import monotonic

from prefetch import Waiting
from tierstore.serve.asking import Ask, Event
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

PATIENCE_S = 5.0
"""Seconds for which others are preferred to a request whose pages are still on disk."""

_LOOK_AT = 8
"""How many of the line may be preferred: each look asks the store where a prompt's pages are."""

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
    asked_at: float = field(default_factory=monotonic)
    cancelled: Flag = field(default_factory=Flag)
    ended: Flag = field(default_factory=Flag)
    name: str = field(default_factory=lambda: f"{next(_numbers)}")


class Line:
    """The requests that wait. Hints tell an attached prefetcher who is how far from its start. One thread at a time."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._line: deque[Asked] = deque()
        self._hints = Waiting(store, name="serve")

    def __len__(self) -> int:
        return len(self._line)

    def add(self, asked: Asked) -> None:
        """At the end."""
        self._line.append(asked)
        self._hints.add(asked.name, asked.keys)

    def take(self, room: int, *, alone: bool) -> Asked | None:
        """Who starts now, no longer waiting; None: nobody. ``room``: HBM pages that are nobody's.

        The first, unless it waits for the disk and another does not, for ``PATIENCE_S`` at most. Nobody passes one that
        waits for room: it would never get any. ``alone``: nothing is computed meanwhile, so waiting gains nothing.
        """
        for asked in islice(self._line, _LOOK_AT):
            if asked.pages > room:
                break
            if self._is_near(asked):
                return self._leave(asked)
        if self._line and alone and self._line[0].pages <= room:
            return self._leave(self._line[0])
        return None

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

    def _is_near(self, asked: Asked) -> bool:
        if monotonic() - asked.asked_at > PATIENCE_S:
            return True
        return Tier.NVME not in self._store.match(asked.keys).tiers

    def _leave(self, asked: Asked) -> Asked:
        self._line.remove(asked)
        self._hints.started(asked.name)
        return asked
