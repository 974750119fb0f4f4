"""Residency: which tiers contain a copy of each page, and whether it is readable.

Pure metadata: this module uses no torch, I/O, thread or clock.

Every copy between tiers follows one protocol. ``reserve`` takes a slot in the destination, which is not
readable yet, and pins the source. ``commit`` makes the new copy readable. ``abort`` marks it as dead. The slot
of a dead copy is quarantined until nothing can read or write it, that is, until its transfer has finished and
its pins are gone. Every slot is free, owned by a caller, used by exactly one copy, or quarantined.

``reserve``, ``commit``, ``pin``, ``unpin``, ``touch`` and ``release`` process a sequence of keys in one call.
A lease pins and unpins thousands of pages while a request waits for its first token, so the loops over keys
call few other functions.

A copy can be evicted if it is readable and unpinned, unless it is the last copy of a page with children. If
the page is unreachable (see ``lineage``), it can be evicted in any case. ``eviction`` decides which eviction
queue contains the copy.

This module also implements ``match``, and tracks which pages are exact, that is, bit for bit as they were
put.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count, repeat
from typing import TYPE_CHECKING, Literal, NamedTuple

from tierstore.directory.admission import MemoryOnly
from tierstore.directory.eviction import VictimQueues, choose_victims
from tierstore.directory.hierarchy import Hierarchy
from tierstore.directory.lineage import Lineage, Orphans
from tierstore.errors import CapacityError, LeaseError, TierStoreError
from tierstore.policy import VictimQueue
from tierstore.types import Copy, PageKey, Tier, TierDescription, exact_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tierstore.policy import Fifo

_RUN = 128
"""Number of consecutive pages that ``match`` looks up together, in case one tier contains all of them."""


@dataclass(slots=True)
class Dead:
    """A quarantined slot.

    ``holders`` is the number of pins and transfers that may still read or write the slot. ``key`` is None if the
    slot was owned by a caller.
    """

    key: PageKey | None
    nbytes: int
    holders: int


class TierTable:
    """The copies and the slots of one tier.

    Args:
        policy: The eviction policy of the tier.
        num_slots: Number of slots. None: the tier stores records, limited only by ``budget_nbytes``.
        budget_nbytes: Maximum total size of the records, in bytes.
        record_nbytes: Maximum size of one record, in bytes.
        durable: Whether records survive a restart.
        lossy: Whether pages that are read back may differ from the pages that were put.
        read_only: Whether nothing is ever written to the tier.
    """

    def __init__(
        self,
        policy: Fifo,
        *,
        num_slots: int | None = None,
        budget_nbytes: int | None = None,
        record_nbytes: int = 0,
        durable: bool = False,
        lossy: bool = False,
        read_only: bool = False,
    ) -> None:
        self.policy = policy
        self.durable = durable
        self.lossy = lossy
        self.read_only = read_only
        self.record_nbytes = record_nbytes
        self.num_slots = num_slots
        self.budget_nbytes = budget_nbytes
        self.used_nbytes = 0
        self.free: list[int] = list(range(num_slots - 1, -1, -1)) if num_slots is not None else []
        self.copies: dict[PageKey, Copy] = {}
        self.new_slots = count()
        """Slot numbers of a record tier. Each record gets a number that was never used before."""
        self.arriving = 0
        """Number of copies that are not readable yet."""
        self.pinned = 0
        """Number of copies with at least one pin, readable or not."""
        self.idle = 0
        """Number of readable copies without a pin."""
        self.owned: set[int] = set()
        self.quarantine: dict[int, Dead] = {}
        self.droppable = VictimQueue()
        self.dirty = VictimQueue()
        self.mirrors = VictimQueue()
        self.leaves = VictimQueue()
        """Copies in ``dirty`` that can be dropped without making other pages unreachable."""
        self.fleeting = VictimQueue()
        """Copies in ``leaves`` whose pages are memory-only."""

    def description(self, below: Tier | None) -> TierDescription:
        """Return a description of the tier. ``below`` is the next slower tier, or None."""
        addressing: Literal["slots", "records"] = "records" if self.num_slots is None else "slots"
        return TierDescription(addressing, self.durable, self.lossy, below, self.read_only)

    def has_space(self, nbytes: int) -> bool:
        """Return whether a slot for ``nbytes`` bytes can be taken without an eviction."""
        if self.num_slots is not None:
            return bool(self.free)
        return self.budget_nbytes is None or self.used_nbytes + nbytes <= self.budget_nbytes

    def ready(self, key: PageKey) -> bool:
        """Return whether this tier contains a readable copy."""
        copy = self.copies.get(key)
        return copy is not None and copy.ready

    def take(self, nbytes: int) -> int:
        """Take a free slot and ``nbytes`` bytes of the budget. The caller must check ``has_space`` first."""
        self.used_nbytes += nbytes
        return self.free.pop() if self.num_slots is not None else next(self.new_slots)

    def put_back(self, slot: int, nbytes: int) -> None:
        """Free a slot and give ``nbytes`` bytes back to the budget."""
        self.used_nbytes -= nbytes
        if self.num_slots is not None:
            self.free.append(slot)

    def count(self, copy: Copy, number: int) -> None:
        """Add ``number`` to each counter that counts the copy in its current state.

        Pass -1 before the copy changes or is removed, and 1 after it was added or changed.
        """
        self.arriving += 0 if copy.ready else number
        self.pinned += number if copy.pins else 0
        self.idle += number if copy.ready and not copy.pins else 0

    @property
    def inner(self) -> int:
        """Number of readable, unpinned copies that cannot be evicted before the children of their pages."""
        return self.idle - len(self.droppable) - len(self.dirty) - len(self.mirrors)

    def wait(self, copy: Copy, key: PageKey, queue: VictimQueue) -> None:
        """Put a copy into this eviction queue, and remove it from any other."""
        if copy.queue is not queue:
            self.withdraw(copy)
            copy.queue = queue
            queue.offer(copy.rank, key)

    def withdraw(self, copy: Copy) -> None:
        """Remove a copy from its eviction queue.

        Call this if the copy cannot be evicted now, and before its rank changes.
        """
        queue, rank = copy.queue, copy.rank
        if queue is None:
            return
        copy.queue = None
        if queue is self.droppable:
            self.droppable.withdraw(rank)
        elif queue is self.mirrors:
            self.mirrors.withdraw(rank)
        else:
            self.dirty.withdraw(rank)
            if self.leaves.withdraw(rank):
                self.fleeting.withdraw(rank)


class Exactness:
    """Tracks which pages are exact, that is, bit for bit as they were put. Only ``Residency`` updates it.

    A page is tainted if its copy above the lossy tiers may be inexact, or if the page was computed from pages
    that may be inexact.

    Args:
        tables: The tables of all tiers.
    """

    def __init__(self, tables: Mapping[Tier, TierTable]) -> None:
        self._first_lossy = min((tier for tier, table in tables.items() if table.lossy), default=None)
        first = self._first_lossy
        self._above = [
            (tier, table.copies) for tier, table in tables.items() if first is None or tier < first
        ]
        self._below = [table.copies for tier, table in tables.items() if first is not None and tier >= first]
        self._tainted: set[PageKey] = set()

    @property
    def lossless(self) -> bool:
        """Whether no tier is lossy. All pages are then exact."""
        return self._first_lossy is None

    def exact(self, key: PageKey) -> bool:
        """Return whether the page has a readable copy that is known to be exact."""
        if self._first_lossy is None:
            return True
        if key in self._tainted:
            return False
        return any(key in copies and copies[key].ready for _, copies in self._above)

    def prefix(self, keys: Sequence[PageKey]) -> int:
        """Return the number of leading keys whose pages are exact."""
        if self._first_lossy is None:
            return len(keys)
        return next((index for index, key in enumerate(keys) if not self.exact(key)), len(keys))

    def loaded(self, keys: Sequence[PageKey], src: Tier, dst: Tier) -> None:
        """Mark pages as tainted if they are copied from a lossy tier to a tier above all lossy tiers.

        The new copies are not exact, and may outlive an exact copy.
        """
        first = self._first_lossy
        if first is not None and dst < first <= src:
            self._tainted.update(keys)

    def put(self, key: PageKey, parent: PageKey | None) -> None:
        """Mark a page that is about to be put after ``parent`` as tainted or not tainted.

        Call this before the new copy is added, and while the copies of ``parent`` exist.
        """
        if self._first_lossy is None:
            return
        if not self.stays_tainted(key):
            self._tainted.discard(key)
        if parent is not None and not (self.exact(parent) or self._coming(parent)):
            self._tainted.add(key)

    def _coming(self, key: PageKey) -> bool:
        """Return whether the page will be exact once its copy, now in flight, is readable.

        That is the case if it is not tainted, and only tiers above the lossy ones have a copy. The method is
        called for the parent of a page that is put: if an engine has put both together, the copy of the
        parent may still be in flight.
        """
        if key in self._tainted or any(key in copies for copies in self._below):
            return False
        return any(key in copies for _, copies in self._above)

    def stays_tainted(self, key: PageKey) -> bool:
        """Return whether a tainted page stays tainted if it is put again now.

        It does if a copy that may be inexact remains. A copy in flight to HBM does not remain, because the put
        replaces it.
        """
        return key in self._tainted and any(
            key in copies and (tier != Tier.HBM or copies[key].ready) for tier, copies in self._above
        )

    def doubt(self, key: PageKey) -> None:
        """Mark a page as tainted even if its parent is exact, because the page was computed from inexact pages."""
        if self._first_lossy is not None:
            self._tainted.add(key)

    def tainted_in(self, key: PageKey) -> list[Tier]:
        """Return the tiers above the lossy ones that have a readable copy of the page, slowest first.

        The result is empty if the page is not tainted.
        """
        if key not in self._tainted:
            return []
        return [tier for tier, copies in self._above[::-1] if key in copies and copies[key].ready]

    def forget(self, key: PageKey) -> None:
        """Forget a page that is no longer in any tier."""
        self._tainted.discard(key)


class Drop(NamedTuple):
    """A copy that was dropped.

    Attributes:
        tier: The tier that contained the copy.
        key: The page.
        last: Whether no tier has a readable copy of the page any more.
        memory_only: Whether the page was restricted to memory, by a caller or by admission.
        refused: Whether admission had refused the page.
        unreachable: Whether the page was unreachable.
    """

    tier: Tier
    key: PageKey
    last: bool
    memory_only: bool
    refused: bool
    unreachable: bool


class Residency:
    """The copies of all pages in all tiers, and the lineage of the pages.

    Only this class adds, changes and removes copies.
    """

    def __init__(self, tables: Mapping[Tier, TierTable]) -> None:
        self.tables = {tier: tables[tier] for tier in sorted(tables)}
        """The tables by tier, fastest tier first."""
        self._order = list(self.tables.items())
        self._copies = [table.copies for _, table in self._order]
        # Fastest first, because the queue of a copy depends on pins in the tiers above.
        self._uses = [(tier, table, table.copies, table.policy.touch) for tier, table in self._order]
        below = [*list(self.tables)[1:], None]
        self.hierarchy = Hierarchy(
            {tier: table.description(under) for (tier, table), under in zip(self._order, below, strict=True)}
        )
        self.lineage = Lineage()
        self.memory_only = MemoryOnly(self.hierarchy, self.lineage)
        self.exactness = Exactness(self.tables)
        self.erased: deque[tuple[Tier, PageKey]] = deque()
        """Records that must be erased from their tiers, because no copy uses them any more."""
        self.dropped: deque[Drop] = deque()
        """Copies that were dropped, until ``Drops.note`` counts them."""
        self.changed: Callable[[PageKey, Tier, bool], None] | None = None
        """Called for each copy, in order: with True when it becomes readable, with False when it is dropped."""
        self.queues = VictimQueues(self.tables, self.lineage, self.memory_only)
        self.orphans = Orphans(self, self.lineage, self.queues)

    # -- queries ------------------------------------------------------------------------------------------------

    def where(self, key: PageKey) -> Tier | None:
        """Return the fastest tier with a readable copy, or None."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None and copy.ready:
                return tier
        return None

    def first_with(self, key: PageKey, tiers: Iterable[Tier]) -> Tier | None:
        """Return the first of ``tiers`` that has a readable copy, or None."""
        return next((tier for tier in tiers if self.tables[tier].ready(key)), None)

    def match(self, keys: Sequence[PageKey]) -> list[Tier]:
        """Return the fastest tier of each page in the longest readable prefix of ``keys``.

        Read-only, and does not count as a use of the pages. Each page needs one dictionary lookup if the pages
        around it are in the same tier, and otherwise at most one lookup per tier.
        """
        found: list[Tier] = []
        for start in range(0, len(keys), _RUN):
            run = keys[start : start + _RUN]
            tier = self._tier_of_all(run)
            tiers = self._prefix(run) if tier is None else [tier] * len(run)
            found += tiers
            if len(tiers) < len(run):
                break
        return found

    def _tier_of_all(self, run: Sequence[PageKey]) -> Tier | None:
        """Return the tier that has the fastest readable copy of every page in ``run``.

        None if that tier may differ between pages, or if a page may have no readable copy.
        """
        for tier, table in self._order:
            if not table.arriving and all(map(table.copies.__contains__, run)):
                return tier
            if not table.copies.keys().isdisjoint(run):
                return None
        return None

    def _prefix(self, keys: Sequence[PageKey]) -> list[Tier]:
        tables = [(tier, table.copies) for tier, table in self._order]
        found: list[Tier] = []
        for key in keys:
            for tier, copies in tables:
                copy = copies.get(key)
                if copy is not None and copy.ready:
                    found.append(tier)
                    break
            else:
                break
        return found

    def locate(self, keys: Sequence[PageKey]) -> list[Tier | None]:
        """Return the fastest tier in which each page is readable, or None for a missing page. Read-only."""
        tables = [(tier, table.copies) for tier, table in self._order]
        found: list[Tier | None] = []
        for key in keys:
            copies = ((tier, table.get(key)) for tier, table in tables)
            found.append(next((tier for tier, copy in copies if copy is not None and copy.ready), None))
        return found

    def unpinned(self, tier: Tier) -> int:
        """Return the number of copies in a tier that are readable and have no pin."""
        return self.tables[tier].idle

    def arriving(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """Return the number of these pages whose copy in the tier is not readable yet."""
        table = self.tables.get(tier)
        if table is None or not table.arriving:
            return 0
        copies = [copy for key in keys if (copy := table.copies.get(key)) is not None]
        return sum(not copy.ready for copy in copies)

    def held(self, key: PageKey) -> bool:
        """Return whether any tier has a copy of the page, readable or in flight."""
        for copies in self._copies:  # noqa: SIM110 - any() with a generator takes three times as long
            if key in copies:
                return True
        return False

    def has_prefix(self, key: PageKey) -> bool:
        """Return whether the page and all known pages before it have a copy, readable or in flight.

        Takes constant time. Also returns False while the set of reachable pages is still being computed.
        """
        return self.held(key) and key not in self.orphans and not self.orphans.pending

    def saved_below(self, key: PageKey, tier: Tier) -> bool:
        """Return whether a tier below ``tier`` has a readable copy of the page."""
        return self.queues.below(key, tier)

    def unsaved(self, key: PageKey, tier: Tier) -> bool:
        """Return whether the page should still be saved to a tier below ``tier``.

        That is not the case if it is saved there already, must not be stored there, or is unreachable.
        """
        return (
            tier < self.memory_only.lowest_for(key)
            and key not in self.orphans
            and not self.saved_below(key, tier)
        )

    def load(self, tier: Tier, records: Iterable[tuple[PageKey, PageKey | None, int]]) -> None:
        """Add the records that a tier already contains when it is opened. Call this before any other change.

        Args:
            tier: The tier. If there are several record tiers, load the slowest first.
            records: The key, the parent (or None) and the size in bytes of each record, oldest first.
        """
        table, lineage = self.tables[tier], self.lineage
        enter, copies, used = table.policy.enter, table.copies, 0
        for key, parent, nbytes in records:
            copies[key] = Copy(next(table.new_slots), nbytes, enter(key), True)
            used += nbytes
            if parent is not None:
                lineage.link(key, parent)
        table.used_nbytes += used
        table.idle += len(copies)
        if tier != self.hierarchy.lowest:
            self._place_loaded(copies)
            return
        self.orphans.load(lineage.without_parent_in(copies))
        has_children, wait, droppable = lineage.has_children, table.wait, table.droppable
        for key, copy in copies.items():
            if not has_children(key):
                wait(copy, key, droppable)

    def _place_loaded(self, keys: Iterable[PageKey]) -> None:
        """Update which of these pages are reachable, and put their copies into the eviction queues.

        Used for the records that were found in a tier other than the lowest.
        """
        parent = self.lineage.parent
        for key in keys:
            self.orphans.recheck(key, parent(key))
            self.orphans.recheck_children(key)
        while self.orphans.pending:
            self.orphans.advance(1 << 16)
        for key in keys:
            self.queues.resettle(key)
            before = parent(key)
            if before is not None:
                self.queues.resettle(before)

    # -- slots owned by callers ---------------------------------------------------------------------------------

    def take(self, tier: Tier, nbytes: int = 0) -> int:
        """Take a slot for a caller, which then owns it. Evict a droppable copy if no slot is free.

        Raises:
            CapacityError: No slot is free, and nothing can be evicted. Nothing has changed.
        """
        table = self.tables[tier]
        self._make_space(tier, table, nbytes)
        slot = table.take(nbytes)
        table.owned.add(slot)
        return slot

    def retire(self, tier: Tier, slot: int) -> None:
        """Quarantine a slot that its owner gave up, until ``release_retired`` is called.

        Until then, work on the device may still use the slot.

        Raises:
            LeaseError: The slot is not owned by a caller.
        """
        table = self.tables[tier]
        if slot not in table.owned:
            raise LeaseError(f"slot {slot} of {tier.name} is not owned by a caller")
        table.owned.discard(slot)
        table.quarantine[slot] = Dead(None, 0, 1)

    def release_retired(self, tier: Tier, slot: int) -> None:
        """Free a slot that was retired."""
        self._let_go(tier, self.tables[tier], slot)

    def adopt(
        self, key: PageKey, tier: Tier, slot: int, parent: PageKey | None, *, memory_only: bool = False
    ) -> None:
        """Turn a slot that a caller owns into the page's readable copy.

        If the tier has a copy of the page in flight, that copy is aborted, and its pins are moved to the new
        copy. ``memory_only`` has the same meaning as in ``reserve``.

        Raises:
            LeaseError: The slot is not owned, or the page already has a readable copy in the tier.
        """
        table = self.tables[tier]
        if slot not in table.owned or table.ready(key):
            raise LeaseError(
                f"slot {slot} of {tier.name} must be owned by a caller, and the page must not be readable there yet"
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
            self._kill(key, table)
        first = self.where(key) is None
        table.owned.discard(slot)
        table.copies[key] = Copy(slot, 0, self.queues.first_rank(key, table), True, pins)
        table.count(table.copies[key], 1)
        self.queues.entered((key,), tier, table)
        self.queues.resettle(key)
        if self.changed is not None:
            self.changed(key, tier, True)
        if first or (parent is not None and self.lineage.parent(key) is None):
            self._place(key, parent, first=first, fresh=fresh)

    def replace(self, key: PageKey, tier: Tier, slot: int) -> None:
        """Turn a slot that a caller owns into the page's readable copy, in place of a pinned copy.

        The slot of the old copy is quarantined, and freed once its pins are gone.

        Raises:
            LeaseError: The slot is not owned, or the old copy is not readable or not pinned.
        """
        table = self.tables[tier]
        if slot not in table.owned or not table.ready(key) or not table.copies[key].pins:
            raise LeaseError(
                f"slot {slot} of {tier.name} must be owned by a caller, and the page must have a readable, pinned "
                "copy there"
            )
        copy = table.copies[key]
        table.count(copy, -1)
        table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins)
        table.owned.discard(slot)
        copy.slot, copy.pins = slot, 0
        table.count(copy, 1)
        self.queues.settle(key, tier, table, copy)
        self.queues.settle_mirror(key, tier)

    # -- reserve, commit, abort ---------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[PageKey],
        dst: Tier,
        nbytes: int = 0,
        src: Tier | None = None,
        *,
        pins: int = 0,
        memory_only: bool = False,
        parents: Sequence[PageKey | None] = (),
    ) -> list[tuple[int, int]]:
        """Reserve slots in ``dst`` for new copies of a prefix of ``keys``, and pin the sources in ``src``.

        The new copies are not readable before ``commit``. If there is a ``src``, only the first page may cause an
        eviction. The prefix ends before a later page if there is no slot for it, if it has a copy in ``dst``
        already, or if it is not readable in ``src``.

        Two rules apply to a copy to a lower tier, and to the first copy of a page. An unreachable page takes
        only a free slot and never causes an eviction. A page never causes the eviction of its own parent,
        because it would then be unreachable itself. If a rule leaves no slot, CapacityError is raised.

        Args:
            keys: The pages, in order.
            dst: The tier of the new copies.
            nbytes: Bytes to reserve for each page if ``dst`` is a record tier.
            src: The tier that the pages are copied from. None: the pages come from outside the tiers.
            pins: Initial number of pins of each new copy.
            memory_only: Whether pages that are in no tier yet must never be stored below memory.
            parents: For each page that is in no tier yet, the page before it, or None if that is unknown or not
                there yet. If the sequence is empty, this is None for all pages.

        Returns:
            A pair for each page of the prefix: its slot in ``dst``, and its slot in ``src`` (-1 if ``src`` is
                None).

        Raises:
            CapacityError: There is no space for the first page. Nothing has changed.
            LeaseError: The first page has a copy in ``dst``, is not readable in ``src``, or is memory-only
                although ``dst`` is not memory. Nothing has changed.
        """
        table, copied = self.tables[dst], src is not None
        copies, free, enter = table.copies, table.free, table.policy.enter
        origin = dst if src is None else src
        source, sources = self.tables[origin], self.tables[origin].copies if copied else {}
        held, unreachable = self.queues.held, self.queues.unreachable
        down, first = not copied or origin < dst, False
        limited = dst > self.memory_only.floor
        places: list[tuple[int, int]] = []
        for key, parent in zip(keys, parents or repeat(None), strict=False):
            below = sources.get(key)
            if key in copies or (copied and (below is None or not below.ready)):
                if places:
                    break
                there = f"already in {dst.name} or in flight to it"
                raise LeaseError(
                    f"the page is {there if key in copies else f'not readable in {origin.name}'}"
                )
            full = not free and not table.has_space(nbytes)
            if down:
                first = not copied and not self.held(key)
                if full or limited:
                    refusal = self._refusal(key, dst, parent, full=full, first=first, memory_only=memory_only)
                    if refusal is not None:
                        if places:
                            break
                        raise refusal
            if full:
                if places and copied:
                    break
                try:
                    self._make_space(dst, table, nbytes, parent if first else None)
                except CapacityError:
                    if places:
                        break
                    raise
            if first:
                if memory_only:
                    self.memory_only.restrict(key)
                if parent is not None:
                    self._begin(key, parent)
            slot = free.pop() if free and not nbytes else table.take(nbytes)
            rank = table.policy.unreachable(key) if key in unreachable else enter(key)
            if below is None:
                places.append((slot, -1))
            else:
                if down and below.rank < 0 <= rank:
                    rank = table.policy.unwanted()  # an unwanted page is evicted first in ``dst``, too
                below.pins += 1
                if below.pins == 1:
                    held(key, origin, source, below)
                places.append((slot, below.slot))
            copies[key] = Copy(slot, nbytes, rank, pins=pins)
            if first:
                self.orphans.recheck_children(key)
        taken = keys[: len(places)]
        table.arriving += len(places)
        table.pinned += len(places) if pins else 0
        if src is not None:
            self.exactness.loaded(taken, src, dst)
        self.queues.entered(taken, dst, table)
        return places

    def commit(
        self,
        keys: Sequence[PageKey],
        dst: Tier,
        slots: Sequence[int],
        src: Tier | None = None,
        src_slots: Sequence[int] = (),
        *,
        sizes: Sequence[int] = (),
        parents: Sequence[PageKey | None] = (),
    ) -> list[bool]:
        """Make copies readable after their bytes have arrived, and unpin their sources.

        Args:
            keys: The pages.
            dst: The tier of the copies.
            slots: The slot of each page in ``dst``.
            src: The tier in which ``reserve`` pinned the sources. None: there are no sources, or they are
                unpinned already.
            src_slots: The slot of each source in ``src``.
            sizes: The size in bytes of each page, if ``dst`` is a record tier. Empty: each page has its
                reserved size.
            parents: The page before each page, or None where it is unknown. Empty: the known parents remain.

        Returns:
            For each page, whether its copy is readable now. If not, the copy was aborted or dropped earlier,
                and this transfer no longer keeps the copy's slot in quarantine.

        Raises:
            LeaseError: A slot is not being written, or a source is not pinned.
        """
        table, source = self.tables[dst], None if src is None else self.tables[src]
        copies, parent_of, resettle = table.copies, self.lineage.parent, self.queues.resettle
        changed = self.changed
        found: list[bool] = []
        previous: PageKey | None = None
        arrived: list[PageKey] = []
        for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            copy, below = copies.get(key), None
            if source is not None and src is not None:
                below = source.copies.get(key)
                if below is None or below.slot != src_slots[i]:
                    below = None
                    self._let_go(src, source, src_slots[i])
                elif not below.pins:
                    raise LeaseError(f"{src.name}: a page was unpinned more often than it was pinned")
                else:
                    below.pins -= 1
                    if not below.pins:
                        source.pinned -= 1
                        source.idle += below.ready
            if copy is None or copy.slot != slot:
                self._let_go(dst, table, slot)
                if below is not None:
                    resettle(key)
                found.append(False)
                continue
            first = below is None and self.where(key) is None
            parent = parents[i] if parents else None
            if sizes:
                table.used_nbytes += sizes[i] - copy.nbytes
                copy.nbytes = sizes[i]
            copy.ready = True
            table.arriving -= 1
            table.idle += not copy.pins
            if changed is not None:
                changed(key, dst, True)
            if first or (parent is not None and parent_of(key) is None):
                self._place(key, parent, first=first, unsettled=previous)
            found.append(True)
            arrived.append(key)
            previous = key
        # Now that all pages are linked, only the last page of a sequence enters a queue of evictable copies.
        for key in arrived:
            resettle(key)
        return found

    def fail(self, key: PageKey, dst: Tier, slot: int) -> None:
        """End the copy of a page whose bytes did not arrive. Nothing writes to the slot of that copy any more."""
        table = self.tables[dst]
        copy = table.copies.get(key)
        if copy is not None and copy.slot == slot and not copy.ready:
            self.abort(key, dst)
        self._let_go(dst, table, slot)

    def abort(self, key: PageKey, dst: Tier) -> None:
        """Mark a copy in flight as dead.

        Its slot is quarantined until its transfer ends with ``commit`` or ``fail``.
        """
        if self.tables[dst].copies[key].ready:
            raise LeaseError(f"cannot abort a copy that is readable in {dst.name}; evict it instead")
        self._kill(key, self.tables[dst])
        self._forget_if_gone(key)

    # -- pins and uses ------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[PageKey], tier: Tier) -> list[int]:
        """Pin the copies of the longest prefix of ``keys`` that has copies in the tier, until ``unpin`` is called.

        The copies may be in flight.

        Returns:
            The slots of the pinned copies.

        Raises:
            LeaseError: The first page has no copy in the tier.
        """
        table, held = self.tables[tier], self.queues.held
        copies = table.copies
        slots: list[int] = []
        for key in keys:
            copy = copies.get(key)
            if copy is None:
                if slots:
                    break
                raise LeaseError(f"cannot pin a page that is not in {tier.name}")
            copy.pins += 1
            if copy.pins == 1:
                if copy.ready:
                    held(key, tier, table, copy)
                else:
                    table.pinned += 1
            slots.append(copy.slot)
        return slots

    def unpin(self, keys: Sequence[PageKey], tier: Tier, slots: Sequence[int]) -> None:
        """Remove one pin from the copy in each of these slots.

        A copy may have been dropped or replaced since it was pinned. Its slot is then in quarantine, and is
        freed when its last pin is removed.

        Raises:
            LeaseError: A copy has no pin.
        """
        table, queues = self.tables[tier], self.queues
        copies = table.copies
        for key, slot in zip(keys, slots, strict=True):
            copy = copies.get(key)
            if copy is None or copy.slot != slot:
                self._let_go(tier, table, slot)
                continue
            if copy.pins == 0:
                raise LeaseError(f"{tier.name}: a page was unpinned more often than it was pinned")
            copy.pins -= 1
            if copy.pins:
                continue
            table.pinned -= 1
            if copy.ready:
                table.idle += 1
                queues.settle(key, tier, table, copy)
                queues.settle_mirror(key, tier)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Give used pages new ranks in every tier.

        Later pages of ``keys`` get lower ranks than earlier ones, so that they are evicted first.
        """
        self.release(keys, None, ())

    def release(self, keys: Sequence[PageKey], tier: Tier | None, slots: Sequence[int]) -> None:
        """Do what ``touch`` and ``unpin`` do, in a single pass from the last page to the first.

        If ``tier`` is None, nothing is unpinned.
        """
        uses, settle, after_use = self._uses, self.queues.settle, self.queues.rank_after_use
        held: Iterator[int] = repeat(-1, len(keys)) if tier is None else reversed(slots)
        for key, slot in zip(reversed(keys), held, strict=True):
            alive = tier is None
            for other, table, copies, touch in uses:
                copy = copies.get(key)
                if copy is None:
                    continue
                rank = touch(key, copy.rank) if copy.rank >= 0 else after_use(key, other, table, copy)
                if rank != copy.rank:
                    table.withdraw(copy)
                    copy.rank = rank
                if other == tier and copy.slot == slot:
                    if copy.pins == 0:
                        raise LeaseError(f"{other.name}: a page was unpinned more often than it was pinned")
                    alive = True
                    copy.pins -= 1
                    if not copy.pins:
                        table.pinned -= 1
                        table.idle += copy.ready
                if copy.ready and not copy.pins:
                    settle(key, other, table, copy)
            if not alive and tier is not None:
                self._let_go(tier, self.tables[tier], slot)

    # -- evict --------------------------------------------------------------------------------------------------

    def evict(self, key: PageKey, tier: Tier) -> Drop:
        """Drop a readable copy. If it is pinned, its slot is quarantined until the last pin is removed.

        The caller must append the result to ``dropped``.
        """
        table = self.tables[tier]
        copy = table.copies.get(key)
        if copy is None or not copy.ready:
            raise LeaseError(f"cannot evict a page that is not readable in {tier.name}")
        table.withdraw(copy)
        table.count(copy, -1)
        del table.copies[key]
        table.policy.left(key, copy.rank)
        if self.changed is not None:
            self.changed(key, tier, False)
        if copy.pins:
            table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins)
        else:
            table.put_back(copy.slot, copy.nbytes)
            self._note_erased(tier, table, key)
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
            if table.read_only:
                self.memory_only.refuse(key)  # the page cannot be written to a read-only tier again
            self.queues.resettle(key)
        return drop

    def lift(self, limit: int) -> list[PageKey]:
        """Lift the restriction of up to ``limit`` pages that ``MemoryOnly`` has queued, and update the queues.

        Returns:
            The pages whose restriction was lifted. They can be saved below memory now.
        """
        lifted = self.memory_only.lift(limit)
        for key in lifted:
            for table in self.tables.values():
                if key in table.copies:
                    table.withdraw(table.copies[key])
            self.queues.resettle(key)
        return lifted

    # -- internals ----------------------------------------------------------------------------------------------

    def _make_space(self, tier: Tier, table: TierTable, nbytes: int, parent: PageKey | None = None) -> None:
        if table.budget_nbytes is not None and nbytes > table.budget_nbytes:
            raise CapacityError(
                f"{tier.name}: a record of {exact_size(nbytes)} exceeds the tier's budget of "
                f"{exact_size(table.budget_nbytes)}"
            )
        if not table.has_space(nbytes):
            if self.orphans.pending:
                self.orphans.look_for_victims(table)
            victims = choose_victims(self.tables, self.lineage, tier, nbytes)
            if parent is not None and parent in victims and not self._elsewhere(parent, table):
                raise CapacityError(
                    f"{tier.name}: only the parent of the new page could be evicted to make space for it"
                )
            for victim in victims:
                self.dropped.append(self.evict(victim, tier))

    def _elsewhere(self, key: PageKey, table: TierTable) -> bool:
        return any(other is not table and key in other.copies for _, other in self._order)

    def _refusal(
        self,
        key: PageKey,
        dst: Tier,
        parent: PageKey | None,
        *,
        full: bool,
        first: bool,
        memory_only: bool,
    ) -> TierStoreError | None:
        """Return the error to raise if a page may not get a slot in ``dst``, or None if it may get one.

        Used for copies to a lower tier, and for the first copy of a page (``first``). ``full`` is True if ``dst``
        has no free slot.
        """
        if dst > (self.memory_only.floor if memory_only else self.memory_only.lowest_for(key)):
            return LeaseError(f"the page is memory-only, and {dst.name} is not memory")
        if full and (self.orphans.after(parent) if first else key in self.orphans):
            return CapacityError(f"{dst.name}: no free slot for a page that no request can reach")
        return None

    def _place(
        self,
        key: PageKey,
        parent: PageKey | None,
        *,
        first: bool,
        fresh: bool = False,
        unsettled: PageKey | None = None,
    ) -> None:
        """After a page became readable, link it to ``parent``, and update which pages are reachable.

        Args:
            key: The page.
            parent: The page before it, or None if unknown.
            first: Whether no other tier has a readable copy.
            fresh: Whether the page was in no tier before.
            unsettled: A page that the caller will put into the right eviction queue itself, or None.
        """
        lineage = self.lineage
        before, followed = lineage.parent(key), lineage.has_children(key)
        linked = False
        if parent is not None and (
            before == parent or not followed or not self._precedes(key, parent, fresh=fresh)
        ):
            linked = True
            lineage.link(key, parent)
            if parent != unsettled:
                self.queues.resettle(parent)
        if first or linked:
            before = lineage.parent(key)  # ``parent``, or the one that was given when the first copy started
            if before is not None and key not in self.memory_only:
                self.memory_only.permit(before)
            elif before is not None and key in self.memory_only.refused:
                self.memory_only.permit_named(before)
            self.orphans.recheck(key, before)
        if first and followed:
            self.orphans.recheck_children(key)

    def _precedes(self, key: PageKey, parent: PageKey, *, fresh: bool) -> bool:
        """Return whether ``key`` comes before ``parent`` in a sequence, in which case linking them would form a cycle.

        If ``key`` was in no tier before (``fresh``), it cannot precede a reachable page, because all pages
        before a reachable page have copies. The answer is then known without a search.
        """
        if fresh and not self.orphans.pending and parent not in self.orphans:
            return False
        return self.lineage.precedes(key, parent)

    def _begin(self, key: PageKey, parent: PageKey) -> None:
        """Link a page to its parent, because the first copy of the page is about to start.

        From now on, the parent is not evicted before this page, just as if the copy were readable.
        """
        if not self._precedes(key, parent, fresh=True):
            self.lineage.link(key, parent)
            self.queues.resettle(parent)
        self.orphans.begin(key, self.lineage.parent(key))

    def _forget_if_gone(self, key: PageKey) -> None:
        if not self.held(key):
            self.memory_only.forget(key)
            self.exactness.forget(key)
            bare = self.lineage.unlink(key)
            if bare is not None:
                self.queues.resettle(bare)
            self.orphans.gone(key)

    def _kill(self, key: PageKey, table: TierTable) -> None:
        """Mark a copy in flight as dead. Its slot is quarantined until its transfer has ended and its pins are gone."""
        copy = table.copies.pop(key)
        table.count(copy, -1)
        table.policy.left(key, copy.rank)
        table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins + 1)

    def _let_go(self, tier: Tier, table: TierTable, slot: int) -> None:
        """Remove one holder of a quarantined slot. When the last holder is removed, the slot becomes free.

        Raises:
            LeaseError: The slot is not in quarantine.
        """
        dead = table.quarantine.get(slot)
        if dead is None:
            raise LeaseError(f"slot {slot} of {tier.name} was released more often than it was held")
        dead.holders -= 1
        if dead.holders == 0:
            del table.quarantine[slot]
            table.put_back(slot, dead.nbytes)
            self._note_erased(tier, table, dead.key)

    def _note_erased(self, tier: Tier, table: TierTable, key: PageKey | None) -> None:
        """If the tier stores records, queue the erase of a record that no copy uses any more."""
        # A newer copy of the same page uses the same record, which must then not be erased.
        if table.num_slots is None and key is not None and key not in table.copies:
            self.erased.append((tier, key))
