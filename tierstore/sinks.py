"""Pages sent down to a tier, by ``demote`` and ``flush``: one tier at a time, until each has arrived or failed."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tierstore.directory.transfers import BATCH_PAGES
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.directory.eviction import Space
    from tierstore.directory.residency import Residency
    from tierstore.types import PageKey


@dataclass(slots=True, eq=False)
class Ticket:
    """Counts the pages of one flush or demote that are not settled yet, those that arrived and those that failed.

    ``moves``: how often a copy of any of them has ended. ``found``: pages that were there already.
    """

    open: int = 0
    arrived: int = 0
    failed: int = 0
    moves: int = 0
    found: int = 0


@dataclass(slots=True)
class Sink:
    """A page on its way down to ``target``, or as far as it may go; ``keep``: copies above stay."""

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
    """The pages on their way down. ``unwritten``: pages, by HBM slot, from which no copy may start yet."""

    def __init__(self, residency: Residency, space: Space, unwritten: dict[PageKey, int]) -> None:
        self.open: dict[PageKey, Sink] = {}
        self.coming: Counter[PageKey] = Counter()
        """Pages on their way out of an engine's slots, out of how many each: they may be sent down before they come."""
        self._residency = residency
        self._tables = residency.tables
        self._tiers = list(residency.tables)
        self._space = space
        self._unwritten = unwritten
        self._queue: deque[PageKey] = deque()
        self._leaving: set[tuple[Tier, PageKey]] = set()

    def add(self, keys: Iterable[PageKey], target: Tier, ticket: Ticket, *, keep: bool) -> None:
        """Sends pages down to ``target``; the ticket counts those that are not there yet."""
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
        """Takes a bounded number of pages one step further; whether more could go on at once."""
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
        """A copy of the page ended, well or not: its way down may go on from another tier now."""
        # Before those that wait for room: the next of them might take the slot that this page has just reached.
        sink = self.open.get(key)
        if sink is not None:
            self._queue.appendleft(key)
            for ticket in sink.tickets:
                ticket.moves += 1

    def to_disk(self, key: PageKey) -> bool:
        """Whether somebody asked for the page to be written."""
        sink = self.open.get(key)
        return sink is not None and sink.target == Tier.NVME

    def came(self, key: PageKey) -> None:
        """The page comes out of one slot less: it is in a tier, on its way there, or will not be."""
        self.coming[key] -= 1
        if not self.coming[key]:
            del self.coming[key]
        self.wake(key)

    def settle(self, key: PageKey, *, failed: bool) -> None:
        """Nothing more is to be done for the page."""
        sink = self.open.pop(key, None)
        if sink is None:
            return
        for ticket in sink.tickets:
            ticket.open -= 1
            ticket.failed += failed

    def unpinned(self, key: PageKey, tier: Tier) -> None:
        """A copy lost a pin: lets go what only waited for that."""
        if (tier, key) not in self._leaving:
            return
        copy = self._tables[tier].copies.get(key)
        if copy is None or not self._residency.saved_below(key, tier):
            self._leaving.discard((tier, key))
        elif copy.ready and copy.pins == 0:
            self._leaving.discard((tier, key))
            self._space.drop(key, tier)

    def all_unpinned(self, keys: Iterable[PageKey], tier: Tier) -> None:
        """As ``unpinned`` for each."""
        for key in keys if self._leaving else ():
            self.unpinned(key, tier)

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
        """Whether the page will be told of by ``wake`` or ``settle``, though no tier has it yet."""
        return key in self.coming or any(
            key in table.copies for tier, table in self._tables.items() if tier > Tier.HBM
        )

    def _leave(self, key: PageKey, target: Tier) -> None:
        for tier in self._tiers:
            if tier < target and self._tables[tier].ready(key):
                self._leaving.add((tier, key))
                self.unpinned(key, tier)
