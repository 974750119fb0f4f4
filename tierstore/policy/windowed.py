"""Orders that try newcomers out in a small window first, and keep those of them that were used, or used more often.

A page in the window stays; what the window pushes out goes into the main part or, not worth it, is the next to leave.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from tierstore.policy.orders import BAND, SHIFT, Fifo, band

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.policy.history import History
    from tierstore.types import PageKey

_MAIN = 1 << SHIFT
_WINDOW = 1 << 100
"""Ranks below ``_MAIN``: of pages that leave next; from here on: of those in the window."""
_USES = 3
"""S3-FIFO's two bits."""


class _Windowed(Fifo):
    """The window is a queue of at most ``pages``; what it pushes out is asked about."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__()
        self._history = history
        self._most = max(1, pages)
        self._window: OrderedDict[PageKey, int] = OrderedDict()
        self._moved: list[tuple[PageKey, int, int]] = []

    def moved(self) -> Iterator[tuple[PageKey, int, int]]:
        moved, self._moved = self._moved, []
        return iter(moved)

    def _uses(self, key: PageKey) -> int:
        record = self._history.get(key)
        return 0 if record is None else record.uses

    def _try_out(self, key: PageKey) -> int:
        """The page is the newest of the window; pushes out what is too much."""
        self._window.pop(key, None)
        rank = self._window[key] = _WINDOW + next(self._next)
        while len(self._window) > self._most:
            oldest, before = self._window.popitem(last=False)
            self._moved.append((oldest, before, self._pushed_out(oldest)))
        return rank

    def _pushed_out(self, key: PageKey) -> int:
        """Rank of a page that the window has no room for: in the main part, or before it."""
        raise NotImplementedError


class S3Fifo(_Windowed):
    """S3-FIFO (Yang, 2023): the window has a tenth of the tier, and what was used twice there goes on to the main part,
    as does what is put again while it is remembered. Both are queues: use moves nobody, but a page of the main part
    that was used stays for as many rounds more, at most three.
    """

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history, pages // 10)
        self._round = 0
        self._counted: dict[PageKey, int] = {}
        """Uses of each page that have counted already: those from before it came."""

    def enter(self, key: PageKey) -> int:
        again = key not in self._counted and self._uses(key) > 0
        self._counted[key] = self._uses(key)
        self._window.pop(key, None)
        return self._keep(0) if again else self._try_out(key)

    def touch(self, key: PageKey, rank: int) -> int:
        if rank < 0:
            return self.enter(key)
        if not _MAIN <= rank < _WINDOW or not self._since(key):
            return rank
        rounds = min(_USES, max(0, (rank >> SHIFT) - 1 - self._round) + self._since(key))
        self._counted[key] = self._uses(key)
        return self._keep(rounds)

    def left(self, key: PageKey, rank: int) -> None:
        """A page of the main part that leaves ends a round."""
        if self._window.get(key) == rank:
            del self._window[key]
        self._counted.pop(key, None)
        if _MAIN <= rank < _WINDOW:
            self._round = max(self._round, (rank >> SHIFT) - 1)

    def _forget(self, key: PageKey) -> None:
        self._window.pop(key, None)
        self._counted.pop(key, None)

    def _keep(self, rounds: int) -> int:
        return _MAIN * (1 + self._round + rounds) + next(self._next)

    def _since(self, key: PageKey) -> int:
        return max(0, self._uses(key) - self._counted.get(key, 0))

    def _pushed_out(self, key: PageKey) -> int:
        if self._since(key) < 2:
            return next(self._next)
        self._counted[key] = self._uses(key)
        return self._keep(0)


class WTinyLfu(_Windowed):
    """W-TinyLFU (Einziger, 2017): the window is an LRU of a hundredth of the tier. What it pushes out takes the place
    of the next victim of the main part only if it was used more often. The main part is a segmented LRU: used again
    means protected, up to four fifths. Uses are those that the history remembers, not a sketch's.
    """

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history, pages // 100)
        self._probation: OrderedDict[PageKey, int] = OrderedDict()
        self._protected: OrderedDict[PageKey, int] = OrderedDict()
        self._most_protected = max(1, (pages - self._most) * 4 // 5)

    def enter(self, key: PageKey) -> int:
        self._forget(key)
        return self._try_out(key)

    def touch(self, key: PageKey, rank: int) -> int:
        if rank >= BAND:
            return next(self._next) + band(rank)
        if not _MAIN <= rank < _WINDOW:
            return self.enter(key)
        self._forget(key)
        renewed = self._protected[key] = 2 * _MAIN + next(self._next)
        if len(self._protected) > self._most_protected:
            oldest, before = self._protected.popitem(last=False)
            self._moved.append((oldest, before, self._on_probation(oldest)))
        return renewed

    def left(self, key: PageKey, rank: int) -> None:
        """It has no segment any more."""
        for segment in (self._window, self._probation, self._protected):
            if segment.get(key) == rank:
                del segment[key]

    def _forget(self, key: PageKey) -> None:
        for segment in (self._window, self._probation, self._protected):
            segment.pop(key, None)

    def _on_probation(self, key: PageKey) -> int:
        rank = self._probation[key] = _MAIN + next(self._next)
        return rank

    def _pushed_out(self, key: PageKey) -> int:
        victim = next(iter(self._probation), None)
        if victim is not None and self._uses(key) <= self._uses(victim):
            return next(self._next)
        return self._on_probation(key)
