"""The history of recently requested pages, including evicted ones.

Admission and the learning policies use it. A record contains a few small numbers about one page. The number
of records is bounded: the least recently requested page is forgotten first. The history's clock counts
requested pages, so that ages are measured in pages, like capacities.

A run consists of the consecutive pages of a sequence that one request puts. Whether they are requested again
depends largely on how the run started. It may start after the last page of a chat (the chat continued), after
a page with a few other successors (the chat branched), or after no page or a page with many successors (a new
chat after a shared prefix). The length of the run matters, too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.types import PageKey

_MOST = 255
_SHARED = 16
"""A page with at least this many successors is a shared prefix."""


class Record:
    """The history of one page. No count exceeds 255, except ``depth``, ``place`` and ``span``.

    Attributes:
        key: The page.
        uses: Number of times that the page was requested, or put again, after it was first put.
        last: Time of the last request or put, on the history's clock.
        depth: Number of pages before this one in its sequence.
        turn: Number of earlier requests that the sequence continues: for a chat, the number of its turns so
            far.
        followers: Number of pages that were put directly after this one.
        steps: Number of times that the chat was continued without a branch, up to the page's run. 0 if the
            run did not continue a chat.
        branch: Whether the run started after a page that already had a few other successors.
        place: Position of the page in its run, starting at 1.
        span: Length of the run in pages, as far as it was known when the page was put.
        lot: A number from 0 to 1 that all pages of a run share, for random selections.
        kind: The page's kind, as assigned by watchers that learn lifetimes. They all assign the same kind.
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
    """An observer of a history. ``now`` is the current time on the history's clock."""

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Observe that a remembered page was requested or put again. The record is not updated yet.

        Args:
            record: The page's record.
            now: The current time on the history's clock.
            below: Whether no memory tier had the page: only a record tier had it, or it was put again because
                no tier had it.
        """
        ...

    def began(self, record: Record, now: int) -> None:
        """Observe that a page was requested, or put. The record is already updated."""
        ...

    def forgotten(self, record: Record, now: int) -> None:
        """Observe that the history is full and has removed the record of the least recently used page."""
        ...


class History:
    """The records of up to ``limit`` pages. The least recently requested page is forgotten first."""

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit)
        self.now = 0
        """The history's clock: the number of pages that were requested or put so far."""
        self.watchers: list[Watcher] = []
        self._records: OrderedDict[PageKey, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: PageKey) -> Record | None:
        """Return the page's record, or None if the history does not remember the page. Changes nothing."""
        return self._records.get(key)

    def put(self, key: PageKey, parent: PageKey | None, following: int = 0) -> tuple[Record, bool]:
        """Record a put of a page that was in no tier.

        Args:
            key: The page.
            parent: The page before it, or None.
            following: Number of pages after it that are put in the same call.

        Returns:
            The page's record, and whether the page was already remembered.
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
        """Record a request for a page that is in some tier.

        Args:
            key: The page.
            below: Whether only a record tier has the page.

        Returns:
            The page's record, or None if the page is not remembered.
        """
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
