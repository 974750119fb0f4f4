"""Leases: the public handle, and the code of the store that loads, awaits and releases leased pages.

The state of a lease is kept by the directory, in a ``LeaseRecord`` (``directory.leases``). A call for many
pages releases the store's lock after each batch of them.
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
from tierstore.types import Event, LeaseState, Tier, require_flag, seconds_to_wait, whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierstore.gpu.device import HbmDevice
    from tierstore.pump import Pump
    from tierstore.types import PageKey


class Lease:
    """A handle that pins the longest available prefix: its pages stay in their HBM slots until ``release``.

    Not thread-safe: use a lease from one thread at a time. ``num_pages``, ``slots`` and ``missing`` are final
    once ``wait`` has returned READY or FAILED. Before that, the lease becomes shorter if one of its pages
    fails to arrive.

    Always release a lease. If the handle is garbage-collected without ``release``, Python issues a
    ResourceWarning, and the store's next ``acquire``, ``allocate`` or ``drain`` releases the lease after all
    device work launched by then has completed.
    """

    def __init__(self, host: LeaseHost, record: LeaseRecord) -> None:
        self._host = host
        self._record = record
        self._covered: list[int] | None = None

    @property
    def keys(self) -> tuple[PageKey, ...]:
        """All keys that were passed to ``acquire``, including those of missing pages."""
        return self._record.keys

    @property
    def num_pages(self) -> int:
        """Number of pages that the lease covers, starting with the first key."""
        return len(self.slots)

    @property
    def slots(self) -> list[int]:
        """The HBM slot of each covered page. The slots may be read once ``wait`` has returned READY.

        With ``keep_in=Tier.HOST``, they are slots of HOST, and may be read at once.
        """
        return list(self._record.slots if self._covered is None else self._covered)

    @property
    def tiers(self) -> list[Tier]:
        """The tier in which each covered page was found."""
        return self._record.sources[: self.num_pages]

    @property
    def exact(self) -> bool:
        """Whether all pages covered by the lease or put with it are exact.

        A page is exact if no lossy codec has changed it or any page that it was computed from.
        """
        first = self._record.inexact_from
        return first is None or first >= self.num_pages

    @property
    def missing(self) -> list[PageKey]:
        """The keys of pages that the lease does not cover. The caller must compute them."""
        return list(self._record.keys[self.num_pages :])

    @property
    def missing_because(self) -> str | None:
        """Why the lease does not cover the first page in ``missing``, or None if ``missing`` is empty.

        - "not_found": no tier has the page.
        - "no_room": HBM is full of pages that are pinned, owned by callers or not saved yet. Acquire again
          later, or compute the page.
        - "deadline": the page did not arrive by the deadline, or was expected to arrive after it.
        - "inexact": the lease is exact, but the page is not.
        - "elsewhere": the lease is on pages in HOST (``keep_in``), but the page is only in other tiers.
        - "failed": the page could not be read.
        - "replaced": the page was put again while it was being loaded layer by layer.
        - "evicted", "capacity" and other values: the reason why the page was dropped from the store.
        """
        return self._record.miss_reason if self.missing else None

    def wait(self, timeout_s: float | None = None, *, written: bool = True) -> LeaseState:
        """Wait until all pages of the lease are in HBM, including pages that were put with the lease.

        A page that was put with an event is in HBM once that event has completed.

        Args:
            timeout_s: Longest time to block, in seconds. None: until the result is final. 0: do not block.
            written: Whether to also wait for the events that were passed to ``put``. With False, READY means
                only that all copies have arrived. In this case, make each stream wait for the event that
                ``ready(layer)`` returns before the stream reads the pages.

        Returns:
            READY: All bytes of the pages are visible to the host and to every stream (unless ``written`` is
                False). FAILED: No covered page is left, or a page that was put with the lease was never
                written because a device failed. PENDING: The wait timed out.

        Raises:
            LeaseError: The lease was released.
            TypeError: ``written`` is not True or False.
        """
        self._require_open("wait")
        require_flag("written", written)
        return self._host.wait_until_settled(self._record, _deadline(timeout_s), written=written)

    def ready(self, layer: int, timeout_s: float | None = None) -> Event | None:
        """Wait until the copies of this layer have been submitted to the device, for all covered pages.

        Later layers may still be in flight: pages from HOST are copied in groups of layers, for all pages of
        the lease together. If a copy fails afterwards, or a ``put`` replaces the copied page, ``wait``
        truncates the lease, and results computed from the removed pages are invalid. A page that is decoded by
        the CPU, or read from NVMe without a HOST tier, counts as submitted once all its layers have arrived.

        Args:
            layer: Index of the layer.
            timeout_s: Longest time to block, in seconds. None: no limit.

        Returns:
            None if the layer can be read now. Otherwise an event that must complete before the layer is read:
                call its ``synchronize``, or pass it to ``stream.wait_event``. It completes once this layer
                has been copied, and once all leased pages that any caller put with an event are written. If
                there is only one event to wait for, it is returned unchanged. Events that a CUDA stream
                cannot wait for are wrapped in an event that it can wait for.

        Raises:
            TimeoutError: The wait timed out.
            ValueError: ``layer`` is out of range.
            LeaseError: The lease was released.
        """
        self._require_open(f"wait for layer {layer}")
        number = whole("layer", layer)
        if number >= self._host.num_layers:
            raise ValueError(f"layer must be from 0 to {self._host.num_layers - 1}, got {number}")
        return self._host.wait_for_layer(self._record, number, _deadline(timeout_s))

    def release(self, after: Event | None = None) -> None:
        """Release the lease. Its slots may be reused once ``after`` has completed.

        ``after`` completes when the caller no longer reads the slots. None stands for the work launched so
        far on the caller's current CUDA stream. If an engine owns HBM and some pages have not arrived yet,
        ``poll`` reports their slots once nothing writes to them.

        Raises:
            LeaseError: The lease was already released.
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
            # If the store was closed in the meantime, all leases have ended already. That is not an error.
            with suppress(StoreClosed):
                self._let_go(None)

    def __del__(self) -> None:
        # A finalizer may run on any thread at any time, even while that thread holds the store's lock. So the
        # lease is only queued here, and a later call to the store releases it.
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
            raise LeaseError(f"cannot {verb}: the lease was already released")


def require_event(after: object) -> None:
    """Raise TypeError unless ``after`` is an Event or None.

    Slots that waited for any other object would never become free.
    """
    if after is not None and not isinstance(after, Event):
        raise TypeError(
            f"after must be an event with the methods query and synchronize, or None, got {after!r:.60}"
        )


def record_of(lease: Lease, host: LeaseHost) -> LeaseRecord:
    """Return the directory's record of an open lease.

    Raises:
        LeaseError: The lease was released, belongs to another store, or is not on pages in HBM.
    """
    lease._require_open("put pages with this lease")
    if lease._host is not host:
        raise LeaseError("the lease belongs to another store")
    if lease._record.tier != Tier.HBM:
        raise LeaseError(
            f"pages cannot be put with a lease on {lease._record.tier.name}: use a lease acquired without keep_in"
        )
    return lease._record


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else monotonic() + seconds_to_wait("timeout_s", timeout_s)


class LeaseHost:
    """The part of a store that creates and releases leases, loads the leased pages, and waits for these pages.

    Thread-safe.
    """

    def __init__(self, pump: Pump, device: HbmDevice, num_layers: int) -> None:
        self.num_layers = num_layers
        self._pump = pump
        self._directory = pump.directory
        self._events = pump.events
        self._device = device
        self._abandoned: deque[LeaseRecord] = deque()
        """Leases that were dropped without ``release``. Finalizers append to this queue without the lock."""
        self._line: deque[LeaseRecord] = deque()
        """Leases that wait for space in HBM, in order of arrival. Some may no longer be waiting."""

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None,
        into: Sequence[int] | None,
        *,
        exact: bool,
        wait_for_room_s: float,
        tier: Tier = Tier.HBM,
    ) -> Lease:
        """Return a lease on the longest available prefix. See ``TierStore.acquire``.

        Slots are reserved in batches. The first pages are already being loaded while slots for later pages
        are reserved.
        """
        now = monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        with self._pump.lock, self._pump.guard:
            if into is not None:
                self._directory.outgoing.require_usable(into)
            record = self._directory.leases.begin(keys, deadline, into, exact=exact, tier=tier)
        try:
            self._extend(record)
            if wait_for_room_s and _lacks_room(record):
                until = now + wait_for_room_s
                self._wait_for_room(record, until if deadline is None else min(until, deadline))
        except BaseException:  # invalid engine slot or signal: the caller never gets this lease
            if not record.released:
                self._abandoned.append(record)
            raise
        return Lease(self, record)

    def _extend(self, record: LeaseRecord) -> None:
        """Add all pages that are available now to the lease, in batches, releasing the lock after each."""
        while not record.complete:
            with self._pump.lock, self._pump.guard:
                self._directory.extend_lease(record, BATCH_PAGES, monotonic())
                self._pump.submit()

    def _wait_for_room(self, record: LeaseRecord, until: float) -> None:
        """Extend the lease as HBM space becomes free.

        Return when the lease needs no more space, when nothing in flight can free any, or at the monotonic
        time ``until``. Waiting leases are served in order of arrival. Pages that the lease already covers
        stay pinned.
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
        except BaseException:  # the caller never gets this lease, and its pages were not used
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
        """Return whether HBM has free space, or will have some without a ``release`` or ``free`` call.

        The caller holds the lock.
        """
        return self._events.waiting or self._directory.room_is_coming(monotonic())

    def wait_until_settled(self, record: LeaseRecord, deadline: float | None, *, written: bool) -> LeaseState:
        """Wait until the lease's state is final or the deadline has passed, and return the state.

        The calling thread processes finished copies and starts new ones while it waits. ``written`` has the
        same meaning as in ``Lease.wait``.
        """
        start = monotonic()
        state = LeaseState.PENDING
        for _ in self._pump.until(deadline):
            state = self._state(record, written=written)
            if state is not LeaseState.PENDING:
                break
        self._pump.metrics.waited(monotonic() - start)
        return state

    def _state(self, record: LeaseRecord, *, written: bool) -> LeaseState:
        """Return the state of the lease. The lock is taken only if some page may be unwritten."""
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
        """Wait until the copies of this layer have been submitted, for all leased pages. See ``Lease.ready``.

        Returns:
            The event that completes when the layer can be read, or None if it can be read now.

        Raises:
            TimeoutError: The deadline has passed.
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
        """End the lease at once, and release its pins once ``after`` has completed."""
        self._pump.advance()
        self._end(record, self._device.last_use(after))

    def abandon(self, record: LeaseRecord) -> bool:
        """Queue a lease whose handle was garbage-collected, so that ``take_back`` releases it.

        Takes no lock, because a finalizer may run on any thread, even while that thread holds the lock.

        Returns:
            False if the store was closed or belongs to another process.
        """
        if not self._pump.usable:
            return False
        self._abandoned.append(record)
        return True

    def take_back(self) -> None:
        """Release the leases that were garbage-collected without ``release``.

        Their pins end after all device work launched so far. If the device cannot record an event now, for
        example during CUDA graph capture, a later call tries again.
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
