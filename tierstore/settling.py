"""In which queue a copy waits that may leave its tier. Pure metadata, changed by residency alone.

Evictable copies wait in one of three queues: ``droppable`` (the bytes are ready below, or the tier is the lowest for
this page and holds the only copy, or no request can reach the page), ``dirty`` (to be copied below first) and, in the
lowest tier for the page, ``mirrors`` of unpinned copies above, which go last: dropping one makes no more room above
than it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.policy.orders import BAND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.directory.lineage import Lineage
    from tierstore.directory.residency import TierTable
    from tierstore.memory_only import MemoryOnly
    from tierstore.types import Copy, PageKey, Tier


class Settling:
    """The queues of all tiers. ``tables``: fastest first. Each call takes a bounded time."""

    def __init__(self, tables: Mapping[Tier, TierTable], lineage: Lineage, memory_only: MemoryOnly) -> None:
        self._tables = tables
        self._lineage = lineage
        self._memory_only = memory_only
        self._order = list(tables.items())
        self.retained: dict[PageKey, int] = {}
        """Pages that requests retain, wherever they are or will be, with their priority."""
        self.kept: dict[tuple[PageKey, Tier], int] = {}
        """Pages that expected requests are to find in a tier, there or not, with their priority: as retained there."""
        self.unreachable: set[PageKey] = set()
        """Pages that no request can reach: each of their copies that nobody holds is the next to leave its tier."""
        self._above = {tier: [t.copies for o, t in self._order if o < tier] for tier in tables}
        self._below = {tier: [t.copies for o, t in self._order if o > tier] for tier in tables}

    def below(self, key: PageKey, tier: Tier) -> bool:
        """Whether a slower tier holds a readable copy."""
        return _ready_in(self._below[tier], key)

    def first_rank(self, key: PageKey, table: TierTable) -> int:
        """Rank of a page that gets a copy in the tier."""
        return table.policy.unreachable(key) if key in self.unreachable else table.policy.enter(key)

    def cut_off(self, key: PageKey) -> None:
        """The page cannot be reached: it leaves every tier before all that can."""
        self.unreachable.add(key)
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                self._rerank(key, tier, table, copy, table.policy.unreachable(key))

    def rejoin(self, key: PageKey) -> None:
        """The page can be reached again: it enters every order anew, as a retained one where it is that."""
        self.unreachable.discard(key)
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                priority = self.priority(key, tier)
                policy = table.policy
                rank = policy.enter(key) if priority is None else policy.retained(priority)
                self._rerank(key, tier, table, copy, rank)
                self.give_up_places(tier, table)

    def entered(self, keys: Sequence[PageKey], tier: Tier, table: TierTable) -> None:
        """The pages have got a copy: those that are retained or kept wait after the ordinary ones there, too."""
        if not self.retained and not self.kept:
            return
        for key in keys:
            priority = self.priority(key, tier)
            if priority is not None:
                self.rerank(key, tier, table, table.copies[key], table.policy.retained(priority))

    def priority(self, key: PageKey, tier: Tier) -> int | None:
        """Of a page that is retained, or kept in the tier; None: it is an ordinary one there."""
        priority = self.retained.get(key)
        return self.kept.get((key, tier)) if priority is None else priority

    def make_ordinary(self, key: PageKey, tier: Tier, table: TierTable) -> None:
        """What moved the copy after the ordinary ones has ended; it stays there while something else does so."""
        copy = table.copies.get(key)
        if copy is None or copy.rank < BAND:
            return
        priority = self.priority(key, tier)
        rank = table.policy.ordinary(key, copy.rank) if priority is None else table.policy.retained(priority)
        self.rerank(key, tier, table, copy, rank)

    def put_first(self, key: PageKey) -> None:
        """The page waits before all normal ones, in every tier."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                self.rerank(key, tier, table, copy, table.policy.unwanted())

    def rank_after_use(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> int:
        """A retained or kept page that was unwanted for a while waits after the ordinary ones again.

        One that cannot be reached stays where it is.
        """
        if copy.rank < 0 and key in self.unreachable:
            return copy.rank
        priority = self.priority(key, tier) if copy.rank < 0 else None
        return table.policy.touch(key, copy.rank) if priority is None else table.policy.retained(priority)

    def resettle(self, key: PageKey) -> None:
        """What is known of the page has changed: each of its copies that may leave goes to where it belongs."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None and copy.ready and copy.pins == 0:
                self.settle(key, tier, table, copy)

    def held(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> None:
        """A readable copy has got its first pin."""
        table.pinned += 1
        table.idle -= 1
        table.withdraw(copy)
        if self._memory_only.lowest_for(key) != tier:
            self.settle_mirror(key, tier)

    def settle_mirror(self, key: PageKey, above: Tier) -> None:
        """A copy above was pinned or let go: the one in the lowest tier for the page may change its queue."""
        lowest = self._memory_only.lowest_for(key)
        if above == lowest:
            return
        table = self._tables[lowest]
        copy = table.copies.get(key)
        if copy is not None and copy.ready and copy.pins == 0:
            self.settle(key, lowest, table, copy)

    def settle(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> None:
        """Puts a readable, unpinned copy into the queue it belongs to, and out of the others."""
        if key in self.unreachable:
            table.wait(copy, key, table.droppable)
            return
        if tier == self._memory_only.lowest_for(key):
            mirror = held = False
            for copies in self._above[tier]:
                other = copies.get(key)
                if other is not None and other.ready:
                    mirror = True
                    held = held or other.pins > 0
            if not mirror and self._lineage.has_children(key):
                table.withdraw(copy)
            elif mirror and not held:
                table.wait(copy, key, table.mirrors)
            else:
                table.wait(copy, key, table.droppable)
        elif _ready_in(self._below[tier], key):
            table.wait(copy, key, table.droppable)
        else:
            table.wait(copy, key, table.dirty)
            inner = self._lineage.has_children(key) and not _ready_in(self._above[tier], key)
            table.leaves.shift(copy.rank, key, offered=not inner)
            if key in self._memory_only.keys:
                table.fleeting.shift(copy.rank, key, offered=not inner)

    def give_up_places(self, tier: Tier, table: TierTable) -> None:
        """Carries out what the order decided about other pages than those it was asked about."""
        for key, before, rank in table.policy.moved():
            copy = table.copies.get(key)
            if copy is not None and copy.rank == before:
                self.rerank(key, tier, table, copy, rank)

    def rerank(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy, rank: int) -> None:
        """Gives a copy another place in its tier's victim order; no effect while the page cannot be reached."""
        if rank != copy.rank and key not in self.unreachable:
            self._rerank(key, tier, table, copy, rank)

    def _rerank(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy, rank: int) -> None:
        table.withdraw(copy)
        copy.rank = rank
        if copy.ready and copy.pins == 0:
            self.settle(key, tier, table, copy)


def _ready_in(tiers: Sequence[Mapping[PageKey, Copy]], key: PageKey) -> bool:
    for copies in tiers:
        copy = copies.get(key)
        if copy is not None and copy.ready:
            return True
    return False
