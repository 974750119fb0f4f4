"""What was asked for lately, pages that are gone included: the ghost memory of admission and of the orders that learn.

A record is a few small numbers of one page. Bounded: the page that was asked for longest ago is forgotten first. Its
clock counts pages asked for: ages are in pages, as capacities are.

Pages put one after another by one request are a run. How a run began says much of whether it is asked for again: after
the last page of a chat (it went on), after a page that a few others follow (it was left for another way), or after
none or one that many follow (a new chat after a shared beginning). So does its length.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.types import PageKey

_MOST = 255
_SHARED = 16
"""What so many pages follow is a shared beginning."""


class Record:
    """What is known of one page. Counts end at 255, but for ``depth``, ``place`` and ``span``.

    ``uses``: how often it was asked for after its first put. ``last``: when. ``depth``: pages before it.
    ``turn``: how often a request went on from pages of an earlier one to reach it: the turn of a chat.
    ``followers``: pages first put after it.

    Of its run: ``steps``, how often in a row runs before it went on from where one had ended, 0 if this one did not;
    ``branch``, whether it began after a page that a few others follow; ``place`` in it, from 1; ``span``, its length as
    far as it was known when the page was put; ``lot``, a number of 0 to 1 that is the run's own.

    ``kind``: a note of the watchers that learn lifetimes, the same for all of them.
    """

    __slots__ = (
        "branch",
        "depth",
        "followers",
        "key",
        "kind",
        "last",
        "lot",
        "place",
        "span",
        "steps",
        "turn",
        "uses",
    )

    def __init__(self, key: PageKey, before: Record | None, following: int = 0) -> None:
        self.key = key
        self.uses = self.last = self.followers = self.kind = 0
        self.turn = self.depth = self.steps = 0
        self.branch, self.place = False, 1
        self.lot = -1.0
        if before is not None:
            self._come_after(before)
        if self.lot < 0:
            self.lot = int.from_bytes(key[:4]) / (1 << 32)
        self.span = self.place + following

    def _come_after(self, before: Record) -> None:
        self.depth = before.depth + 1
        self.turn = min(before.turn + (before.uses > 0), _MOST)
        if before.followers:
            self.branch = before.followers < _SHARED
        elif before.uses:
            self.steps = min(before.steps + 1, _MOST)
        else:
            self.steps, self.branch, self.lot = before.steps, before.branch, before.lot
            self.place = before.place + 1
        before.followers = min(before.followers + 1, _MOST)


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

    def put(self, key: PageKey, parent: PageKey | None, following: int = 0) -> tuple[Record, bool]:
        """A page that no tier holds was put after ``parent``; its record, and whether it was remembered.

        ``following``: pages that are put after it at once.
        """
        record = self.get(key)
        if record is not None:
            self._again(record, below=True)
            return record, True
        before = None if parent is None else self.get(parent)
        record = self._records[key] = Record(key, before, following)
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
        record.uses = min(record.uses + 1, _MOST)
        self._records.move_to_end(record.key)
        self._begin(record)

    def _begin(self, record: Record) -> None:
        record.last = self.now
        self.now += 1
        for watcher in self.watchers:
            watcher.began(record, self.now)
