"""What leases need of a running store: to be filled, waited for and released, a bounded piece per hold of the lock."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.directory.leases import LeaseRecord
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import StoreClosed
from tierstore.gpu.layer_events import HERE, NOT_YET, Arriving, as_one
from tierstore.lease import Lease
from tierstore.types import Event, LeaseState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.directory import Directory
    from tierstore.events import PendingEvents
    from tierstore.gpu.device import HbmDevice
    from tierstore.metrics import Metrics
    from tierstore.mover import Mover
    from tierstore.pump import Progress
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
        self._line: deque[LeaseRecord] = deque()
        """Leases that wait for room, in the order in which they came, and some that wait no longer."""
        self.num_layers = num_layers
        self._directory = directory
        self._mover = mover
        self._pending = pending
        self._progress = progress
        self._metrics = metrics

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None,
        into: Sequence[int] | None,
        *,
        exact: bool,
        wait_for_room_s: float,
    ) -> Lease:
        """A lease over the longest prefix that can be had; its first pages move before its last are reserved."""
        now = monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        with self._progress.lock:
            if into is not None:
                self._directory.outgoing.require_usable(into)
            record = self._directory.leasing.begin(keys, deadline, into, exact=exact)
        try:
            self._extend(record)
            if wait_for_room_s and _lacks_room(record):
                until = now + wait_for_room_s
                self._wait_for_room(record, until if deadline is None else min(until, deadline))
        except BaseException:  # an engine's slot that cannot be used, a signal: nobody gets this lease
            if not record.released:
                self._abandoned.append(record)
            raise
        return Lease(self, record)

    def _extend(self, record: LeaseRecord) -> None:
        """Cover all that can be had now, a batch at each hold of the lock."""
        while not record.complete:
            with self._progress.lock:
                self._directory.extend_lease(record, BATCH_PAGES, monotonic())
                self._progress.submit()

    def _wait_for_room(self, record: LeaseRecord, until: float) -> None:
        """Go on covering pages as room comes, until the monotonic ``until``, or until nothing on its way brings any.

        Leases that wait take room in the order in which they came. What this one holds already stays pinned.
        """
        record.wants_room = True
        self._line.append(record)
        try:
            for _ in self._progress.until(until):
                with self._progress.lock:
                    while not self._line[0].wants_room:
                        self._line.popleft()
                    first = self._line[0] is record
                    coming = self._room_is_coming()
                if first or not coming:
                    self._extend_again(record)
                    if not _lacks_room(record):
                        return
                    with self._progress.lock:
                        coming = self._room_is_coming()
                if not coming:
                    return
            self._extend_again(record)
        except BaseException:  # nobody gets this lease, and nobody used its pages
            record.counted = True
            with suppress(StoreClosed):
                self._end_pins(record, None)
                record.released = True
            raise
        finally:
            record.wants_room = False
            self._progress.notify()

    def _extend_again(self, record: LeaseRecord) -> None:
        with self._progress.lock:
            record.complete = record.cut
        self._extend(record)

    def _room_is_coming(self) -> bool:
        """With the lock held: whether HBM gets room without any lease being released or slot given back."""
        return self._pending.waiting or self._directory.room_is_coming(monotonic())

    def wait_until_settled(self, record: LeaseRecord, deadline: float | None, *, written: bool) -> LeaseState:
        """Drives the store until the lease is final or the time has come. ``written``: and its pages are written."""
        start = monotonic()
        state = LeaseState.PENDING
        for _ in self._progress.until(deadline):
            state = self._state(record, written=written)
            if state is not LeaseState.PENDING:
                break
        self._metrics.waited(monotonic() - start)
        return state

    def _state(self, record: LeaseRecord, *, written: bool) -> LeaseState:
        """Takes the lock only while a page of some lease may be unwritten."""
        state = record.state
        if state is LeaseState.PENDING or self._pending.all_written:
            return state
        with self._progress.lock:
            state = record.state
            if state is LeaseState.READY and self._pending.writers(record):
                if written:
                    return LeaseState.PENDING
                record.told = True
            return state

    def wait_for_layer(self, record: LeaseRecord, layer: int, deadline: float | None) -> Event | None:
        """Drives the store until this layer of the lease's pages is on its way; what ends its copies and the writing
        of the pages, None: it is there. TimeoutError at the deadline."""
        start = monotonic()
        for _ in self._progress.until(deadline):
            with self._progress.lock:
                arriving = self._arriving(record, layer)
                if arriving.submitted:
                    writers = self._pending.writers(record)
                    record.told |= bool(writers) or record.state is LeaseState.PENDING
                    self._metrics.waited(monotonic() - start)
                    return as_one(writers if arriving.event is None else [*writers, arriving.event])
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
        self._end_pins(record, after)

    def _end_pins(self, record: LeaseRecord, after: Event | None) -> None:
        more = True
        while more:
            with self._progress.lock:
                more = self._pending.release(record, after)
        self._progress.notify()


def _lacks_room(record: LeaseRecord) -> bool:
    return record.miss_reason == "no_room" and len(record.slots) < len(record.keys) and not record.cut
