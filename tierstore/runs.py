"""What residency does to many pages in one call: as page by page, for a third of the time. Pure metadata.

The pages of a lease are taken, arrive and are let go one after the other, thousands of them, while a link or a first
token waits. Here is what is usual; a page that is not as usual goes the way of single ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tierstore.errors import LeaseError
from tierstore.types import Copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tierstore.exactness import Exactness
    from tierstore.lineage import Lineage
    from tierstore.orphans import Orphans
    from tierstore.settling import Settling
    from tierstore.tier_table import TierTable
    from tierstore.types import PageKey, Tier


class Pages(Protocol):
    """The calls for single pages, which of them are what was put, and which follows which."""

    exactness: Exactness
    lineage: Lineage
    orphans: Orphans

    def commit(self, key: PageKey, dst: Tier, slot: int) -> bool:
        """See ``Residency.commit``."""
        ...

    def unpin(self, key: PageKey, tier: Tier, slot: int) -> None:
        """See ``Residency.unpin``."""
        ...


class Runs:
    """Runs of pages of ``tables``. Changed by residency, of which it is a part."""

    def __init__(self, tables: Mapping[Tier, TierTable], settling: Settling, pages: Pages) -> None:
        self._tables = tables
        self._settling = settling
        self._pages = pages

    def reserve(self, keys: Sequence[PageKey], dst: Tier, src: Tier, pins: int = 1) -> list[tuple[int, int]]:
        """As ``reserve`` from below, for the first of ``keys`` that need no eviction: slot and slot in ``src``.

        Ends before a page that has a copy in ``dst`` or none that is readable in ``src``, and where no slot is free.
        ``dst`` has slots.
        """
        table, source, held = self._tables[dst], self._tables[src], self._settling.held
        copies, free, enter = table.copies, table.free, table.policy.enter
        unreachable = self._settling.unreachable
        found: list[tuple[int, int]] = []
        for key in keys:
            below = source.copies.get(key)
            if below is None or not below.ready or key in copies or not free:
                break
            below.pins += 1
            if below.pins == 1:
                held(key, src, source, below)
            slot = free.pop()
            rank = table.policy.unreachable(key) if key in unreachable else enter(key)
            copies[key] = Copy(slot, 0, rank, pins=pins)
            found.append((slot, below.slot))
        self._pages.exactness.loaded(keys[: len(found)], src, dst)
        table.arriving += len(found)
        table.pinned += len(found) if pins else 0
        self._settling.entered(keys[: len(found)], dst, table)
        self._settling.give_up_places(dst, table)
        return found

    def arrive(
        self,
        keys: Sequence[PageKey],
        src: Tier,
        src_slots: Sequence[int],
        dst: Tier,
        dst_slots: Sequence[int],
    ) -> list[bool]:
        """As ``commit`` in ``dst``, which has slots, and ``unpin`` in ``src``: of each whether it is readable now."""
        source, table = self._tables[src], self._tables[dst]
        resettle = self._settling.resettle
        found: list[bool] = []
        for key, src_slot, slot in zip(keys, src_slots, dst_slots, strict=True):
            below, copy = source.copies.get(key), table.copies.get(key)
            if copy is None or copy.slot != slot or below is None or below.slot != src_slot or not below.pins:
                found.append(self._pages.commit(key, dst, slot))
                self._pages.unpin(key, src, src_slot)
                continue
            copy.ready = True
            table.arriving -= 1
            table.idle += not copy.pins
            below.pins -= 1
            if not below.pins:
                source.pinned -= 1
                source.idle += below.ready
            resettle(key)
            found.append(True)
        return found

    def pin(self, keys: Sequence[PageKey], tier: Tier) -> list[int]:
        """As ``pin``, for the first of ``keys`` that are readable in the tier: their slots."""
        table, held = self._tables[tier], self._settling.held
        copies = table.copies
        slots: list[int] = []
        for key in keys:
            copy = copies.get(key)
            if copy is None or not copy.ready:
                break
            copy.pins += 1
            if copy.pins == 1:
                held(key, tier, table, copy)
            slots.append(copy.slot)
        return slots

    def release(self, keys: Sequence[PageKey], tier: Tier, slots: Sequence[int]) -> None:
        """As ``touch`` of the pages and ``unpin`` of each in ``tier``, last ones first."""
        # Fastest first: where a copy waits depends on the pins of those above.
        order = [(other, each, each.copies, each.policy.touch) for other, each in self._tables.items()]
        table, settle, after_use = self._tables[tier], self._settling.settle, self._settling.rank_after_use
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            alive = False
            for other, each, copies, touch in order:
                copy = copies.get(key)
                if copy is None:
                    continue
                rank = touch(key, copy.rank) if copy.rank >= 0 else after_use(key, other, each, copy)
                if rank != copy.rank:
                    each.withdraw(copy)
                    copy.rank = rank
                if other == tier and copy.slot == slot:
                    if copy.pins == 0:
                        raise LeaseError(f"unpin below zero in {tier.name}")
                    alive = True
                    copy.pins -= 1
                    if not copy.pins:
                        table.pinned -= 1
                        table.idle += copy.ready
                if copy.ready and not copy.pins:
                    settle(key, other, each, copy)
            if not alive:
                self._pages.unpin(key, tier, slot)
        for other, each in self._tables.items():
            self._settling.give_up_places(other, each)

    def load(self, tier: Tier, records: Iterable[tuple[PageKey, PageKey | None, int]]) -> None:
        """Takes over what a tier found at open, oldest first: (key, parent, nbytes). Before anything else."""
        table, lineage = self._tables[tier], self._pages.lineage
        enter, copies, used = table.policy.enter, table.copies, 0
        for key, parent, nbytes in records:
            copies[key] = Copy(next(table.new_slots), nbytes, enter(key), True)
            used += nbytes
            if parent is not None:
                lineage.link(key, parent)
        table.used_nbytes += used
        table.idle += len(copies)
        self._pages.orphans.load(lineage.without_parent_in(copies))
        has_children, wait, droppable = lineage.has_children, table.wait, table.droppable
        for key, copy in copies.items():
            if not has_children(key):
                wait(copy, key, droppable)
