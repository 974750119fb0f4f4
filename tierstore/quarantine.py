"""Slots of dead copies, kept apart until nothing can write or read them, and records that nobody needs any more.

A slot's holders are the pins that its copy had and the writer of its bytes: the last to end frees it. Pure metadata.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tierstore.errors import LeaseError
from tierstore.tier_table import Dead

if TYPE_CHECKING:
    from tierstore.tier_table import TierTable
    from tierstore.types import PageKey, Tier


class Quarantine:
    """Of all tiers; each table has its own dead slots. Changed by residency, of which it is a part."""

    def __init__(self) -> None:
        self.erased: deque[tuple[Tier, PageKey]] = deque()
        """Records of key-addressed tiers whose bytes nobody needs any more."""

    def kill(self, key: PageKey, table: TierTable) -> None:
        """A copy on its way will never be readable: its writer and its pins hold the slot."""
        copy = table.copies.pop(key)
        table.count(copy, -1)
        table.policy.left(key, copy.rank)
        table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins + 1)

    def let_go(self, tier: Tier, table: TierTable, slot: int) -> None:
        """One holder of a dead slot has ended. LeaseError if it has none."""
        dead = table.quarantine.get(slot)
        if dead is None:
            raise LeaseError(f"slot {slot} of {tier.name} has no such holder")
        dead.holders -= 1
        if dead.holders == 0:
            del table.quarantine[slot]
            table.put_back(slot, dead.nbytes)
            self.note_erased(tier, table, dead.key)

    def note_erased(self, tier: Tier, table: TierTable, key: PageKey | None) -> None:
        """Nothing uses a dead copy any more: where bytes are kept by key, its record is to be erased."""
        # A newer copy under the same key owns the record now: erasing it would lose that one.
        if table.num_slots is None and key is not None and key not in table.copies:
            self.erased.append((tier, key))
