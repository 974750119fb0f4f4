"""Which copies leave a tier, in which order, and why. Decides, copies nothing. Pure metadata.

Evictable copies wait in one of three queues: ``droppable`` (the bytes are readable below, or the tier is the lowest for
this page and holds the only copy, or no request can reach the page), ``dirty`` (must be copied down first) and, in the
lowest tier for the page, ``mirrors`` of unpinned upper copies. Mirrors go last, because dropping one frees no more
space above than it costs. Wanted pages wait after ordinary ones, unwanted pages before them.

A readable page is dropped only if no lower tier may hold it, if that tier refuses, fails or is full of pages that
cannot leave, or if its bytes are readable elsewhere. Every drop is counted by its reason.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from tierstore.directory.transfers import BATCH_PAGES, Move
from tierstore.errors import CapacityError
from tierstore.policy.orders import BAND
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tierstore.directory.admission import MemoryOnly
    from tierstore.directory.lineage import Lineage
    from tierstore.directory.residency import Drop, Residency, TierTable
    from tierstore.directory.transfers import Transfers
    from tierstore.types import Copy, Counters, PageKey


class VictimQueues:
    """The queues of all tiers. ``tables``: fastest first. Each call takes bounded time."""

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
        """Return whether a slower tier holds a readable copy."""
        return _ready_in(self._below[tier], key)

    def first_rank(self, key: PageKey, table: TierTable) -> int:
        """Return the rank of a page that gets a copy in the tier."""
        return table.policy.unreachable(key) if key in self.unreachable else table.policy.enter(key)

    def cut_off(self, key: PageKey) -> None:
        """Move an unreachable page before all reachable ones in every tier."""
        self.unreachable.add(key)
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                self._rerank(key, tier, table, copy, table.policy.unreachable(key))

    def rejoin(self, key: PageKey) -> None:
        """Put a page that became reachable again into every order anew, as a retained page if it is one."""
        self.unreachable.discard(key)
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                priority = self.priority(key, tier)
                policy = table.policy
                rank = policy.enter(key) if priority is None else policy.retained(priority)
                self._rerank(key, tier, table, copy, rank)

    def entered(self, keys: Sequence[PageKey], tier: Tier, table: TierTable) -> None:
        """Move pages that got a copy, and are retained or kept, after the ordinary ones of that tier."""
        if not self.retained and not self.kept:
            return
        for key in keys:
            priority = self.priority(key, tier)
            if priority is not None:
                self.rerank(key, tier, table, table.copies[key], table.policy.retained(priority))

    def priority(self, key: PageKey, tier: Tier) -> int | None:
        """Return the priority of a page that is retained, or kept in the tier; None for an ordinary one."""
        priority = self.retained.get(key)
        return self.kept.get((key, tier)) if priority is None else priority

    def make_ordinary(self, key: PageKey, tier: Tier, table: TierTable) -> None:
        """Make a copy ordinary again, unless another reason still keeps it after the ordinary ones."""
        copy = table.copies.get(key)
        if copy is None or copy.rank < BAND:
            return
        priority = self.priority(key, tier)
        rank = table.policy.ordinary(key, copy.rank) if priority is None else table.policy.retained(priority)
        self.rerank(key, tier, table, copy, rank)

    def put_first(self, key: PageKey) -> None:
        """Move the page before all ordinary ones in every tier."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None:
                self.rerank(key, tier, table, copy, table.policy.unwanted())

    def rank_after_use(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> int:
        """Move a retained or kept page that was unwanted back after the ordinary ones.

        An unreachable page stays where it is.
        """
        if copy.rank < 0 and key in self.unreachable:
            return copy.rank
        priority = self.priority(key, tier) if copy.rank < 0 else None
        return table.policy.touch(key, copy.rank) if priority is None else table.policy.retained(priority)

    def set_wanted(self, keys: Iterable[PageKey], *, wanted: bool, priority: int = 0) -> None:
        """Move pages after (wanted) or before (unwanted) all ordinary ones in every tier's eviction order.

        ``priority``: of wanted pages. Copies that they get later are wanted as well, until ``end_retention``.
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
        """Keep the page in the tier for an expected request: it waits after all ordinary ones there.

        This includes a copy that it gets there later, until ``end_keeping``. While it is kept, the first priority
        counts.
        """
        priority = self.kept.setdefault((key, tier), priority)
        table = self._tables[tier]
        copy = table.copies.get(key)
        if copy is not None and copy.rank < BAND:
            self.rerank(key, tier, table, copy, table.policy.retained(priority))

    def end_keeping(self, key: PageKey, tier: Tier) -> None:
        """Stop keeping the page in the tier: it becomes ordinary there, unless it is retained."""
        self.kept.pop((key, tier), None)
        if key not in self.retained:
            self.make_ordinary(key, tier, self._tables[tier])

    def end_retention(self, keys: Iterable[PageKey]) -> None:
        """Make retained pages ordinary, except where they are kept."""
        for key in keys:
            self.retained.pop(key, None)
            for tier, table in self._tables.items():
                self.make_ordinary(key, tier, table)

    def resettle(self, key: PageKey) -> None:
        """Move each evictable copy of the page to the queue it belongs to, because its state has changed."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None and copy.ready and copy.pins == 0:
                self.settle(key, tier, table, copy)

    def held(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> None:
        """Note that a readable copy got its first pin."""
        table.pinned += 1
        table.idle -= 1
        table.withdraw(copy)
        if self._memory_only.lowest_for(key) != tier:
            self.settle_mirror(key, tier)

    def settle_mirror(self, key: PageKey, above: Tier) -> None:
        """Requeue the copy in the page's lowest tier, because an upper copy was pinned or dropped."""
        lowest = self._memory_only.lowest_for(key)
        if above == lowest:
            return
        table = self._tables[lowest]
        copy = table.copies.get(key)
        if copy is not None and copy.ready and copy.pins == 0:
            self.settle(key, lowest, table, copy)

    def settle(self, key: PageKey, tier: Tier, table: TierTable, copy: Copy) -> None:
        """Put a readable, unpinned copy into the queue it belongs to, and remove it from the others."""
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
        """Give a copy another rank in its tier's eviction order. No effect while the page is unreachable."""
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
    """Return copies to drop from ``tier``, in order, so that ``nbytes`` fit.

    Mirrors go last. One victim suffices if all records have the same size; otherwise the lowest rank goes first, and a
    parent after its last child.

    Raises:
        CapacityError: That is impossible.
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
    """Return whether the page's last copy could leave the lowest tier once ``victims`` have, and not before."""

    def only_here(page: PageKey) -> bool:
        return not any(table.ready(page) for other, table in tables.items() if other != tier)

    copy = tables[tier].copies.get(key)
    if copy is None or not copy.ready or copy.pins or copy.queue is tables[tier].droppable:
        return False
    if key in victims or not only_here(key):
        return False
    return all(child in victims and only_here(child) for child in lineage.children(key))


STALL_S = 2.0
"""An edge that carries pages and has not moved one for this long counts as failing until it moves again."""
RELAYED_PAGES = 16
"""Pages at most that are on their way from one tier of records to the next."""


class Space:
    """Plans copies to lower tiers that make room above, and drops what cannot be saved."""

    def __init__(self, residency: Residency, transfers: Transfers) -> None:
        self.failing: set[Tier] = set()
        """Tiers whose last write failed."""
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._transfers = transfers
        self._records = residency.hierarchy.records
        self.below = residency.hierarchy.below

    def room(self, tier: Tier) -> int:
        """Return the number of pages that ``tier`` can take without waiting."""
        table = self._tables[tier]
        if table.budget_nbytes is not None:
            return (table.budget_nbytes - table.used_nbytes) // table.record_nbytes + len(table.droppable)
        return len(table.free) + len(table.droppable)

    def make_room(self, tier: Tier, wanted: int, now: float) -> None:
        """Start to save dirty victims below: as many as ``wanted`` pages need beyond free space and saves in flight."""
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
        """Return the pages that may be sent along the edge now. Between record tiers each takes memory of the mover."""
        return RELAYED_PAGES - self._transfers.carrying(src, dst) if src in self._records else BATCH_PAGES

    def relieve(
        self,
        tier: Tier,
        wanted: int,
        now: float,
        above: Tier | None = None,
        spared: PageKey | None = None,
    ) -> None:
        """Drop what ``wanted`` pages need if pages cannot be saved, leaf first, at most a batch.

        A page that both tiers hold is dropped from both: without its copy here, the upper one would have to be saved
        again, endlessly.

        Args:
            above: The tier whose pages need the space.
            spared: The page before the one that needs the space, which would be unreachable without it.
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
        if self.room(tier) < wanted and not leaves and self._transfers.quiet(tier, now, STALL_S):
            if not any(len(self._tables[other].leaves) for other in self._tiers if other < tier):
                self._drop_before_saved(tier, wanted)
            elif above is None:
                self._drop_end_above(tier)

    def give_way(self, tier: Tier, now: float) -> bool:
        """Drop memory-only pages of a full tier that only stay for later pages above, at most a batch.

        Otherwise they would block memory and disk for pages that are to be stored. Returns whether there is space now.
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
        """Return whether the tier is full of pages that cannot leave, and nothing in flight will change that."""
        return self.room(tier) == 0 and self._transfers.quiet(tier, now, STALL_S)

    def stuck(self, src: Tier, dst: Tier, now: float) -> bool:
        """Return whether the edge to the lower tier is unreliable: its last write failed, or it is stalled."""
        return dst in self.failing or self._transfers.stalled((src, dst), now, STALL_S)

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
        """Plan the copy of a page that no tier has out of an engine's slot. False if there is no space.

        ``coming``: ``parent`` will be copied out of another slot, and counts as present.
        """
        follows = None if coming else parent
        nbytes = self._nbytes(dst)
        try:
            [(dst_slot, _)] = self._residency.reserve(
                (key,), dst, nbytes, memory_only=memory_only, parent=follows
            )
        except CapacityError:
            return False
        self._residency.exactness.put(key, parent)
        self._transfers.add(Tier.HBM, dst, Move(key, slot, dst_slot, nbytes, parent))
        return True

    def copy(self, key: PageKey, src: Tier, dst: Tier) -> bool:
        """Plan the copy of a page one tier down. False if there is no space; True also if it is there or in flight."""
        if key in self._tables[dst].copies:
            return True
        nbytes = self._nbytes(dst)
        try:
            [(slot, src_slot)] = self._residency.reserve((key,), dst, nbytes, src)
        except CapacityError:
            return False
        parent = self._residency.lineage.parent(key)
        self._transfers.add(src, dst, Move(key, src_slot, slot, nbytes, parent))
        return True

    def _has_room(self, tier: Tier) -> bool:
        """Return whether a page can be taken in without dropping a mirror of an upper page."""
        table = self._tables[tier]
        return table.has_space(self._nbytes(tier)) or len(table.droppable) > 0

    def _nbytes(self, tier: Tier) -> int:
        table = self._tables[tier]
        return table.record_nbytes if table.budget_nbytes is not None else 0

    def drop(self, key: PageKey, tier: Tier) -> None:
        """Drop a readable copy."""
        self._residency.dropped.append(self._residency.evict(key, tier))

    def _drop_mirrored_leaf(self, tier: Tier, below: Tier, spared: PageKey | None) -> None:
        """Drop the last page of a sequence from both tiers, so that an earlier one can be saved instead."""
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
        """Drop the end of a sequence that continues in an upper tier, and the page before it from here.

        The upper tiers end what is here: no page of this tier could leave without making another unreachable.
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
        """Drop pages that cannot be saved although later pages were, at most a batch.

        This makes the lower pages unreachable, which are evicted first from then on. Otherwise a disk that refuses
        forever would keep these pages here, and nobody could get their slots.
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
    """Processes residency's log of dropped copies. Bounded."""

    def __init__(self, residency: Residency, metrics: Counters) -> None:
        self._residency = residency
        self._metrics = metrics
        self._fates: OrderedDict[PageKey, str] = OrderedDict()
        self.left: Callable[[PageKey, Tier], None] | None = None
        """Told of every dropped copy."""
        self.unsaved = 0
        """Pages lost although a tier below was there for them, since ``tell`` was last asked."""
        self.refused = 0
        """Pages lost because admission did not want them below."""
        self._lowest = max(residency.tables)
        self._told = False

    def note(self, reason: str | None = None) -> None:
        """Count what was dropped since the last call. Reason None: to make room."""
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
        """Warn once that pages arrive faster than the lower tiers take them. A tier that refuses is reported
        elsewhere.
        """
        if self.unsaved and not refused and not self._told:
            self._told = True
            _log.warning(
                "pages come faster than the tiers below take them; what finds no room is lost and counted in "
                "dropped_copies (said once)"
            )
        self.unsaved = 0

    def fate(self, key: PageKey) -> str | None:
        """Return why the page's last copy was dropped, if that was recent and the page has not come back."""
        return None if self._residency.where(key) is not None else self._fates.get(key)


def _to_make_room(drop: Drop) -> str:
    if not drop.last:
        return "saved"
    if drop.refused:
        return "not_admitted"
    if drop.memory_only:
        return "memory_only"
    return "unreachable" if drop.unreachable else "capacity"
