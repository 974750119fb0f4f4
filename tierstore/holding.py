"""What leases need of a running store: to be filled, waited for and released, a bounded piece per hold of the lock."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.gpu.arriving import HERE, NOT_YET, Arriving
from tierstore.lease import Event, Lease, LeaseRecord
from tierstore.pending import both
from tierstore.traffic import BATCH_PAGES
from tierstore.types import LeaseState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory import Directory
    from tierstore.gpu.device import HbmDevice
    from tierstore.metrics import Metrics
    from tierstore.mover import Mover
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
        mover: Mover,
        num_layers: int,
        device: HbmDevice,
    ) -> None:
        self._device = device
        self._abandoned: deque[LeaseRecord] = deque()
        """Of leases that were dropped without release: finalisers append to it, without the lock."""
        self.num_layers = num_layers
        self._directory = directory
        self._mover = mover
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
        try:
            while not record.complete:
                with self._progress.lock:
                    self._directory.extend_lease(record, BATCH_PAGES, monotonic())
                    self._progress.submit()
        except BaseException:  # an engine's slot that cannot be used, a signal: nobody gets this lease
            self._abandoned.append(record)
            raise
        return Lease(self, record)

    def wait_until_settled(self, record: LeaseRecord, deadline: float | None) -> LeaseState:
        """Drives the store until the lease is final or the time has come."""
        start = monotonic()
        for _ in self._progress.until(deadline):
            if record.state is not LeaseState.PENDING:
                break
        self._metrics.waited(monotonic() - start)
        return record.state

    def wait_for_layer(self, record: LeaseRecord, layer: int, deadline: float | None) -> Event | None:
        """Drives the store until this layer of the lease's pages is on its way; what ends its copies and the writing
        of the pages, None: it is there. TimeoutError at the deadline."""
        start = monotonic()
        for _ in self._progress.until(deadline):
            with self._progress.lock:
                arriving = self._arriving(record, layer)
                if arriving.submitted:
                    record.told |= record.state is LeaseState.PENDING
                    self._metrics.waited(monotonic() - start)
                    written = self._pending.writers(record.slots)
                    return arriving.event if written is None else both(written, arriving.event)
        raise TimeoutError(f"layer {layer} of the leased pages was not on its way in time")

    def _arriving(self, record: LeaseRecord, layer: int) -> Arriving:
        if record.state is not LeaseState.PENDING:
            return HERE
        coming = self._directory.leasing.under_way(record)
        return NOT_YET if coming is None else self._mover.arriving(coming, layer)

    def release_lease(self, record: LeaseRecord, after: Event | None) -> None:
        """Ends the lease's pins, once ``after`` has happened."""
        self._progress.advance()
        self._end(record, self._device.last_use(after))

    def abandon(self, record: LeaseRecord) -> bool:
        """Leaves a lease whose handle is gone to ``take_back``; False if the store has ended, or is another process's.

        Takes no lock: a finaliser runs in any thread, also in the middle of a hold.
        """
        if not self._progress.usable:
            return False
        self._abandoned.append(record)
        return True

    def take_back(self) -> None:
        """Releases abandoned leases once all that was launched by now has ended: nobody says what reads their pages.

        Where a card cannot tell that now, another time.
        """
        while self._abandoned:
            try:
                record = self._abandoned.popleft()
            except IndexError:  # another thread was first
                return
            try:
                after = self._device.all_work()
            except RuntimeError:
                self._abandoned.append(record)
                return
            if not record.released:
                self._metrics.abandoned()
                self._end(record, after)

    def _end(self, record: LeaseRecord, after: Event | None) -> None:
        record.released = True
        more = True
        while more:
            with self._progress.lock:
                more = self._pending.release(record, after)
        self._progress.notify()
