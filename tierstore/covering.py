"""How a lease comes to cover pages: those that are there, on their way, or to be loaded for it. Metadata only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import CapacityError, LeaseError
from tierstore.types import PageKey, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.directory.loads import Load, Loads
    from tierstore.directory.residency import Residency
    from tierstore.directory.transfers import Traffic
    from tierstore.leasing import LeaseRecord


class Covering:
    """Of the leases of a store. ``fate`` tells why a page is gone, for the reason of a miss.

    ``hit`` is told of the pages that a lease takes in, and of the fastest tier that had them.
    """

    def __init__(
        self,
        residency: Residency,
        traffic: Traffic,
        loads: Loads,
        fate: Callable[[PageKey], str | None],
        hit: Callable[[Sequence[PageKey], Tier], None],
    ) -> None:
        self._residency = residency
        self._traffic = traffic
        self._loads = loads
        self._fate = fate
        self._hit = hit
        self._hbm = residency.tables.get(Tier.HBM)
        """None where an engine owns HBM: leases pin nothing there."""

    def extend(self, lease: LeaseRecord, limit: int, now: float) -> None:
        """Adds up to ``limit`` pages; the lease is complete when the next page cannot be had."""
        end = len(lease.slots) + limit
        while (index := len(lease.slots)) < end:
            if lease.cut or index == len(lease.keys):
                lease.complete = True
                return
            if self._attach_run(lease, index, lease.keys[index:end]):
                continue
            reason = self._attach(lease, index, lease.keys[index], now)
            if reason is not None:
                lease.miss_reason = reason
                lease.complete = True
                return

    # -- inside -------------------------------------------------------------------------------------------------

    def _attach_run(self, lease: LeaseRecord, index: int, keys: Sequence[PageKey]) -> bool:
        """Adds the first of ``keys`` that are there, on their way, or only to be copied into free slots; whether there
        was one.

        What is usual, without what is not: its Python is what the link and the first token wait for.
        """
        exact = self._residency.exactness.prefix(keys)
        if lease.exact:
            keys = keys[:exact]
        if self._hbm is None or not keys or not self._take_run(lease, index, keys):
            return False
        if lease.inexact_from is None and index + exact < len(lease.slots):
            lease.inexact_from = index + exact
        return True

    def _take_run(self, lease: LeaseRecord, index: int, keys: Sequence[PageKey]) -> bool:
        """``_attach_run`` without a look at whether they are exact."""
        assert self._hbm is not None
        if keys[0] in self._hbm.copies:
            slots = self._residency.runs.pin(keys, Tier.HBM)
            lease.slots += slots
            return self._taken(lease, keys[: len(slots)], Tier.HBM) or self._join_run(lease, index, keys)
        gate = self._loads.gate
        if lease.deadline is not None or gate == Tier.HBM:
            return False
        places = self._residency.runs.reserve(keys, Tier.HBM, gate)
        keys = keys[: len(places)]
        self._loads.start_run(lease, index, keys, places)
        lease.slots += [slot for slot, _ in places]
        lease.waiting.update(range(index, index + len(places)))
        return self._taken(lease, keys, gate)

    def _join_run(self, lease: LeaseRecord, index: int, keys: Sequence[PageKey]) -> bool:
        """Adds the first of ``keys`` that are on their way from one tier, the first of them certainly."""
        assert self._hbm is not None
        copies, by_slot, pin = self._hbm.copies, self._loads.by_slot, self._residency.pin
        source = by_slot[copies[keys[0]].slot].source
        joined = 0
        for key in keys:
            copy = copies.get(key)
            load = None if copy is None or copy.ready else by_slot[copy.slot]
            if load is None or load.source != source:
                break
            lease.slots.append(pin(key, Tier.HBM))
            lease.waiting.add(index + joined)
            load.waiters.append((lease, index + joined))
            joined += 1
        return self._taken(lease, keys[:joined], source)

    def _taken(self, lease: LeaseRecord, keys: Sequence[PageKey], source: Tier) -> bool:
        lease.sources += [source] * len(keys)
        if keys:
            self._hit(keys, source)
        return bool(keys)

    def _attach(self, lease: LeaseRecord, index: int, key: PageKey, now: float) -> str | None:
        """Adds one page to a lease; the reason if it cannot."""
        if not self._residency.exactness.exact(key):
            if lease.exact:
                return "inexact" if self._residency.held(key) else self._fate(key) or "not_found"
            if lease.inexact_from is None:
                lease.inexact_from = index
        copy = None if self._hbm is None else self._hbm.copies.get(key)
        if copy is not None:
            lease.slots.append(self._residency.pin(key, Tier.HBM))
            if copy.ready:
                lease.sources.append(Tier.HBM)
            else:
                self._await(lease, index, self._loads.by_slot[copy.slot])
            self._hit((key,), lease.sources[-1])
            return None
        source = self._residency.where(key)
        if source is None:
            return self._fate(key) or "not_found"
        if lease.deadline is not None and self._too_late(source, lease.deadline, now):
            return "deadline"
        slot = (
            self._reserve(key, source) if lease.into is None else self._given(lease.into[index], key, source)
        )
        if slot is None:
            return "no_room"
        lease.slots.append(slot)
        source_slot = self._residency.tables[source].copies[key].slot
        self._await(lease, index, self._loads.start(key, slot, source, source_slot))
        self._hit((key,), source)
        return None

    def _await(self, lease: LeaseRecord, index: int, load: Load) -> None:
        lease.sources.append(load.source)
        lease.waiting.add(index)
        load.waiters.append((lease, index))

    def _reserve(self, key: PageKey, source: Tier) -> int | None:
        """A slot that the lease pins; the source is pinned for the load. None: there is no room."""
        try:
            return self._residency.reserve(key, Tier.HBM, 0, source, pins=1)
        except CapacityError:
            return None

    def _given(self, slot: int, key: PageKey, source: Tier) -> int:
        """An engine's slot; the source is pinned for the load. LeaseError if another load is to fill the slot."""
        if slot in self._loads.by_slot:
            raise LeaseError(f"HBM slot {slot} is already the target of a load")
        self._residency.pin(key, source)
        return slot

    def _too_late(self, source: Tier, deadline: float, now: float) -> bool:
        hops = [tier for tier in self._residency.tables if Tier.HBM < tier <= source]
        edges = zip(reversed(hops), [*reversed(hops[:-1]), Tier.HBM], strict=True)
        return deadline <= now or now + sum(self._traffic.seconds_for(e, 1) for e in edges) > deadline
