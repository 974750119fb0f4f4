"""Sends what only HBM and HOST hold down to NVMe and waits for it: ``flush``, ``drain`` and ``close``."""

from __future__ import annotations

import logging
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.directory.transfers import BATCH_PAGES
from tierstore.directory.writeback import Ticket
from tierstore.errors import StoreClosed
from tierstore.types import FlushResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.build import Parts
    from tierstore.directory.directory import Directory
    from tierstore.mover import Mover, SyncMark
    from tierstore.pump import Progress

_log = logging.getLogger(__name__)

_FLUSH_STALL_S = 10.0


class Saving:
    """What of a store is to be finished, and its end. Any thread."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        self._directory = parts.directory
        self._mover = parts.mover
        self._arena = parts.arena
        self._progress = progress

    def flush(self) -> FlushResult:
        """``TierStore.flush``."""
        ticket = save_unsaved(self._directory, self._progress)
        wait = _Wait(self._progress, self._mover, ticket)
        wait.until(lambda: ticket.open == 0)
        erases, synced = self._settle_erases(wait)
        arrived = ticket.arrived if synced else 0
        pending = ticket.open + ticket.arrived - arrived
        return FlushResult(ticket.found + arrived, ticket.failed, pending, erases)

    def flush_evictions(self) -> int:
        """``TierStore.flush_evictions``."""
        return self._settle_erases(_Wait(self._progress, self._mover, Ticket()))[0]

    def _settle_erases(self, wait: _Wait) -> tuple[int, bool]:
        """Wait until all that was written and evicted before is durable: erases that are not, whether writes are."""
        with self._progress.lock:
            dying = self._directory.dying()

        def ended() -> bool:
            with self._progress.lock:
                dying.intersection_update(self._directory.dying())
            return not dying

        wait.until(ended)
        mark: SyncMark | None = self._mover.begin_sync()
        if mark is None:
            return 0, True
        wait.until(mark.done.is_set)
        if wait.over:
            self._mover.give_up_waiting()
        return (0 if mark.ok else self._mover.pending_erases) + len(dying), mark.synced

    def wait_idle(self, deadline: float) -> bool:
        """``TierStore.drain``, until the monotonic ``deadline``."""
        for _ in self._progress.until(deadline):
            with self._progress.lock:
                if self._progress.settled:
                    return True
        return False

    def close(self, timeout_s: float) -> None:
        """``TierStore.close``, of a store that is open; one call at a time."""
        deadline = monotonic() + timeout_s
        # Of a store that was interrupted nothing is saved: what memory holds is doubtful.
        with suppress(StoreClosed):
            with self._progress.lock:
                self._directory.hints.close()
            save_unsaved(self._directory, self._progress)
            self.wait_idle(deadline)
        self._progress.stop(max(0.0, deadline - monotonic()))
        if not self._mover.close(max(0.0, deadline - monotonic())):
            _log.warning("a copy or I/O thread did not end within %s s and was left behind", timeout_s)
        elif self._arena is not None:
            self._arena.close()


class _Wait:
    """Waits for several things in turn, and gives up for good when nothing has moved for 10 s.

    What moves is a page of the ticket, or the disk: a write or an erase of any page, or a single write within a batch.
    """

    def __init__(self, progress: Progress, mover: Mover, ticket: Ticket) -> None:
        self.over = False
        """Whether it gave up."""
        self._progress = progress
        self._mover = mover
        self._ticket = ticket
        self._last, self._since = self._moved(), monotonic()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds, or not at all once it is over."""
        for _ in self._progress.until(None):
            if holds() or self.over:
                return
            moved = self._moved()
            if moved != self._last:
                self._last, self._since = moved, monotonic()
            elif monotonic() - self._since > _FLUSH_STALL_S:
                self.over = True

    def _moved(self) -> tuple[object, ...]:
        return self._ticket.open, self._ticket.moves, self._mover.progress


def save_unsaved(directory: Directory, progress: Progress) -> Ticket:
    """Every page readable now and not in NVMe is on its way there; the ticket counts those that are not settled."""
    with progress.lock:
        directory.admitting.insist_on_all()
    try:
        return _send_down(directory, progress)
    finally:
        with progress.lock:
            directory.admitting.insisted()


def _send_down(directory: Directory, progress: Progress) -> Ticket:
    lifting = True
    while lifting:
        with progress.lock:
            progress.step()
            lifting = directory.residency.memory_only.lifting
    with progress.lock:
        keys, ticket = directory.begin_flush()
    keys = list(dict.fromkeys(keys))
    for start in range(0, len(keys), BATCH_PAGES):
        with progress.lock:
            directory.save(keys[start : start + BATCH_PAGES], ticket)
            progress.step()
    return ticket
