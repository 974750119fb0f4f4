"""What leases need of a running store: to be filled, waited for and released, a bounded piece per hold of the lock."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from tierstore.lease import Event, Lease, LeaseRecord
from tierstore.traffic import BATCH_PAGES
from tierstore.types import LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.directory import Directory
    from tierstore.metrics import Metrics
    from tierstore.pending import PendingEvents
    from tierstore.progress import Progress
    from tierstore.types import PageKey


class Holding:
    """The host of all leases of a store. Any thread."""

    def __init__(
        self,
        directory: Directory,
        pending: PendingEvents,
        progress: Progress,
        metrics: Metrics,
        num_layers: int,
        last_use: Callable[[Event | None], Event | None],
    ) -> None:
        """``last_use``: the event that ends a caller's use of pages, given the one it named."""
        self._last_use = last_use
        self.num_layers = num_layers
        self._directory = directory
        self._pending = pending
        self._progress = progress
        self._metrics = metrics

    def acquire(
        self, keys: Sequence[PageKey], deadline_s: float | None, into: Sequence[int] | None, *, exact: bool
    ) -> Lease:
        """A lease over the longest prefix that can be had; its first pages move before its last are reserved."""
        deadline = None if deadline_s is None else monotonic() + deadline_s
        with self._progress.lock:
            if into is not None:
                self._directory.outgoing.require_usable(into)
            record = self._directory.leasing.begin(keys, deadline, into, exact=exact)
        while not record.complete:
            with self._progress.lock:
                self._directory.extend_lease(record, BATCH_PAGES, monotonic())
                self._progress.submit()
        return Lease(self, record)

    def wait_until_settled(self, record: LeaseRecord, deadline: float | None) -> LeaseState:
        """Drives the store until the lease is final or the time has come."""
        start = monotonic()
        for _ in self._progress.until(deadline):
            if record.state is not LeaseState.PENDING:
                break
        self._metrics.waited(monotonic() - start)
        return record.state

    def unwritten(self, record: LeaseRecord) -> Event | None:
        """The event that ends the writing of the lease's pages; None: they are written."""
        with self._progress.lock:
            return self._pending.writers(record.slots)

    def release_lease(self, record: LeaseRecord, after: Event | None) -> None:
        """Ends the lease's pins, once ``after`` has happened."""
        self._progress.advance()
        after = self._last_use(after)
        record.released = True
        more = True
        while more:
            with self._progress.lock:
                more = self._pending.release(record, after)
        self._progress.notify()
