"""Callbacks that are told of pages as they come to tiers and leave them, in order and outside the store's lock.

Under the lock a change is only appended to a queue of each callback. The store's thread and ``poll`` empty the queues.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from tierstore.types import PageChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.directory.residency import Residency
    from tierstore.types import PageKey, Tier

_MOST_UNTOLD = 1 << 20


class Watch:
    """A callback that is told of pages as they come and go, until ``end``. Made by ``TierStore.watch``.

    Attributes:
        lost: Changes that were never told, because 1,048,576 others waited to be told when they happened.
    """

    def __init__(self, callback: Callable[[PageChange], object], watches: Watches) -> None:
        """Use ``TierStore.watch``."""
        self.lost = 0
        self._callback = callback
        self._watches = watches
        self._untold: deque[tuple[PageKey, Tier, bool]] = deque()
        self._ended = False

    def end(self) -> None:
        """Tell nothing more; drop what was not told. Any thread, also from within the callback. Idempotent.

        A call of the callback that is under way in another thread goes on.
        """
        self._ended = True
        self._watches.remove(self)
        self._untold.clear()

    def _append(self, key: PageKey, tier: Tier, came: bool) -> bool:
        """Return whether this is the first change that waits to be told."""
        if len(self._untold) >= _MOST_UNTOLD:
            self.lost += 1
            return False
        self._untold.append((key, tier, came))
        return len(self._untold) == 1

    def _tell(self) -> None:
        while self._untold and not self._ended:
            try:
                change = self._untold.popleft()
            except IndexError:  # ended by another thread
                return
            self._callback(PageChange(*change))


class Watches:
    """All watches of a store. ``wake``: called when there is something to tell and nothing waited before."""

    def __init__(self, residency: Residency, wake: Callable[[], None]) -> None:
        self._residency = residency
        self._wake = wake
        self._open: tuple[Watch, ...] = ()
        self._changing = Lock()
        """Held while ``_open`` changes."""
        self._telling = Lock()
        """Held by the thread that calls callbacks."""

    def add(self, callback: Callable[[PageChange], object]) -> Watch:
        """Open a watch, which is told of every change after this call. With the store's lock held."""
        watch = Watch(callback, self)
        with self._changing:
            self._open = (*self._open, watch)
            self._residency.changed = self._append
        return watch

    def remove(self, watch: Watch) -> None:
        """Tell this watch nothing more. Any thread."""
        with self._changing:
            self._open = tuple(each for each in self._open if each is not watch)
            if not self._open:
                self._residency.changed = None

    def tell(self) -> None:
        """Call the callbacks until nothing is left to tell. Not with the store's lock held.

        One thread at a time. A thread that comes meanwhile, or a callback that comes here by a call of the store,
        returns at once: the first one tells what has happened since. What a callback raises passes; its change counts
        as told.
        """
        while any(watch._untold for watch in self._open):
            if not self._telling.acquire(blocking=False):
                return
            try:
                for watch in self._open:
                    watch._tell()
            finally:
                self._telling.release()

    def close(self) -> None:
        """End every watch."""
        for watch in self._open:
            watch.end()

    def _append(self, key: PageKey, tier: Tier, came: bool) -> None:
        first = [watch._append(key, tier, came) for watch in self._open]
        if any(first):
            self._wake()
