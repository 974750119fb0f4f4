"""Whom to drop so that a record fits a byte budget. Decides, drops nothing."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from tierstore.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierstore.directory.lineage import Lineage
    from tierstore.directory.residency import TierTable
    from tierstore.types import PageKey, Tier


def choose_victims(
    tables: Mapping[Tier, TierTable], lineage: Lineage, tier: Tier, nbytes: int
) -> list[PageKey]:
    """Copies to drop from ``tier``, in order, so that ``nbytes`` fit. CapacityError if that cannot be.

    Mirrors go last. One victim is enough where all records are of one size; else lowest rank first,
    a parent after its last child.
    """
    table = tables[tier]
    first = table.droppable.first() or table.mirrors.first()
    if first is None:
        raise CapacityError(f"{tier.name}: no free slot and nothing to drop")
    if table.num_slots is not None or table.has_space(nbytes - table.copies[first].nbytes):
        return [first]
    victims: dict[PageKey, None] = {}
    freed = 0
    heap = [(table.copies[key].rank, key) for key in table.droppable]
    heapify(heap)
    while heap and not table.has_space(nbytes - freed):
        _, victim = heappop(heap)
        victims[victim] = None
        freed += table.copies[victim].nbytes
        parent = lineage.parent(victim)
        if parent is not None and _left_bare(tables, lineage, tier, parent, victims):
            heappush(heap, (table.copies[parent].rank, parent))
    if not table.has_space(nbytes - freed):
        raise CapacityError(f"{tier.name}: not enough to drop for {nbytes} bytes")
    return list(victims)


def _left_bare(
    tables: Mapping[Tier, TierTable],
    lineage: Lineage,
    tier: Tier,
    key: PageKey,
    victims: dict[PageKey, None],
) -> bool:
    """Whether the page's last copy could leave the lowest tier once ``victims`` have, and not before."""

    def only_here(page: PageKey) -> bool:
        return not any(table.ready(page) for other, table in tables.items() if other != tier)

    copy = tables[tier].copies.get(key)
    if copy is None or not copy.ready or copy.pins or copy.queue is tables[tier].droppable:
        return False
    if key in victims or not only_here(key):
        return False
    return all(child in victims and only_here(child) for child in lineage.children(key))
