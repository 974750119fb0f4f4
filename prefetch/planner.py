"""The planner: selects the pages to promote, orders the promotions, and predicts when each page arrives.

It is a pure computation without a clock, threads or a store.

The model of time is as follows. An edge transfers one page at a time, at the measured rate. A page that is
only on disk is first read into host memory and then loaded into HBM. From the start of the read to the end of the
load, the page occupies one of a limited number of slots in host memory. On every edge, the want with the earliest
deadline is served first, and later wants get the remaining time. A request starts at its deadline. Its prompt is
complete when the loaded pages are in HBM and the remaining pages are computed. Pages can be computed while others
are loaded from host memory, because loaded pages arrive layer by layer. No page can be computed before all reads
from disk have finished, because a page arrives from disk as a whole. For each want, the planner chooses how many
pages to load so that the prompt is complete as soon as possible.

Earliest deadline first is Jackson's rule (1955): no other order reduces the maximum lateness.
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
    """The periods, from ``now`` on, in which one edge is free.

    ``page_s`` is the number of seconds that the edge takes per page, 0 if unknown.
    """

    def __init__(self, now: float, page_s: float) -> None:
        self.page_s = page_s
        self._free: list[tuple[float, float]] = [(now, inf)]

    def cursor(self) -> Cursor:
        """Return a cursor that finds start times but does not reserve them. Do not use the cursor after ``take``."""
        return Cursor(self._free, self.page_s)

    def take(self, starts: list[float]) -> None:
        """Reserve ``page_s`` seconds from each start time. Takes O(free intervals + starts) time.

        ``starts`` must come from a single cursor and be in ascending order.
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
    """Finds a start time in a ``Timeline`` for one page after another, without changing the timeline."""

    def __init__(self, free: list[tuple[float, float]], page_s: float) -> None:
        self._free = free
        self._page_s = page_s
        self._piece = 0
        self._at = 0.0

    def place(self, available: float) -> float:
        """Return the earliest time at which the next page can start, and place the page there.

        This time is not before ``available``, and not before the end of the last page that was placed.
        """
        self._at = max(self._at, available)
        while True:
            start, end = self._free[self._piece]
            begin = max(start, self._at)
            if begin + self._page_s <= end:
                self._at = begin + self._page_s
                return begin
            self._piece += 1


PIECE_PAGES = 32
"""Maximum number of pages per promotion. The store takes its lock once per promotion."""


def plan(
    wants: Sequence[Want],
    machine: Machine,
    now: float,
    retained: Sequence[Retained] = (),
    most_pages: int = 1 << 30,
) -> Plan:
    """Plan the promotions for ``wants``. Takes O(pages log pages) time.

    Wants get slots in HBM in the order of their deadlines. Pages already in HBM need slots too, so a page that is
    needed later never displaces a page that is needed sooner. Once at least ``most_pages`` page copies are planned,
    no further wants are planned.

    Args:
        wants: The expected requests.
        machine: The rates and the space of the machine.
        now: The current time in seconds.
        retained: Pages that keep their slots in HBM.
        most_pages: Number of page copies after which planning stops.

    Returns:
        The promotions, and an outcome for every want. Wants that were not planned load 0 pages.
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
    # A Retained item precedes wants whose deadline equals its ``until``.
    return (item.until, -(1 << 62)) if isinstance(item, Retained) else (item.deadline, -item.priority)


@dataclass(slots=True)
class _Step:
    """The planned copy of one page along one edge. ``index`` is the page's index in its want."""

    index: int
    src: Tier
    dst: Tier
    starts: float
    ends: float


@dataclass(slots=True)
class _Try:
    """A trial schedule that loads the longest prefix of a want that fits into HBM.

    For each page, ``there`` is the time at which the page arrives in HBM, and ``read`` is the time at which its read
    from disk, if any, ends.
    """

    there: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    """Indices of pages for which no earlier want has reserved a slot in HBM."""


class _Planning:
    """The state of one call to ``plan``: the periods in which each edge is free, and the free space."""

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
        """Reserve HBM slots for those retained pages that are in HBM now, until no slot is left."""
        for key, tier in zip(retained.keys, retained.tiers, strict=False):
            if tier == Tier.HBM and key not in self._there and self._room > 0:
                self._there[key] = (self._now, self._now)
                self._room -= 1

    def serve(self, want: Want) -> Outcome:
        """Plan one want, and reserve the time and space that its pages need."""
        tried = self._try(want)
        load, done = self._choose(want, tried)
        self._commit(want, tried, load)
        if load == len(tried.there) < len(want.tiers):
            self._stage(want, load)
        return Outcome(load, max(tried.there[:load], default=self._now), done)

    def _try(self, want: Want) -> _Try:
        """Return a trial schedule for a want, without reserving anything.

        Pages that are in host memory are loaded before pages that must first be read from disk.
        """
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
        """Shorten the trial schedule to its first ``length`` pages."""
        del tried.there[length:], tried.read[length:]
        tried.new = [i for i in tried.new if i < length]
        tried.steps = [step for step in tried.steps if step.index < length]

    def _choose(self, want: Want, tried: _Try) -> tuple[int, float]:
        """Choose how many pages to load so that the prompt is complete as soon as possible.

        Returns:
            The number of pages to load, and the time at which the prompt is complete. If several numbers give
                the same time, this is the largest of them.
        """
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
        """Plan reads into host memory for the pages from index ``first`` on, which do not fit into HBM.

        Each page keeps its slot in host memory for the rest of the plan.
        """
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
        """Add one promotion for each run of up to ``PIECE_PAGES`` consecutive pages in ``steps``."""
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
