"""Sends what only HBM and HOST hold down to NVMe and waits for it: ``flush``, ``drain`` and ``close``."""

from __future__ import annotations

import logging
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed
from tierstore.traffic import BATCH_PAGES

if TYPE_CHECKING:
    from tierstore.assembly import Parts
    from tierstore.directory import Directory
    from tierstore.progress import Progress
    from tierstore.sinks import Ticket

_log = logging.getLogger(__name__)

_FLUSH_STALL_S = 10.0


class Saving:
    """What of a store is to be finished, and its end. Any thread."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        self._directory = parts.directory
        self._mover = parts.mover
        self._arena = parts.arena
        self._progress = progress

    def flush(self) -> None:
        """``TierStore.flush``."""
        ticket = save_unsaved(self._directory, self._progress)
        wait_settled(ticket, self._progress, deadline=None, stall_s=_FLUSH_STALL_S)
        self._mover.sync(_FLUSH_STALL_S)
        # Pages evicted while they were being written are erased only now that their writes have ended.
        self._progress.advance()
        self._mover.sync(_FLUSH_STALL_S)

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
            ticket = save_unsaved(self._directory, self._progress)
            wait_settled(ticket, self._progress, deadline=deadline, stall_s=timeout_s)
            self.wait_idle(deadline)
        self._progress.stop(max(0.0, deadline - monotonic()))
        if not self._mover.close(max(0.0, deadline - monotonic())):
            _log.warning("a copy or I/O thread did not end within %s s and was left behind", timeout_s)
        elif self._arena is not None:
            self._arena.close()


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


def wait_settled(ticket: Ticket, progress: Progress, *, deadline: float | None, stall_s: float) -> None:
    """Until every page of the ticket has arrived or failed, time is up, or nothing moved for ``stall_s``."""
    last, since = ticket.open, monotonic()
    for _ in progress.until(deadline):
        if ticket.open == 0:
            return
        if ticket.open != last:
            last, since = ticket.open, monotonic()
        elif monotonic() - since > stall_s:
            return
