"""Sends what only HBM and HOST hold down to NVMe, for ``flush`` and ``close``."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from tierstore.traffic import BATCH_PAGES

if TYPE_CHECKING:
    from tierstore.directory import Directory
    from tierstore.progress import Progress
    from tierstore.sinks import Ticket


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
