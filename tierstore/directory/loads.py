"""Pages on their way up: loads into HBM for leases, and promotions ahead of need for hints. Metadata only.

A load comes straight from the tier below HBM, or, where that is memory, is brought there from a tier of records first:
from whichever has it, past those between. It owns an HBM slot from the
moment it starts and pins its source, so its page cannot leave before it arrives. Promotions for a load take HOST slots
as they come free: a lease of any size streams through a HOST tier of any size.

A promotion ahead of need starts at once or not at all: nothing is queued that a cancelled hint would have to be taken
out of. It takes free slots, and slots of saved pages that nobody announced to come back for. A page it brings is kept
before others in its tier, never pinned, until its hint ends.
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
    """A page being loaded into an HBM slot. ``submitted``: a transfer writes the slot and holds the source pin."""

    key: PageKey
    slot: int
    source: Tier
    source_slot: int
    submitted: bool = False
    abandoned: bool = False
    waiters: list[tuple[LeaseRecord, int]] = field(default_factory=list)


class Loads:
    """All loads in progress, by HBM slot. Finished ones wait in ``ended`` for the directory."""

    def __init__(self, residency: Residency, transfers: Transfers, *, owned: bool) -> None:
        self.by_slot: dict[int, Load] = {}
        self.ended: list[tuple[Load, bool]] = []
        self.abandoned: list[int] = []
        """An engine's slots whose lease was released before they were loaded, once nothing writes them."""
        self._residency = residency
        self._transfers = transfers
        self.owned = owned
        """Whether HBM has a residency table; an engine's slots have none."""
        hierarchy = residency.hierarchy
        self._records = hierarchy.records
        self.gate = hierarchy.below(Tier.HBM) or Tier.HBM
        """The tier below HBM."""
        self.staged = self.gate == hierarchy.memory_floor
        """Whether pages come from records to HBM by way of the gate, and not straight."""
        self.promoting: dict[PageKey, list[Load]] = {}
        """Those that wait for their page to come up to the gate; all others are submitted."""
        self._queue: deque[PageKey] = deque()

    @property
    def queued(self) -> int:
        """Number of promotions that wait for a slot of the gate."""
        return len(self._queue)

    def start(
        self,
        lease: LeaseRecord | None,
        index: int,
        keys: Sequence[PageKey],
        source: Tier,
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Begin to bring pages of a lease from ``index`` on, or of none, from their copies in ``source`` into HBM.

        ``places``: for each page the slot reserved for it, which no other load fills, and that of its source, pinned.
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
        """Start a bounded number of queued promotions for which the gate has space now.

        A promotion that nobody waits for ends if it would cost another page its slot: it belongs to no request any
        more, and its source may be stalled.
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
        """Continue the loads of a page that became readable in the gate."""
        for load in self.promoting.pop(key, ()):
            [source_slot] = self._residency.pin((key,), self.gate)
            self._residency.unpin((key,), load.source, (load.source_slot,))
            load.source, load.source_slot = self.gate, source_slot
            self._submit(load)

    def lost(self, key: PageKey) -> None:
        """End the loads of a page that cannot be promoted."""
        for load in self.promoting.pop(key, ()):
            self._residency.unpin((key,), load.source, (load.source_slot,))
            self._end(load, arrived=False)

    def give_up_queued(self) -> None:
        """End loads that wait for a promotion, because the gate will get no space."""
        for key in self._queue:
            self.lost(key)
        self._queue.clear()

    def arrived(
        self, keys: Sequence[PageKey], slots: Sequence[int], src: Tier, src_slots: Sequence[int]
    ) -> None:
        """Note that a transfer has filled the slot."""
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
        """Note that a transfer has ended without filling the slot."""
        load = self.by_slot.get(slot)
        if load is not None and load.key == key and load.submitted:
            self._end(load, arrived=False)
        elif self.owned:
            self._residency.fail(key, Tier.HBM, slot)

    def late(self, key: PageKey, slot: int) -> None:
        """End the load without a transfer that takes too long. The slot stays the transfer's."""
        load = self.by_slot.pop(slot)
        self._residency.abort(key, Tier.HBM)
        self.ended.append((load, False))

    def cancel(self, slot: int) -> Load:
        """Stop waiting for a load whose HBM copy in flight was aborted or replaced."""
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
        """End up to ``wanted`` loads that nobody holds and nothing has begun to write, the newest first.

        They wait for a promotion, which may never come. Their HBM slots are free at once.
        """
        if wanted <= 0 or not self.owned:
            return
        unheld = [x for key, loads in self.promoting.items() for x in loads if self._unheld(key)]
        self._end_unheld(unheld[-wanted:])

    def any_unheld(self) -> bool:
        """Return whether a load is in flight whose page no lease holds: its slot is available when it has ended."""
        return any(load.submitted and self._unheld(load.key) for load in self.by_slot.values())

    def too_late(self, source: Tier, deadline: float, now: float, pages: int) -> bool:
        """Return whether a page from ``source`` is expected in HBM only after the deadline."""
        if source == self.gate or not self.staged:
            edges = [(source, Tier.HBM)]
        else:
            edges = [(source, self.gate), (self.gate, Tier.HBM)]
        return deadline <= now or now + sum(self._transfers.seconds_for(e, pages) for e in edges) > deadline

    def abandon(self, slot: int) -> None:
        """Stop waiting for a load into an engine's slot, which is reported once nothing writes it."""
        load = self.by_slot[slot]
        load.abandoned = True
        if not load.submitted:
            self.cancel(slot)
            self.abandoned.append(slot)

    def _unheld(self, key: PageKey) -> bool:
        """Return whether no lease holds the page's HBM copy in flight. An engine's loads are abandoned one by one."""
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
    """A page that was brought to ``tier`` and that no lease has taken yet. ``ways``: the edges it took, last one
    last.
    """

    tier: Tier
    hint: Hint
    ways: tuple[tuple[Tier, Tier], ...]


class Promotions:
    """All promotions of a store. ``awaited``: whether a lease waits for a page from a tier."""

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
        """By request what is kept for it, in the order in which it came."""
        self._ending: deque[OrderedDict[_Place, None]] = deque()
        self._keepers: Counter[_Place] = Counter()
        self._brought: OrderedDict[PageKey, _Brought] = OrderedDict()
        self._most_brought = sum(table.num_slots or 0 for table in self._tables.values())

    def sources(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers from which pages come to ``tier``, fastest first; empty if it cannot be promoted to."""
        hierarchy = self._residency.hierarchy
        if tier not in hierarchy.tiers or tier in hierarchy.records:
            return ()
        return hierarchy.records if tier == hierarchy.memory_floor else (self._loads.gate,)

    def start(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint]) -> Promoted:
        """Start to bring pages to ``tier``, in order, until one is not in the next lower tier or finds no space.

        ``over``: hints whose pages may be displaced by these, the last named first.
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
        """Release what was kept for hints that ended, up to ``limit`` pages. Returns whether some are left."""
        self._take_ended()
        while self._ending and limit > 0:
            if self._ending[0]:
                self._let_go(self._ending[0].popitem()[0])
                limit -= 1
            else:
                self._ending.popleft()
        return bool(self._ending)

    def used(self, keys: Sequence[PageKey], source: Tier) -> None:
        """Note that a lease took in pages that were readable in ``source``."""
        if not self._brought:
            return
        taken = [self._brought.pop(key, None) for key in keys]
        kinds = Counter((each.tier, each.ways) for each in taken if each is not None)
        for (tier, ways), pages in kinds.items():
            self._count("useful" if source <= tier else "late", pages)
            # Reads and loads go side by side, page after page: the slower of the two is what a lease would have waited.
            done = [way for way in ways if way[1] >= source]
            self._metrics.avoided(pages * max(map(self._transfers.page_seconds, done), default=0.0))

    def left(self, key: PageKey, tier: Tier) -> None:
        """Note that a copy was dropped."""
        brought = self._brought.get(key)
        if brought is not None and brought.tier == tier:
            del self._brought[key]
            self._count("wasted" if self._hints.in_force(brought.hint) else "cancelled")

    # -- inside -------------------------------------------------------------------------------------------------

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
        """Return whether a slot is available that costs no page which somebody announced to use."""
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
        """Stop keeping the page that came last for the first of these. False if there is none."""
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
        """Brings the first of ``keys``, and those after it that are as easily had: these. () if it is in ``dst``
        already, None if it cannot be brought."""
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
        """Start the copies of these pages into slots reserved for them; ``places`` as for ``Loads.start``."""
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
        """Free the host memory that a page came through, once the page is in flight to HBM."""
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
        """Keep nothing for the older hint of a request that has a newer one."""
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
        """Forget what has arrived or will not: examines a bounded number, each in turn."""
        for tier, moving in self._moving.items():
            copies = self._tables[tier].copies
            for key in list(islice(moving, 2 * BATCH_PAGES)):
                copy = copies.get(key)
                if copy is None or copy.ready:
                    del moving[key]
                else:
                    moving.move_to_end(key)
