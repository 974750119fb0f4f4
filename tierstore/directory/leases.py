"""Leases: what they hold, how they come to cover pages, and when they end. Metadata only.

A lease pins pages in HBM and waits for those in flight. It takes in pages that are there, in flight, or to be loaded
for it; its deadline, a failed load or an eviction cuts it short.
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
    """What a lease holds. Pages ``[0, len(slots))`` are covered; those in ``waiting`` are still in flight."""

    keys: tuple[PageKey, ...]
    into: tuple[int, ...] | None = None
    deadline: float | None = None
    exact: bool = False
    """Only pages that are what was put."""
    slots: list[int] = field(default_factory=list)
    sources: list[Tier] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    landing: set[int] = field(default_factory=set)
    """Pages already given up whose copies still write an engine's slots."""
    inexact_from: int | None = None
    """Before a page of this number all it took in were exact; -1: one that was sealed under it is not."""
    held: list[tuple[PageKey, int]] = field(default_factory=list)
    """Pages sealed under this lease by ``put``."""
    complete: bool = False
    """No further page will be added."""
    cut: bool = False
    """A page was lost on its way, or came too late."""
    miss_reason: str = "not_found"
    told: bool = False
    """Its caller was told of a layer before all of it was there, and may be reading these slots."""
    never_written: Event | None = None
    """The event of a failed device that was to end the writing of a page sealed under it."""
    wants_room: bool = False
    """Its ``acquire`` waits for room in HBM."""
    counted: bool = False
    released: bool = False

    @property
    def inexact(self) -> bool:
        """Whether a page that it covers may differ from what was put, and so anything computed over it."""
        return self.inexact_from is not None and self.inexact_from < len(self.slots)

    @property
    def state(self) -> LeaseState:
        """State of its copies; their writers may not be done. READY and FAILED are final."""
        if not self.complete or self.waiting or self.landing:
            return LeaseState.PENDING
        if self.never_written is not None:
            return LeaseState.FAILED
        return LeaseState.FAILED if self.cut and not self.slots else LeaseState.READY


class Leases:
    """The open leases of a store, from begin to release.

    ``drops`` says why a page is gone, for the reason of a miss. ``hit`` is called with the pages that a lease takes in,
    and the fastest tier that had them.
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
        """When the next lease is to be cut, as of the last ``expire``."""
        self._replaced: list[tuple[LeaseRecord, int]] = []
        self._timed: set[LeaseRecord] = set()
        """Open leases with a deadline that may still have to be cut: the others cost ``expire`` nothing."""
        self._residency = residency
        self._loads = loads
        self._sinks = writeback.sinks
        self._unwritten: Mapping[PageKey, int] = writeback.unwritten
        """Pages whose bytes an engine has not finished writing, by HBM slot."""
        self._drops = drops
        self._metrics = metrics
        self._hit = hit
        self._hbm = residency.tables.get(Tier.HBM)
        """None where an engine owns HBM: leases pin nothing there."""

    def begin(
        self, keys: Sequence[PageKey], deadline: float | None, into: Sequence[int] | None, *, exact: bool
    ) -> LeaseRecord:
        """Return a lease that covers nothing yet. ``exact``: it takes no page that may differ from what was put."""
        lease = LeaseRecord(tuple(keys), None if into is None else tuple(into), deadline, exact)
        self.open.add(lease)
        if deadline is not None:
            self._timed.add(lease)
        return lease

    def extend(self, lease: LeaseRecord, limit: int, now: float) -> None:
        """Add up to ``limit`` pages. The lease is complete when the next page is unavailable."""
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
        """Pin a page sealed under the lease until its release."""
        [slot] = self._residency.pin((key,), Tier.HBM)
        lease.held.append((key, slot))
        if not self._residency.exactness.exact(key):
            lease.inexact_from = -1

    def moved(self, load: Load, slot: int) -> None:
        """Note that the page was put into another slot while a load was in flight.

        Leases that are still waiting switch to the new slot. A lease that may already be reading the old slot is cut by
        ``cut_replaced``, because that slot is about to be reused.
        """
        for lease, index in load.waiters:
            if lease in self.open and index < len(lease.slots):
                lease.slots[index] = slot
                if lease.told:
                    self._replaced.append((lease, index))
                else:
                    lease.waiting.discard(index)

    def cut_replaced(self) -> None:
        """Cut leases before pages that moved while they may have been read."""
        for lease, index in self._replaced:
            self.cut(lease, index, "replaced")
        self._replaced.clear()

    def arrived(self, load: Load) -> None:
        """Note that the page has arrived, for all leases that wait for this load."""
        for lease, index in load.waiters:
            lease.waiting.discard(index)
            lease.landing.discard(index)

    def lost(self, load: Load, reason: str) -> None:
        """Cut every lease that waits for the page, because it will not arrive."""
        for lease, index in load.waiters:
            lease.landing.discard(index)
            self.cut(lease, index, reason)

    def never_written(self, slots: Collection[int], event: Event) -> None:
        """Note that the writer of these slots failed: leases that cover one are cut before it.

        Leases under which one was sealed have failed with ``event``. O(leased pages), after a device failure.
        """
        for lease in [lease for lease in self.open if not lease.released]:
            index = next((i for i, slot in enumerate(lease.slots) if slot in slots), None)
            if index is not None:
                self.cut(lease, index, "failed")
            if any(slot in slots for _, slot in lease.held):
                lease.never_written = event

    def cut(self, lease: LeaseRecord, index: int, reason: str) -> None:
        """Cut the lease before page ``index`` and release later pages.

        An engine computes into the slots of missing pages, so its lease is final only when no copy writes them.
        """
        if lease not in self.open or index >= len(lease.slots):
            return
        if self._hbm is None:
            lease.landing |= {i for i in lease.waiting if i >= index and self._still_landing(lease, i)}
        lease.cut, lease.complete, lease.miss_reason = True, True, reason
        self._unpin_from(lease, index)
        lease.waiting = {i for i in lease.waiting if i < index}

    def under_way(self, lease: LeaseRecord) -> list[int] | None:
        """Return the slots of its pages in flight.

        None if one is unknown: it waits for a promotion, or pages that the lease gave up are still in flight.
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
        """Cut leases whose deadline has come before the first page that is not there."""
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
        """Stop waiting for the pages of a lease that is being released."""
        self._count(lease)
        if lease.into is not None:
            for index in lease.waiting | lease.landing:
                self._loads.abandon(lease.into[index])
        lease.waiting.clear()
        lease.landing.clear()

    def release_some(self, lease: LeaseRecord, limit: int) -> bool:
        """End up to ``limit`` pins of a lease, last pages first. Returns whether some are left.

        Loads that nobody waits for any more continue while HOST has free slots.
        """
        self.stop_waiting(lease)
        if lease.held:
            pins = lease.held[-limit:]
            del lease.held[-limit:]
            self._release([key for key, _ in pins], [slot for _, slot in pins])
        else:
            end = len(lease.slots)
            start = max(0, end - limit)
            self._release(lease.keys[start:end], lease.slots[start:])
            del lease.slots[start:]
        more = bool(lease.held or lease.slots)
        if not more:
            self.open.discard(lease)
        return more

    def awaits(self, src: Tier) -> bool:
        """Return whether a lease waits for a page that has to come from ``src``."""
        by_slot = self._loads.by_slot
        return any(
            load is not None and load.source == src
            for lease in self.open
            if not lease.released
            for load in (by_slot.get(lease.slots[index]) for index in lease.waiting)
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _attach(self, lease: LeaseRecord, keys: Sequence[PageKey], now: float) -> str | None:
        """Add one page to a lease. Returns the reason if that is impossible."""
        index = len(lease.slots)
        exact = self._residency.exactness.prefix(keys)
        if lease.exact:
            if not exact:
                held = self._residency.held(keys[0])
                return "inexact" if held else self._drops.fate(keys[0]) or "not_found"
            keys = keys[:exact]
        if self._hbm is not None and keys[0] in self._hbm.copies:
            self._join(lease, index, keys, self._hbm)
        else:
            reason = self._load(lease, index, keys, now)
            if reason is not None:
                return reason
        if lease.inexact_from is None and index + exact < len(lease.slots):
            lease.inexact_from = index + exact
        return None

    def _join(self, lease: LeaseRecord, index: int, keys: Sequence[PageKey], hbm: TierTable) -> None:
        """Add the first of ``keys``, those that are in HBM or on their way there."""
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
        """Start to load the first of ``keys`` from the fastest tier that has it, and those after it from there.

        Returns the reason if the first page cannot be loaded.
        """
        source = self._residency.where(keys[0])
        if source is None:
            return self._drops.fate(keys[0]) or "not_found"
        if source != self._loads.gate:
            keys = keys[:1]  # the next one may be in a faster tier
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
        """Use an engine's slot, and pin the source for the load. LeaseError if another load is to fill the slot."""
        for slot in slots:
            if slot in self._loads.by_slot:
                raise LeaseError(f"HBM slot {slot} is already the target of a load")
        readable = list(takewhile(self._residency.tables[source].ready, keys))
        return list(zip(slots, self._residency.pin(readable, source), strict=False))

    def _first_not_there(self, lease: LeaseRecord) -> int | None:
        """Return the first page in flight, or still being written for a caller who was not told of its writer."""
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

    def _release(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Note that these pages were used, and end one pin of each."""
        if self._hbm is None:
            self._residency.touch(keys)
            return
        self._residency.release(keys, Tier.HBM, slots)
        self._sinks.unpinned(reversed(keys), Tier.HBM)

    def _unpin_from(self, lease: LeaseRecord, start: int) -> None:
        if self._hbm is not None:
            keys = lease.keys[start : len(lease.slots)]
            self._residency.unpin(keys, Tier.HBM, lease.slots[start:])
            self._sinks.unpinned(reversed(keys), Tier.HBM)
        del lease.slots[start:]

    def _count(self, lease: LeaseRecord) -> None:
        """Count every requested page once: a hit where it was found, or a miss with its reason."""
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
    """Return the page that the next one sealed under this lease follows."""
    if lease is None:
        return None
    if lease.held:
        return lease.held[-1][0]
    return lease.keys[len(lease.slots) - 1] if lease.slots else None
