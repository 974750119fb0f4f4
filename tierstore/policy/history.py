"""What was asked for lately, pages that are gone included: the ghost memory of admission and of eviction.

A record is a few small numbers of one page. Bounded: the page that was asked for longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.types import PageKey

MOST_USES = 3
MOST_TURNS = 7


class Record:
    """``uses``: how often the page was asked for after its first put, up to 3. ``depth``: pages before it.

    ``turn``: how often a request went on from pages of an earlier one to reach it, up to 7: the turn of a chat.
    """

    __slots__ = ("depth", "turn", "uses")

    def __init__(self, turn: int, depth: int) -> None:
        self.turn = turn
        self.depth = depth
        self.uses = 0


class History:
    """Records by page, at most ``limit``; ``forgotten`` is told of each that is pushed out."""

    def __init__(self, limit: int, forgotten: Callable[[Record], None] | None = None) -> None:
        self.limit = max(1, limit)
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._forgotten = forgotten

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: PageKey) -> Record | None:
        """The page's record, if it is remembered. Changes nothing."""
        return self._records.get(_short(key))

    def first(self, key: PageKey, parent: PageKey | None) -> Record:
        """A page that is not remembered was put. It may push out the oldest."""
        before = None if parent is None else self.get(parent)
        if before is None:
            record = Record(0, 0)
        else:
            turn = before.turn + 1 if before.uses else before.turn
            record = Record(min(turn, MOST_TURNS), before.depth + 1)
        self._records[_short(key)] = record
        if len(self._records) > self.limit:
            _, oldest = self._records.popitem(last=False)
            if self._forgotten is not None:
                self._forgotten(oldest)
        return record

    def again(self, key: PageKey, record: Record) -> None:
        """A remembered page was asked for, or put again."""
        record.uses = min(record.uses + 1, MOST_USES)
        self._records.move_to_end(_short(key))


def _short(key: PageKey) -> int:
    # Eight bytes of a digest: two pages that share them share a record, and nothing worse follows.
    return int.from_bytes(key[:8])
