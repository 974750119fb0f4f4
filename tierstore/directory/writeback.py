"""Which pages are copied down: write-behind of sealed pages, timed spills, space ahead of need, ``demote``, ``flush``.

Decides, copies nothing. Pages go down one tier at a time. Pages sent down by request are sinks: each is followed until
it has arrived or failed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from tierstore.directory.eviction import RELAYED_PAGES, Space
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.directory.residency import Residency, TierTable
    from tierstore.directory.transfers import Transfers
    from tierstore.types import PageKey


@dataclass(slots=True, eq=False)
class Ticket:
    """Counts the pages of one flush or demote: not settled yet, arrived, and failed.

    ``moves``: how often a copy of any of them has ended. ``found``: pages that were there already.
    """

    open: int = 0
    arrived: int = 0
    failed: int = 0
    moves: int = 0
    found: int = 0


@dataclass(slots=True)
class Sink:
    """A page on its way down to ``target``, or as far as it may go. ``keep``: upper copies stay."""

    target: Tier
    keep: bool
    tickets: list[Ticket] = field(default_factory=list)


class _Step(Enum):
    DONE = "done"
    FAILED = "failed"
    PASSED = "passed"
    MOVING = "moving"
    BLOCKED = "blocked"


class Sinks:
    """The pages on their way down. ``unwritten``: pages from which no copy may start yet, by HBM slot."""

    def __init__(self, residency: Residency, space: Space, unwritten: dict[PageKey, int]) -> None:
        self.open: dict[PageKey, Sink] = {}
        self.coming: Counter[PageKey] = Counter()
        """Pages on their way out of an engine's slots, out of how many each: they may be sent down before they come."""
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._records = residency.hierarchy.records
        self._space = space
        self._unwritten = unwritten
        self._queue: deque[PageKey] = deque()
        self._leaving: set[tuple[Tier, PageKey]] = set()

    def add(self, keys: Iterable[PageKey], target: Tier, ticket: Ticket, *, keep: bool) -> None:
        """Send pages down to ``target``. The ticket counts those that are not there yet."""
        for key in keys:
            sink = self.open.get(key)
            if sink is None:
                sink = self.open[key] = Sink(target, keep)
                self._queue.append(key)
            elif target > sink.target or not keep:
                sink.target, sink.keep = max(target, sink.target), keep and sink.keep
                self._queue.append(key)
            sink.tickets.append(ticket)
            ticket.open += 1

    def advance(self, now: float) -> bool:
        """Take a bounded number of pages one step further. Returns whether more could continue at once."""
        stepped = False
        for _ in range(min(len(self._queue), BATCH_PAGES)):
            key = self._queue.popleft()
            sink = self.open.get(key)
            if sink is None:
                continue
            step = self._step(key, sink, now)
            stepped |= step is not _Step.BLOCKED
            if step is _Step.BLOCKED:
                self._queue.append(key)
            elif step is not _Step.MOVING:
                for ticket in sink.tickets:
                    ticket.arrived += step is _Step.DONE
                self.settle(key, failed=step is _Step.FAILED)
        return stepped and bool(self._queue)

    def wake(self, key: PageKey) -> None:
        """Note that a copy of the page ended, successfully or not, so that its way down may continue."""
        # Before those that wait for room: the next of them might take the slot that this page has just reached.
        sink = self.open.get(key)
        if sink is not None:
            self._queue.appendleft(key)
            for ticket in sink.tickets:
                ticket.moves += 1

    def to_disk(self, key: PageKey) -> bool:
        """Return whether a caller asked for the page to be written."""
        sink = self.open.get(key)
        return sink is not None and sink.target in self._records

    def came(self, key: PageKey) -> None:
        """Note that the page leaves one slot less: it is in a tier, in flight to it, or given up."""
        self.coming[key] -= 1
        if not self.coming[key]:
            del self.coming[key]
        self.wake(key)

    def settle(self, key: PageKey, *, failed: bool) -> None:
        """Note that nothing more is to be done for the page."""
        sink = self.open.pop(key, None)
        if sink is None:
            return
        for ticket in sink.tickets:
            ticket.open -= 1
            ticket.failed += failed

    def unpinned(self, keys: Iterable[PageKey], tier: Tier) -> None:
        """Drop the upper copies of these pages that only waited to be unpinned."""
        for key in keys if self._leaving else ():
            if (tier, key) not in self._leaving:
                continue
            copy = self._tables[tier].copies.get(key)
            if copy is None or not self._residency.saved_below(key, tier):
                self._leaving.discard((tier, key))
            elif copy.ready and copy.pins == 0:
                self._leaving.discard((tier, key))
                self._space.drop(key, tier)

    def _step(self, key: PageKey, sink: Sink, now: float) -> _Step:
        holders = [tier for tier in self._tiers if self._tables[tier].ready(key)]
        if not holders:
            return _Step.MOVING if self._arriving_below(key) else _Step.FAILED
        src = holders[-1]
        target = min(sink.target, self._residency.memory_only.lowest_for(key))
        if target < sink.target and key in self.coming:
            return _Step.MOVING  # what keeps the page in memory ends when it has come
        if src >= target:
            if not sink.keep:
                self._leave(key, target)
            return _Step.DONE
        dst = self._space.below(src)
        if dst is None:
            return _Step.FAILED
        if key in self._tables[dst].copies or (src == Tier.HBM and key in self._unwritten):
            return _Step.MOVING
        if self._space.could_start(src, dst) <= 0:
            return _Step.BLOCKED
        if self._space.copy(key, src, dst):
            return _Step.MOVING
        if key in self._residency.orphans:
            # It costs no page its place. A flush passes it over; who asked for this page is told.
            return _Step.PASSED if sink.keep else _Step.FAILED
        self._space.make_room(dst, 1, now)
        to_be_stored = key not in self._residency.memory_only
        if to_be_stored and self._space.give_way(dst, now) and self._space.copy(key, src, dst):
            return _Step.MOVING
        further = self._space.below(dst)
        if self._space.blocked(dst, now) or (further is not None and self._space.stuck(dst, further, now)):
            return _Step.FAILED
        return _Step.BLOCKED

    def _arriving_below(self, key: PageKey) -> bool:
        """Return whether ``wake`` or ``settle`` will report the page, although no tier has it yet."""
        return key in self.coming or any(
            key in table.copies for tier, table in self._tables.items() if tier > Tier.HBM
        )

    def _leave(self, key: PageKey, target: Tier) -> None:
        for tier in self._tiers:
            if tier < target and self._tables[tier].ready(key):
                self._leaving.add((tier, key))
                self.unpinned((key,), tier)


_AHEAD = 16
"""One slot in this many is kept free or droppable ahead of need."""
_ASK_AGAIN_S = 0.2
"""How long a tier, after a copy to it failed, is left alone unless a page is sealed or sent there."""


class WriteBack:
    """Plans every copy to a lower tier. ``space`` makes room, ``sinks`` are the pages sent down by request."""

    def __init__(self, residency: Residency, transfers: Transfers, flush_s: float) -> None:
        self.unwritten: dict[PageKey, int] = {}
        """Sealed pages whose bytes the engine has not finished writing, by HBM slot; no copy may start from them."""
        self.space = Space(residency, transfers)
        self.sinks = Sinks(residency, self.space, self.unwritten)
        self._residency = residency
        self._tables = residency.tables
        self._transfers = transfers
        self._flush_s = flush_s
        self._fresh: dict[PageKey, None] = {}
        self._unsaved: dict[PageKey, None] = {}
        self._next_spill = 0.0
        self._next_try = 0.0
        self._due = 0
        self._above = residency.hierarchy.above
        self._spill_to = residency.hierarchy.first_durable
        """Where timed spills go: pages are to survive a restart soon."""
        self._spill_from = None if self._spill_to is None else self._above(self._spill_to)

    # -- what happened ------------------------------------------------------------------------------------------

    def sealed(self, key: PageKey) -> None:
        """Note that a page became readable in HBM and its bytes are written."""
        self.sinks.wake(key)
        if self._residency.unsaved(key, Tier.HBM):
            if self._spill_from == Tier.HBM:
                self._unsaved[key] = None
            elif Tier.HOST in self._tables:
                self._fresh[key] = None

    def saved(self, key: PageKey, dst: Tier) -> None:
        """Note that a copy to ``dst`` arrived."""
        self.space.failing.discard(dst)
        self._await_spill(key, dst)
        self.sinks.wake(key)

    def permitted(self, key: PageKey) -> None:
        """Note that a page that was memory-only or unreachable may be saved below memory from now on."""
        for tier, table in self._tables.items():
            if table.ready(key) and tier == Tier.HBM:
                self.sealed(key)
            elif table.ready(key):
                self._await_spill(key, tier)

    def not_saved(self, key: PageKey, src: Tier, dst: Tier) -> None:
        """Note that a copy to a lower tier failed: the source is intact and waits for the next timed spill."""
        self.space.failing.add(dst)
        if src == self._spill_from and self._tables[src].ready(key):
            self._unsaved[key] = None
        self.sinks.settle(key, failed=True)

    def forgotten(self, key: PageKey) -> None:
        """Note that the page was evicted by request: nothing more is to be done for it."""
        self.sinks.settle(key, failed=False)
        self._fresh.pop(key, None)
        self._unsaved.pop(key, None)

    def left(self, key: PageKey, tier: Tier) -> None:
        """Stop waiting to save a page whose copy was dropped; otherwise a tier that refuses would accumulate keys."""
        if self._tables[tier].ready(key):
            return
        if tier == Tier.HBM:
            self._fresh.pop(key, None)
        if tier == self._spill_from:
            self._unsaved.pop(key, None)

    # -- what to do next ----------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """Plan a bounded number of copies: sinks, write-behind, timed spills, space ahead of need.

        Returns whether there is more to plan at once.
        """
        more = self.sinks.advance(now)
        more |= self._write_behind(now)
        more |= self._spill(now)
        self._ask_again(now)
        for tier, table in self._tables.items():
            if len(table.dirty):
                ahead = RELAYED_PAGES if table.num_slots is None else max(1, table.num_slots // _AHEAD)
                self.space.make_room(tier, ahead, now)
        return more

    @property
    def writing_behind(self) -> bool:
        """Whether sealed pages wait for a copy to HOST, and HOST has space for it."""
        host = self._tables.get(Tier.HOST)
        if host is None:
            return False
        return any(self._has_spare(host, key) for key in islice(self._fresh, BATCH_PAGES))

    @property
    def next_spill(self) -> float | None:
        """When a timed spill is due; None if there is nothing to spill."""
        return self._next_spill if self._unsaved else None

    # -- inside -------------------------------------------------------------------------------------------------

    def _await_spill(self, key: PageKey, tier: Tier) -> None:
        if tier == self._spill_from and self._residency.unsaved(key, tier):
            self._unsaved[key] = None

    def _write_behind(self, now: float) -> bool:
        host = self._tables.get(Tier.HOST)
        if host is None or not self._fresh:
            return False
        before = len(self._fresh)
        for key in list(islice(self._fresh, BATCH_PAGES)):
            if not (self._tables[Tier.HBM].ready(key) and self._residency.unsaved(key, Tier.HBM)):
                del self._fresh[key]
            elif key in self.unwritten or self._waits_aside(host, key):
                self._fresh[key] = self._fresh.pop(key)
            elif self._has_spare(host, key):
                del self._fresh[key]
                self.space.copy(key, Tier.HBM, Tier.HOST)
            else:
                self.space.make_room(Tier.HOST, min(len(self._fresh), BATCH_PAGES), now)
                self.space.give_way(Tier.HOST, now)
                return False
        return 0 < len(self._fresh) < before

    def _ask_again(self, now: float) -> None:
        """Send a page now and then to a tier that failed.

        Otherwise an unsaved page with later pages below it could neither be saved nor dropped until somebody puts a
        page.
        """
        if not self.space.failing or now < self._next_try:
            return
        for dst in self.space.failing:
            src = self._above(dst)
            if src is None or src == self._spill_from:
                continue
            self._next_try = now + _ASK_AGAIN_S
            key = self._tables[src].dirty.first()
            if key is not None and self.space.could_start(src, dst) > 0:
                self.space.copy(key, src, dst)

    def _waits_aside(self, host: TierTable, key: PageKey) -> bool:
        """Return whether a page waits without delaying others: a memory-only page for which HOST has no space."""
        return key in self._residency.memory_only and not self._has_spare(host, key)

    def _has_spare(self, host: TierTable, key: PageKey) -> bool:
        """Return whether HOST can take a copy made ahead of need, without dropping another page's last copy below HBM.

        Memory-only pages give way to one that is to be stored, which would otherwise not be written in time.
        Unreachable pages give way to all.
        """
        if host.free:
            return True
        victim = host.droppable.first()
        if victim is None:
            return False
        memory_only = self._residency.memory_only
        gives_way = self._spill_from == Tier.HOST and victim in memory_only and key not in memory_only
        gives_way |= victim in self._residency.orphans
        return gives_way or self._residency.saved_below(victim, Tier.HOST)

    def _spill(self, now: float) -> bool:
        src, dst = self._spill_from, self._spill_to
        if src is None or dst is None or not self._unsaved:
            return False
        if now >= self._next_spill:
            self._next_spill = now + self._flush_s
            # A tier that fails is asked a little at a time: all would only come back, again and again.
            self._due = BATCH_PAGES if dst in self.space.failing else len(self._unsaved)
        slots = self._tables[src].num_slots or 1
        allowed = max(1, slots // 2) - self._transfers.carrying(src, dst)
        budget = min(BATCH_PAGES, allowed)
        while self._due > 0 and budget > 0 and self._unsaved:
            key = next(iter(self._unsaved))
            self._due -= 1
            if src == Tier.HBM and key in self.unwritten:
                self._unsaved[key] = self._unsaved.pop(key)
                continue
            del self._unsaved[key]
            if self._tables[src].ready(key) and self._residency.unsaved(key, src):
                budget -= 1
                if not self.space.copy(key, src, dst):
                    self._unsaved[key] = None
                    return False
        return self._due > 0 and budget == 0 and allowed > BATCH_PAGES and bool(self._unsaved)
