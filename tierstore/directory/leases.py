"""The state of leases: which pages they cover, how they are extended, truncated and released. Metadata only.

A lease covers pages that are in HBM or in flight to HBM, and pins them there. Pages in other tiers are loaded
for it. A lease is truncated if a page does not arrive by the deadline, if a load fails, or if a page in flight
is evicted. A lease on pages in HOST covers only pages that are readable there, and nothing is loaded for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

from tierstore.errors import CapacityError, LeaseError
from tierstore.types import LeaseState, PageKey, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tierstore.directory.eviction import Drops
    from tierstore.directory.loads import Load, Loads
    from tierstore.directory.residency import Residency, TierTable
    from tierstore.directory.writeback import WriteBack
    from tierstore.types import Counters, Event


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """The state of one lease. It covers pages ``[0, len(slots))`` of ``keys``.

    Attributes:
        keys: The requested keys.
        into: The engine's slot for each key, or None if the store owns HBM.
        deadline: The monotonic time by which pages must arrive, or None.
        slots: The slot of each covered page, in ``tier``.
        sources: The tier in which each covered page was found.
        waiting: Indices of covered pages that are still in flight.
        miss_reason: Why the first page that is not covered is missing.
        counted: Whether the hits and misses of this lease were counted.
        released: Whether the lease was released. Some pins may remain for a while.
    """

    keys: tuple[PageKey, ...]
    into: tuple[int, ...] | None = None
    deadline: float | None = None
    exact: bool = False
    """Whether the lease may cover only exact pages."""
    tier: Tier = Tier.HBM
    """The tier in which the covered pages are pinned."""
    slots: list[int] = field(default_factory=list)
    sources: list[Tier] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    landing: set[int] = field(default_factory=set)
    """Indices of pages that the lease no longer covers, but that are still being copied into an engine's slots."""
    inexact_from: int | None = None
    """Index of the first covered page that may be inexact, or None.

    It is -1 if a page that was put with the lease is inexact.
    """
    held: list[tuple[PageKey, int]] = field(default_factory=list)
    """The pages that were put with this lease, each with its slot."""
    complete: bool = False
    """Whether no further page will be added."""
    cut: bool = False
    """Whether the lease was truncated: a page in flight was lost, or did not arrive by the deadline."""
    miss_reason: str = "not_found"
    told: bool = False
    """Whether the caller may be reading the slots already.

    This is the case once ``ready`` or ``wait(written=False)`` has returned before all pages had arrived.
    """
    never_written: Event | None = None
    """The event of a page that was put with the lease and never written, because the event's device failed.

    None if there is no such page.
    """
    wants_room: bool = False
    """Whether ``acquire`` waits for space in HBM for this lease."""
    counted: bool = False
    released: bool = False

    @property
    def inexact(self) -> bool:
        """Whether a covered page may be inexact. Pages that are computed from it may then be inexact, too."""
        return self.inexact_from is not None and self.inexact_from < len(self.slots)

    @property
    def state(self) -> LeaseState:
        """The state of the lease: whether all of its pages have arrived. READY and FAILED are final.

        READY does not mean that pages that were put with an event are already written.
        """
        if not self.complete or self.waiting or self.landing:
            return LeaseState.PENDING
        if self.never_written is not None:
            return LeaseState.FAILED
        return LeaseState.FAILED if self.cut and not self.slots else LeaseState.READY


class Leases:
    """The open leases of a store.

    ``drops`` provides the reason why a page is missing. ``hit`` is called when a lease is extended, with the
    added pages and the fastest tier that contained them.
    """

    def __init__(
        self,
        residency: Residency,
        loads: Loads,
        writeback: WriteBack,
        drops: Drops,
        metrics: Counters,
        hit: Callable[[Sequence[PageKey], Tier], None],
    ) -> None:
        self.open: set[LeaseRecord] = set()
        self.next_deadline: float | None = None
        """The monotonic time at which ``expire`` must be called next, or None. Set by ``expire``."""
        self._replaced: list[tuple[LeaseRecord, int]] = []
        self._timed: set[LeaseRecord] = set()
        """Open leases with a deadline that may still have to be truncated. ``expire`` examines only these."""
        self._residency = residency
        self._loads = loads
        self._sinks = writeback.sinks
        self._unwritten: Mapping[PageKey, int] = writeback.unwritten
        """HBM slots of pages whose bytes are not written yet."""
        self._drops = drops
        self._metrics = metrics
        self._hit = hit
        self._hbm = residency.tables.get(Tier.HBM)
        """The table of HBM, or None if an engine owns HBM. Leases then pin no HBM pages."""

    def begin(
        self,
        keys: Sequence[PageKey],
        deadline: float | None,
        into: Sequence[int] | None,
        *,
        exact: bool,
        tier: Tier = Tier.HBM,
    ) -> LeaseRecord:
        """Create a lease that covers no pages yet. If ``exact``, it will cover only exact pages.

        A lease on another tier than HBM serves no reads of a request by itself, so it counts no hits or misses.
        """
        lease = LeaseRecord(tuple(keys), None if into is None else tuple(into), deadline, exact, tier)
        lease.counted = tier != Tier.HBM
        self.open.add(lease)
        if deadline is not None:
            self._timed.add(lease)
        return lease

    def extend(self, lease: LeaseRecord, limit: int, now: float) -> None:
        """Add up to ``limit`` pages to the lease, and start the loads that they need.

        If the next page is unavailable, or there are no more keys, the lease is marked as complete.
        """
        end = len(lease.slots) + limit
        while (index := len(lease.slots)) < end:
            if lease.cut or index == len(lease.keys):
                lease.complete = True
                return
            reason = self._attach(lease, lease.keys[index:end], now)
            if reason is not None:
                lease.miss_reason = reason
                lease.complete = True
                return

    def hold(self, lease: LeaseRecord, key: PageKey) -> None:
        """Pin a page that was put with the lease. The pin lasts until the lease is released."""
        [slot] = self._residency.pin((key,), Tier.HBM)
        lease.held.append((key, slot))
        if not self._residency.exactness.exact(key):
            lease.inexact_from = -1

    def moved(self, load: Load, slot: int) -> None:
        """Record that the page of ``load`` was put into ``slot`` while the load was in flight.

        Leases that wait for the load switch to the new slot. If the caller of a lease may already be reading
        the old slot, ``cut_replaced`` truncates the lease, because the old slot is about to be reused.
        """
        for lease, index in load.waiters:
            if lease in self.open and index < len(lease.slots):
                lease.slots[index] = slot
                if lease.told:
                    self._replaced.append((lease, index))
                else:
                    lease.waiting.discard(index)

    def cut_replaced(self) -> None:
        """Truncate the leases for which ``moved`` replaced a slot that their callers may be reading.

        Each lease is truncated before the page of that slot.
        """
        for lease, index in self._replaced:
            self.cut(lease, index, "replaced")
        self._replaced.clear()

    def arrived(self, load: Load) -> None:
        """Record that a load has finished. Leases stop waiting for it."""
        for lease, index in load.waiters:
            lease.waiting.discard(index)
            lease.landing.discard(index)

    def lost(self, load: Load, reason: str) -> None:
        """Record that a load's page will not arrive. Every lease that waits for it is truncated before that page."""
        for lease, index in load.waiters:
            lease.landing.discard(index)
            self.cut(lease, index, reason)

    def never_written(self, slots: Collection[int], event: Event) -> None:
        """Record that these slots will never be written, because a device failed.

        A lease is truncated before the first page that it covers in one of these slots. If such a page was put
        with a lease, that lease fails. Takes O(leased pages) time.
        """
        for lease in [lease for lease in self.open if not lease.released and lease.tier == Tier.HBM]:
            index = next((i for i, slot in enumerate(lease.slots) if slot in slots), None)
            if index is not None:
                self.cut(lease, index, "failed")
            if any(slot in slots for _, slot in lease.held):
                lease.never_written = event

    def cut(self, lease: LeaseRecord, index: int, reason: str) -> None:
        """Truncate the lease before page ``index``, and unpin that page and all later ones.

        If an engine owns HBM, it computes the missing pages into their slots. The lease's state is therefore
        not final before all copies into these slots have finished.
        """
        if lease not in self.open or index >= len(lease.slots):
            return
        if self._hbm is None:
            lease.landing |= {i for i in lease.waiting if i >= index and self._still_landing(lease, i)}
        lease.cut, lease.complete, lease.miss_reason = True, True, reason
        self._unpin_from(lease, index)
        lease.waiting = {i for i in lease.waiting if i < index}

    def under_way(self, lease: LeaseRecord) -> list[int] | None:
        """Return the HBM slots into which pages of the lease are being copied.

        The result is None if the lease is not complete, if a page must be promoted before its copy to HBM can
        be submitted, or if copies of pages that the lease no longer covers are still in flight.
        """
        if not lease.complete or lease.landing:
            return None
        slots, by_slot = lease.slots, self._loads.by_slot
        if not self._loads.promoting:
            return list(map(slots.__getitem__, lease.waiting))
        coming = []
        for index in lease.waiting:
            load = by_slot.get(slots[index])
            if load is None or not load.submitted:
                return None
            coming.append(load.slot)
        return coming

    def expire(self, now: float) -> None:
        """Truncate each lease whose deadline has passed, so that it ends before the first page that has not arrived."""
        if not self._timed:
            self.next_deadline = None
            return
        for lease in [x for x in self._timed if x.deadline is not None and x.deadline <= now]:
            index = self._first_not_there(lease)
            if index is not None:
                self.cut(lease, index, "deadline")
        self._timed = {
            x
            for x in self._timed
            if x in self.open
            and (x.waiting or not x.complete or (self._unwritten and (x.deadline or now) > now))
        }
        self.next_deadline = min(
            (x.deadline for x in self._timed if x.deadline is not None and (x.waiting or self._unwritten)),
            default=None,
        )

    def stop_waiting(self, lease: LeaseRecord) -> None:
        """Stop waiting for pages, because the lease is being released. Count its hits and misses."""
        self._count(lease)
        if lease.into is not None:
            for index in lease.waiting | lease.landing:
                self._loads.abandon(lease.into[index])
        lease.waiting.clear()
        lease.landing.clear()

    def release_some(self, lease: LeaseRecord, limit: int) -> bool:
        """Remove up to ``limit`` pins of a lease that is being released, last pages first.

        A load that no lease needs any more still continues if HOST has a free slot for it.

        Returns:
            Whether any pins are left.
        """
        self.stop_waiting(lease)
        if lease.held:
            pins = lease.held[-limit:]
            del lease.held[-limit:]
            self._release([key for key, _ in pins], [slot for _, slot in pins])
        else:
            end = len(lease.slots)
            start = max(0, end - limit)
            self._release(lease.keys[start:end], lease.slots[start:], lease.tier)
            del lease.slots[start:]
        more = bool(lease.held or lease.slots)
        if not more:
            self.open.discard(lease)
        return more

    def awaits(self, src: Tier) -> bool:
        """Return whether a lease waits for a page from ``src``."""
        by_slot = self._loads.by_slot
        return any(
            load is not None and load.source == src
            for lease in self.open
            if not lease.released
            for load in (by_slot.get(lease.slots[index]) for index in lease.waiting)
        )

    # -- internals ----------------------------------------------------------------------------------------------

    def _attach(self, lease: LeaseRecord, keys: Sequence[PageKey], now: float) -> str | None:
        """Extend a lease by pages that are available now: the first of ``keys``, and possibly some that follow it.

        Returns:
            None, or the reason why the first page cannot be added.
        """
        index = len(lease.slots)
        exact = self._residency.exactness.prefix(keys)
        if lease.exact:
            if not exact:
                held = self._residency.held(keys[0])
                return "inexact" if held else self._drops.fate(keys[0]) or "not_found"
            keys = keys[:exact]
        if lease.tier != Tier.HBM:
            readable = list(takewhile(self._residency.tables[lease.tier].ready, keys))
            if not readable:
                return (
                    "elsewhere" if self._residency.held(keys[0]) else self._drops.fate(keys[0]) or "not_found"
                )
            lease.slots += self._residency.pin(readable, lease.tier)
            lease.sources += [lease.tier] * len(readable)
        elif self._hbm is not None and keys[0] in self._hbm.copies:
            self._join(lease, index, keys, self._hbm)
        else:
            reason = self._load(lease, index, keys, now)
            if reason is not None:
                return reason
        if lease.inexact_from is None and index + exact < len(lease.slots):
            lease.inexact_from = index + exact
        return None

    def _join(self, lease: LeaseRecord, index: int, keys: Sequence[PageKey], hbm: TierTable) -> None:
        """Add to the lease the longest prefix of ``keys`` whose pages are in HBM or in flight to HBM."""
        slots = self._residency.pin(keys, Tier.HBM)
        lease.slots += slots
        if not hbm.arriving:
            lease.sources += [Tier.HBM] * len(slots)
            self._hit(keys[: len(slots)], Tier.HBM)
            return
        loads = list(map(self._loads.by_slot.get, slots))
        for number, load in enumerate(loads, index):
            if load is not None:
                lease.waiting.add(number)
                load.waiters.append((lease, number))
        sources = [Tier.HBM if load is None else load.source for load in loads]
        lease.sources += sources
        for source, run in groupby(zip(sources, keys, strict=False), itemgetter(0)):
            self._hit([key for _, key in run], source)

    def _load(self, lease: LeaseRecord, index: int, keys: Sequence[PageKey], now: float) -> str | None:
        """Start loading a prefix of ``keys`` from the fastest tier that has the first page.

        The prefix ends before the first page that cannot be loaded from that tier now.

        Returns:
            The reason why the first page cannot be loaded, or None.
        """
        source = self._residency.where(keys[0])
        if source is None:
            return self._drops.fate(keys[0]) or "not_found"
        if source != self._loads.gate:
            keys = keys[:1]  # the next page may be in a faster tier
        if lease.deadline is not None and self._loads.too_late(source, lease.deadline, now, len(keys)):
            if self._loads.too_late(source, lease.deadline, now, 1):
                return "deadline"
            keys = keys[:1]
        if lease.into is not None:
            places = self._given(lease.into[index : index + len(keys)], keys, source)
        else:
            try:
                places = self._residency.reserve(keys, Tier.HBM, 0, source, pins=1)
            except CapacityError:
                return "no_room"
        keys = keys[: len(places)]
        self._loads.start(lease, index, keys, source, places)
        lease.slots += [slot for slot, _ in places]
        lease.sources += [source] * len(places)
        lease.waiting.update(range(index, index + len(places)))
        self._hit(keys, source)
        return None

    def _given(self, slots: Sequence[int], keys: Sequence[PageKey], source: Tier) -> list[tuple[int, int]]:
        """Pin, in ``source``, the longest prefix of ``keys`` that is readable there.

        Returns:
            For each page of that prefix, the engine's slot and the slot in ``source``.

        Raises:
            LeaseError: Another page is being loaded into one of the slots.
        """
        for slot in slots:
            if slot in self._loads.by_slot:
                raise LeaseError(f"another page is already being loaded into slot {slot}; use another slot")
        readable = list(takewhile(self._residency.tables[source].ready, keys))
        return list(zip(slots, self._residency.pin(readable, source), strict=False))

    def _first_not_there(self, lease: LeaseRecord) -> int | None:
        """Return the index of the first covered page that has not arrived, or None.

        A page that another caller is still writing counts as not arrived, unless the lease's caller may
        already be reading its pages.
        """
        found = min(lease.waiting, default=None)
        if not self._unwritten or lease.told:
            return found
        pages = enumerate(zip(lease.keys[:found], lease.slots[:found], strict=False))
        return next((i for i, (key, slot) in pages if self._unwritten.get(key) == slot), found)

    def _still_landing(self, lease: LeaseRecord, index: int) -> bool:
        load = self._loads.by_slot.get(lease.slots[index])
        if load is None:
            return False
        if not load.submitted:
            self._loads.cancel(load.slot)
        return load.submitted

    def _release(self, keys: Sequence[PageKey], slots: Sequence[int], tier: Tier = Tier.HBM) -> None:
        """Record that these pages were used, and remove one pin of each in ``tier``."""
        if tier not in self._residency.tables:  # an engine owns HBM
            self._residency.touch(keys)
            return
        self._residency.release(keys, tier, slots)
        self._sinks.unpinned(reversed(keys), tier)

    def _unpin_from(self, lease: LeaseRecord, start: int) -> None:
        if lease.tier in self._residency.tables:
            keys = lease.keys[start : len(lease.slots)]
            self._residency.unpin(keys, lease.tier, lease.slots[start:])
            self._sinks.unpinned(reversed(keys), lease.tier)
        del lease.slots[start:]

    def _count(self, lease: LeaseRecord) -> None:
        """Count each requested page, as a hit in the tier where it was found or as a miss with its reason.

        Later calls for the same lease have no effect.
        """
        if lease.counted:
            return
        lease.counted = True
        served = [tier for i, tier in enumerate(lease.sources[: len(lease.slots)]) if i not in lease.waiting]
        for tier, pages in Counter(served).items():
            self._metrics.hit(tier, pages)
        if lease.waiting:
            self._metrics.miss("released_early", len(lease.waiting))
        missed = len(lease.keys) - len(lease.slots)
        if missed:
            self._metrics.miss(lease.miss_reason)
        if missed > 1:
            self._metrics.miss("after_gap", missed - 1)


def last_key(lease: LeaseRecord | None) -> PageKey | None:
    """Return the key of the last page that was put with the lease.

    If no page was put with it, return the key of the last page that it covers, or None if it covers none.
    """
    if lease is None:
        return None
    if lease.held:
        return lease.held[-1][0]
    return lease.keys[len(lease.slots) - 1] if lease.slots else None
