"""HBM slots in callers' hands, who write pages there: from ``allocate`` until they are put or given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import CapacityError, LeaseError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.eviction import Drops, Space
    from tierstore.directory.residency import Residency


class OwnedSlots:
    """Of a store whose HBM is its own."""

    def __init__(self, residency: Residency, space: Space, drops: Drops) -> None:
        self._residency = residency
        self._space = space
        self._drops = drops

    def allocate(self, n: int, *, reserve: int) -> list[int] | None:
        """``n`` owned HBM slots, or None, changing nothing, if ``reserve`` are not free or droppable now."""
        if self._space.room(Tier.HBM) < reserve and not self._could_drop(reserve):
            return None
        slots: list[int] = []
        try:
            for _ in range(n):
                slots.append(self._residency.take(Tier.HBM))
        except CapacityError:
            self.retire(slots)
            self.free(slots)
            return None
        finally:
            self._drops.note()
        return slots

    def retire(self, slots: Sequence[int]) -> None:
        """Owned slots may not be used any more by their owner, and not yet by others; ``free`` ends that."""
        self.require(slots)
        for slot in slots:
            self._residency.retire(Tier.HBM, slot)

    def free(self, slots: Sequence[int]) -> None:
        """Retired slots become free."""
        for slot in slots:
            self._residency.release_retired(Tier.HBM, slot)

    def require(self, slots: Sequence[int]) -> None:
        """LeaseError unless all slots are owned by callers, each named once."""
        owned = self._residency.tables[Tier.HBM].owned
        strange = [slot for slot in slots if slot not in owned]
        if strange:
            raise LeaseError(f"slot {strange[0]} is not owned by a caller")
        if len(set(slots)) != len(slots):
            raise LeaseError("a slot is named twice")

    def _could_drop(self, n: int) -> bool:
        """With no tier below to go to, a page is droppable when its last child goes: room() does not count it yet."""
        hbm = self._residency.tables[Tier.HBM]
        return len(hbm.free) + self._residency.unpinned(Tier.HBM) - len(hbm.dirty) >= n
