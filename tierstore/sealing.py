"""Filled HBM slots become pages that can be matched: put, and the end of their writing. Metadata only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.directory.leases import last_key
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tierstore.directory.admission import Admitting
    from tierstore.directory.leases import LeaseRecord, Leasing
    from tierstore.directory.loads import Loads
    from tierstore.directory.residency import Residency
    from tierstore.directory.writeback import Placement
    from tierstore.types import PageKey


class Sealing:
    """Takes over slots of callers. Where an engine owns HBM nothing is sealed."""

    def __init__(
        self,
        residency: Residency,
        admitting: Admitting,
        leasing: Leasing,
        loads: Loads,
        placement: Placement,
    ) -> None:
        self._residency = residency
        self._admitting = admitting
        self._leasing = leasing
        self._loads = loads
        self._placement = placement

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        parent: PageKey | None,
        lease: LeaseRecord | None,
        *,
        written: bool,
        memory_only: bool = False,
        replaceable: Collection[PageKey] = (),
    ) -> tuple[list[int], list[int]]:
        """Seals owned slots: the slot that holds each key now, and the duplicates among yours (retired).

        ``parent`` is the page before the first key; None: the last page of the lease, if there is one. Under an exact
        lease it ends before a key of which a copy in memory is not exact and does not make way. ``replaceable``: keys
        whose copy in HBM is still being written by others. Yours takes its place, unless it is less exact: without a
        lease nobody could tell the caller when to read the other one.
        """
        table = self._residency.tables[Tier.HBM]
        kept: list[int] = []
        duplicates: list[int] = []
        parent = parent or last_key(lease)
        if not memory_only and parent is not None:
            self._residency.memory_only.permit_named(parent)
        for following, key, slot in zip(range(len(keys) - 1, -1, -1), keys, slots, strict=True):
            if not self._may_put(key, parent, lease):
                break
            if replaceable and key in replaceable and self._replace(key, slot, parent, written=written):
                if not memory_only:
                    self._admitting.hit((key,), Tier.HBM)
            elif table.ready(key):
                self._residency.retire(Tier.HBM, slot)
                duplicates.append(slot)
                if not memory_only:
                    self._admitting.hit((key,), Tier.HBM)
            else:
                self._seal(key, slot, parent, following, written=written, memory_only=memory_only)
                if lease is not None and lease.inexact:
                    self._residency.exactness.doubt(key)
            if not memory_only:
                self._residency.memory_only.permit_named(key)
            kept.append(table.copies[key].slot)
            if lease is not None:
                self._leasing.hold(lease, key)
            parent = key
        self._residency.touch(keys)
        return kept, duplicates

    def written(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """The engine has finished writing pages sealed earlier: copies may start from them."""
        for key, slot in zip(keys, slots, strict=True):
            if self._placement.unwritten.get(key) == slot:
                del self._placement.unwritten[key]
            self._unpin(key, Tier.HBM, slot)
            if self._residency.tables[Tier.HBM].ready(key):
                self._placement.sealed(key)

    # -- inside -------------------------------------------------------------------------------------------------

    def _seal(
        self,
        key: PageKey,
        slot: int,
        parent: PageKey | None,
        following: int,
        *,
        written: bool,
        memory_only: bool,
    ) -> None:
        table = self._residency.tables[Tier.HBM]
        copy = table.copies.get(key)
        old_slot = None if copy is None else copy.slot
        source = self._residency.where(key)
        if not memory_only and source is not None:
            self._admitting.hit((key,), source)
        elif not memory_only and not self._residency.held(key):
            self._admitting.put(key, parent, following)
        self._residency.adopt(key, Tier.HBM, slot, parent, memory_only=memory_only)
        if written:
            self._placement.sealed(key)
        else:
            self._placement.unwritten[key] = self._residency.pin(key, Tier.HBM)
        # Only now: whoever sees that a lease waits for no copy any more must see that its page is still being written.
        if old_slot is not None and old_slot in self._loads.by_slot:
            self._leasing.moved(self._loads.cancel(old_slot), slot)

    def _replace(self, key: PageKey, slot: int, parent: PageKey | None, *, written: bool) -> bool:
        """Make ``slot`` the page's copy in place of one that is still being written; leases keep the old slot.

        False, nothing changed: there is no such copy, or this one would be less exact.
        """
        residency, unwritten = self._residency, self._placement.unwritten
        copy = residency.tables[Tier.HBM].copies.get(key)
        if copy is None or not copy.ready or copy.slot != unwritten.get(key):
            return False
        if parent is not None and not residency.exactness.exact(parent):
            return False
        residency.replace(key, Tier.HBM, slot)
        if written:
            del unwritten[key]
            self._placement.sealed(key)
        else:
            unwritten[key] = residency.pin(key, Tier.HBM)
        return True

    def _may_put(self, key: PageKey, parent: PageKey | None, lease: LeaseRecord | None) -> bool:
        """Whether the lease may hold what will be the page's copy in HBM.

        For an exact page copies that are not, that nobody uses and that are saved below, make way.
        """
        exactness = self._residency.exactness
        if exactness.exact(key):
            return True
        if (parent is None or exactness.exact(parent)) and not (lease is not None and lease.inexact):
            for tier in exactness.tainted_in(key):
                if not self._residency.tables[tier].copies[key].pins and self._residency.saved_below(
                    key, tier
                ):
                    self._residency.dropped.append(self._residency.evict(key, tier))
        return lease is None or not lease.exact or not exactness.stays_tainted(key)

    def _unpin(self, key: PageKey, tier: Tier, slot: int) -> None:
        self._residency.unpin(key, tier, slot)
        self._placement.sinks.unpinned(key, tier)
