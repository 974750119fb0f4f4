"""Watches: callbacks for pages that enter or leave a tier, called in order and without the store's lock.

Code that holds the lock only appends each change to the queue of every watch. The store's thread and ``poll``
call the callbacks later.
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
    """A subscription to page changes in all tiers. Created by ``TierStore.watch``.

    It lasts until ``end`` is called or the store is closed.

    Attributes:
        lost: Number of changes that were discarded, because 1,048,576 changes were queued already.
    """

    def __init__(self, callback: Callable[[PageChange], object], watches: Watches) -> None:
        """Create a watch. For internal use: call ``TierStore.watch`` instead."""
        self.lost = 0
        self._callback = callback
        self._watches = watches
        self._untold: deque[tuple[PageKey, Tier, bool]] = deque()
        self._ended = False

    def end(self) -> None:
        """Stop calling the callback, and discard queued changes.

        Thread-safe and idempotent. May be called from within the callback. If the callback is running in
        another thread, it may still be running when ``end`` returns.
        """
        self._ended = True
        self._watches.remove(self)
        self._untold.clear()

    def _append(self, key: PageKey, tier: Tier, came: bool) -> bool:
        """Queue a change. Return whether the queue was empty before."""
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
    """All watches of a store.

    Args:
        residency: The residency table, which reports each change.
        wake: Called when the queue of a watch is no longer empty.
    """

    def __init__(self, residency: Residency, wake: Callable[[], None]) -> None:
        self._residency = residency
        self._wake = wake
        self._open: tuple[Watch, ...] = ()
        self._changing = Lock()
        """Held while ``_open`` is replaced. Reading ``_open`` needs no lock."""
        self._telling = Lock()
        """Held by the thread that is calling callbacks."""

    def add(self, callback: Callable[[PageChange], object]) -> Watch:
        """Create a watch that reports every later change. The caller holds the store's lock."""
        watch = Watch(callback, self)
        with self._changing:
            self._open = (*self._open, watch)
            self._residency.changed = self._append
        return watch

    def remove(self, watch: Watch) -> None:
        """Report no further changes to this watch. Thread-safe."""
        with self._changing:
            self._open = tuple(each for each in self._open if each is not watch)
            if not self._open:
                self._residency.changed = None

    def tell(self) -> None:
        """Call the callbacks until all queued changes are reported.

        The caller must not hold the store's lock. Only one thread at a time calls callbacks. A call that is
        made meanwhile, by another thread or by a callback, returns at once, because the first thread reports
        all changes. An exception raised by a callback is propagated, and the change counts as reported.
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
        """End all watches."""
        for watch in self._open:
            watch.end()

    def _append(self, key: PageKey, tier: Tier, came: bool) -> None:
        first = [watch._append(key, tier, came) for watch in self._open]
        if any(first):
            self._wake()
