"""Write-back: decides which pages are copied to lower tiers, and when. Pure metadata.

Pages are copied down for four reasons: write-behind of newly put pages to HOST, timed spills to disk, making
space ahead of need, and explicit requests (``demote`` and ``flush``). Pages are copied down one tier at a
time. A page whose copy was requested explicitly is called a sink, and is tracked until it has arrived or failed.
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
    """The page counts of one flush or demote.

    Attributes:
        open: Number of pages without a final result.
        arrived: Number of pages that have arrived in the target tier.
        failed: Number of pages that could not be copied.
        moves: Number of copies of these pages, from one tier to the next, that have finished or failed.
        found: Number of pages that the target tier already had.
    """

    open: int = 0
    arrived: int = 0
    failed: int = 0
    moves: int = 0
    found: int = 0


@dataclass(slots=True)
class Sink:
    """A page to be copied down to ``target``, or to the lowest tier that may store it.

    If ``keep`` is False, its upper copies are dropped when it has arrived.
    """

    target: Tier
    keep: bool
    tickets: list[Ticket] = field(default_factory=list)
    even_if_saved: bool = False
    """Whether the page must get a copy in ``target`` itself, even if a lower tier has one."""


class _Step(Enum):
    DONE = "done"
    FAILED = "failed"
    PASSED = "passed"
    MOVING = "moving"
    BLOCKED = "blocked"


class Sinks:
    """The pages that are being copied down because a caller requested it.

    ``unwritten`` contains the HBM slots of pages that cannot be copied, because their bytes are not written yet.
    """

    def __init__(self, residency: Residency, space: Space, unwritten: dict[PageKey, int]) -> None:
        self.open: dict[PageKey, Sink] = {}
        self.coming: Counter[PageKey] = Counter()
        """Pages that are to be copied out of an engine's slots, with the number of slots for each.

        They may be added as sinks before their copy starts.
        """
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._records = residency.hierarchy.records
        self._space = space
        self._unwritten = unwritten
        self._queue: deque[PageKey] = deque()
        self._woken: deque[PageKey] = deque()
        """Pages whose copy to the next tier has finished. They are advanced before the pages in ``_queue``.

        Their order is kept, so that a disk that cannot store all pages of a sequence stores its beginning.
        """
        self._leaving: set[tuple[Tier, PageKey]] = set()

    def add(
        self,
        keys: Iterable[PageKey],
        target: Tier,
        ticket: Ticket,
        *,
        keep: bool,
        even_if_saved: bool = False,
    ) -> None:
        """Request that pages be copied down to ``target``. ``ticket`` counts these pages and their results.

        With ``even_if_saved``, the pages also get a copy in ``target`` if a lower tier has one already, unless they are
        being copied to a lower tier at the moment.
        """
        for key in keys:
            sink = self.open.get(key)
            if sink is None:
                sink = self.open[key] = Sink(target, keep)
                self._queue.append(key)
            elif target > sink.target or not keep:
                sink.target, sink.keep = max(target, sink.target), keep and sink.keep
                self._queue.append(key)
            sink.even_if_saved |= even_if_saved and sink.target == target
            sink.tickets.append(ticket)
            ticket.open += 1

    def advance(self, now: float) -> bool:
        """Start copying a bounded number of pages to their next tier.

        Returns:
            Whether there are further copies that can start now.
        """
        stepped = False
        for _ in range(min(len(self._woken) + len(self._queue), BATCH_PAGES)):
            key = (self._woken or self._queue).popleft()
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
        return stepped and bool(self._woken or self._queue)

    def wake(self, keys: Iterable[PageKey]) -> None:
        """Record that a copy of each of these pages has finished or failed, so that its next copy can start."""
        # These pages go before pages that wait for space, which might otherwise take their slots.
        for key in keys if self.open else ():
            sink = self.open.get(key)
            if sink is not None:
                self._woken.append(key)
                for ticket in sink.tickets:
                    ticket.moves += 1

    def to_disk(self, key: PageKey) -> bool:
        """Return whether a caller has requested that the page be written to disk."""
        sink = self.open.get(key)
        return sink is not None and sink.target in self._records

    def came(self, keys: Iterable[PageKey]) -> None:
        """Record that engine slots no longer wait to be copied: the copies have finished, or were not needed.

        ``keys`` names the page of each slot.
        """
        coming = self.coming
        for key in keys:
            if coming[key] > 1:
                coming[key] -= 1
            else:
                coming.pop(key)
        self.wake(keys)

    def settle(self, key: PageKey, *, failed: bool) -> None:
        """Stop tracking the page, because it has arrived or failed, and count that in its tickets."""
        sink = self.open.pop(key, None)
        if sink is None:
            return
        for ticket in sink.tickets:
            ticket.open -= 1
            ticket.failed += failed

    def unpinned(self, keys: Iterable[PageKey], tier: Tier) -> None:
        """Drop copies in ``tier`` that are no longer needed and that were only waiting to be unpinned."""
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
        if sink.even_if_saved and target < src and not self._tables[target].ready(key):
            above = [tier for tier in holders if tier < target]
            if not above:
                return _Step.FAILED
            src = above[-1]
        if target < sink.target and key in self.coming:
            return _Step.MOVING  # the page is no longer memory-only once it has been copied out of its slot
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
        if self._space.copy(key, src, dst, over_mirrors=not sink.keep):
            return _Step.MOVING
        if key in self._residency.orphans:
            # An unreachable page must not displace another page. A flush skips it; a demote counts a failure.
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
        """Return whether the page is in flight to a tier below HBM.

        If so, ``wake`` or ``settle`` will be called for it.
        """
        return key in self.coming or any(
            key in table.copies for tier, table in self._tables.items() if tier > Tier.HBM
        )

    def _leave(self, key: PageKey, target: Tier) -> None:
        for tier in self._tiers:
            if tier < target and self._tables[tier].ready(key):
                self._leaving.add((tier, key))
                self.unpinned((key,), tier)


_AHEAD = 16
"""In each memory tier, one of every ``_AHEAD`` slots is kept free or droppable ahead of need."""
_ASK_AGAIN_S = 0.2
"""Pause in seconds between attempts to copy a page to a tier that failed. New pages are tried at once."""


class WriteBack:
    """Plans all copies to lower tiers.

    ``space`` makes space in a tier. ``sinks`` contains the pages that are copied down because a caller asked for it.
    """

    def __init__(self, residency: Residency, transfers: Transfers, flush_s: float) -> None:
        self.unwritten: dict[PageKey, int] = {}
        """HBM slots of pages that were put, but whose bytes are not written yet, so they cannot be copied."""
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
        """The destination of timed spills: the fastest tier in which pages survive a restart, or None."""
        self._spill_from = None if self._spill_to is None else self._above(self._spill_to)

    # -- notifications ------------------------------------------------------------------------------------------

    def sealed(self, key: PageKey) -> None:
        """Queue a page for write-behind or a timed spill, now that its bytes in HBM have been written."""
        self.sinks.wake((key,))
        if self._residency.unsaved(key, Tier.HBM):
            if self._spill_from == Tier.HBM:
                self._unsaved[key] = None
            elif Tier.HOST in self._tables:
                self._fresh[key] = None

    def saved(self, keys: Iterable[PageKey], dst: Tier) -> None:
        """Record that copies of these pages to ``dst`` have arrived."""
        self.space.failing.discard(dst)
        self._await_spill(keys, dst)

    def permitted(self, key: PageKey) -> None:
        """Record that a page that was memory-only or unreachable may now be saved below memory."""
        for tier, table in self._tables.items():
            if table.ready(key) and tier == Tier.HBM:
                self.sealed(key)
            elif table.ready(key):
                self._await_spill((key,), tier)

    def not_saved(self, key: PageKey, src: Tier, dst: Tier) -> None:
        """Record that a copy from ``src`` to a lower tier failed.

        The page is still in ``src``. If timed spills save pages from ``src``, the next spill retries this page.
        """
        self.space.failing.add(dst)
        if src == self._spill_from and self._tables[src].ready(key):
            self._unsaved[key] = None
        self.sinks.settle(key, failed=True)

    def forgotten(self, key: PageKey) -> None:
        """Record that a caller evicted the page, so it need not be saved any more."""
        self.sinks.settle(key, failed=False)
        self._fresh.pop(key, None)
        self._unsaved.pop(key, None)

    def left(self, key: PageKey, tier: Tier) -> None:
        """Stop waiting to save a page from ``tier``, because its copy there was dropped.

        Otherwise keys would accumulate in the queues while a lower tier refuses writes.
        """
        if self._tables[tier].ready(key):
            return
        if tier == Tier.HBM:
            self._fresh.pop(key, None)
        if tier == self._spill_from:
            self._unsaved.pop(key, None)

    # -- planning -----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """Plan a bounded number of copies, for each of the four reasons in the module docstring.

        Returns:
            Whether there are further copies that can be planned now.
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
        """Whether newly put pages are waiting to be copied to HOST, and HOST has space for at least one of them."""
        host = self._tables.get(Tier.HOST)
        if host is None:
            return False
        return any(self._has_spare(host, key) for key in islice(self._fresh, BATCH_PAGES))

    @property
    def next_spill(self) -> float | None:
        """Monotonic time of the next timed spill, or None if there is nothing to spill."""
        return self._next_spill if self._unsaved else None

    # -- internals ----------------------------------------------------------------------------------------------

    def _await_spill(self, keys: Iterable[PageKey], tier: Tier) -> None:
        if tier == self._spill_from:
            unsaved = self._residency.unsaved
            self._unsaved.update((key, None) for key in keys if unsaved(key, tier))

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
        """From time to time, try to copy one page to each tier that failed.

        Otherwise, while no caller puts a page, an unsaved page could stay in the upper tier indefinitely: it
        cannot be dropped if later pages of its sequence are in the lower tier.
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
        """Return whether the page is memory-only and HOST has no space for it.

        It then waits without delaying other pages.
        """
        return key in self._residency.memory_only and not self._has_spare(host, key)

    def _has_spare(self, host: TierTable, key: PageKey) -> bool:
        """Return whether HOST can accept a copy of this page ahead of need.

        For such a copy, HOST must not drop another page's only copy below HBM, with two exceptions. A
        memory-only page may be dropped for a page that is to be written to disk, which would otherwise not be
        written in time. An unreachable page may always be dropped.
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
            # Only one batch is sent to a tier whose last write failed. If all pages were sent, all of them
            # would fail again and again.
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
