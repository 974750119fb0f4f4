"""Room in the tiers: who is saved below, and who is dropped where saving is not possible. Decides, copies nothing.

A readable page is dropped only when there is no tier below that may hold it, when that tier refuses or fails or is
full of pages that cannot leave, or when its bytes are readable elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import CapacityError
from tierstore.traffic import BATCH_PAGES, Move
from tierstore.types import Tier

if TYPE_CHECKING:
    from tierstore.directory.residency import Residency
    from tierstore.traffic import Traffic
    from tierstore.types import PageKey

STALL_S = 2.0
"""An edge that carries pages and has not moved one for this long counts as failing until it moves again."""


class Space:
    """Plans copies downwards that make room above, and drops what cannot be saved."""

    def __init__(self, residency: Residency, traffic: Traffic, record_nbytes: int) -> None:
        self.failing: set[Tier] = set()
        """Tiers whose last write failed."""
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._traffic = traffic
        self._record_nbytes = record_nbytes

    def below(self, tier: Tier) -> Tier | None:
        """The next slower tier there is."""
        return next((other for other in self._tiers if other > tier), None)

    def room(self, tier: Tier) -> int:
        """Pages that ``tier`` can take in without waiting."""
        table = self._tables[tier]
        if table.budget_nbytes is not None:
            return (table.budget_nbytes - table.used_nbytes) // self._record_nbytes + len(table.droppable)
        return len(table.free) + len(table.droppable)

    def make_room(self, tier: Tier, wanted: int, now: float) -> None:
        """Starts to save dirty victims below, up to what ``wanted`` pages need beyond room and saves in flight."""
        table, below = self._tables[tier], self.below(tier)
        if below is None or below in self.failing or self.room(tier) >= wanted:
            return
        for _ in range(min(BATCH_PAGES, wanted - self.room(tier) - self._traffic.carrying(tier, below))):
            key = table.dirty.first()
            if key is None:
                return
            if not self._has_room(below):
                self.make_room(below, wanted, now)
            if not self._has_room(below) or not self.copy(key, tier, below):
                return

    def relieve(
        self,
        tier: Tier,
        wanted: int,
        now: float,
        above: Tier | None = None,
        spared: PageKey | None = None,
    ) -> None:
        """Where pages cannot be saved, drops what ``wanted`` pages need, leaf first, a batch at most.

        ``above``: the tier whose pages need the room. A page that both tiers hold goes from both: without its copy
        here the one above would have to be saved in its place, for ever. ``spared``: the page before the one that
        needs the room, which would be out of reach without it.
        """
        below = self.below(tier)
        if below is None or self.room(tier) >= wanted:
            return
        self.give_way(tier, now)
        if not self.stuck(tier, below, now):
            self.relieve(below, wanted - self.room(tier), now, tier, spared)
            if not self.blocked(below, now):
                return
        leaves = self._tables[tier].leaves
        for _ in range(min(BATCH_PAGES, wanted - self.room(tier))):
            key = leaves.first()
            if key is None or key == spared:
                break
            self.drop(key, tier)
            copy = None if above is None else self._tables[above].copies.get(key)
            if above is not None and copy is not None and copy.ready and not copy.pins:
                self.drop(key, above)
        if self.room(tier) < wanted:
            self._drop_mirrored_leaf(tier, below, spared)
        # A page on its way here is about to be a leaf: without it what follows the dropped one is cut off for nothing.
        if self.room(tier) < wanted and not leaves and self._traffic.quiet(tier, now, STALL_S):
            if not any(len(self._tables[other].leaves) for other in self._tiers if other < tier):
                self._drop_before_saved(tier, wanted)
            elif above is None:
                self._drop_end_above(tier)

    def give_way(self, tier: Tier, now: float) -> bool:
        """Where a tier is full of memory-only pages that stay for those after them above, drops these, a batch at most.

        Else they would keep from memory, and from the disk, what is or is to be stored. Whether there is room now.
        """
        if not self._tables[tier].inner or not self.blocked(tier, now):
            return False
        above = [(other, self._tables[other].fleeting) for other in self._tiers if other < tier]
        for _ in range(BATCH_PAGES):
            found = next(((key, other) for other, queue in above if (key := queue.first()) is not None), None)
            if found is None or self.room(tier) > 0:
                break
            self.drop(*found)
        return self.room(tier) > 0

    def blocked(self, tier: Tier, now: float) -> bool:
        """Whether the tier is full of pages that cannot leave, and nothing that moves will change that."""
        return self.room(tier) == 0 and self._traffic.quiet(tier, now, STALL_S)

    def stuck(self, src: Tier, dst: Tier, now: float) -> bool:
        """Whether the edge down cannot be counted on: its last write failed, or it carries pages and stands still."""
        return dst in self.failing or self._traffic.stalled((src, dst), now, STALL_S)

    def copy_from_engine(
        self,
        key: PageKey,
        slot: int,
        dst: Tier,
        parent: PageKey | None,
        *,
        memory_only: bool,
        coming: bool = False,
    ) -> bool:
        """Plans the copy of a page that no tier has out of an engine's slot; False if there is no room.

        ``coming``: ``parent`` will be copied out of another slot, and counts as there.
        """
        follows = None if coming else parent
        nbytes = self._nbytes(dst)
        try:
            dst_slot = self._residency.reserve(key, dst, nbytes, memory_only=memory_only, parent=follows)
        except CapacityError:
            return False
        self._residency.exactness.put(key, parent)
        self._traffic.add(Tier.HBM, dst, Move(key, slot, dst_slot, nbytes, parent))
        return True

    def copy(self, key: PageKey, src: Tier, dst: Tier) -> bool:
        """Plans the copy of a page one tier down; False if there is no room. True if it is there or on its way."""
        tables = self._tables
        if key in tables[dst].copies:
            return True
        nbytes = self._nbytes(dst)
        try:
            slot = self._residency.reserve(key, dst, nbytes, src)
        except CapacityError:
            return False
        parent = self._residency.lineage.parent(key)
        self._traffic.add(src, dst, Move(key, tables[src].copies[key].slot, slot, nbytes, parent))
        return True

    def _has_room(self, tier: Tier) -> bool:
        """Whether a page can be taken in without dropping a mirror of a page above."""
        table = self._tables[tier]
        return table.has_space(self._nbytes(tier)) or len(table.droppable) > 0

    def _nbytes(self, tier: Tier) -> int:
        return self._record_nbytes if self._tables[tier].budget_nbytes is not None else 0

    def drop(self, key: PageKey, tier: Tier) -> None:
        """Lets a readable copy go."""
        self._residency.dropped.append(self._residency.evict(key, tier))

    def _drop_mirrored_leaf(self, tier: Tier, below: Tier, spared: PageKey | None) -> None:
        """Drops a last page of a sequence from both tiers, so that an earlier one can be saved in its place."""
        if self._has_room(below):
            return
        copies, lineage = self._tables[tier].copies, self._residency.lineage
        key = self._tables[below].mirrors.first_where(
            lambda k: (
                k != spared
                and k in copies
                and copies[k].ready
                and not copies[k].pins
                and not lineage.has_children(k)
            )
        )
        if key is not None:
            self.drop(key, below)
            self.drop(key, tier)

    def _drop_end_above(self, tier: Tier) -> None:
        """Drops the end of a sequence that goes on in a tier above, and the page before it from here.

        The tiers above end what is here: no page of this tier could leave without cutting off another.
        """
        copies, parent = self._tables[tier].copies, self._residency.lineage.parent
        for other in self._tiers:
            if other >= tier:
                return
            key = self._tables[other].leaves.first_where(lambda k: parent(k) in copies)
            if key is not None:
                self.drop(key, other)
                uncovered = self._tables[tier].leaves.first()
                if uncovered is not None:
                    self.drop(uncovered, tier)
                return

    def _drop_before_saved(self, tier: Tier, wanted: int) -> None:
        """Drops pages that cannot be saved although what follows them was, a batch at most.

        It cuts off what lies below, which goes first from then on: else a disk that refuses for good would keep these
        pages here for good, and nobody could have their slots.
        """
        tables, lineage = self._tables, self._residency.lineage
        here = [tables[other].copies for other in self._tiers if other <= tier]
        for _ in range(min(BATCH_PAGES, wanted - self.room(tier))):
            key = tables[tier].dirty.first_where(
                lambda k: not any(child in copies for child in lineage.children(k) for copies in here)
            )
            if key is None:
                return
            self.drop(key, tier)
