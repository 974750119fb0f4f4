"""Copies of pages to faster tiers: loads into HBM for leases, and promotions for hints. Metadata only.

If the tier below HBM is memory, a load from a record tier takes two steps: the page is first promoted from
its record tier to the tier below HBM, and then copied to HBM. Otherwise the page is copied to HBM directly. A
load has an HBM slot from the start and pins its source, so the page cannot be evicted before it arrives.
Promotions for loads take HOST slots as these become free, so a lease of any size can be loaded through a HOST
tier of any size.

A promotion for a hint starts at once or not at all, so that nothing is queued when a hint is cancelled. It
takes free slots, and slots of saved pages that no hint expects to be used. Until the hint ends, a promoted
page is evicted after other pages of its tier, but it is never pinned.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import TYPE_CHECKING, NamedTuple

from tierstore.directory.transfers import BATCH_PAGES, Move
from tierstore.errors import CapacityError
from tierstore.policy.orders import BAND
from tierstore.types import Promoted, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierstore.directory.hints import HintTable
    from tierstore.directory.leases import LeaseRecord
    from tierstore.directory.residency import Residency
    from tierstore.directory.transfers import Transfers
    from tierstore.types import Counters, Hint, PageKey


@dataclass(slots=True, eq=False)
class Load:
    """A page that is being loaded into an HBM slot.

    Attributes:
        key: The page.
        slot: The HBM slot.
        source: The tier that the page is copied from next.
        source_slot: The slot of the page in ``source``.
        submitted: Whether a transfer that fills the slot was submitted, which then owns the pin of the source.
        abandoned: Whether the lease was released before the load finished. Only set if an engine owns HBM.
        waiters: The leases that wait for the page, each with the page's index in the lease.
    """

    key: PageKey
    slot: int
    source: Tier
    source_slot: int
    submitted: bool = False
    abandoned: bool = False
    waiters: list[tuple[LeaseRecord, int]] = field(default_factory=list)


class Loads:
    """All loads in progress, by HBM slot.

    ``ended`` lists finished loads, each with a bool that says whether the page arrived, until the directory
    processes them.
    """

    def __init__(self, residency: Residency, transfers: Transfers, *, owned: bool) -> None:
        self.by_slot: dict[int, Load] = {}
        self.ended: list[tuple[Load, bool]] = []
        self.abandoned: list[int] = []
        """Engine slots of abandoned loads (see ``Load``) to which nothing writes any more."""
        self._residency = residency
        self._transfers = transfers
        self.owned = owned
        """Whether the store owns HBM. An engine's slots have no residency table."""
        hierarchy = residency.hierarchy
        self._records = hierarchy.records
        self.gate = hierarchy.below(Tier.HBM) or Tier.HBM
        """The tier below HBM, through which pages are loaded."""
        self.staged = self.gate == hierarchy.memory_floor
        """Whether pages in record tiers are copied to the gate tier first, rather than directly to HBM."""
        self.promoting: dict[PageKey, list[Load]] = {}
        """The loads of each page that must first be promoted to the gate tier. All other loads are submitted."""
        self._queue: deque[PageKey] = deque()

    @property
    def queued(self) -> int:
        """Number of promotions that are waiting for a slot in the gate tier, which is the tier below HBM."""
        return len(self._queue)

    def start(
        self,
        lease: LeaseRecord | None,
        index: int,
        keys: Sequence[PageKey],
        source: Tier,
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Start loading pages into HBM from their copies in ``source``.

        Args:
            lease: The lease that the pages are loaded for, or None.
            index: Index of the first page in the lease.
            keys: The pages.
            source: The tier that the pages are copied from.
            places: For each page, the HBM slot that is reserved for it, and the slot of its source, which is
                pinned. No other page may be in flight to the HBM slot.
        """
        by_slot, parent = self.by_slot, self._residency.lineage.parent
        straight = source == self.gate or not self.staged
        moves = []
        for number, (key, (slot, source_slot)) in enumerate(zip(keys, places, strict=True), index):
            waiters = [] if lease is None else [(lease, number)]
            load = by_slot[slot] = Load(key, slot, source, source_slot, straight, False, waiters)
            if straight:
                moves.append(Move(key, source_slot, slot, 0, parent(key)))
            else:
                self._await_promotion(load)
        self._transfers.add(source, Tier.HBM, *moves)

    def promote_queued(self) -> None:
        """Start a bounded number of queued promotions, if the gate tier (the tier below HBM) has space for them now.

        If no lease needs a load any more, and its promotion would displace another page, the load ends
        instead: no request waits for it, and its source may be stalled.
        """
        residency, queue, gate = self._residency, self._queue, self.gate
        memory, started = residency.tables[gate], 0
        while queue and started < BATCH_PAGES:
            key = queue[0]
            if key in self.promoting and key not in memory.copies:
                source = residency.first_with(key, self._records)
                if source is None:
                    self.lost(key)
                elif not memory.free and self._unheld(key):
                    self._end_unheld(self.promoting[key])
                else:
                    try:
                        [(slot, source_slot)] = residency.reserve((key,), gate, 0, source)
                    except CapacityError:
                        return
                    parent = residency.lineage.parent(key)
                    self._transfers.add(source, gate, Move(key, source_slot, slot, 0, parent))
                    started += 1
            elif memory.ready(key):
                self.promoted(key)
            queue.popleft()

    def promoted(self, key: PageKey) -> None:
        """Continue the loads of a page that became readable in the gate tier."""
        for load in self.promoting.pop(key, ()):
            [source_slot] = self._residency.pin((key,), self.gate)
            self._residency.unpin((key,), load.source, (load.source_slot,))
            load.source, load.source_slot = self.gate, source_slot
            self._submit(load)

    def lost(self, key: PageKey) -> None:
        """End all loads that wait for the promotion of a page, because the page cannot be promoted."""
        for load in self.promoting.pop(key, ()):
            self._residency.unpin((key,), load.source, (load.source_slot,))
            self._end(load, arrived=False)

    def give_up_queued(self) -> None:
        """End all loads that wait for a promotion, because the gate tier will not have space."""
        for key in self._queue:
            self.lost(key)
        self._queue.clear()

    def arrived(
        self, keys: Sequence[PageKey], slots: Sequence[int], src: Tier, src_slots: Sequence[int]
    ) -> None:
        """End the loads of pages that a transfer has copied into these HBM slots, and unpin the sources."""
        readable: Iterable[bool]
        if self.owned:
            readable = self._residency.commit(keys, Tier.HBM, slots, src, src_slots)
        else:
            self._residency.unpin(keys, src, src_slots)
            readable = repeat(True, len(keys))
        by_slot = self.by_slot
        for key, slot, there in zip(keys, slots, readable, strict=True):
            load = by_slot.get(slot)
            if there and load is not None and load.key == key and load.submitted:
                self._end(load, arrived=True)

    def failed(self, key: PageKey, slot: int) -> None:
        """End the load of a page whose transfer into this HBM slot has failed."""
        load = self.by_slot.get(slot)
        if load is not None and load.key == key and load.submitted:
            self._end(load, arrived=False)
        elif self.owned:
            self._residency.fail(key, Tier.HBM, slot)

    def late(self, key: PageKey, slot: int) -> None:
        """End the load into this HBM slot, because its transfer takes too long. The transfer keeps the slot."""
        load = self.by_slot.pop(slot)
        self._residency.abort(key, Tier.HBM)
        self.ended.append((load, False))

    def cancel(self, slot: int) -> Load:
        """Remove and return the load into this HBM slot, because it was aborted, abandoned or replaced."""
        load = self.by_slot.pop(slot)
        if not load.submitted:
            waiting = self.promoting[load.key]
            waiting.remove(load)
            if not waiting:
                del self.promoting[load.key]
            self._residency.unpin((load.key,), load.source, (load.source_slot,))
            if self.owned:
                self._residency.fail(load.key, Tier.HBM, slot)
        return load

    def give_back(self, wanted: int) -> None:
        """End up to ``wanted`` loads that no lease needs and whose slots are not being written yet, newest first.

        These loads wait for promotions that may never start. Their HBM slots become free at once.
        """
        if wanted <= 0 or not self.owned:
            return
        unheld = [x for key, loads in self.promoting.items() for x in loads if self._unheld(key)]
        self._end_unheld(unheld[-wanted:])

    def any_unheld(self) -> bool:
        """Return whether there is a submitted load that no lease needs. When it ends, its slot becomes available."""
        return any(load.submitted and self._unheld(load.key) for load in self.by_slot.values())

    def too_late(self, source: Tier, deadline: float, now: float, pages: int) -> bool:
        """Return whether ``pages`` more pages from ``source`` are expected to reach HBM only after the deadline."""
        if source == self.gate or not self.staged:
            edges = [(source, Tier.HBM)]
        else:
            edges = [(source, self.gate), (self.gate, Tier.HBM)]
        return deadline <= now or now + sum(self._transfers.seconds_for(e, pages) for e in edges) > deadline

    def abandon(self, slot: int) -> None:
        """Give up a load into an engine's slot. The slot is added to ``abandoned`` once nothing writes to it."""
        load = self.by_slot[slot]
        load.abandoned = True
        if not load.submitted:
            self.cancel(slot)
            self.abandoned.append(slot)

    def _unheld(self, key: PageKey) -> bool:
        """Return whether no lease pins the page's HBM copy, which is in flight.

        Always False if an engine owns HBM, because ``abandon`` handles each of its loads.
        """
        return self.owned and not self._residency.tables[Tier.HBM].copies[key].pins

    def _end_unheld(self, loads: Sequence[Load]) -> None:
        for load in list(loads):
            self._residency.abort(load.key, Tier.HBM)
            self.cancel(load.slot)

    def _await_promotion(self, load: Load) -> None:
        waiting = self.promoting.setdefault(load.key, [])
        if not waiting:
            self._queue.append(load.key)
        waiting.append(load)

    def _submit(self, load: Load) -> None:
        load.submitted = True
        parent = self._residency.lineage.parent(load.key)
        move = Move(load.key, load.source_slot, load.slot, 0, parent)
        self._transfers.add(load.source, Tier.HBM, move)

    def _end(self, load: Load, *, arrived: bool) -> None:
        del self.by_slot[load.slot]
        if load.abandoned:
            self.abandoned.append(load.slot)
        if self.owned and not arrived:
            self._residency.fail(load.key, Tier.HBM, load.slot)
        self.ended.append((load, arrived))


_Place = tuple["PageKey", Tier]


class _Brought(NamedTuple):
    """A promoted page that no lease has used yet.

    ``tier`` is the tier that the page was promoted to, and ``ways`` lists the edges that the page took, in order.
    """

    tier: Tier
    hint: Hint
    ways: tuple[tuple[Tier, Tier], ...]


class Promotions:
    """Promotes pages for hints. ``awaited`` returns whether a lease waits for a page from a given tier."""

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        loads: Loads,
        hints: HintTable,
        metrics: Counters,
        awaited: Callable[[Tier], bool],
    ) -> None:
        self._residency = residency
        self._tables = residency.tables
        self._transfers = transfers
        self._loads = loads
        self._hints = hints
        self._metrics = metrics
        self._awaited = awaited
        self._moving: dict[Tier, OrderedDict[PageKey, None]] = {tier: OrderedDict() for tier in self._tables}
        self._kept: dict[str, OrderedDict[_Place, None]] = {}
        """The pages, with their tiers, that are kept for each request, by request ID. Oldest first."""
        self._ending: deque[OrderedDict[_Place, None]] = deque()
        self._keepers: Counter[_Place] = Counter()
        self._brought: OrderedDict[PageKey, _Brought] = OrderedDict()
        self._most_brought = sum(table.num_slots or 0 for table in self._tables.values())

    def sources(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers from which pages are promoted to ``tier``, fastest first.

        The result is empty if pages cannot be promoted to ``tier``.
        """
        hierarchy = self._residency.hierarchy
        if tier not in hierarchy.tiers or tier in hierarchy.records:
            return ()
        return hierarchy.records if tier == hierarchy.memory_floor else (self._loads.gate,)

    def start(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint]) -> Promoted:
        """Start promoting pages to ``tier``, in order, until one cannot be promoted now.

        See ``TierStore.promote``.
        """
        sources = self.sources(tier)
        self._take_ended()
        in_force = self._hints.in_force(hint)
        started: list[PageKey] = []
        covered = 0
        if in_force and sources and not any(map(self._awaited, sources)):
            while covered < len(keys):
                src = self._residency.first_with(keys[covered], sources) or sources[0]
                run = self._bring_some(keys[covered:], src, tier, over)
                if run is None:
                    break
                self._note_brought(hint, run, src, tier)
                started += run
                there = max(1, len(run))
                self._keep(hint, keys[covered : covered + there], tier)
                covered += there
            while len(self._brought) > self._most_brought:
                self._brought.popitem(last=False)
        self._settle()
        in_flight = sum(map(len, self._moving.values()))
        return Promoted(tuple(started), covered, in_force, in_flight, len(self._moving[tier]))

    def end(self, limit: int) -> bool:
        """Stop keeping up to ``limit`` pages that were kept for ended hints. Return whether any remain."""
        self._take_ended()
        while self._ending and limit > 0:
            if self._ending[0]:
                self._let_go(self._ending[0].popitem()[0])
                limit -= 1
            else:
                self._ending.popleft()
        return bool(self._ending)

    def used(self, keys: Sequence[PageKey], source: Tier) -> None:
        """Count prefetched pages that a lease now covers. They were found in ``source``."""
        if not self._brought:
            return
        taken = [self._brought.pop(key, None) for key in keys]
        kinds = Counter((each.tier, each.ways) for each in taken if each is not None)
        for (tier, ways), pages in kinds.items():
            self._count("useful" if source <= tier else "late", pages)
            # Pages are read from disk while others are loaded into HBM, so a lease would have waited only for
            # the slower of the two.
            done = [way for way in ways if way[1] >= source]
            self._metrics.avoided(pages * max(map(self._transfers.page_seconds, done), default=0.0))

    def left(self, key: PageKey, tier: Tier) -> None:
        """Count a prefetched page whose copy in ``tier`` was dropped before any lease used it."""
        brought = self._brought.get(key)
        if brought is not None and brought.tier == tier:
            del self._brought[key]
            self._count("wasted" if self._hints.in_force(brought.hint) else "cancelled")

    # -- internals ----------------------------------------------------------------------------------------------

    def _count(self, result: str, pages: int = 1) -> None:
        self._metrics.prefetched(result, pages * self._transfers.page_nbytes)

    def _note_brought(self, hint: Hint, keys: Sequence[PageKey], src: Tier, tier: Tier) -> None:
        first = _Brought(tier, hint, ((src, tier),))
        for key in keys:
            before = self._brought.pop(key, None)
            if before is not None and before.tier == src:
                self._brought[key] = first._replace(ways=before.ways + first.ways)
            else:
                self._brought[key] = first

    def _find_room(self, tier: Tier, over: Sequence[Hint]) -> bool:
        """Return whether a slot is available without evicting a page that must be kept.

        If necessary, stop keeping pages that were kept for the hints in ``over``, those of the last hint first.
        """
        later = [hint.request_id for hint in over]
        rank = len(later) - 1
        while not self._has_room(tier):
            while rank >= 0 and not self._give_place(later[rank:], tier):
                rank -= 1
            if rank < 0:
                return False
        return True

    def _has_room(self, tier: Tier) -> bool:
        table = self._tables[tier]
        if table.free:
            return True
        victim = table.droppable.first()
        return victim is not None and table.copies[victim].rank < BAND

    def _give_place(self, later: Sequence[str], tier: Tier) -> bool:
        """Stop keeping one page in the tier for the requests in ``later``.

        It is the most recently kept page of the first request in ``later`` that can be given up.

        Returns:
            False if no page of this request can be given up.
        """
        kept = self._kept.get(later[0], OrderedDict())
        place = next((p for p in reversed(kept) if p[1] == tier and self._could_go(p, later)), None)
        if place is None:
            return False
        for request_id in later:
            if place in self._kept.get(request_id, ()):
                del self._kept[request_id][place]
                self._let_go(place)
        return True

    def _could_go(self, place: _Place, later: Sequence[str]) -> bool:
        copy = self._tables[place[1]].copies.get(place[0])
        if copy is None or not copy.ready or copy.pins or self._hints.retained(place[0]):
            return False
        keepers = self._keepers[place]
        return keepers == 1 or keepers == sum(place in self._kept.get(name, ()) for name in later)

    def _bring_some(
        self, keys: Sequence[PageKey], src: Tier, dst: Tier, over: Sequence[Hint]
    ) -> Sequence[PageKey] | None:
        """Start promoting the first of ``keys``, and the pages after it that can be promoted with it.

        Returns:
            The pages whose promotion was started. Empty if the first page is already in ``dst`` or in flight
                to it. None if the first page cannot be promoted.
        """
        if keys[0] in self._tables[dst].copies:
            return ()
        if not self._tables[src].ready(keys[0]) or not self._find_room(dst, over):
            return None
        straight = dst != Tier.HBM or src == self._loads.gate
        run = keys if straight and self._residency.exactness.lossless else keys[:1]
        places = self._residency.reserve(run, dst, 0, src)
        return self._bring(keys[: len(places)], src, dst, places)

    def _bring(
        self, keys: Sequence[PageKey], src: Tier, dst: Tier, places: Sequence[tuple[int, int]]
    ) -> Sequence[PageKey]:
        """Start copying these pages into reserved slots.

        ``places`` has the same form as in ``Loads.start``.
        """
        self._moving[dst].update(dict.fromkeys(keys))
        if dst == Tier.HBM:
            self._loads.start(None, 0, keys, src, places)
            return keys
        parent = self._residency.lineage.parent
        moves = [
            Move(key, source_slot, slot, 0, parent(key))
            for key, (slot, source_slot) in zip(keys, places, strict=True)
        ]
        self._transfers.add(src, dst, *moves)
        return keys

    def _keep(self, hint: Hint, keys: Sequence[PageKey], tier: Tier) -> None:
        """Keep promoted pages in the tier until the hint ends, because its request will use them.

        A page that is now kept in HBM is no longer kept in HOST.
        """
        kept = self._kept.setdefault(hint.request_id, OrderedDict())
        for key in keys:
            place, below = (key, tier), (key, Tier.HOST)
            if tier == Tier.HBM and below in kept:
                del kept[below]
                self._let_go(below)
            if place not in kept:
                kept[place] = None
                self._keepers[place] += 1
            self._residency.queues.keep(key, tier, hint.priority)

    def _take_ended(self) -> None:
        """Collect the pages that were kept for hints that have ended or were replaced. ``end`` processes them."""
        ended = self._hints.ended
        while ended:
            kept = self._kept.pop(ended.popleft(), None)
            if kept:
                self._ending.append(kept)

    def _let_go(self, place: _Place) -> None:
        self._keepers[place] -= 1
        if self._keepers[place]:
            return
        del self._keepers[place]
        self._residency.queues.end_keeping(*place)

    def _settle(self) -> None:
        """Remove finished and failed promotions from ``_moving``. Each call examines a limited number of promotions."""
        for tier, moving in self._moving.items():
            copies = self._tables[tier].copies
            for key in list(islice(moving, 2 * BATCH_PAGES)):
                copy = copies.get(key)
                if copy is None or copy.ready:
                    del moving[key]
                else:
                    moving.move_to_end(key)
