"""Which tiers hold a readable copy of each page. Pure metadata: no torch, no I/O, no thread, no clock.

One protocol on every edge: ``reserve`` takes an unreadable slot in the destination and pins the source, ``commit``
makes it readable, ``abort`` marks the copy dead. A dead slot is quarantined until nothing can write or read it:
its transfer has settled and its pins are gone. A slot is free, owned by a caller, in exactly one copy, or quarantined.

``reserve``, ``commit``, ``pin``, ``unpin``, ``touch`` and ``release`` take a run of keys; one page is a run of one. A
lease takes and releases thousands of pages while a link or a first token waits, so these loops call little.

A copy is evictable iff it is ready, unpinned, and either its page is unreachable (``lineage``) or it is not the last
copy of a page with readable children. The queue in which it waits is decided in ``eviction``.

``match`` is here, and so is exactness: which pages are still, bit by bit, what was put.
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
from tierstore.types import Copy, PageKey, Tier, TierDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tierstore.policy import Fifo

_RUN = 128
"""Pages of which ``match`` asks together whether one tier has them all."""


@dataclass(slots=True)
class Dead:
    """A quarantined slot: ``holders`` are the pins and the writer that can still touch it."""

    key: PageKey | None
    nbytes: int
    holders: int


class TierTable:
    """Slots of one tier. ``num_slots`` None: the tier keeps records by key, bounded by ``budget_nbytes`` alone.

    ``record_nbytes``: what one record may cost. ``durable``: records survive a restart. ``lossy``: what is read back
    from there differs from what was put. ``read_only``: nothing is written there.
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
        """Slots of a tier that keeps bytes by key: a new number for each record."""
        self.arriving = 0
        """Copies that are not readable yet."""
        self.pinned = 0
        """Copies with a pin, readable or not."""
        self.idle = 0
        """Readable copies without a pin."""
        self.owned: set[int] = set()
        self.quarantine: dict[int, Dead] = {}
        self.droppable = VictimQueue()
        self.dirty = VictimQueue()
        self.mirrors = VictimQueue()
        self.leaves = VictimQueue()
        """Those of ``dirty`` that can be dropped without cutting off other pages."""
        self.fleeting = VictimQueue()
        """Those of ``leaves`` that are memory-only."""

    def description(self, below: Tier | None) -> TierDescription:
        """Describe the tier, which has ``below`` under it."""
        addressing: Literal["slots", "records"] = "records" if self.num_slots is None else "slots"
        return TierDescription(addressing, self.durable, self.lossy, below, self.read_only)

    def has_space(self, nbytes: int) -> bool:
        """Whether a slot for ``nbytes`` can be taken without an eviction."""
        if self.num_slots is not None:
            return bool(self.free)
        return self.budget_nbytes is None or self.used_nbytes + nbytes <= self.budget_nbytes

    def ready(self, key: PageKey) -> bool:
        """Whether this tier holds a readable copy."""
        copy = self.copies.get(key)
        return copy is not None and copy.ready

    def take(self, nbytes: int) -> int:
        """Take a free slot and ``nbytes`` of the budget. There must be space."""
        self.used_nbytes += nbytes
        return self.free.pop() if self.num_slots is not None else next(self.new_slots)

    def put_back(self, slot: int, nbytes: int) -> None:
        """Free a slot and the bytes of its record."""
        self.used_nbytes -= nbytes
        if self.num_slots is not None:
            self.free.append(slot)

    def count(self, copy: Copy, number: int) -> None:
        """Count a copy as it is now: ``number`` is -1 before it changes or goes, 1 after it came or changed."""
        self.arriving += 0 if copy.ready else number
        self.pinned += number if copy.pins else 0
        self.idle += number if copy.ready and not copy.pins else 0

    @property
    def inner(self) -> int:
        """Copies that may leave only after pages that follow theirs."""
        return self.idle - len(self.droppable) - len(self.dirty) - len(self.mirrors)

    def wait(self, copy: Copy, key: PageKey, queue: VictimQueue) -> None:
        """Let a copy wait in this queue, and in no other, until it is evicted."""
        if copy.queue is not queue:
            self.withdraw(copy)
            copy.queue = queue
            queue.offer(copy.rank, key)

    def withdraw(self, copy: Copy) -> None:
        """Take a copy out of its queue: it may not be evicted now. Call this before its rank changes."""
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
    """Which pages of a store are, bit by bit, what was put. Only ``Residency`` changes it.

    ``tables``: of all tiers.
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
        """Whether no tier loses anything: all pages are exact then."""
        return self._first_lossy is None

    def exact(self, key: PageKey) -> bool:
        """Whether a readable copy of the page is certainly what was put."""
        if self._first_lossy is None:
            return True
        if key in self._tainted:
            return False
        return any(key in copies and copies[key].ready for _, copies in self._above)

    def prefix(self, keys: Sequence[PageKey]) -> int:
        """Count the exact pages before the first of ``keys`` that is not exact."""
        if self._first_lossy is None:
            return len(keys)
        return next((index for index, key in enumerate(keys) if not self.exact(key)), len(keys))

    def loaded(self, keys: Sequence[PageKey], src: Tier, dst: Tier) -> None:
        """Taint pages that are copied from ``src``, a lossy tier, to ``dst``, above all lossy tiers.

        The copies are inexact, and may outlive an exact one.
        """
        first = self._first_lossy
        if first is not None and dst < first <= src:
            self._tainted.update(keys)

    def put(self, key: PageKey, parent: PageKey | None) -> None:
        """Note that a page is put after ``parent``. Call this before its copy counts, while those of ``parent`` do."""
        if self._first_lossy is None:
            return
        if not self.stays_tainted(key):
            self._tainted.discard(key)
        if parent is not None and not (self.exact(parent) or self._coming(parent)):
            self._tainted.add(key)

    def _coming(self, key: PageKey) -> bool:
        """Return whether the page will be exact once it is readable: only tiers above the lossy ones have it.

        An engine may put a page together with its parent, whose copy is then not readable yet either.
        """
        if key in self._tainted or any(key in copies for copies in self._below):
            return False
        return any(key in copies for _, copies in self._above)

    def stays_tainted(self, key: PageKey) -> bool:
        """Return whether the page is still tainted after a put, because a copy that may be inexact remains.

        A copy on its way into HBM does not count: the put replaces it.
        """
        return key in self._tainted and any(
            key in copies and (tier != Tier.HBM or copies[key].ready) for tier, copies in self._above
        )

    def doubt(self, key: PageKey) -> None:
        """Taint a page that was computed over inexact pages, whatever its parent says."""
        if self._first_lossy is not None:
            self._tainted.add(key)

    def tainted_in(self, key: PageKey) -> list[Tier]:
        """Return the tiers above the lossy ones that hold a readable copy of a tainted page, slowest first."""
        if key not in self._tainted:
            return []
        return [tier for tier, copies in self._above[::-1] if key in copies and copies[key].ready]

    def forget(self, key: PageKey) -> None:
        """Forget a page that no tier holds any more."""
        self._tainted.discard(key)


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


class Residency:
    """The tables of all tiers and the lineage of their pages. The only code that changes residency."""

    def __init__(self, tables: Mapping[Tier, TierTable]) -> None:
        self.tables = {tier: tables[tier] for tier in sorted(tables)}
        """Fastest first."""
        self._order = list(self.tables.items())
        self._copies = [table.copies for _, table in self._order]
        # Fastest first: where a copy waits depends on the pins of those above.
        self._uses = [(tier, table, table.copies, table.policy.touch) for tier, table in self._order]
        below = [*list(self.tables)[1:], None]
        self.hierarchy = Hierarchy(
            {tier: table.description(under) for (tier, table), under in zip(self._order, below, strict=True)}
        )
        self.lineage = Lineage()
        self.memory_only = MemoryOnly(self.hierarchy, self.lineage)
        self.exactness = Exactness(self.tables)
        self.erased: deque[tuple[Tier, PageKey]] = deque()
        """Records of key-addressed tiers whose bytes nobody needs any more."""
        self.dropped: deque[Drop] = deque()
        """Copies that ``reserve`` and ``take`` evicted to make room."""
        self.changed: Callable[[PageKey, Tier, bool], None] | None = None
        """Told of each copy that becomes readable (True), and of each readable one that goes (False), in order."""
        self.queues = VictimQueues(self.tables, self.lineage, self.memory_only)
        self.orphans = Orphans(self, self.lineage, self.queues)

    # -- questions ----------------------------------------------------------------------------------------------

    def where(self, key: PageKey) -> Tier | None:
        """Fastest tier with a readable copy, or None."""
        for tier, table in self._order:
            copy = table.copies.get(key)
            if copy is not None and copy.ready:
                return tier
        return None

    def first_with(self, key: PageKey, tiers: Iterable[Tier]) -> Tier | None:
        """First of ``tiers`` that has a readable copy, or None."""
        return next((tier for tier in tiers if self.tables[tier].ready(key)), None)

    def match(self, keys: Sequence[PageKey]) -> list[Tier]:
        """Tier of each page of the longest readable prefix. Changes nothing, is no use for the policy.

        One dictionary look-up a key where runs of pages are in one tier, at most one a key and tier elsewhere.
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
        """The fastest tier of every page of a run where it is one and the same; None: look at each page."""
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

    def unpinned(self, tier: Tier) -> int:
        """Readable copies of a tier that nothing holds."""
        return self.tables[tier].idle

    def arriving(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """How many of these pages have a copy in the tier that is not readable yet."""
        table = self.tables.get(tier)
        if table is None or not table.arriving:
            return 0
        copies = [copy for key in keys if (copy := table.copies.get(key)) is not None]
        return sum(not copy.ready for copy in copies)

    def held(self, key: PageKey) -> bool:
        """Whether any tier has a copy, readable or on its way."""
        for copies in self._copies:  # noqa: SIM110 - any() with a generator takes three times as long
            if key in copies:
                return True
        return False

    def saved_below(self, key: PageKey, tier: Tier) -> bool:
        """Whether a slower tier holds a readable copy."""
        return self.queues.below(key, tier)

    def unsaved(self, key: PageKey, tier: Tier) -> bool:
        """Whether a slower tier is to hold the page and none does: not while no request can reach it."""
        return (
            tier < self.memory_only.lowest_for(key)
            and key not in self.orphans
            and not self.saved_below(key, tier)
        )

    def load(self, tier: Tier, records: Iterable[tuple[PageKey, PageKey | None, int]]) -> None:
        """Enter the records that a tier found at open, before anything else happens.

        Args:
            tier: Of several tiers, the slowest is loaded first.
            records: (key, parent, nbytes) of each record, oldest first.
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
        """Put pages of a tier above others into their queues, and those that they make reachable or not."""
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
        """Return a slot that the caller owns; evict a droppable copy if none is free.

        Raises:
            CapacityError: There is none. Nothing has changed.
        """
        table = self.tables[tier]
        self._make_space(tier, table, nbytes)
        slot = table.take(nbytes)
        table.owned.add(slot)
        return slot

    def retire(self, tier: Tier, slot: int) -> None:
        """Quarantine an owned slot: its owner gave it up, but a copy may use it until ``release_retired``."""
        table = self.tables[tier]
        if slot not in table.owned:
            raise LeaseError(f"slot {slot} of {tier.name} is not owned by a caller")
        table.owned.discard(slot)
        table.quarantine[slot] = Dead(None, 0, 1)

    def release_retired(self, tier: Tier, slot: int) -> None:
        """Free a retired slot."""
        self._let_go(tier, self.tables[tier], slot)

    def adopt(
        self, key: PageKey, tier: Tier, slot: int, parent: PageKey | None, *, memory_only: bool = False
    ) -> None:
        """Make an owned slot the page's readable copy.

        A copy of the page that is still being written is aborted, and its pins move to this one.
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
        """Make an owned slot the page's readable copy; the old copy's slot is free once its pins have ended.

        Raises:
            LeaseError: The slot is not owned, or the old copy is not readable or not pinned.
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
        parent: PageKey | None = None,
    ) -> list[tuple[int, int]]:
        """Take unreadable slots in ``dst`` for the first of ``keys``, and pin their copies in ``src``.

        Only the first page may evict a victim. The run ends before a later page for which there is no space, that has
        a copy in ``dst``, or that is not readable in ``src``.

        On its way down, or as its first copy, a page that no request can reach takes a free slot and nobody's place,
        and no page takes the place of the page before it, without which it could not be reached: CapacityError.

        Args:
            keys: Pages in the order of their sequence.
            dst: The tier that gets the copies.
            nbytes: Bytes set aside for each page where ``dst`` keeps records.
            src: The tier that they are copied from; None: from outside the tiers.
            pins: Pins that each new copy has from the start.
            memory_only: Whether pages that no tier holds yet may never be stored below memory.
            parent: The page before the first key, if no tier holds that key yet.

        Returns:
            For each page its slot in ``dst`` and its slot in ``src``, or -1 without ``src``.

        Raises:
            CapacityError: There is no space for the first page. Nothing has changed.
            LeaseError: The first page has a copy in ``dst``, is not readable in ``src``, or is memory-only and ``dst``
                is not memory. Nothing has changed.
        """
        table, copied = self.tables[dst], src is not None
        copies, free, enter = table.copies, table.free, table.policy.enter
        origin = dst if src is None else src
        source, sources = self.tables[origin], self.tables[origin].copies if copied else {}
        held, unreachable = self.queues.held, self.queues.unreachable
        down, first = not copied or origin < dst, False
        places: list[tuple[int, int]] = []
        for key in keys:
            below = sources.get(key)
            if key in copies or (copied and (below is None or not below.ready)):
                if places:
                    break
                there = f"already resident or on its way in {dst.name}"
                raise LeaseError(
                    f"the page is {there if key in copies else f'not readable in {origin.name}'}"
                )
            if down:
                first = not copied and not self.held(key)
                refusal = self._refusal(key, dst, nbytes, parent, first=first, memory_only=memory_only)
                if refusal is not None:
                    if places:
                        break
                    raise refusal
            if not free and not table.has_space(nbytes):
                if places:
                    break
                self._make_space(dst, table, nbytes, parent if first else None)
            if first:
                if memory_only:
                    self.memory_only.restrict(key)
                self._begin(key, parent)
            slot = free.pop() if free and not nbytes else table.take(nbytes)
            rank = table.policy.unreachable(key) if key in unreachable else enter(key)
            if below is None:
                places.append((slot, -1))
            else:
                if down and below.rank < 0 <= rank:
                    rank = table.policy.unwanted()  # what nobody wants above is the first to go below, too
                below.pins += 1
                if below.pins == 1:
                    held(key, origin, source, below)
                places.append((slot, below.slot))
            copies[key] = Copy(slot, nbytes, rank, pins=pins)
            if first:
                self.orphans.recheck_children(key)
                parent = key
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
        """Make copies readable whose bytes are in their slots, and end the pins of their sources.

        Args:
            keys: The pages.
            dst: The tier that got the bytes.
            slots: The slot of each page in ``dst``.
            src: The tier in which ``reserve`` pinned the sources; None: there are none, or they are unpinned already.
            src_slots: The slot of each source in ``src``.
            sizes: Bytes that each page takes where ``dst`` keeps records; empty: what was set aside for it.
            parents: The page before each one, where known; empty: no page has a new one.

        Returns:
            For each page whether its copy is readable now. If not, it was aborted, and its slot is let go.

        Raises:
            LeaseError: A slot has no such writer, or a source has no pin.
        """
        table, source = self.tables[dst], None if src is None else self.tables[src]
        copies, parent_of, resettle = table.copies, self.lineage.parent, self.queues.resettle
        changed = self.changed
        found: list[bool] = []
        for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            copy, below = copies.get(key), None
            if source is not None and src is not None:
                below = source.copies.get(key)
                if below is None or below.slot != src_slots[i]:
                    below = None
                    self._let_go(src, source, src_slots[i])
                elif not below.pins:
                    raise LeaseError(f"unpin below zero in {src.name}")
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
            resettle(key)
            if changed is not None:
                changed(key, dst, True)
            if first or (parent is not None and parent_of(key) is None):
                self._place(key, parent, first=first)
            found.append(True)
        return found

    def fail(self, key: PageKey, dst: Tier, slot: int) -> None:
        """End a transfer that did not bring the bytes: nothing writes the slot any more."""
        table = self.tables[dst]
        copy = table.copies.get(key)
        if copy is not None and copy.slot == slot and not copy.ready:
            self.abort(key, dst)
        self._let_go(dst, table, slot)

    def abort(self, key: PageKey, dst: Tier) -> None:
        """Mark the copy on its way dead. Its slot is quarantined until ``commit`` or ``fail``: its writer has ended."""
        if self.tables[dst].copies[key].ready:
            raise LeaseError(f"the copy in {dst.name} is readable; evict it")
        self._kill(key, self.tables[dst])
        self._forget_if_gone(key)

    # -- pins and uses ------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[PageKey], tier: Tier) -> list[int]:
        """Keep the copies of the first of ``keys``, readable or on their way, where they are until ``unpin``.

        Returns:
            Their slots, up to a page that has no copy in the tier.

        Raises:
            LeaseError: The first page has none.
        """
        table, held = self.tables[tier], self.queues.held
        copies = table.copies
        slots: list[int] = []
        for key in keys:
            copy = copies.get(key)
            if copy is None:
                if slots:
                    break
                raise LeaseError(f"pin of a page that is not in {tier.name}")
            copy.pins += 1
            if copy.pins == 1:
                if copy.ready:
                    held(key, tier, table, copy)
                else:
                    table.pinned += 1
            slots.append(copy.slot)
        return slots

    def unpin(self, keys: Sequence[PageKey], tier: Tier, slots: Sequence[int]) -> None:
        """End one pin of each copy that held its slot; the copy may be dead by now."""
        table, queues = self.tables[tier], self.queues
        copies = table.copies
        for key, slot in zip(keys, slots, strict=True):
            copy = copies.get(key)
            if copy is None or copy.slot != slot:
                self._let_go(tier, table, slot)
                continue
            if copy.pins == 0:
                raise LeaseError(f"unpin below zero in {tier.name}")
            copy.pins -= 1
            if copy.pins:
                continue
            table.pinned -= 1
            if copy.ready:
                table.idle += 1
                queues.settle(key, tier, table, copy)
                queues.settle_mirror(key, tier)

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Renew the ranks of used pages in every tier, the last page as the oldest, so that tails go first."""
        self.release(keys, None, ())

    def release(self, keys: Sequence[PageKey], tier: Tier | None, slots: Sequence[int]) -> None:
        """Do ``touch`` and ``unpin`` in one pass, last page first. ``tier`` None: no page is pinned."""
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
                        raise LeaseError(f"unpin below zero in {other.name}")
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
        """Drop a readable copy. It is not matched any more; if pinned, its slot is quarantined until the last unpin."""
        table = self.tables[tier]
        copy = table.copies.get(key)
        if copy is None or not copy.ready:
            raise LeaseError(f"evict of a page that is not readable in {tier.name}")
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
                self.memory_only.refuse(key)  # it cannot be written again
            self.queues.resettle(key)
        return drop

    def lift(self, limit: int) -> list[PageKey]:
        """Let up to ``limit`` permitted pages, and the pages before them, be saved below memory; return them."""
        lifted = self.memory_only.lift(limit)
        for key in lifted:
            for table in self.tables.values():
                if key in table.copies:
                    table.withdraw(table.copies[key])
            self.queues.resettle(key)
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

    def _refusal(
        self,
        key: PageKey,
        dst: Tier,
        nbytes: int,
        parent: PageKey | None,
        *,
        first: bool,
        memory_only: bool,
    ) -> TierStoreError | None:
        """Why a page on its way down, or that gets its first copy, may not have a slot in ``dst``; None: it may."""
        if dst > (self.memory_only.floor if memory_only else self.memory_only.lowest_for(key)):
            return LeaseError(f"the page is memory-only, and {dst.name} is not memory")
        cut_off = self.orphans.after(parent) if first else key in self.orphans
        if cut_off and not self.tables[dst].has_space(nbytes):
            return CapacityError(f"{dst.name}: no free slot for a page that no request can reach")
        return None

    def _place(self, key: PageKey, parent: PageKey | None, *, first: bool, fresh: bool = False) -> None:
        """Link a page that became readable to ``parent``, and see what can be reached now.

        ``first``: no other tier has a readable copy. ``fresh``: no tier had the page a moment ago.
        """
        lineage = self.lineage
        before, followed = lineage.parent(key), lineage.has_children(key)
        linked = False
        if parent is not None and (
            before == parent or not followed or not self._precedes(key, parent, fresh=fresh)
        ):
            linked = True
            lineage.link(key, parent)
            self.queues.resettle(parent)
        if first or linked:
            before = lineage.parent(key)  # named now, or when the page's first copy was begun
            if before is not None and key not in self.memory_only:
                self.memory_only.permit(before)
            elif before is not None and key in self.memory_only.refused:
                self.memory_only.permit_named(before)
            self.orphans.recheck(key, before)
        if first and followed:
            self.orphans.recheck_children(key)

    def _precedes(self, key: PageKey, parent: PageKey, *, fresh: bool) -> bool:
        """Whether the page is one of those before ``parent``. Those before a reachable one were there already."""
        if fresh and not self.orphans.pending and parent not in self.orphans:
            return False
        return self.lineage.precedes(key, parent)

    def _begin(self, key: PageKey, parent: PageKey | None) -> None:
        """Begin the first copy of a page, which is in flight: it keeps the page before it, as a readable one does."""
        if parent is not None and not self._precedes(key, parent, fresh=True):
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
        """A copy on its way will never be readable: its writer and its pins hold the slot."""
        copy = table.copies.pop(key)
        table.count(copy, -1)
        table.policy.left(key, copy.rank)
        table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins + 1)

    def _let_go(self, tier: Tier, table: TierTable, slot: int) -> None:
        """One holder of a dead slot has ended. LeaseError if it has none."""
        dead = table.quarantine.get(slot)
        if dead is None:
            raise LeaseError(f"slot {slot} of {tier.name} has no such holder")
        dead.holders -= 1
        if dead.holders == 0:
            del table.quarantine[slot]
            table.put_back(slot, dead.nbytes)
            self._note_erased(tier, table, dead.key)

    def _note_erased(self, tier: Tier, table: TierTable, key: PageKey | None) -> None:
        """Nothing uses a dead copy any more: where bytes are kept by key, its record is to be erased."""
        # A newer copy under the same key owns the record now: erasing it would lose that one.
        if table.num_slots is None and key is not None and key not in table.copies:
            self.erased.append((tier, key))
