"""Recently requested pages, including evicted ones: the ghost memory of admission and of the learning orders.

A record is a few small numbers about one page. Memory is bounded: the page that was requested longest ago is forgotten
first. The clock counts requested pages, so ages are in pages, like capacities.

Pages that one request puts one after another are a run. How a run began says much about whether it is requested again:
after the last page of a chat (the chat continued), after a page that a few others follow (the chat branched), or after
none or one that many follow (a new chat after a shared prefix). So does its length.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.types import PageKey

_MOST = 255
_SHARED = 16
"""A page followed by at least this many pages is a shared prefix."""


class Record:
    """What is known about one page. Counts saturate at 255, except for ``depth``, ``place`` and ``span``.

    Attributes:
        uses: How often the page was requested after its first put.
        last: When it was requested last.
        depth: Number of pages before it.
        turn: How often a request continued from pages of an earlier one to reach it: the turn of a chat.
        followers: Number of pages first put after it.
        steps: How often in a row the runs before its own continued where one had ended; 0 if its own did not.
        branch: Whether its run began after a page that a few others follow.
        place: Position in its run, from 1.
        span: Length of its run, as far as it was known when the page was put.
        lot: A number from 0 to 1, the same for all pages of its run.
        kind: A note of the watchers that learn lifetimes; all of them use the same value.
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
    """An observer of records. ``now`` is the history's clock."""

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Observe that a remembered page was requested; the record still has its previous state.

        Args:
            record: The page's record.
            now: The history's clock.
            below: Only the lowest tier had the page, or no tier had it and it was put again.
        """
        ...

    def began(self, record: Record, now: int) -> None:
        """Observe that a page was requested or first put; the record is up to date."""
        ...

    def forgotten(self, record: Record, now: int) -> None:
        """Observe that a record was dropped: the page was not requested again in time."""
        ...


class History:
    """Records of at most ``limit`` pages."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self.now = 0
        """Number of pages requested so far."""
        self.watchers: list[Watcher] = []
        self._records: OrderedDict[PageKey, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: PageKey) -> Record | None:
        """Return the page's record, or None if it is not remembered. Changes nothing."""
        return self._records.get(key)

    def put(self, key: PageKey, parent: PageKey | None, following: int = 0) -> tuple[Record, bool]:
        """Record that a page which no tier holds was put after ``parent``.

        Args:
            key: The page.
            parent: The page before it, or None.
            following: Number of pages put after it in the same call.

        Returns:
            Its record, and whether it was remembered.
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
        """Record that a page which a tier holds was requested. Returns its record, or None if it is not remembered."""
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
