"""What residency does to many pages in one call: as page by page, for a third of the time. Pure metadata.

The pages of a lease are taken, arrive and are let go one after the other, thousands of them, while a link or a first
token waits. Here is what is usual; a page that is not as usual goes the way of single ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tierstore.errors import LeaseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.settling import Settling
    from tierstore.tier_table import TierTable
    from tierstore.types import PageKey, Tier


class Pages(Protocol):
    """The calls for single pages."""

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

    def release(self, keys: Sequence[PageKey], tier: Tier, slots: Sequence[int]) -> None:
        """As ``touch`` of the pages and ``unpin`` of each in ``tier``, last ones first."""
        # Fastest first: where a copy waits depends on the pins of those above.
        order = [(other, each, each.copies, each.policy.touch) for other, each in self._tables.items()]
        table, settle = self._tables[tier], self._settling.settle
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            alive = False
            for other, each, copies, touch in order:
                copy = copies.get(key)
                if copy is None:
                    continue
                rank = touch(key, copy.rank)
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
