"""What was asked for lately, pages that are gone included: the ghost memory of admission and of the orders that learn.

A record is a few small numbers of one page. Bounded: the page that was asked for longest ago is forgotten first. Its
clock counts pages asked for: ages are in pages, as capacities are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.types import PageKey

MOST_USES = 255
MOST_TURNS = 255


class Record:
    """``uses``: how often the page was asked for after its first put. ``depth``: pages before it. ``last``: when.

    ``turn``: how often a request went on from pages of an earlier one to reach it: the turn of a chat.
    """

    __slots__ = ("depth", "key", "last", "turn", "uses")

    def __init__(self, key: PageKey, turn: int, depth: int) -> None:
        self.key = key
        self.turn = turn
        self.depth = depth
        self.uses = 0
        self.last = 0


class Watcher(Protocol):
    """Told of what happens to records. ``now`` is the history's clock."""

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """A remembered page was asked for; the record is still as it was before.

        ``below``: only the lowest tier had it, or none and it was put again.
        """
        ...

    def began(self, record: Record, now: int) -> None:
        """A page was asked for or first put; the record says so."""
        ...

    def forgotten(self, record: Record, now: int) -> None:
        """The record was pushed out: the page was not asked for again in its time."""
        ...


class History:
    """Records by page, at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self.now = 0
        """Pages asked for so far."""
        self.watchers: list[Watcher] = []
        self._records: OrderedDict[PageKey, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: PageKey) -> Record | None:
        """The page's record, if it is remembered. Changes nothing."""
        return self._records.get(key)

    def put(self, key: PageKey, parent: PageKey | None) -> tuple[Record, bool]:
        """A page that no tier holds was put after ``parent``; its record, and whether it was remembered."""
        record = self.get(key)
        if record is not None:
            self._again(record, below=True)
            return record, True
        before = None if parent is None else self.get(parent)
        turn = depth = 0
        if before is not None:
            turn = min(before.turn + 1 if before.uses else before.turn, MOST_TURNS)
            depth = before.depth + 1
        record = self._records[key] = Record(key, turn, depth)
        self._begin(record)
        if len(self._records) > self.limit:
            _, oldest = self._records.popitem(last=False)
            for watcher in self.watchers:
                watcher.forgotten(oldest, self.now)
        return record, False

    def hit(self, key: PageKey, *, below: bool) -> Record | None:
        """A page that a tier holds was asked for; its record, if it is remembered."""
        record = self.get(key)
        if record is not None:
            self._again(record, below=below)
        return record

    def _again(self, record: Record, *, below: bool) -> None:
        for watcher in self.watchers:
            watcher.asked(record, self.now, below=below)
        record.uses = min(record.uses + 1, MOST_USES)
        self._records.move_to_end(record.key)
        self._begin(record)

    def _begin(self, record: Record) -> None:
        record.last = self.now
        self.now += 1
        for watcher in self.watchers:
            watcher.began(record, self.now)
