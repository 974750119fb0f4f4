"""Which tiers hold a readable copy of each page. Pure metadata: no torch, no I/O, no thread, no clock.

One protocol on every edge: ``reserve`` takes an unreadable slot in the destination and pins the source, ``commit``
makes it readable, ``abort`` marks the copy dead. A dead slot is quarantined until nothing can write or read it:
its transfer has settled and its pins are gone. A slot is free, owned by a caller, in exactly one copy, or quarantined.

A copy is evictable iff it is ready, unpinned, and either its page is unreachable (``orphans``) or it is not the last
copy of a page with readable children. In which queue it waits: ``settling``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tierstore.errors import CapacityError, LeaseError
from tierstore.exactness import Exactness
from tierstore.lineage import Lineage
from tierstore.memory_only import MemoryOnly
from tierstore.orphans import Orphans
from tierstore.quarantine import Quarantine
from tierstore.retaining import Retaining
from tierstore.runs import Runs
from tierstore.settling import Settling
from tierstore.tier_table import Dead
from tierstore.types import Copy, PageKey, Tier
from tierstore.victims import choose_victims
from tierstore.whereabouts import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.tier_table import TierTable


class Drop(NamedTuple):
    """A copy that left its tier. ``last``: no other tier holds the page now. ``memory_only``: none below was to.

    ``refused``: admission did not want it below. ``unreachable``: a page before it was gone.
    """

    tier: Tier
    key: PageKey
    last: bool
    memory_only: bool
    refused: bool
    unreachable: bool


class Residency(Whereabouts):
    """The tables of all tiers and the lineage of their pages. The only code that changes residency."""

    def __init__(self, tables: Mapping[Tier, TierTable]) -> None:
        super().__init__(tables)
        self.lineage = Lineage()
        self.memory_only = MemoryOnly(self.tables, self.lineage)
        self.exactness = Exactness(self.tables)
        self._quarantine = Quarantine()
        self.erased = self._quarantine.erased
        self.dropped: deque[Drop] = deque()
        """Copies that ``reserve`` and ``take`` evicted to make room."""
        self._settling = Settling(self.tables, self.lineage, self.memory_only)
        self.orphans = Orphans(self, self.lineage, self._settling)
        self.retaining = Retaining(self.tables, self._settling)
        self.runs = Runs(self.tables, self._settling, self)
        """The same for many pages at once."""

    # -- questions ----------------------------------------------------------------------------------------------

    def saved_below(self, key: PageKey, tier: Tier) -> bool:
        """Whether a slower tier holds a readable copy."""
        return self._settling.below(key, tier)

    def unsaved(self, key: PageKey, tier: Tier) -> bool:
        """Whether a slower tier is to hold the page and none does: not while no request can reach it."""
        return (
            tier < self.memory_only.lowest_for(key)
            and key not in self.orphans
            and not self.saved_below(key, tier)
        )

    # -- slots owned by callers ---------------------------------------------------------------------------------

    def take(self, tier: Tier, nbytes: int = 0) -> int:
        """A slot owned by the caller, by evicting a droppable copy if none is free. CapacityError changes nothing."""
        table = self.tables[tier]
        self._make_space(tier, table, nbytes)
        slot = table.take(nbytes)
        table.owned.add(slot)
        return slot

    def retire(self, tier: Tier, slot: int) -> None:
        """An owned slot is quarantined: given up, but something may still use it until ``release_retired``."""
        table = self.tables[tier]
        if slot not in table.owned:
            raise LeaseError(f"slot {slot} of {tier.name} is not owned by a caller")
        table.owned.discard(slot)
        table.quarantine[slot] = Dead(None, 0, 1)

    def release_retired(self, tier: Tier, slot: int) -> None:
        """A retired slot becomes free."""
        self._quarantine.let_go(tier, self.tables[tier], slot)

    def adopt(
        self, key: PageKey, tier: Tier, slot: int, parent: PageKey | None, *, memory_only: bool = False
    ) -> None:
        """An owned slot becomes the page's readable copy. A copy that was being written is aborted, its pins move.

        ``memory_only``: as for ``reserve``.
        """
        table = self.tables[tier]
        if slot not in table.owned or table.ready(key):
            raise LeaseError(
                f"slot {slot} of {tier.name} is not owned, or the page is readable there already"
            )
        fresh = not self.held(key)
        if memory_only and fresh:
            self.memory_only.restrict(key)
        self.exactness.put(key, parent)
        pins = 0
        if key in table.copies:
            pins = table.copies[key].pins
            table.count(table.copies[key], -1)
            table.copies[key].pins = 0
            table.count(table.copies[key], 1)
            self._quarantine.kill(key, table)
        table.owned.discard(slot)
        table.copies[key] = Copy(slot, 0, self._settling.first_rank(key, table), pins=pins)
        table.count(table.copies[key], 1)
        self._settling.entered((key,), tier, table)
        self._make_ready(table, key, parent, fresh=fresh)
        self._settling.give_up_places(tier, table)

    def replace(self, key: PageKey, tier: Tier, slot: int) -> None:
        """An owned slot becomes the page's readable copy; the slot of the old one is free once its pins have ended.

        LeaseError unless the slot is owned and the old copy readable and pinned.
        """
        table = self.tables[tier]
        if slot not in table.owned or not table.ready(key) or not table.copies[key].pins:
            raise LeaseError(f"slot {slot} of {tier.name} is not owned, or the page has no pinned copy there")
        copy = table.copies[key]
        table.count(copy, -1)
        table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins)
        table.owned.discard(slot)
        copy.slot, copy.pins = slot, 0
        table.count(copy, 1)
        self._settling.settle(key, tier, table, copy)
        self._settling.settle_mirror(key, tier)

    # -- reserve, commit, abort ---------------------------------------------------------------------------------

    def reserve(
        self,
        key: PageKey,
        dst: Tier,
        nbytes: int = 0,
        src: Tier | None = None,
        *,
        pins: int = 0,
        memory_only: bool = False,
        parent: PageKey | None = None,
    ) -> int:
        """An unreadable slot in ``dst``; pins the copy in ``src``. CapacityError and LeaseError change nothing.

        ``pins`` are those the new copy has from the start. ``memory_only``: if no tier holds the page yet, none but
        memory ever is to. LeaseError if ``dst`` is not to. ``parent``: the page before one that no tier holds yet.

        On its way down, or as its first copy, a page that no request can reach takes a free slot and nobody's place,
        and no page takes the place of the page before it, without which it could not be reached: CapacityError.
        """
        table = self.tables[dst]
        if dst > (self.memory_only.floor if memory_only else self.memory_only.lowest_for(key)):
            raise LeaseError(f"the page is memory-only, and {dst.name} is not memory")
        if key in table.copies:
            raise LeaseError(f"the page is already resident or on its way in {dst.name}")
        first = src is None and not self.held(key)
        if src is None or src < dst:
            cut_off = self.orphans.after(parent) if first else key in self.orphans
            if cut_off and not table.has_space(nbytes):
                raise CapacityError(f"{dst.name}: no free slot for a page that no request can reach")
        if src is not None:
            self.pin(key, src)
        try:
            self._make_space(dst, table, nbytes, parent if first else None)
        except CapacityError:
            if src is not None:
                self.unpin(key, src, self.tables[src].copies[key].slot)
            raise
        if memory_only and first:
            self.memory_only.restrict(key)
        if src is not None:
            self.exactness.loaded((key,), src, dst)
        if first:
            self._begin(key, parent)
        slot, rank = table.take(nbytes), self._settling.first_rank(key, table)
        if rank >= 0 and src is not None and src < dst and self.tables[src].copies[key].rank < 0:
            rank = table.policy.unwanted()  # what nobody wants above is the first to go below, too
        copy = table.copies[key] = Copy(slot, nbytes, rank, pins=pins)
        table.count(copy, 1)
        self._settling.entered((key,), dst, table)
        self._settling.give_up_places(dst, table)
        if first:
            self.orphans.recheck_children(key)
        return slot

    def commit(
        self, key: PageKey, dst: Tier, slot: int, nbytes: int = 0, parent: PageKey | None = None
    ) -> bool:
        """The bytes are in the slot. True: the copy is readable now; False: it was aborted, its slot is let go."""
        table = self.tables[dst]
        copy = table.copies.get(key)
        if copy is None or copy.slot != slot:
            self._quarantine.let_go(dst, table, slot)
            return False
        table.used_nbytes += nbytes - copy.nbytes
        copy.nbytes = nbytes
        self._make_ready(table, key, parent)
        return True

    def fail(self, key: PageKey, dst: Tier, slot: int) -> None:
        """The transfer ended without the bytes: nothing writes the slot any more."""
        table = self.tables[dst]
        copy = table.copies.get(key)
        if copy is not None and copy.slot == slot and not copy.ready:
            self.abort(key, dst)
        self._quarantine.let_go(dst, table, slot)

    def abort(self, key: PageKey, dst: Tier) -> None:
        """The copy on its way is dead. Its slot is quarantined until ``commit`` or ``fail`` says the writer is done."""
        if self.tables[dst].copies[key].ready:
            raise LeaseError(f"the copy in {dst.name} is readable; evict it")
        self._quarantine.kill(key, self.tables[dst])
        self._forget_if_gone(key)

    # -- pins ---------------------------------------------------------------------------------------------------

    def pin(self, key: PageKey, tier: Tier) -> int:
        """Keeps a copy (readable, or on its way) where it is until ``unpin``; its slot."""
        table = self.tables[tier]
        copy = table.copies.get(key)
        if copy is None:
            raise LeaseError(f"pin of a page that is not in {tier.name}")
        copy.pins += 1
        if copy.pins > 1:
            return copy.slot
        if copy.ready:
            self._settling.held(key, tier, table, copy)
        else:
            table.pinned += 1
        return copy.slot

    def unpin(self, key: PageKey, tier: Tier, slot: int) -> None:
        """Ends one pin of the copy that held ``slot``, which may be dead by now."""
        table = self.tables[tier]
        copy = table.copies.get(key)
        if copy is not None and copy.slot == slot:
            if copy.pins == 0:
                raise LeaseError(f"unpin below zero in {tier.name}")
            copy.pins -= 1
            if copy.pins:
                return
            table.pinned -= 1
            if copy.ready:
                table.idle += 1
                self._settling.settle(key, tier, table, copy)
                self._settling.settle_mirror(key, tier)
        else:
            self._quarantine.let_go(tier, table, slot)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """The pages were used: renews their ranks in every tier, the last page oldest, so that tails go first."""
        for key in reversed(keys):
            for tier, table in self._order:
                copy = table.copies.get(key)
                if copy is not None:
                    rank = self._settling.rank_after_use(key, tier, table, copy)
                    self._settling.rerank(key, tier, table, copy, rank)
        for tier, table in self._order:
            self._settling.give_up_places(tier, table)

    # -- evict --------------------------------------------------------------------------------------------------

    def evict(self, key: PageKey, tier: Tier) -> Drop:
        """Drops a readable copy: unmatchable at once; a pinned copy's slot is quarantined until its last unpin."""
        table = self.tables[tier]
        copy = table.copies.get(key)
        if copy is None or not copy.ready:
            raise LeaseError(f"evict of a page that is not readable in {tier.name}")
        table.withdraw(copy)
        table.count(copy, -1)
        del table.copies[key]
        table.policy.left(key, copy.rank)
        if copy.pins:
            table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins)
        else:
            table.put_back(copy.slot, copy.nbytes)
            self._quarantine.note_erased(tier, table, key)
        drop = Drop(
            tier,
            key,
            self.where(key) is None,
            key in self.memory_only,
            key in self.memory_only.refused,
            key in self.orphans,
        )
        if drop.last:
            self._forget_if_gone(key)
        else:
            self._settling.resettle(key)
        return drop

    def lift(self, limit: int) -> list[PageKey]:
        """Up to ``limit`` permitted pages, and pages before them, that may be saved below memory from now on."""
        lifted = self.memory_only.lift(limit)
        for key in lifted:
            for table in self.tables.values():
                if key in table.copies:
                    table.withdraw(table.copies[key])
            self._settling.resettle(key)
        return lifted

    # -- inside -------------------------------------------------------------------------------------------------

    def _make_space(self, tier: Tier, table: TierTable, nbytes: int, parent: PageKey | None = None) -> None:
        if table.budget_nbytes is not None and nbytes > table.budget_nbytes:
            raise CapacityError(f"{tier.name}: {nbytes} bytes exceed its budget of {table.budget_nbytes}")
        if not table.has_space(nbytes):
            if self.orphans.pending:
                self.orphans.look_for_victims(table)
            victims = choose_victims(self.tables, self.lineage, tier, nbytes)
            if parent is not None and parent in victims and not self._elsewhere(parent, table):
                raise CapacityError(f"{tier.name}: only the page before this one could make room for it")
            for victim in victims:
                self.dropped.append(self.evict(victim, tier))

    def _elsewhere(self, key: PageKey, table: TierTable) -> bool:
        return any(other is not table and key in other.copies for _, other in self._order)

    def _make_ready(
        self, table: TierTable, key: PageKey, parent: PageKey | None, *, fresh: bool = False
    ) -> None:
        """``fresh``: no tier had the page a moment ago."""
        first = self.where(key) is None
        copy = table.copies[key]
        table.count(copy, -1)
        copy.ready = True
        table.count(copy, 1)
        lineage = self.lineage
        before, followed = lineage.parent(key), lineage.has_children(key)
        linked = False
        if (
            parent is not None
            and (first or before is None)
            and (before == parent or not followed or not self._precedes(key, parent, fresh=fresh))
        ):
            linked = True
            lineage.link(key, parent)
            if key not in self.memory_only:
                self.memory_only.permit(parent)
            elif key in self.memory_only.refused:
                self.memory_only.permit_named(parent)
            self._settling.resettle(parent)
        self._settling.resettle(key)
        if first or linked:
            self.orphans.recheck(key, lineage.parent(key))
        if first and followed:
            self.orphans.recheck_children(key)

    def _precedes(self, key: PageKey, parent: PageKey, *, fresh: bool) -> bool:
        """Whether the page is one of those before ``parent``. Those before a reachable one were there already."""
        if fresh and not self.orphans.pending and parent not in self.orphans:
            return False
        return self.lineage.precedes(key, parent)

    def _begin(self, key: PageKey, parent: PageKey | None) -> None:
        """The page gets its first copy, in flight: the page before it stays for it, as for a readable one."""
        if parent is not None and not self._precedes(key, parent, fresh=True):
            self.lineage.link(key, parent)
            self._settling.resettle(parent)
        self.orphans.begin(key, self.lineage.parent(key))

    def _forget_if_gone(self, key: PageKey) -> None:
        if not self.held(key):
            self.memory_only.forget(key)
            self.exactness.forget(key)
            bare = self.lineage.unlink(key)
            if bare is not None:
                self._settling.resettle(bare)
            self.orphans.gone(key)
