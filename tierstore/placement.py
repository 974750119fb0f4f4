"""Who moves down and who leaves: room for newcomers, write-behind, timed spills, demotions. Decides, copies nothing.

Pages go down one tier at a time. A readable page is dropped only when there is no tier below, when that tier refuses
or fails, or when its bytes are readable elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from tierstore.errors import CapacityError
from tierstore.traffic import BATCH_PAGES, Move
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.residency import Residency
    from tierstore.tier_table import TierTable
    from tierstore.traffic import Traffic
    from tierstore.types import PageKey

STALL_S = 2.0
"""An edge that carries pages and has not moved one for this long counts as failing until it moves again."""

_AHEAD = 16
"""One slot in this many is kept free or droppable ahead of need."""


@dataclass(slots=True, eq=False)
class Ticket:
    """Counts the pages of one flush or demote that are not settled yet, and those that failed."""

    open: int = 0
    failed: int = 0


@dataclass(slots=True)
class Sink:
    """A page on its way down to ``target``; ``keep``: copies above stay."""

    target: Tier
    keep: bool
    tickets: list[Ticket] = field(default_factory=list)


class _Step(Enum):
    DONE = "done"
    FAILED = "failed"
    MOVING = "moving"
    BLOCKED = "blocked"


class Placement:
    """Plans every copy downwards and every eviction that is not an explicit one."""

    def __init__(self, residency: Residency, traffic: Traffic, record_nbytes: int, flush_s: float) -> None:
        self.unwritten: dict[PageKey, int] = {}
        """Sealed pages whose bytes the engine has not finished writing, by HBM slot; no copy may start from them."""
        self.sinks: dict[PageKey, Sink] = {}
        self.failing: set[Tier] = set()
        """Tiers whose last write failed."""
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._traffic = traffic
        self._record_nbytes = record_nbytes
        self._flush_s = flush_s
        self._sink_queue: deque[PageKey] = deque()
        self._fresh: dict[PageKey, None] = {}
        self._unsaved: dict[PageKey, None] = {}
        self._next_spill = 0.0
        self._due = 0
        self._leaving: set[tuple[Tier, PageKey]] = set()
        above_nvme = [tier for tier in self._tiers if tier < Tier.NVME]
        self._spill_from = above_nvme[-1] if above_nvme and Tier.NVME in self._tables else None

    # -- room ---------------------------------------------------------------------------------------------------

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
            if not self._has_room(below) or not self._copy(key, tier, below):
                return

    def relieve(self, tier: Tier, wanted: int, now: float) -> None:
        """Where pages cannot be saved, drops as many of them, leaf first, as ``wanted`` pages need."""
        below = self.below(tier)
        if below is None or self.room(tier) >= wanted:
            return
        if not self.stuck(tier, below, now):
            self.relieve(below, wanted - self.room(tier), now)
            if not self.blocked(below):
                return
        while self.room(tier) < wanted and self._drop_one(tier):
            pass
        if self.room(tier) < wanted:
            self._drop_mirrored_leaf(tier, below)

    def blocked(self, tier: Tier) -> bool:
        """Whether the tier is full of pages that cannot leave, and nothing under way will change that."""
        return self.room(tier) == 0 and self._traffic.quiet(tier)

    def stuck(self, src: Tier, dst: Tier, now: float) -> bool:
        """Whether the edge down cannot be counted on: its last write failed, or it carries pages and stands still."""
        return dst in self.failing or self._traffic.stalled((src, dst), now, STALL_S)

    # -- what happened ------------------------------------------------------------------------------------------

    def sealed(self, key: PageKey) -> None:
        """A page became readable in HBM and its bytes are written."""
        self._wake_sink(key)
        if not self._residency.saved_below(key, Tier.HBM):
            if self._spill_from == Tier.HBM:
                self._unsaved[key] = None
            elif Tier.HOST in self._tables:
                self._fresh[key] = None

    def saved(self, key: PageKey, dst: Tier) -> None:
        """A copy downwards arrived in ``dst``."""
        self.failing.discard(dst)
        if dst == self._spill_from and not self._residency.saved_below(key, dst):
            self._unsaved[key] = None
        self._wake_sink(key)

    def not_saved(self, key: PageKey, src: Tier, dst: Tier) -> None:
        """A copy downwards failed: the source is intact and waits for the next timed spill."""
        self.failing.add(dst)
        if src == self._spill_from:
            self._unsaved[key] = None
        self._settle_sink(key, failed=True)

    def wake(self, key: PageKey) -> None:
        """A copy of the page ended, well or not: its way down may go on from another tier now."""
        self._wake_sink(key)

    def unpinned(self, key: PageKey, tier: Tier) -> None:
        """A copy lost a pin: lets go what only waited for that."""
        if (tier, key) not in self._leaving:
            return
        copy = self._tables[tier].copies.get(key)
        if copy is None or not self._residency.saved_below(key, tier):
            self._leaving.discard((tier, key))
        elif copy.ready and copy.pins == 0:
            self._leaving.discard((tier, key))
            self._evict(key, tier)

    def forgotten(self, key: PageKey) -> None:
        """The page was evicted by request: nothing is to be done for it any more."""
        self._settle_sink(key, failed=False)
        self._fresh.pop(key, None)
        self._unsaved.pop(key, None)

    # -- what to do next ----------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """Plans a bounded number of copies: sinks, write-behind, timed spills, room ahead of need.

        Whether there is more to plan at once.
        """
        more = self._advance_sinks(now)
        more |= self._write_behind(now)
        more |= self._spill(now)
        for tier, table in self._tables.items():
            if table.num_slots is not None and len(table.dirty):
                self.make_room(tier, max(1, table.num_slots // _AHEAD), now)
        return more

    def copy_from_engine(self, key: PageKey, slot: int, dst: Tier, parent: PageKey | None) -> bool:
        """Plans the copy of a page that no tier has out of an engine's slot; False if there is no room."""
        nbytes = self._nbytes(dst)
        try:
            dst_slot = self._residency.reserve(key, dst, nbytes)
        except CapacityError:
            return False
        self._traffic.add(Tier.HBM, dst, Move(key, slot, dst_slot, nbytes, parent))
        return True

    def sink(self, keys: Iterable[PageKey], target: Tier, ticket: Ticket, *, keep: bool) -> None:
        """Sends pages down to ``target``; the ticket counts those that are not there yet."""
        for key in keys:
            sink = self.sinks.get(key)
            if sink is None:
                sink = self.sinks[key] = Sink(target, keep)
                self._sink_queue.append(key)
            elif target > sink.target or not keep:
                sink.target, sink.keep = max(target, sink.target), keep and sink.keep
                self._sink_queue.append(key)
            sink.tickets.append(ticket)
            ticket.open += 1

    @property
    def writing_behind(self) -> bool:
        """Whether sealed pages wait for a copy to HOST that HOST has room for."""
        host = self._tables.get(Tier.HOST)
        return host is not None and bool(self._fresh) and self._has_spare(host)

    @property
    def next_spill(self) -> float | None:
        """When a timed spill is due; None while there is nothing to spill."""
        return self._next_spill if self._unsaved else None

    # -- inside -------------------------------------------------------------------------------------------------

    def _copy(self, key: PageKey, src: Tier, dst: Tier) -> bool:
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

    def _evict(self, key: PageKey, tier: Tier) -> None:
        self._residency.dropped.append(self._residency.evict(key, tier))

    def _drop_one(self, tier: Tier) -> bool:
        key = self._leaf(tier)
        if key is None:
            return False
        self._evict(key, tier)
        return True

    def _drop_mirrored_leaf(self, tier: Tier, lowest: Tier) -> None:
        """Drops a last page of a sequence from both tiers, so that an earlier one can be saved in its place."""
        if self.below(lowest) is not None or self._has_room(lowest):
            return
        copies, lineage = self._tables[tier].copies, self._residency.lineage
        key = self._tables[lowest].dirty.first_where(
            lambda k: k in copies and copies[k].ready and not copies[k].pins and not lineage.has_children(k)
        )
        if key is not None:
            self._evict(key, lowest)
            self._evict(key, tier)

    def _leaf(self, tier: Tier) -> PageKey | None:
        """The first unsaved page that may be dropped without cutting off others."""
        residency = self._residency
        return self._tables[tier].dirty.first_where(
            lambda k: residency.where(k) != tier or not residency.lineage.has_children(k)
        )

    def _write_behind(self, now: float) -> bool:
        host = self._tables.get(Tier.HOST)
        if host is None or not self._fresh:
            return False
        before = len(self._fresh)
        for key in list(islice(self._fresh, BATCH_PAGES)):
            if not self._tables[Tier.HBM].ready(key) or self._residency.saved_below(key, Tier.HBM):
                del self._fresh[key]
            elif key in self.unwritten:
                self._fresh[key] = self._fresh.pop(key)
            elif self._has_spare(host):
                del self._fresh[key]
                self._copy(key, Tier.HBM, Tier.HOST)
            else:
                self.make_room(Tier.HOST, min(len(self._fresh), BATCH_PAGES), now)
                return False
        return 0 < len(self._fresh) < before

    def _has_spare(self, host: TierTable) -> bool:
        """Whether HOST can take a copy made ahead of need: it never costs another page its last copy below HBM."""
        if host.free:
            return True
        victim = host.droppable.first()
        return victim is not None and self._residency.saved_below(victim, Tier.HOST)

    def _spill(self, now: float) -> bool:
        src = self._spill_from
        if src is None or not self._unsaved:
            return False
        if now >= self._next_spill:
            self._next_spill = now + self._flush_s
            self._due = len(self._unsaved)
        slots = self._tables[src].num_slots or 1
        allowed = max(1, slots // 2) - self._traffic.carrying(src, Tier.NVME)
        budget = min(BATCH_PAGES, allowed)
        while self._due > 0 and budget > 0 and self._unsaved:
            key = next(iter(self._unsaved))
            self._due -= 1
            if src == Tier.HBM and key in self.unwritten:
                self._unsaved[key] = self._unsaved.pop(key)
                continue
            del self._unsaved[key]
            if self._tables[src].ready(key) and not self._residency.saved_below(key, src):
                budget -= 1
                if not self._copy(key, src, Tier.NVME):
                    self._unsaved[key] = None
                    return False
        return self._due > 0 and budget == 0 and allowed > BATCH_PAGES and bool(self._unsaved)

    def _advance_sinks(self, now: float) -> bool:
        stepped = False
        for _ in range(min(len(self._sink_queue), BATCH_PAGES)):
            key = self._sink_queue.popleft()
            sink = self.sinks.get(key)
            if sink is None:
                continue
            step = self._sink_step(key, sink, now)
            stepped |= step is not _Step.BLOCKED
            if step is _Step.BLOCKED:
                self._sink_queue.append(key)
            elif step is not _Step.MOVING:
                self._settle_sink(key, failed=step is _Step.FAILED)
        return stepped and bool(self._sink_queue)

    def _sink_step(self, key: PageKey, sink: Sink, now: float) -> _Step:
        holders = [tier for tier in self._tiers if self._tables[tier].ready(key)]
        if not holders:
            return _Step.FAILED
        src = holders[-1]
        if src >= sink.target:
            if not sink.keep:
                self._leave(key, sink.target)
            return _Step.DONE
        dst = self.below(src)
        if dst is None:
            return _Step.FAILED
        if key in self._tables[dst].copies or (src == Tier.HBM and key in self.unwritten):
            return _Step.MOVING
        if self._copy(key, src, dst):
            return _Step.MOVING
        self.make_room(dst, 1, now)
        further = self.below(dst)
        if self.blocked(dst) or (further is not None and self.stuck(dst, further, now)):
            return _Step.FAILED
        return _Step.BLOCKED

    def _leave(self, key: PageKey, target: Tier) -> None:
        for tier in self._tiers:
            if tier < target and self._tables[tier].ready(key):
                self._leaving.add((tier, key))
                self.unpinned(key, tier)

    def _wake_sink(self, key: PageKey) -> None:
        # Before those that wait for room: the next of them might take the slot that this page has just reached.
        if key in self.sinks:
            self._sink_queue.appendleft(key)

    def _settle_sink(self, key: PageKey, *, failed: bool) -> None:
        sink = self.sinks.pop(key, None)
        if sink is None:
            return
        for ticket in sink.tickets:
            ticket.open -= 1
            ticket.failed += failed
