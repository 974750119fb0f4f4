"""Simulation of a server on a request trace, with different prefetch policies.

The simulated server prefills one request at a time and decodes many at once. It has three tiers of pages, one
link from disk to host memory, and one link from host memory to HBM. Page bytes are not simulated.
``bench prefetch`` prints a row for each trace, utilisation and policy. For a given utilisation, all policies get the
same arrival times. These times are scaled relative to the time in which the policy "on-lookup" serves the trace if
all requests arrive at once.

Requests are served in the order of arrival. The first waiting request starts once the server is idle and a
decoding slot and enough HBM pages are free. Then the pages of its stored prefix that are not in HBM are loaded,
unless the policy has loaded them before. As in the planner, computing starts when the reads from disk have
finished, and overlaps with loads from host memory. The policies differ only in when loads start, and in
whether pages may be computed instead of loaded:

    none          no page is loaded; pages that are not in HBM are computed
    on-lookup     all stored pages are loaded when the request starts
    ours          loads ahead: for waiting requests, and for a session's next turn when it is expected
    oracle        loads ahead: for waiting requests, and for the next requests before they arrive
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

from tierstore.errors import ConfigError
from tierstore.prefetch import OVERDUE_S, Compute, Machine, Pauses, Want, plan
from tierstore.types import Tier, exact_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tierstore.replay.traces import Request, Trace
    from tierstore.types import PageKey

_PLAN_PAGES = 1024


class Ahead:
    """Copies that are made before a request needs the pages, in the order of the latest plan.

    ``brought`` is the number of pages copied ahead, and ``useful`` is the number of those pages that a request used.
    """

    def __init__(self, memory: Memory) -> None:
        self.brought = 0
        self.useful = 0
        self.late = 0
        """Number of useful pages that had not yet arrived in HBM when their request started."""
        self._memory = memory
        self._reads: deque[PageKey] = deque()
        self._loads: deque[PageKey] = deque()
        self._unused: set[PageKey] = set()

    def plan(self, wants: Sequence[Want], now: float) -> None:
        """Plan copies for these requests, replacing the previous plan.

        The pages that the plan loads are kept in HBM. Pages that only the previous plan kept may be evicted from now
        on. ``now`` is the simulated time in seconds.
        """
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
        """Start the planned copies that can start between the times ``now`` and ``until``."""
        self._read(now, until)
        self._load(now, until)

    def used(self, keys: Sequence[PageKey], at: float) -> None:
        """Record that a request that starts at time ``at`` uses these pages."""
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
    """Sizes and speeds of the simulated machine.

    ``hbm``, ``host`` and ``nvme`` are the capacities of the tiers in pages. ``read_s`` is the time to read a page
    from NVMe, ``load_s`` the time to load a page into HBM, and ``step_s`` the time of a decoding step, all in
    seconds. ``prefill`` returns the time to compute a number of tokens, not pages. ``block_tokens`` is the number of
    tokens per page, and ``decode_slots`` the number of requests that can be decoded at once.
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
    """The pages of a tier below HBM, each with its time of arrival, least recently used first."""

    def __init__(self, pages: int) -> None:
        self.there: OrderedDict[PageKey, float] = OrderedDict()
        self._pages = pages

    def put(self, key: PageKey, at: float) -> None:
        self.there[key] = min(at, self.there.get(key, at))
        self.there.move_to_end(key)
        while len(self.there) > self._pages:
            self.there.popitem(last=False)


class Memory:
    """The pages in each tier. Writes take no simulated time, so a computed page is in all tiers at once.

    ``hbm`` contains each page's time of arrival, least recently used page first. ``disk_free`` and ``link_free``
    are the times from which the link from disk and the link into HBM are idle.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.hbm: OrderedDict[PageKey, float] = OrderedDict()
        self.host = _Lru(sizes.host)
        self.nvme = _Lru(sizes.nvme)
        self.pinned: Counter[PageKey] = Counter()
        self.kept: set[PageKey] = set()
        """Pages that copies ahead of need must not displace. When a request starts, these pages are displaced last."""
        self._victims: deque[PageKey] = deque()
        self.disk_free = 0.0
        self.link_free = 0.0

    def tier(self, key: PageKey) -> Tier | None:
        """Return the fastest tier that contains the page or into which it is being copied, or None."""
        if key in self.hbm:
            return Tier.HBM
        if key in self.host.there:
            return Tier.HOST
        return Tier.NVME if key in self.nvme.there else None

    def match(self, keys: Sequence[PageKey]) -> list[Tier]:
        """Return the fastest tier of each page in the longest prefix of ``keys`` that is stored."""
        found: list[Tier] = []
        for key in keys:
            tier = self.tier(key)
            if tier is None:
                break
            found.append(tier)
        return found

    @property
    def free(self) -> int:
        """Number of free slots in HBM."""
        return self.sizes.hbm - len(self.hbm)

    def make_room(self, pages: int) -> None:
        """Evict unpinned pages from HBM until ``pages`` slots are free.

        Least recently used pages are evicted first, and kept pages last.
        """
        missing = pages - self.free
        if missing <= 0:
            return
        idle = [key for key in self.hbm if key not in self.pinned]
        for key in sorted(idle, key=self.kept.__contains__)[:missing]:
            del self.hbm[key]

    def keep(self, keys: set[PageKey]) -> None:
        """Replace the set of kept pages. Copies made ahead of need must not displace them."""
        self.kept = keys
        self._victims = deque(key for key in self.hbm if key not in self.pinned and key not in keys)

    def room_ahead(self) -> bool:
        """Free an HBM slot for a copy ahead of need. Return False if all pages in HBM are kept or pinned."""
        while self.free <= 0 and self._victims:
            key = self._victims.popleft()
            if key in self.hbm and key not in self.pinned:
                del self.hbm[key]
        return self.free > 0

    def pin(self, keys: Iterable[PageKey]) -> None:
        """Pin the pages in HBM. Pages may be pinned several times."""
        self.pinned.update(keys)

    def unpin(self, keys: Iterable[PageKey]) -> None:
        """Remove one pin from each page. A page without pins can be evicted from HBM."""
        for key in keys:
            self.pinned[key] -= 1
            if not self.pinned[key]:
                del self.pinned[key]

    def store(self, keys: Sequence[PageKey], at: float) -> None:
        """Add the pages of a request, loaded or computed by time ``at``, to HBM and all tiers below.

        The pages become the most recently used pages. The first page of the sequence becomes the most recent of
        them, so the end of the sequence is evicted first.
        """
        for key in reversed(keys):
            self.hbm[key] = min(at, self.hbm.get(key, at))
            self.hbm.move_to_end(key)
            self.host.put(key, at)
            self.nvme.put(key, at)


class Sessions:
    """Recognizes, from pages alone, which session each request belongs to, and predicts the next turns."""

    def __init__(self) -> None:
        self._last: dict[PageKey, int] = {}
        self._ends: dict[int, float] = {}
        self._pauses: dict[int, Pauses] = {}

    def arrived(self, request: Request, at: float) -> int:
        """Return the number of the session that the request continues, or of a new session.

        ``at`` is the request's time of arrival in seconds.
        """
        # Many sessions start with the same first page, for example a system prompt, so this page is not used.
        session = next((self._last.pop(k) for k in reversed(request.keys[1:]) if k in self._last), None)
        if session is None:
            session = len(self._ends)
            self._ends[session] = at
        else:
            self._pauses.setdefault(session, Pauses()).note(at - self._ends[session])
        return session

    def answered(self, session: int, request: Request, at: float) -> float | None:
        """Record that the answer to a request ended at time ``at``.

        Return when the session's next request is expected, or None if the session has had only one turn.
        """
        if request.keys:
            self._last[request.keys[-1]] = session
        self._ends[session] = at
        pauses = self._pauses.get(session)
        pause = None if pauses is None else pauses.expected_s
        return None if pause is None else at + pause


Policy = Literal["none", "on-lookup", "ours", "oracle"]
POLICIES: tuple[Policy, ...] = ("none", "on-lookup", "ours", "oracle")

AHEAD = 32
"""Maximum number of requests in a plan."""


@dataclass(slots=True)
class Outcome:
    """Results of a run. Times are in seconds.

    ``ttfts`` contains each request's time to first token. ``busy_s`` is the time that the server spent on prefill.
    ``makespan`` is the time from the first arrival to the end of the last answer. For ``brought``,
    ``useful`` and ``late``, see ``Ahead``. ``too_long`` is the number of requests left out because HBM is too small.
    """

    stalls: list[float] = field(default_factory=list)
    """For each request, how much longer its prefill took than it would have taken with all stored pages in HBM."""
    ttfts: list[float] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)
    """Sum of the stalls, by the name of the slowest tier that a late page of the request came from."""
    busy_s: float = 0.0
    makespan: float = 0.0
    brought: int = 0
    useful: int = 0
    late: int = 0
    too_long: int = 0


class Server:
    """Simulation of one policy on one trace.

    The arrival times in the trace are multiplied by ``stretch``. With 0, all requests arrive at once.
    """

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
        """Serve all requests and return the results. Call ``step(1)`` after each request."""
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
        """Advance the simulated time until the request can start, and return that time."""
        self._advance(max(self._at[number], self._free_at))
        while len(self._decoding) >= self._sizes.decode_slots or not self._fits(request):
            self._advance(self._decoding[0][0])
        return self._now

    def _fits(self, request: Request) -> bool:
        pinned = self._memory.pinned
        return len(pinned) + sum(key not in pinned for key in request.keys) <= self._sizes.hbm

    def _advance(self, to: float) -> None:
        """Advance the simulated time to ``to``, and process the arrivals, finished answers and copies up to then."""
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
        """Return two lists with the times at which each page would arrive in HBM and in host memory.

        The loads are assumed to be queued at ``start``. For a page that is already in HBM, the time in host memory
        is ``start``.
        """
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
        """Yield wants for the waiting requests, in the order in which they will start, and then for future ones.

        The policy "oracle" takes future requests from the trace; the policy "ours" predicts them.
        """
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
    """Return the first wants, at most ``AHEAD``: those that together fit into ``pages`` HBM pages, and one more."""
    found: list[Want] = []
    for want in wants:
        found.append(want)
        pages -= len(want.keys)
        if pages < 0 or len(found) == AHEAD:
            break
    return found


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile, or 0 if there are no values."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else 0.0


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0 if there are no values."""
    return fmean(values) if values else 0.0


PREFILL = Compute(2.28e-5, 4.33e-10)
"""Time to prefill n tokens of an 8B model in seconds, ``2.28e-5 n + 4.33e-10 n^2``, measured on an H200."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Capacity of each tier in bytes, rate of each link in bytes/s, and size of a token's K and V in bytes.

    ``nvme_bytes_per_s`` is the rate of reads from disk, and ``link_bytes_per_s`` is the rate of loads into HBM.
    """

    hbm: int
    host: int
    nvme: int
    nvme_bytes_per_s: float
    link_bytes_per_s: float
    token_nbytes: int

    def sizes(self, block_tokens: int) -> Sizes:
        """Return the sizes of the simulated machine in pages of ``block_tokens`` tokens.

        Raises:
            ConfigError: A tier is too small for a page.
        """
        page = block_tokens * self.token_nbytes
        for name in ("hbm", "host", "nvme"):
            if getattr(self, name) < page:
                raise ConfigError(
                    f"--{name} must be at least the size of one block ({exact_size(page)}), got "
                    f"{exact_size(getattr(self, name))}"
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
    """Results of one policy on one trace. Times are in seconds.

    A stall is the time by which a prefill takes longer than it would with all stored pages in HBM.
    ``utilisation`` says how fast requests arrive. It is the time to serve the whole trace with the policy
    "on-lookup" if all requests arrive at once, divided by the time over which the requests arrive. ``prefill_share``
    is the share of the time in which the server prefills. ``brought_pages`` is the number of pages loaded ahead of
    need. ``wasted`` is the share of these pages that no request used, and ``late`` is the share that had not arrived
    when their request started. ``stall_by_source`` is the sum of the stalls, by the slowest tier that a late page
    came from.
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
        """Return the row as JSON-serializable data."""
        return asdict(self)


def prefetch_rows(
    trace: Trace,
    capacities: Capacities,
    utilisations: Sequence[float],
    step: Callable[[str, int], None],
) -> Iterator[PrefetchRow]:
    """Simulate every policy at every utilisation, and yield a row for each.

    Args:
        trace: The requests.
        capacities: The simulated machine.
        utilisations: How fast requests arrive. See ``PrefetchRow``.
        step: Called after each request with the name of the policy and 1. The name is "at once" while the time to
            serve the whole trace is determined.

    Raises:
        ConfigError: A tier is too small for a page.
    """
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
    """Return the first ``number`` requests of a trace, or all of them if ``number`` is None."""
    return trace.requests if number is None else trace.requests[:number]
