"""A server that prefills one request after another and decodes many, with and without a prefetcher: simulated.

First come, first served. The head starts when the server, a slot to decode in and room in HBM are free. The pages of
its prefix that are below HBM are loaded then, unless that has happened before; computing goes along with loads from
host memory and begins after reads from disk, as the planner has it. All that differs between the policies is when
loads start, and whether computing may take the place of some:

    none          nothing is loaded: what is not in HBM is computed
    on-lookup     all that is found is loaded when the request is the head
    ours          hints: a request when it comes, and a session's next turn when past ones let expect it
    oracle        hints: the requests that come next, before they do
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from prefetch.pauses import OVERDUE_S
from prefetch.terms import Want
from tierstore.bench.prefetch_ahead import Ahead
from tierstore.bench.prefetch_machine import Memory, Sizes
from tierstore.bench.prefetch_sessions import Sessions
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierstore.replay.traces import Request
    from tierstore.types import PageKey

Policy = Literal["none", "on-lookup", "ours", "oracle"]
POLICIES: tuple[Policy, ...] = ("none", "on-lookup", "ours", "oracle")

AHEAD = 32
"""Requests that are planned for at once."""


@dataclass(slots=True)
class Outcome:
    """Seconds and pages by request served; ``makespan`` from the first arrival to the end of the last answer."""

    stalls: list[float] = field(default_factory=list)
    """Beyond what the prefill would take were every page found in HBM."""
    ttfts: list[float] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)
    """Seconds of stalls by where the pages that ended them came from."""
    busy_s: float = 0.0
    makespan: float = 0.0
    brought: int = 0
    useful: int = 0
    late: int = 0
    too_long: int = 0


class Server:
    """One run of one policy over one trace whose times are stretched."""

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
        """Serves all requests; ``step`` is told of each."""
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
        """Waits until the request may start; when that is."""
        self._advance(max(self._at[number], self._free_at))
        while len(self._decoding) >= self._sizes.decode_slots or not self._fits(request):
            self._advance(self._decoding[0][0])
        return self._now

    def _fits(self, request: Request) -> bool:
        pinned = self._memory.pinned
        return len(pinned) + sum(key not in pinned for key in request.keys) <= self._sizes.hbm

    def _advance(self, to: float) -> None:
        """Everything that happens until then: requests come, answers end, pages are brought up."""
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
        """When each page would be in HBM, and in host memory, were all loaded from now on."""
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
        """Those that wait, as they will start; then those to come: known to the oracle, guessed by us."""
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
    """The first, as many as HBM could hold at once and one more."""
    found: list[Want] = []
    for want in wants:
        found.append(want)
        pages -= len(want.keys)
        if pages < 0 or len(found) == AHEAD:
            break
    return found


def p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else 0.0


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return fmean(values) if values else 0.0
