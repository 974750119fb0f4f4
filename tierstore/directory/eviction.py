"""Eviction: decides which copies are dropped from a tier, in which order, and why. Pure metadata.

In each tier, the copies that can be evicted are in three queues. ``droppable`` contains copies that can be
dropped without being saved: the page is readable in a lower tier, or this tier is the lowest that may store the
page and has its only copy, or the page is unreachable. ``dirty`` contains copies that must first be copied
down. ``mirrors`` contains copies in the lowest tier whose pages are also in an upper tier and unpinned there.
Mirrors are dropped last, because the upper copy of a dropped mirror must be saved again. Wanted pages are
evicted after ordinary pages, and unwanted pages before them.

A readable copy is dropped only in these cases: another tier has a readable copy, no lower tier may store the
page, or the lower tier refuses it, fails, or is full of pages that cannot be evicted. Every drop is counted
with its reason.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from tierstore.directory.transfers import BATCH_PAGES, Move
from tierstore.errors import CapacityError
from tierstore.policy.orders import BAND
from tierstore.types import Tier, exact_size

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from tierstore.directory.admission import MemoryOnly
    from tierstore.directory.lineage import Lineage
    from tierstore.directory.residency import Drop, Residency, TierTable
    from tierstore.directory.transfers import Transfers
    from tierstore.types import Copy, Counters, PageKey


class VictimQueues:
    """Puts every evictable copy of every tier into the right eviction queue, with the right rank.

    Each call takes bounded time.

    Args:
        tables: The tables by tier, fastest tier first.
        lineage: The lineage of the pages.
        memory_only: The memory-only pages.
    """

    def __init__(self, tables: Mapping[Tier, TierTable], lineage: Lineage, memory_only: MemoryOnly) -> None:
        self._tables = tables
        self._lineage = lineage
        self._memory_only = memory_only
        self._order = list(tables.items())
        self.retained: dict[PageKey, int] = {}
        """The priority of each page that a ``retain`` hint keeps. It applies in every tier, also to later copies."""
        self.kept: dict[tuple[PageKey, Tier], int] = {}
        """The priority of each page to keep in a tier for an expected request, even before the tier has a copy."""
        self.unreachable: set[PageKey] = set()
        """Pages that no request can reach. Their unpinned copies are evicted first in every tier."""
        self._above = {tier: [t.copies for o, t in self._order if o < tier] for tier in tables}
        self._below = {tier: [t.copies for o, t in self._order if o > tier] for tier in tables}

    def below(self, key: PageKey, tier: Tier) -> bool:
        """Return whether a tier below ``tier`` has a readable copy of the page."""
        return _ready_in(self._below[tier], key)

    def first_rank(self, key: PageKey, table: TierTable) -> int:
        """Return the rank of a new copy of the page in this tier."""
        return table.policy.unreachable(key) if key in self.unreachable else table.policy.enter(key)

    def cut_off(self, key: PageKey) -> None:
        """Mark a page as unreachable. In every tier, it is then evicted before all reachable pages."""
        self.unreachable.add(key)
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                self._rerank(key, tier, table, copy, table.policy.unreachable(key))

    def rejoin(self, key: PageKey) -> None:
        """Mark a page as reachable again, and give it a new rank in every tier."""
        self.unreachable.discard(key)
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                priority = self.priority(key, tier)
                policy = table.policy
                rank = policy.enter(key) if priority is None else policy.retained(priority)
                self._rerank(key, tier, table, copy, rank)

    def entered(self, keys: Sequence[PageKey], tier: Tier, table: TierTable) -> None:
        """Rank new copies in a tier. Copies of retained pages, and of pages kept by ``keep``, are evicted last."""
        if not self.retained and not self.kept:
            return
        for key in keys:
            priority = self.priority(key, tier)
            if priority is not None:
                self.rerank(key, tier, table, table.copies[key], table.policy.retained(priority))

    def priority(self, key: PageKey, tier: Tier) -> int | None:
        """Return the priority of a page that a hint retains, or that ``keep`` keeps in the tier, else None."""
        priority = self.retained.get(key)
        return self.kept.get((key, tier)) if priority is None else priority

    def make_ordinary(self, key: PageKey, tier: Tier, table: TierTable) -> None:
        """Make the copy in a tier ordinary again, unless its page is still retained, or kept there by ``keep``."""
        copy = table.copies.get(key)
        if copy is None or copy.rank < BAND:
            return
        priority = self.priority(key, tier)
        rank = table.policy.ordinary(key, copy.rank) if priority is None else table.policy.retained(priority)
        self.rerank(key, tier, table, copy, rank)

    def put_first(self, key: PageKey) -> None:
        """Move the page ahead of all ordinary pages in every tier, so that it is evicted before them."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                self.rerank(key, tier, table, copy, table.policy.unwanted())

    def rank_after_use(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> int:
        """Return the new rank of a copy that was used.

        Meant for copies that are ranked ahead of the ordinary pages (negative ranks). If the page is retained,
        or kept in the tier by ``keep``, the new rank is behind the ordinary pages. The rank of an unreachable
        page does not change.
        """
        if copy.rank < 0 and key in self.unreachable:
            return copy.rank
        priority = self.priority(key, tier) if copy.rank < 0 else None
        return table.policy.touch(key, copy.rank) if priority is None else table.policy.retained(priority)

    def set_wanted(self, keys: Iterable[PageKey], *, wanted: bool, priority: int = 0) -> None:
        """Apply a ``retain`` hint (``wanted``) or a ``wont_need`` hint (not ``wanted``) in every tier.

        Wanted pages are evicted after all ordinary pages, in the order of ``priority``, until
        ``end_retention`` is called. This also applies to copies that are made later. Unwanted pages are
        evicted before all ordinary pages.
        """
        for key in keys:
            if not wanted:
                self.retained.pop(key, None)
                self.put_first(key)
                continue
            self.retained[key] = priority
            for tier, table in self._tables.items():
                copy = table.copies.get(key)
                if copy is not None:
                    self.rerank(key, tier, table, copy, table.policy.retained(priority))

    def keep(self, key: PageKey, tier: Tier, priority: int) -> None:
        """Keep a page in the tier for an expected request: it is evicted after all ordinary pages.

        This applies until ``end_keeping`` is called, even to a copy that is made there later. A second call
        does not change the priority.
        """
        priority = self.kept.setdefault((key, tier), priority)
        table = self._tables[tier]
        copy = table.copies.get(key)
        if copy is not None and copy.rank < BAND:
            self.rerank(key, tier, table, copy, table.policy.retained(priority))

    def end_keeping(self, key: PageKey, tier: Tier) -> None:
        """Undo ``keep`` for the page in the tier. Unless a hint retains the page, its copy there is ordinary again."""
        self.kept.pop((key, tier), None)
        if key not in self.retained:
            self.make_ordinary(key, tier, self._tables[tier])

    def end_retention(self, keys: Iterable[PageKey]) -> None:
        """End the retention of these pages. They become ordinary, except in tiers where ``keep`` applies to them."""
        for key in keys:
            self.retained.pop(key, None)
            for tier, table in self._tables.items():
                self.make_ordinary(key, tier, table)

    def resettle(self, key: PageKey) -> None:
        """Put each evictable copy of the page into the right queue, after the state of the page has changed."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None and copy.ready and copy.pins == 0:
                self.settle(key, tier, table, copy)

    def held(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> None:
        """Update the counters and queues after a readable copy got its first pin."""
        table.pinned += 1
        table.idle -= 1
        table.withdraw(copy)
        if self._memory_only.lowest_for(key) != tier:
            self.settle_mirror(key, tier)

    def settle_mirror(self, key: PageKey, above: Tier) -> None:
        """Put the page's copy in its lowest tier into the eviction queue where it now belongs.

        Call this after the copy in ``above`` got its first pin or lost its last one.
        """
        lowest = self._memory_only.lowest_for(key)
        if above == lowest:
            return
        table = self._tables[lowest]
        copy = table.copies.get(key)
        if copy is not None and copy.ready and copy.pins == 0:
            self.settle(key, lowest, table, copy)

    def settle(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> None:
        """Put a readable, unpinned copy into the right queue, and remove it from the others."""
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

    def rerank(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy, rank: int) -> None:
        """Change the rank of a copy in its tier, unless the page is unreachable."""
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


def choose_victims(
    tables: Mapping[Tier, TierTable], lineage: Lineage, tier: Tier, nbytes: int
) -> list[PageKey]:
    """Return the keys of the copies to drop from ``tier``, in order, so that ``nbytes`` bytes fit.

    A mirror is chosen only if there are no droppable copies. Usually one victim is enough. In a record tier,
    whose records differ in size, several may be needed: the droppable copies with the lowest ranks, and
    pages whose children are all victims.

    Raises:
        CapacityError: Not enough copies can be dropped.
    """
    table = tables[tier]
    first = table.droppable.first() or table.mirrors.first()
    if first is None:
        raise CapacityError(f"{tier.name}: no slot is free and no page can be dropped")
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
        raise CapacityError(
            f"{tier.name}: the pages that can be dropped take less than the required {exact_size(nbytes)}"
        )
    return list(victims)


def _left_bare(
    tables: Mapping[Tier, TierTable],
    lineage: Lineage,
    tier: Tier,
    key: PageKey,
    victims: dict[PageKey, None],
) -> bool:
    """Return whether the page can be evicted from the tier once ``victims``, its children, are dropped.

    It cannot be evicted if the page or one of its children has a copy, readable or in flight, in another tier.
    """

    def only_here(page: PageKey) -> bool:
        return not any(page in table.copies for other, table in tables.items() if other != tier)

    copy = tables[tier].copies.get(key)
    if copy is None or not copy.ready or copy.pins or copy.queue is tables[tier].droppable:
        return False
    if key in victims or not only_here(key):
        return False
    return all(child in victims and only_here(child) for child in lineage.children(key))


STALL_S = 2.0
"""Number of seconds without progress after which an edge with pages in flight counts as failing."""
RELAYED_PAGES = 16
"""Maximum number of pages in flight between two record tiers."""


class Space:
    """Makes space in a tier, by copying pages down or by dropping them."""

    def __init__(self, residency: Residency, transfers: Transfers) -> None:
        self.failing: set[Tier] = set()
        """Tiers in which the last write failed."""
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._transfers = transfers
        self._records = residency.hierarchy.records
        self.below = residency.hierarchy.below

    def room(self, tier: Tier) -> int:
        """Return the number of pages that ``tier`` can accept now, in free slots or by dropping pages."""
        table = self._tables[tier]
        if table.budget_nbytes is not None:
            return (table.budget_nbytes - table.used_nbytes) // table.record_nbytes + len(table.droppable)
        return len(table.free) + len(table.droppable)

    def make_room(self, tier: Tier, wanted: int, now: float) -> None:
        """If ``tier`` cannot accept ``wanted`` pages now, start to copy dirty pages down.

        Pages that are already being copied down count as space that will be free.
        """
        table, below = self._tables[tier], self.below(tier)
        if below is None or below in self.failing or self.room(tier) >= wanted:
            return
        number = min(
            BATCH_PAGES,
            wanted - self.room(tier) - self._transfers.carrying(tier, below),
            self.could_start(tier, below),
        )
        for _ in range(number):
            key = table.dirty.first()
            if key is None:
                return
            if not self._has_room(below):
                self.make_room(below, wanted, now)
            if not self._has_room(below) or not self.copy(key, tier, below):
                return

    def could_start(self, src: Tier, dst: Tier) -> int:
        """Return how many copies from ``src`` to ``dst`` may start now.

        Between record tiers, the number of pages in flight is limited, because each takes memory in the
        mover.
        """
        return RELAYED_PAGES - self._transfers.carrying(src, dst) if src in self._records else BATCH_PAGES

    def relieve(
        self,
        tier: Tier,
        wanted: int,
        now: float,
        above: Tier | None = None,
        spared: PageKey | None = None,
    ) -> None:
        """Make space for ``wanted`` pages by dropping pages that cannot be saved.

        The last pages of sequences are dropped first. A call drops at most one batch. A page that is also in
        ``above`` is dropped from both tiers. If only its lower copy were dropped, the upper copy would have to
        be saved again, and so on without end.

        Args:
            tier: The tier that needs space.
            wanted: Number of pages to make space for.
            now: The current monotonic time.
            above: The upper tier from which pages are to be copied into the space, or None.
            spared: The parent of the page that needs the space, or None. It is not dropped, because the page
                that needs the space would then be unreachable.
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
        # While a page is in flight to this tier, wait: it may soon be a leaf that can be dropped. If a page
        # before it were dropped now, later pages would become unreachable for no benefit.
        if self.room(tier) < wanted and not leaves and self._transfers.quiet(tier, now, STALL_S):
            if not any(len(self._tables[other].leaves) for other in self._tiers if other < tier):
                self._drop_before_saved(tier, wanted)
            elif above is None:
                self._drop_end_above(tier)

    def give_way(self, tier: Tier, now: float) -> bool:
        """If a full tier cannot evict pages because later pages are memory-only, drop the memory-only pages.

        At most one batch is dropped, from upper tiers. If these pages were kept, pages that are to be stored
        could get no space in memory or on disk.

        Returns:
            Whether pages were dropped and the tier has space now.
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
        """Return whether the tier has no space and nothing in flight will free any."""
        return self.room(tier) == 0 and self._transfers.quiet(tier, now, STALL_S)

    def stuck(self, src: Tier, dst: Tier, now: float) -> bool:
        """Return whether copies from ``src`` to ``dst`` are failing or stalled."""
        return dst in self.failing or self._transfers.stalled((src, dst), now, STALL_S)

    def copy_from_engine(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        dst: Tier,
        parents: Sequence[PageKey | None],
        *,
        memory_only: bool,
        coming: Container[PageKey | None] = (),
    ) -> int:
        """Reserve slots in ``dst`` and plan to copy a prefix of ``keys`` there from an engine's slots.

        Args:
            keys: Pages that are in no tier.
            slots: The engine's slots.
            dst: The destination.
            parents: The page before each page, or None.
            memory_only: Whether the pages must never be stored below memory.
            coming: The pages that are still to be copied out of an engine's slot. A parent among them counts as
                present.

        Returns:
            The number of pages. 0 if there is no space.
        """
        follows = [None if parent in coming else parent for parent in parents]
        nbytes, residency = self._nbytes(dst), self._residency
        try:
            places = residency.reserve(keys, dst, nbytes, memory_only=memory_only, parents=follows)
        except CapacityError:
            return 0
        moves = [
            Move(key, slot, dst_slot, nbytes, parent)
            for key, slot, (dst_slot, _), parent in zip(keys, slots, places, parents, strict=False)
        ]
        if not residency.exactness.lossless:
            for move in moves:
                residency.exactness.put(move.key, move.parent)
        self._transfers.add(Tier.HBM, dst, *moves)
        return len(moves)

    def copy(self, key: PageKey, src: Tier, dst: Tier, *, over_mirrors: bool = False) -> bool:
        """Reserve a slot in the next lower tier and plan to copy a page there.

        Args:
            key: The page, which is readable in ``src``.
            src: The tier that has the page.
            dst: The next lower tier.
            over_mirrors: Whether a mirror may be dropped from a record tier to make space. That only exchanges
                one saved page for another, so it makes sense only if the page is to leave ``src``.

        Returns:
            False if there is no space. True if ``dst`` already has a copy, readable or in flight, or if a copy
                was planned.
        """
        if key in self._tables[dst].copies:
            return True
        if dst in self._records and not over_mirrors and not self._has_room(dst):
            return False
        nbytes = self._nbytes(dst)
        try:
            [(slot, src_slot)] = self._residency.reserve((key,), dst, nbytes, src)
        except CapacityError:
            return False
        parent = self._residency.lineage.parent(key)
        self._transfers.add(src, dst, Move(key, src_slot, slot, nbytes, parent))
        return True

    def _has_room(self, tier: Tier) -> bool:
        """Return whether the tier can accept a page without dropping a mirror."""
        table = self._tables[tier]
        return table.has_space(self._nbytes(tier)) or len(table.droppable) > 0

    def _nbytes(self, tier: Tier) -> int:
        table = self._tables[tier]
        return table.record_nbytes if table.budget_nbytes is not None else 0

    def drop(self, key: PageKey, tier: Tier) -> None:
        """Drop the readable copy in ``tier`` without saving it."""
        self._residency.dropped.append(self._residency.evict(key, tier))

    def _drop_mirrored_leaf(self, tier: Tier, below: Tier, spared: PageKey | None) -> None:
        """Drop the last page of a sequence from ``tier`` and ``below``, to make space in both tiers.

        An earlier page can then be saved instead. ``spared`` is not dropped.
        """
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
        """Drop the last page of a sequence from an upper tier, and then the page before it from this tier.

        Used if all sequences in this tier continue in upper tiers. Dropping a page only here would make the
        pages after it unreachable.
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
        """Drop pages that cannot be saved, although later pages of their sequences are saved below.

        At most one batch is dropped. The later pages become unreachable and are evicted first from then on.
        Without this, if a disk refuses all writes, these pages would stay here forever and their slots could
        not be reused.
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


_log = logging.getLogger("tierstore.drops")

_REMEMBERED = 8192


class Drops:
    """Counts dropped copies by reason, and remembers why recently dropped pages were dropped."""

    def __init__(self, residency: Residency, metrics: Counters) -> None:
        self._residency = residency
        self._metrics = metrics
        self._fates: OrderedDict[PageKey, str] = OrderedDict()
        self.left: Callable[[PageKey, Tier], None] | None = None
        """Called with the page and the tier of every dropped copy."""
        self.unsaved = 0
        """Number of pages lost since the last ``tell`` because they could not be saved to a lower tier."""
        self.refused = 0
        """Number of pages lost so far because admission had kept them off disk."""
        self._lowest = max(residency.tables)
        self._told = False

    def note(self, reason: str | None = None) -> None:
        """Count the copies that were dropped since the last call.

        If ``reason`` is None, they were dropped to make space, and the reason depends on the page.
        """
        dropped = self._residency.dropped
        counts: Counter[tuple[Tier, str]] = Counter()
        while dropped:
            drop = dropped.popleft()
            why = reason or _to_make_room(drop)
            counts[drop.tier, why] += 1
            self.unsaved += why == "capacity" and drop.tier < self._lowest
            if self.left is not None:
                self.left(drop.key, drop.tier)
            if drop.last:
                self.refused += why == "not_admitted"
                self._fates[drop.key] = why
                self._fates.move_to_end(drop.key)
        for (tier, why), number in counts.items():
            self._metrics.dropped(tier, why, number)
        while len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)

    def tell(self, *, refused: bool) -> None:
        """If pages were lost, warn once that pages are put faster than the lower tiers can store them.

        If ``refused``, do not warn, because a tier that refuses writes is reported elsewhere.
        """
        if self.unsaved and not refused and not self._told:
            self._told = True
            _log.warning(
                "pages are put faster than the lower tiers can store them; pages that do not fit are lost and counted "
                "in dropped_copies (logged once)"
            )
        self.unsaved = 0

    def fate(self, key: PageKey) -> str | None:
        """Return why the page's last copy was dropped, or None if that is unknown or the page is readable."""
        return None if self._residency.where(key) is not None else self._fates.get(key)


def _to_make_room(drop: Drop) -> str:
    if not drop.last:
        return "saved"
    if drop.refused:
        return "not_admitted"
    if drop.memory_only:
        return "memory_only"
    return "unreachable" if drop.unreachable else "capacity"
