"""A simulated server that prefills one request after another and decodes many, with and without a prefetcher.

The rows of ``bench prefetch``: each trace under each policy at the same pace, compared with loads that start on
look-up. The machine has three tiers of pages, an edge from disk and one into HBM, and no bytes.

Requests are served in the order in which they come. The first one starts once the server, a decoding slot and
space in HBM are free. Pages of its prefix below HBM are then loaded, unless they were loaded before. As in
the planner, computing overlaps with loads from host memory and begins after reads from disk. Policies differ
only in when loads start, and in whether computing may replace some of them:

    none          no page is loaded: pages that are not in HBM are computed
    on-lookup     all stored pages are loaded once the request is the first in the queue
    ours          hints: a request when it comes, and a session's next turn when past turns suggest it
    oracle        hints: the next requests, before they come
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from dataclasses import asdict, dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from prefetch import Compute
from prefetch.planner import plan
from prefetch.sources import OVERDUE_S, Pauses
from prefetch.types import Machine, Want
from tierstore.errors import ConfigError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tierstore.replay.traces import Request, Trace
    from tierstore.types import PageKey

_PLAN_PAGES = 1024


class Ahead:
    """Copies ahead of need in the order of the last plan, and whether they were used."""

    def __init__(self, memory: Memory) -> None:
        self.brought = 0
        self.useful = 0
        self.late = 0
        """Number of pages that were used before they had arrived."""
        self._memory = memory
        self._reads: deque[PageKey] = deque()
        self._loads: deque[PageKey] = deque()
        self._unused: set[PageKey] = set()

    def plan(self, wants: Sequence[Want], now: float) -> None:
        """Copy for these requests from now on, and keep only the pages that they need in HBM."""
        memory, sizes = self._memory, self._memory.sizes
        machine = Machine(
            read_s=sizes.read_s,
            load_s=sizes.load_s,
            hbm_pages=sizes.hbm - len(memory.pinned),
            host_pages=sizes.host // 4,
            compute=None,
        )
        found = plan(wants, machine, now, most_pages=_PLAN_PAGES)
        memory.keep({key for want in wants for key in want.keys[: found.outcomes[want.request_id].load]})
        self._reads = deque(key for p in found.promotions if p.src == Tier.NVME for key in p.keys)
        self._loads = deque(key for p in found.promotions if p.src == Tier.HOST for key in p.keys)

    def copy(self, now: float, until: float) -> None:
        """Start the copies that may start before ``until``."""
        self._read(now, until)
        self._load(now, until)

    def used(self, keys: Sequence[PageKey], at: float) -> None:
        """Note that a request uses these pages."""
        for key in keys:
            if key in self._unused:
                self._unused.remove(key)
                self.useful += 1
                self.late += self._memory.hbm.get(key, inf) > at

    def _read(self, now: float, until: float) -> None:
        memory = self._memory
        while self._reads and max(memory.disk_free, now) < until:
            key = self._reads.popleft()
            if memory.tier(key) == Tier.NVME:
                memory.disk_free = max(memory.disk_free, now) + memory.sizes.read_s
                memory.host.put(key, memory.disk_free)
                self._bring(key)

    def _load(self, now: float, until: float) -> None:
        memory = self._memory
        while self._loads:
            key = self._loads[0]
            there = memory.host.there.get(key)
            if there is None and memory.tier(key) == Tier.NVME and self._reads:
                return
            start = max(memory.link_free, now, there or 0.0)
            if there is not None and start >= until:
                return
            if not memory.room_ahead():
                return
            self._loads.popleft()
            if memory.tier(key) == Tier.HOST:
                memory.link_free = start + memory.sizes.load_s
                memory.hbm[key] = memory.link_free
                self._bring(key)

    def _bring(self, key: PageKey) -> None:
        if key not in self._unused:
            self._unused.add(key)
            self.brought += 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pages per tier, seconds per page to read from NVMe and to load into HBM, decoding slots, seconds per step.

    ``prefill`` is by tokens, not by pages.
    """

    hbm: int
    host: int
    nvme: int
    read_s: float
    load_s: float
    prefill: Compute
    block_tokens: int
    decode_slots: int = 32
    step_s: float = 0.02


class _Lru:
    """Pages of a tier below HBM with the time when each arrives, least recently used first."""

    def __init__(self, pages: int) -> None:
        self.there: OrderedDict[PageKey, float] = OrderedDict()
        self._pages = pages

    def put(self, key: PageKey, at: float) -> None:
        self.there[key] = min(at, self.there.get(key, at))
        self.there.move_to_end(key)
        while len(self.there) > self._pages:
            self.there.popitem(last=False)


class Memory:
    """The tiers and the pages in them. A computed page is in all tiers at once: writes take no time."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.hbm: OrderedDict[PageKey, float] = OrderedDict()
        self.host = _Lru(sizes.host)
        self.nvme = _Lru(sizes.nvme)
        self.pinned: Counter[PageKey] = Counter()
        self.kept: set[PageKey] = set()
        """Pages that only running requests may displace, after all others."""
        self._victims: deque[PageKey] = deque()
        self.disk_free = 0.0
        self.link_free = 0.0

    def tier(self, key: PageKey) -> Tier | None:
        """Return the fastest tier that has the page, or will have it once a copy ends."""
        if key in self.hbm:
            return Tier.HBM
        if key in self.host.there:
            return Tier.HOST
        return Tier.NVME if key in self.nvme.there else None

    def match(self, keys: Sequence[PageKey]) -> list[Tier]:
        """Return the tiers of the longest prefix that is stored."""
        found: list[Tier] = []
        for key in keys:
            tier = self.tier(key)
            if tier is None:
                break
            found.append(tier)
        return found

    @property
    def free(self) -> int:
        """Return the free slots of HBM."""
        return self.sizes.hbm - len(self.hbm)

    def make_room(self, pages: int) -> None:
        """Drop the least recently used pages that are not in use until ``pages`` fit. Kept pages go last."""
        missing = pages - self.free
        if missing <= 0:
            return
        idle = [key for key in self.hbm if key not in self.pinned]
        for key in sorted(idle, key=self.kept.__contains__)[:missing]:
            del self.hbm[key]

    def keep(self, keys: set[PageKey]) -> None:
        """Keep these pages from now on, and no others."""
        self.kept = keys
        self._victims = deque(key for key in self.hbm if key not in self.pinned and key not in keys)

    def room_ahead(self) -> bool:
        """Return whether one more page may be brought up without displacing a kept or used one."""
        while self.free <= 0 and self._victims:
            key = self._victims.popleft()
            if key in self.hbm and key not in self.pinned:
                del self.hbm[key]
        return self.free > 0

    def pin(self, keys: Iterable[PageKey]) -> None:
        """Hold the pages in HBM until ``unpin``."""
        self.pinned.update(keys)

    def unpin(self, keys: Iterable[PageKey]) -> None:
        """End one pin of each page."""
        for key in keys:
            self.pinned[key] -= 1
            if not self.pinned[key]:
                del self.pinned[key]

    def store(self, keys: Sequence[PageKey], at: float) -> None:
        """Note that pages were used or computed. They are in HBM and below; tails are older than heads."""
        for key in reversed(keys):
            self.hbm[key] = min(at, self.hbm.get(key, at))
            self.hbm.move_to_end(key)
            self.host.put(key, at)
            self.nvme.put(key, at)


class Sessions:
    """Groups requests into sessions by their pages alone, and predicts when the next turn arrives."""

    def __init__(self) -> None:
        self._last: dict[PageKey, int] = {}
        self._ends: dict[int, float] = {}
        self._pauses: dict[int, Pauses] = {}

    def arrived(self, request: Request, at: float) -> int:
        """Return the session that the request continues, or a new one."""
        # Many sessions begin with the same first page, so it identifies none.
        session = next((self._last.pop(k) for k in reversed(request.keys[1:]) if k in self._last), None)
        if session is None:
            session = len(self._ends)
            self._ends[session] = at
        else:
            self._pauses.setdefault(session, Pauses()).note(at - self._ends[session])
        return session

    def answered(self, session: int, request: Request, at: float) -> float | None:
        """Return when the next turn is expected, or None while nothing is known about the session."""
        if request.keys:
            self._last[request.keys[-1]] = session
        self._ends[session] = at
        pauses = self._pauses.get(session)
        pause = None if pauses is None else pauses.expected_s
        return None if pause is None else at + pause


Policy = Literal["none", "on-lookup", "ours", "oracle"]
POLICIES: tuple[Policy, ...] = ("none", "on-lookup", "ours", "oracle")

AHEAD = 32
"""Most requests that are planned for at once."""


@dataclass(slots=True)
class Outcome:
    """Seconds and pages by request; ``makespan`` is from the first arrival to the end of the last answer."""

    stalls: list[float] = field(default_factory=list)
    """Seconds that each request took beyond a prefill with all stored pages in HBM."""
    ttfts: list[float] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)
    """Seconds of stalls by the tier of the pages that ended them."""
    busy_s: float = 0.0
    makespan: float = 0.0
    brought: int = 0
    useful: int = 0
    late: int = 0
    too_long: int = 0


class Server:
    """One run of one policy over one trace with stretched times."""

    def __init__(self, policy: Policy, sizes: Sizes, requests: Sequence[Request], stretch: float) -> None:
        self.outcome = Outcome()
        self._policy = policy
        self._sizes = sizes
        self._memory = Memory(sizes)
        self._ahead = Ahead(self._memory)
        fits = [r for r in requests if len(r.keys) < sizes.hbm]
        self.outcome.too_long = len(requests) - len(fits)
        self._requests = fits
        self._at = [r.at * stretch for r in fits]
        self._now = 0.0
        self._free_at = 0.0
        self._next = 0
        self._come = 0
        self._decoding: list[tuple[float, int]] = []
        self._sessions = Sessions()
        self._session_of: dict[int, int] = {}
        self._expected: dict[int, tuple[float, int]] = {}
        self._stale = True

    def run(self, step: Callable[[int], None]) -> Outcome:
        """Serve all requests. ``step`` is called after each."""
        for number, request in enumerate(self._requests):
            self._next = number
            start = self._head(number, request)
            end = self._prefill(number, request, start)
            self._free_at = end
            self.outcome.ttfts.append(end - self._at[number])
            self.outcome.busy_s += end - start
            step(1)
        last = max((end for end, _ in self._decoding), default=self._now)
        self.outcome.makespan = last - (self._at[0] if self._at else 0.0)
        ahead = self._ahead
        self.outcome.brought, self.outcome.useful, self.outcome.late = ahead.brought, ahead.useful, ahead.late
        return self.outcome

    # -- time ---------------------------------------------------------------------------------------------------

    def _head(self, number: int, request: Request) -> float:
        """Wait until the request may start. Returns that time."""
        self._advance(max(self._at[number], self._free_at))
        while len(self._decoding) >= self._sizes.decode_slots or not self._fits(request):
            self._advance(self._decoding[0][0])
        return self._now

    def _fits(self, request: Request) -> bool:
        pinned = self._memory.pinned
        return len(pinned) + sum(key not in pinned for key in request.keys) <= self._sizes.hbm

    def _advance(self, to: float) -> None:
        """Process all events until then: requests arrive, answers end, pages are brought up."""
        while True:
            come = self._at[self._come] if self._come < len(self._at) else inf
            ends = self._decoding[0][0] if self._decoding else inf
            at = min(come, ends, to)
            self._copy_until(at)
            self._now = max(self._now, at)
            if come <= at:
                self._stale = True
                self._session_of[self._come] = self._sessions.arrived(self._requests[self._come], come)
                self._expected.pop(self._session_of[self._come], None)
                self._come += 1
            elif ends <= at:
                self._end(*heappop(self._decoding))
            else:
                return

    def _end(self, at: float, number: int) -> None:
        request = self._requests[number]
        self._memory.unpin(request.keys)
        session = self._session_of[number]
        expected = self._sessions.answered(session, request, at)
        if expected is not None:
            self._expected[session] = (expected, number)
            self._stale = True

    # -- one request --------------------------------------------------------------------------------------------

    def _prefill(self, number: int, request: Request, start: float) -> float:
        memory, pages = self._memory, request.keys
        tiers = memory.match(pages)
        there, read = self._arrivals(pages, tiers, start)
        if self._policy == "none":
            load = next((i for i, tier in enumerate(tiers) if tier != Tier.HBM), len(tiers))
        elif self._policy == "on-lookup":
            load = len(tiers)
        else:
            load = min(range(len(tiers), -1, -1), key=lambda n: self._done(request, n, start, there, read))
        end = self._done(request, load, start, there, read)
        self._ahead.used(pages[:load], start)
        memory.pin(pages)
        self._take_edges(pages[:load], tiers, start)
        memory.make_room(sum(key not in memory.hbm for key in pages))
        memory.store(pages, end)
        stall = end - self._done(request, len(tiers), start, [start] * len(tiers), [start] * len(tiers))
        self.outcome.stalls.append(stall)
        slowest = max((tiers[i] for i in range(len(tiers)) if there[i] > start), default=Tier.HBM)
        causes = self.outcome.causes
        causes[slowest.name] = causes.get(slowest.name, 0.0) + stall
        heappush(self._decoding, (end + request.output_tokens * self._sizes.step_s, number))
        self._stale = True
        return end

    def _arrivals(
        self, keys: Sequence[PageKey], tiers: Sequence[Tier], start: float
    ) -> tuple[list[float], list[float]]:
        """Return when each page would be in HBM and in host memory if all were loaded from now on."""
        memory, sizes = self._memory, self._sizes
        link, disk = max(start, memory.link_free), max(start, memory.disk_free)
        there, read = [start] * len(tiers), [start] * len(tiers)
        for wanted in (Tier.HBM, Tier.HOST, Tier.NVME):
            for i, tier in enumerate(tiers):
                if tier != wanted:
                    continue
                if tier == Tier.HBM:
                    there[i] = max(start, memory.hbm[keys[i]])
                    continue
                if tier == Tier.NVME:
                    disk += sizes.read_s
                    read[i] = disk
                else:
                    read[i] = max(start, memory.host.there[keys[i]])
                link = there[i] = max(link, read[i]) + sizes.load_s
        return there, read

    def _done(
        self, request: Request, load: int, start: float, there: Sequence[float], read: Sequence[float]
    ) -> float:
        rest = self._sizes.prefill.seconds(
            min(load * self._sizes.block_tokens, request.tokens), request.tokens
        )
        return max(max(there[:load], default=start), max(read[:load], default=start) + rest)

    def _take_edges(self, keys: Sequence[PageKey], tiers: Sequence[Tier], start: float) -> None:
        there, read = self._arrivals(keys, tiers[: len(keys)], start)
        used = [i for i in range(len(keys)) if tiers[i] != Tier.HBM]
        if used:
            self._memory.link_free = max(there[i] for i in used)
        reads = [read[i] for i in used if tiers[i] == Tier.NVME]
        if reads:
            self._memory.disk_free = max(reads)

    # -- ahead of need ------------------------------------------------------------------------------------------

    def _copy_until(self, until: float) -> None:
        if self._policy in ("none", "on-lookup"):
            return
        if self._stale:
            self._stale = False
            self._ahead.plan(_few(self._wants(), self._sizes.hbm), self._now)
        self._ahead.copy(self._now, until)

    def _wants(self) -> Iterator[Want]:
        """Yield waiting requests as they will start, then those to come: known to the oracle, guessed by us."""
        first = self._next
        at = max(self._now, self._free_at)
        for number in range(first, min(self._come, first + AHEAD)):
            want = self._want(f"r{number}", number, at)
            yield want
            cached, tokens = len(want.tiers) * self._sizes.block_tokens, self._requests[number].tokens
            at += self._sizes.prefill.seconds(min(cached, tokens), tokens)
        if self._policy == "oracle":
            for number in range(max(first, self._come), min(len(self._at), first + AHEAD)):
                yield self._want(f"r{number}", number, max(at, self._at[number]))
            return
        soon = sorted(self._expected.values())
        place = bisect_left(soon, (self._now - OVERDUE_S, 0))
        for expected, number in soon[place : place + AHEAD]:
            yield self._want(f"s{number}", number, max(at, expected))

    def _want(self, name: str, number: int, at: float) -> Want:
        keys = self._requests[number].keys
        return Want(
            request_id=name,
            keys=keys,
            tiers=tuple(self._memory.match(keys)),
            deadline=at,
        )


def _few(wants: Iterator[Want], pages: int) -> list[Want]:
    """Return the first wants: as many as HBM could hold at once, and one more."""
    found: list[Want] = []
    for want in wants:
        found.append(want)
        pages -= len(want.keys)
        if pages < 0 or len(found) == AHEAD:
            break
    return found


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else 0.0


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 without values."""
    return fmean(values) if values else 0.0


PREFILL = Compute(2.28e-5, 4.33e-10)
"""Seconds to prefill n tokens of an 8B model, ``2.28e-5 n + 4.33e-10 n n``, as measured on an H200."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Bytes per tier and bytes/s per edge; ``token_nbytes`` is the KV size."""

    hbm: int
    host: int
    nvme: int
    nvme_bytes_per_s: float
    link_bytes_per_s: float
    token_nbytes: int

    def sizes(self, block_tokens: int) -> Sizes:
        """Return the sizes in pages of one block. ConfigError if a tier holds none."""
        page = block_tokens * self.token_nbytes
        for name in ("hbm", "host", "nvme"):
            if getattr(self, name) < page:
                raise ConfigError(
                    f"--{name} must be at least one block, {page} bytes, got {getattr(self, name)}"
                )
        return Sizes(
            hbm=self.hbm // page,
            host=self.host // page,
            nvme=self.nvme // page,
            read_s=page / self.nvme_bytes_per_s,
            load_s=page / self.link_bytes_per_s,
            prefill=PREFILL,
            block_tokens=block_tokens,
        )


@dataclass(frozen=True, slots=True)
class PrefetchRow:
    """One policy on one trace, in seconds. Stalls are beyond a prefill with all pages in HBM.

    ``utilisation`` is the least time to serve all requests (all there at once, loads on look-up), divided by
    the time in which they arrive. ``prefill_share`` is the share of time with a request in prefill.
    ``wasted`` is the share of pages brought up ahead of need that no request used. ``stall_by_source`` is in
    seconds, by the tier of the slowest page.
    """

    trace: str
    policy: str
    utilisation: float
    requests: int
    too_long: int
    stall_mean_s: float
    stall_p99_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    prefill_share: float
    brought_pages: int
    wasted: float
    late: float
    stall_by_source: dict[str, float]

    def plain(self) -> dict[str, object]:
        """Return the row for JSON."""
        return asdict(self)


def prefetch_rows(
    trace: Trace,
    capacities: Capacities,
    utilisations: Sequence[float],
    step: Callable[[str, int], None],
) -> Iterator[PrefetchRow]:
    """Yield a row for every policy at every utilisation. ``step`` is called with the policy after each request."""
    sizes, requests = capacities.sizes(trace.block_tokens), trace.requests
    span = requests[-1].at - requests[0].at if requests else 0.0
    full = Server("on-lookup", sizes, requests, 0.0).run(lambda served: step("at once", served)).makespan
    for utilisation in utilisations:
        stretch = full / (utilisation * span) if span else 0.0
        for policy in POLICIES:
            server = Server(policy, sizes, requests, stretch)
            yield _row(trace.name, policy, utilisation, server, partial(step, policy))


def _row(
    trace: str, policy: str, utilisation: float, server: Server, step: Callable[[int], None]
) -> PrefetchRow:
    found = server.run(step)
    used = found.useful / found.brought if found.brought else 1.0
    return PrefetchRow(
        trace=trace,
        policy=policy,
        utilisation=utilisation,
        requests=len(found.stalls),
        too_long=found.too_long,
        stall_mean_s=mean(found.stalls),
        stall_p99_s=p99(found.stalls),
        ttft_mean_s=mean(found.ttfts),
        ttft_p99_s=p99(found.ttfts),
        prefill_share=found.busy_s / found.makespan if found.makespan else 0.0,
        brought_pages=found.brought,
        wasted=1.0 - used,
        late=found.late / found.brought if found.brought else 0.0,
        stall_by_source=dict(found.causes),
    )


def first(trace: Trace, number: int | None) -> Sequence[Request]:
    """Return the first requests of a trace; None: all."""
    return trace.requests if number is None else trace.requests[:number]
