"""Which pages to bring up, in which order, and when each would be there. Pure: no clock, no thread, no store.

The model of time: an edge carries one page at a time, at the rate measured. A page below host memory is first read into
it and then loaded; a place in host memory is taken from the start of its read to the end of its load, and there are
only so many. The earliest deadline goes first on every edge; a later one takes the time that those before it
leave. A request that starts at its deadline is done with its prompt when its pages are there and the rest is
computed; computing goes along with loads from host memory, which come layer by layer, and begins after reads from
disk, which come page by page. Of all numbers of pages to load the planner takes the one that is done first.

Earliest deadline first is Jackson's rule (1955): no other order makes the latest request less late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from prefetch.types import Outcome, Plan, Promotion, Retained
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefetch.types import Machine, Want
    from tierstore.types import PageKey


class Timeline:
    """The free time of one edge from ``now`` on. ``page_s`` is seconds per page, 0 if unknown."""

    def __init__(self, now: float, page_s: float) -> None:
        self.page_s = page_s
        self._free: list[tuple[float, float]] = [(now, inf)]

    def cursor(self) -> Cursor:
        """Return a cursor that tries times, each after the last. It changes nothing and is void after ``take``."""
        return Cursor(self._free, self.page_s)

    def take(self, starts: list[float]) -> None:
        """Mark ``page_s`` seconds from each of ``starts`` as taken; cost O(free intervals + starts).

        ``starts`` must come from one cursor, in ascending order.
        """
        free: list[tuple[float, float]] = []
        left = iter(self._free)
        start, end = next(left)
        for taken in starts:
            while end < taken + self.page_s:
                free.append((start, end))
                start, end = next(left)
            if start < taken:
                free.append((start, taken))
            start = taken + self.page_s
        free.append((start, end))
        free.extend(left)
        self._free = [piece for piece in free if piece[0] < piece[1]]


class Cursor:
    """Walks forward over free time."""

    def __init__(self, free: list[tuple[float, float]], page_s: float) -> None:
        self._free = free
        self._page_s = page_s
        self._piece = 0
        self._at = 0.0

    def place(self, available: float) -> float:
        """Return the earliest start of a page that is available from ``available`` on, after all placed before."""
        self._at = max(self._at, available)
        while True:
            start, end = self._free[self._piece]
            begin = max(start, self._at)
            if begin + self._page_s <= end:
                self._at = begin + self._page_s
                return begin
            self._piece += 1


PIECE_PAGES = 32
"""Most pages of one promotion: what the store starts in one hold of its lock."""


def plan(
    wants: Sequence[Want],
    machine: Machine,
    now: float,
    retained: Sequence[Retained] = (),
    most_pages: int = 1 << 30,
) -> Plan:
    """Promotions for all wants; those that come after ``most_pages`` have been planned get none. Changes nothing.

    Pages of a want with an earlier deadline take their room first, those that are in HBM already included: what is
    needed sooner is never displaced. O(pages log pages).
    """
    planning = _Planning(machine, now)
    outcomes = {want.request_id: Outcome(0, now, inf) for want in wants}
    items: list[Want | Retained] = [*wants, *retained]
    for item in sorted(items, key=_order):
        if isinstance(item, Retained):
            planning.stay(item)
        elif planning.planned < most_pages:
            outcomes[item.request_id] = planning.serve(item)
    return Plan(tuple(sorted(planning.promotions, key=lambda p: p.starts)), outcomes)


def _order(item: Want | Retained) -> tuple[float, int]:
    # What is retained until then goes before what is wanted by then.
    return (item.until, -(1 << 62)) if isinstance(item, Retained) else (item.deadline, -item.priority)


@dataclass(slots=True)
class _Step:
    """One page along one edge."""

    index: int
    src: Tier
    dst: Tier
    starts: float
    ends: float


@dataclass(slots=True)
class _Try:
    """A trial schedule that loads as much of one want's prefix as there is space for.

    For each page, ``there`` is the time at which it is in HBM and ``read`` the time at which it is in host
    memory.
    """

    there: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    """Pages that take room in HBM that no earlier want has taken for them."""


class _Planning:
    """One run of the planner: the time and the room that are left."""

    def __init__(self, machine: Machine, now: float) -> None:
        self.promotions: list[Promotion] = []
        self.planned = 0
        self._machine = machine
        self._now = now
        self._room = machine.hbm_pages
        self._there: dict[PageKey, tuple[float, float]] = {}
        self._staged: dict[PageKey, float] = {}
        self._link = Timeline(now, machine.load_s)
        self._disk_free = now
        self._places = [now] * min(machine.host_pages or 0, 1 << 20)

    def stay(self, retained: Retained) -> None:
        """Its pages in HBM keep their room."""
        for key, tier in zip(retained.keys, retained.tiers, strict=False):
            if tier == Tier.HBM and key not in self._there and self._room > 0:
                self._there[key] = (self._now, self._now)
                self._room -= 1

    def serve(self, want: Want) -> Outcome:
        """Takes the time and room that the want's pages need."""
        tried = self._try(want)
        load, done = self._choose(want, tried)
        self._commit(want, tried, load)
        if load == len(tried.there) < len(want.tiers):
            self._stage(want, load)
        return Outcome(load, max(tried.there[:load], default=self._now), done)

    def _try(self, want: Want) -> _Try:
        """Pages of host memory go first: they are there, and wait for nobody."""
        tried = _Try()
        room = self._room
        for key in want.keys[: len(want.tiers)]:
            if key not in self._there:
                if room == 0:
                    break
                room -= 1
                tried.new.append(len(tried.there))
            there, read = self._there.get(key, (self._now, self._now))
            tried.there.append(there)
            tried.read.append(read)
        self._try_loads(want, tried)
        return tried

    def _try_loads(self, want: Want, tried: _Try) -> None:
        cursor, places, disk = self._link.cursor(), self._places.copy(), self._disk_free
        below = [i for i in tried.new if want.tiers[i] > Tier.HBM]
        ready = {i: self._staged.get(want.keys[i], self._now) for i in below if self._in_host(want, i)}
        for i in sorted(ready, key=ready.__getitem__):
            self._load(tried, i, cursor.place(ready[i]))
        for i in (i for i in below if i not in ready):
            if self._machine.host_pages is None:
                tried.there[i] = tried.read[i] = disk + self._machine.read_s
                tried.steps.append(_Step(i, want.tiers[i], Tier.HBM, disk, tried.there[i]))
                disk = tried.there[i]
                continue
            if not places:
                self._cut(tried, i)
                return
            start = max(disk, heappop(places))
            disk = start + self._machine.read_s
            tried.read[i] = disk
            tried.steps.append(_Step(i, want.tiers[i], Tier.HOST, start, disk))
            self._load(tried, i, cursor.place(disk))
            heappush(places, tried.there[i])

    def _in_host(self, want: Want, i: int) -> bool:
        return want.tiers[i] == Tier.HOST or want.keys[i] in self._staged

    def _load(self, tried: _Try, i: int, start: float) -> None:
        tried.there[i] = start + self._machine.load_s
        tried.steps.append(_Step(i, Tier.HOST, Tier.HBM, start, tried.there[i]))

    def _cut(self, tried: _Try, length: int) -> None:
        """No place in host memory for this page: the prefix ends before it."""
        del tried.there[length:], tried.read[length:]
        tried.new = [i for i in tried.new if i < length]
        tried.steps = [step for step in tried.steps if step.index < length]

    def _choose(self, want: Want, tried: _Try) -> tuple[int, float]:
        """How many pages of the prefix to load so that the prompt is done first, and when that is; of equals more."""
        compute, total = self._machine.compute, len(want.keys)
        there = read = best_done = self._now
        start = max(want.deadline, self._now)
        if compute is None or want.deadline == inf:
            return len(tried.there), max([*tried.there, want.deadline if want.deadline < inf else self._now])
        best, best_done = 0, start + compute.seconds(0, total)
        for load in range(1, len(tried.there) + 1):
            there, read = max(there, tried.there[load - 1]), max(read, tried.read[load - 1])
            done = max(there, max(start, read) + compute.seconds(load, total))
            if done <= best_done:
                best, best_done = load, done
        return best, best_done

    def _commit(self, want: Want, tried: _Try, load: int) -> None:
        steps = [step for step in tried.steps if step.index < load]
        self._link.take([step.starts for step in steps if step.src == Tier.HOST])
        for step in steps:
            if step.src > Tier.HOST:
                self._disk_free = step.ends
                if step.dst == Tier.HOST:
                    heappop(self._places)
                    heappush(self._places, tried.there[step.index])
        for i in tried.new:
            if i < load:
                self._there[want.keys[i]] = (tried.there[i], tried.read[i])
                self._room -= 1
        self._emit(want, steps)

    def _stage(self, want: Want, first: int) -> None:
        """No room in HBM for the rest: it waits in host memory, as far as there are places for good."""
        steps = []
        for i in range(first, len(want.tiers) if self._machine.host_pages else 0):
            key = want.keys[i]
            if want.tiers[i] <= Tier.HOST or key in self._there or key in self._staged:
                continue
            if not self._places:
                break
            start = max(self._disk_free, heappop(self._places))
            self._disk_free = self._staged[key] = start + self._machine.read_s
            steps.append(_Step(i, want.tiers[i], Tier.HOST, start, self._disk_free))
        self._emit(want, steps)

    def _emit(self, want: Want, steps: list[_Step]) -> None:
        """Consecutive pages of an edge become one promotion."""
        self.planned += len(steps)
        for src in sorted({step.src for step in steps}):
            run: list[_Step] = []
            for step in (*(s for s in steps if s.src == src), None):
                if run and (step is None or step.index != run[-1].index + 1 or len(run) == PIECE_PAGES):
                    keys = tuple(want.keys[s.index] for s in run)
                    self.promotions.append(
                        Promotion(want.request_id, keys, src, run[0].dst, run[0].starts, run[-1].ends)
                    )
                    run = []
                if step is not None:
                    run.append(step)
