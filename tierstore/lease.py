"""Leases of a running store: the handle that a caller holds, and how it is filled, awaited and released.

The record behind a handle belongs to the directory (``directory.leases``). Every call does a bounded amount of work per
hold of the store's lock.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.directory.leases import LeaseRecord
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import LeaseError, StoreClosed
from tierstore.gpu.events import HERE, NOT_YET, Arriving, as_one
from tierstore.types import Event, LeaseState, require_flag, seconds_to_wait, whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierstore.gpu.device import HbmDevice
    from tierstore.pump import Pump
    from tierstore.types import PageKey, Tier


class Lease:
    """A hold on the longest available prefix: its pages stay in their HBM slots until ``release``.

    Not thread-safe: use a lease from one thread at a time. ``num_pages``, ``slots`` and ``missing`` are final once
    ``wait`` returned READY or FAILED; before that, a page that fails to arrive may still shorten the lease.

    Dropping a lease without ``release`` is a mistake: it causes a ResourceWarning, and the next ``acquire``,
    ``allocate`` or ``drain`` of the store releases it once everything launched on the device by then has ended.
    """

    def __init__(self, host: LeaseHost, record: LeaseRecord) -> None:
        self._host = host
        self._record = record
        self._covered: list[int] | None = None

    @property
    def keys(self) -> tuple[PageKey, ...]:
        """The requested keys."""
        return self._record.keys

    @property
    def num_pages(self) -> int:
        """Number of leading pages that this lease covers."""
        return len(self.slots)

    @property
    def slots(self) -> list[int]:
        """HBM slot of each covered page, readable once ``wait`` returned READY."""
        return list(self._record.slots if self._covered is None else self._covered)

    @property
    def tiers(self) -> list[Tier]:
        """The tier in which each covered page was found."""
        return self._record.sources[: self.num_pages]

    @property
    def exact(self) -> bool:
        """Whether all pages that it covers, or that were sealed under it, are exactly what was put.

        No such page went through a lossy codec, or was computed over one that did.
        """
        first = self._record.inexact_from
        return first is None or first >= self.num_pages

    @property
    def missing(self) -> list[PageKey]:
        """The keys that are not covered and must be computed."""
        return list(self._record.keys[self.num_pages :])

    @property
    def missing_because(self) -> str | None:
        """Why the first missing page is missing; None if no page is.

        "not_found"; "no_room": HBM was full of pages that are held or not saved yet, so ask again or compute;
        "deadline"; "failed": it could not be read; "replaced": it was put while its layers were read from other slots;
        "evicted", "capacity", or another reason for which it left.
        """
        return self._record.miss_reason if self.missing else None

    def wait(self, timeout_s: float | None = None, *, written: bool = True) -> LeaseState:
        """Wait until the lease's pages are in HBM, including pages sealed under it by ``put``.

        A page that was put with an event counts once that event has happened.

        Args:
            timeout_s: Longest time to block, in seconds. None: until the result is final. 0: do not block.
            written: Wait for writers, too. With False, READY means that all copies have arrived; make your stream wait
                for the event of ``ready(layer)`` before it reads.

        Returns:
            READY: every byte of the covered and sealed pages is there, for the host and for every stream. FAILED: no
                covered page is left, or a sealed one was never written because its writer's device failed. PENDING: it
                timed out, and nothing changed.

        Raises:
            LeaseError: The lease was released.
            TypeError: ``written`` is not True or False.
        """
        self._require_open("wait")
        require_flag("written", written)
        return self._host.wait_until_settled(self._record, _deadline(timeout_s), written=written)

    def ready(self, layer: int, timeout_s: float | None = None) -> Event | None:
        """Block until this layer's copies of all covered pages are queued.

        Later layers may still be in flight: pages from HOST arrive in groups of layers, all pages of the lease
        together. If a copy fails later, or a ``put`` replaces it, ``wait`` still cuts the lease, and what was computed
        from the pages that were cut off is void. A page that the CPU decodes, or that comes from NVMe without HOST,
        counts as queued once it is complete.

        Args:
            layer: Index of the layer.
            timeout_s: Longest time to block, in seconds; None without a limit.

        Returns:
            None if the bytes are there. Otherwise an event to wait for before reading, on the host or with
                ``stream.wait_event``. It ends these copies, and the writing of pages put with an event, covered or
                sealed under the lease, whoever put them. A single event is returned as it was given; events that a CUDA
                stream cannot wait for are wrapped in one that it can.

        Raises:
            TimeoutError: ``timeout_s`` ran out.
            ValueError: There is no such layer.
            LeaseError: The lease was released.
        """
        self._require_open(f"ready({layer})")
        number = whole("layer", layer)
        if number >= self._host.num_layers:
            raise ValueError(f"layer must be from 0 to {self._host.num_layers - 1}, got {number}")
        return self._host.wait_for_layer(self._record, number, _deadline(timeout_s))

    def release(self, after: Event | None = None) -> None:
        """End the hold. The slots may be reused once ``after`` has happened.

        With engine-owned HBM, slots whose pages had not arrived are reported by ``poll``, once nothing writes them.

        Raises:
            LeaseError: The lease was released before.
        """
        self._require_open("release")
        require_event(after)
        self._let_go(after)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._record.released:
            # A store closed in the meantime has ended all leases; leaving the block is no mistake of the caller.
            with suppress(StoreClosed):
                self._let_go(None)

    def __del__(self) -> None:
        # Any thread, at any moment, also one that has the store's lock: what is held is left for a call to take back.
        if not self._record.released and self._host.abandon(self._record):
            warnings.warn(
                f"a lease of {len(self._record.slots)} pages was dropped without release",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _let_go(self, after: Event | None) -> None:
        self._covered = list(self._record.slots)
        self._host.release_lease(self._record, after)

    def _require_open(self, verb: str) -> None:
        if self._record.released:
            raise LeaseError(f"{verb}: the lease was released already")


def require_event(after: object) -> None:
    """Raise TypeError unless ``after`` is an event or None. Slots that wait for anything else would be lost."""
    if after is not None and not isinstance(after, Event):
        raise TypeError(f"after must be an event with query() and synchronize(), or None, got {after!r:.60}")


def record_of(lease: Lease, host: LeaseHost) -> LeaseRecord:
    """Return the record behind an open lease of this host. LeaseError if it was released or is another store's."""
    lease._require_open("put under")
    if lease._host is not host:
        raise LeaseError("the lease belongs to another store")
    return lease._record


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else monotonic() + seconds_to_wait("timeout_s", timeout_s)


class LeaseHost:
    """The host of all leases of a store: fills them, waits for their pages and ends them. Thread-safe."""

    def __init__(self, pump: Pump, device: HbmDevice, num_layers: int) -> None:
        self.num_layers = num_layers
        self._pump = pump
        self._directory = pump.directory
        self._events = pump.events
        self._device = device
        self._abandoned: deque[LeaseRecord] = deque()
        """Of leases that were dropped without release: finalisers append to it, without the lock."""
        self._line: deque[LeaseRecord] = deque()
        """Leases that wait for room, in the order in which they came, and some that wait no longer."""

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None,
        into: Sequence[int] | None,
        *,
        exact: bool,
        wait_for_room_s: float,
    ) -> Lease:
        """Return a lease over the longest available prefix. Its first pages move before its last are reserved."""
        now = monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        with self._pump.lock, self._pump.guard:
            if into is not None:
                self._directory.outgoing.require_usable(into)
            record = self._directory.leases.begin(keys, deadline, into, exact=exact)
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
        """Cover all pages that are available now, one batch per hold of the lock."""
        while not record.complete:
            with self._pump.lock, self._pump.guard:
                self._directory.extend_lease(record, BATCH_PAGES, monotonic())
                self._pump.submit()

    def _wait_for_room(self, record: LeaseRecord, until: float) -> None:
        """Keep covering pages as space becomes free.

        Ends at the monotonic time ``until``, or when nothing in flight can free any. Waiting leases get space in the
        order in which they came. The pages that this lease holds already stay pinned.
        """
        record.wants_room = True
        self._line.append(record)
        try:
            for _ in self._pump.until(until):
                with self._pump.lock, self._pump.guard:
                    while not self._line[0].wants_room:
                        self._line.popleft()
                    first = self._line[0] is record
                    coming = self._room_is_coming()
                if first or not coming:
                    self._extend_again(record)
                    if not _lacks_room(record):
                        return
                    with self._pump.lock, self._pump.guard:
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
            self._pump.notify()

    def _extend_again(self, record: LeaseRecord) -> None:
        with self._pump.lock, self._pump.guard:
            record.complete = record.cut
        self._extend(record)

    def _room_is_coming(self) -> bool:
        """Return, with the lock held, whether HBM gets space without a release or a freed slot."""
        return self._events.waiting or self._directory.room_is_coming(monotonic())

    def wait_until_settled(self, record: LeaseRecord, deadline: float | None, *, written: bool) -> LeaseState:
        """Advance the store until the lease is final, and its pages ``written``, or the deadline has come."""
        start = monotonic()
        state = LeaseState.PENDING
        for _ in self._pump.until(deadline):
            state = self._state(record, written=written)
            if state is not LeaseState.PENDING:
                break
        self._pump.metrics.waited(monotonic() - start)
        return state

    def _state(self, record: LeaseRecord, *, written: bool) -> LeaseState:
        """Return the lease's state. Takes the lock only while a page of some lease may be unwritten."""
        state = record.state
        if state is LeaseState.PENDING or self._events.all_written:
            return state
        with self._pump.lock, self._pump.guard:
            state = record.state
            if state is LeaseState.READY and self._events.writers(record):
                if written:
                    return LeaseState.PENDING
                record.told = True
            return state

    def wait_for_layer(self, record: LeaseRecord, layer: int, deadline: float | None) -> Event | None:
        """Advance the store until this layer of the lease's pages is in flight.

        Returns:
            The event that ends its copies and the writing of the pages; None if it is there.

        Raises:
            TimeoutError: The deadline has come.
        """
        start = monotonic()
        for _ in self._pump.until(deadline):
            with self._pump.lock, self._pump.guard:
                arriving = self._arriving(record, layer)
                if arriving.submitted:
                    writers = self._events.writers(record)
                    record.told |= bool(writers) or record.state is LeaseState.PENDING
                    self._pump.metrics.waited(monotonic() - start)
                    return as_one(writers if arriving.event is None else [*writers, arriving.event])
        raise TimeoutError(f"timed out waiting for layer {layer} of the leased pages")

    def _arriving(self, record: LeaseRecord, layer: int) -> Arriving:
        if record.state is not LeaseState.PENDING:
            return HERE
        coming = self._directory.leases.under_way(record)
        return NOT_YET if coming is None else self._pump.mover.arriving(coming, layer)

    def release_lease(self, record: LeaseRecord, after: Event | None) -> None:
        """End the lease's pins once ``after`` has happened."""
        self._pump.advance()
        self._end(record, self._device.last_use(after))

    def abandon(self, record: LeaseRecord) -> bool:
        """Leave a lease whose handle is gone to ``take_back``. False if the store has ended or is another process's.

        Takes no lock, because a finalizer runs on any thread, also in the middle of a hold.
        """
        if not self._pump.usable:
            return False
        self._abandoned.append(record)
        return True

    def take_back(self) -> None:
        """Release leases that were garbage-collected without ``release()``, after all device work launched so far.

        Tries again later if the device cannot record an event now (for example during CUDA graph capture).
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
                self._pump.metrics.abandoned()
                self._end(record, after)

    def _end(self, record: LeaseRecord, after: Event | None) -> None:
        record.released = True
        self._end_pins(record, after)

    def _end_pins(self, record: LeaseRecord, after: Event | None) -> None:
        more = True
        while more:
            with self._pump.lock, self._pump.guard:
                more = self._events.release(record, after)
        self._pump.notify()


def _lacks_room(record: LeaseRecord) -> bool:
    return record.miss_reason == "no_room" and len(record.slots) < len(record.keys) and not record.cut
