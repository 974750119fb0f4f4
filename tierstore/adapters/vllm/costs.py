"""Estimates how long it takes to load and to compute tokens, and decides how much of a hit to load.

The disk, the link to HBM and the engine are queues. A load waits for the reads that are in flight and for the
reads of earlier loads. While a load runs, its request computes nothing, so other requests can use the engine. Then
the request computes every token after the last loaded page, while other requests wait for the engine.

``worth_loading`` chooses how much of the hit to load, so that all requests together wait the least:

- This request waits until its tokens are loaded and computed.
- Every other request that wants the engine waits while this one computes.
- Every other request that wants pages from disk waits while this one reads pages from disk.
- Every other request that only loads pages from memory waits while this one moves pages from memory.

A run is a sequence of pages that are either all on disk or all in memory. Each token takes longer to compute than
the previous one, but all pages of a run take the same time to load. Therefore, a run is loaded completely or not at
all. Pages that are already being read form a run of their own.

``MeasuredCosts`` derives the disk's throughput from the store's traffic. ``ComputeRate`` derives the engine's compute
rate from its steps.
"""

from __future__ import annotations

from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tierstore.adapters.compute_rate import ComputeRate
    from tierstore.adapters.vllm.hit import Hit
    from tierstore.store import TierStore
    from tierstore.types import PageKey

    Edge = tuple[Tier, Tier]

_CLEARLY = 1.25
"""A part of a hit is chosen only if requests would wait more than this many times as long with the whole hit.

The factor is above 1 because the estimates are rough.
"""
_LOAD = (Tier.HOST, Tier.HBM)
_OLD_S = 60.0
"""Seconds without an arriving page after which a rate counts as unknown, so that loads are tried again."""
_TRIAL_S = 3.0
"""While the compute rate is unknown, pages are loaded from disk only if they will arrive within this many seconds."""


class Queues(NamedTuple):
    """The load and speed of the disk and of the link to HBM at one moment. Unknown times are 0.

    Attributes:
        disk_s: Seconds until the disk has read all pages that were requested earlier.
        link_s: Seconds until all pages in flight to HBM have arrived.
        read_s: Seconds to read one page from disk into memory.
        move_s: Seconds to move one page from memory to HBM.
    """

    disk_s: float = 0.0
    link_s: float = 0.0
    read_s: float = 0.0
    move_s: float = 0.0

    def load_s(self, pages: int, on_disk: int) -> float:
        """Return how many seconds it takes until ``pages`` more pages are in HBM, including the wait in the queues.

        ``on_disk`` of these pages must be read from disk first.
        """
        if not pages:
            return 0.0
        waiting = self.link_s + (self.disk_s if on_disk else 0.0)
        return waiting + self.move_all_s(pages - on_disk) + self.read_all_s(on_disk)

    def read_all_s(self, pages: int) -> float:
        """Return how many seconds it takes to load this many pages from disk to HBM if no others are queued.

        Reads and moves overlap, so only the slower of the two counts.
        """
        return pages * max(self.move_s, self.read_s)

    def move_all_s(self, pages: int) -> float:
        """Return how many seconds it takes to move this many pages from memory to HBM if no others are queued."""
        return pages * self.move_s


class Costs(Protocol):
    """Estimates how long loading and computing take, in seconds."""

    def queues(self, coming: int = 0) -> Queues:
        """Return the current state of the disk and the link.

        ``coming`` is the number of the request's own pages that are already being read. The time to read them
        is not part of the result's ``disk_s``.
        """
        ...

    def coming(self, keys: Sequence[PageKey]) -> int:
        """Return how many of these pages are already being read from disk."""
        ...

    def compute_s(self, start: int, end: int) -> float | None:
        """Return how many seconds it takes to compute tokens ``start`` to ``end``, or None if unknown.

        The result may be too large as long as ``to_measure`` is not 0.
        """
        ...

    @property
    def to_measure(self) -> int:
        """Return how many tokens a step must compute to measure the compute rate, or 0 if the rate is known."""
        ...


class Others(NamedTuple):
    """Numbers of other requests that wait for each resource.

    Attributes:
        engine: Number of requests that want the engine.
        reads: Number of requests that want pages from disk.
        moves: Number of requests that are loading pages from memory only.
    """

    engine: int = 0
    reads: int = 0
    moves: int = 0


class Demand:
    """Tracks which requests want the engine, the disk, or the link to HBM.

    A queued request with pages on disk wants both the engine and the disk.
    """

    def __init__(self) -> None:
        self._engine: set[str] = set()
        self._reads: set[str] = set()
        self._moves: set[str] = set()

    def queued(self, request_id: str, *, on_disk: bool) -> None:
        """Add a queued request. ``on_disk`` tells whether any of its pages are only on disk."""
        self._engine.add(request_id)
        if on_disk:
            self._reads.add(request_id)

    def loads(self, request_id: str, *, on_disk: bool) -> None:
        """Record that the request is waiting for its load. ``on_disk`` tells whether the load reads from disk."""
        self.ended(request_id)
        (self._reads if on_disk else self._moves).add(request_id)

    def computes(self, request_id: str) -> None:
        """Record that the request no longer waits for pages, and now waits only for the engine."""
        self.ended(request_id)
        self._engine.add(request_id)

    def ended(self, request_id: str) -> None:
        """Remove a request. Unknown requests are ignored."""
        for wanting in (self._engine, self._reads, self._moves):
            wanting.discard(request_id)

    def others(self, request_id: str) -> Others:
        """Return how many requests want each resource, not counting this one."""
        return Others(
            *(len(each) - (request_id in each) for each in (self._engine, self._reads, self._moves))
        )


class _End(NamedTuple):
    """A possible end of the loaded part of a hit, with the numbers of tokens, pages and pages on disk before it."""

    tokens: int
    pages: int
    on_disk: int


def worth_loading(
    hit: Hit, total: int, costs: Costs, others: Others | None = None, in_memory: Hit | None = None
) -> int:
    """Return how many tokens of ``hit`` to load for a prompt of ``total`` tokens.

    If the time to compute is unknown, the result is the part of the hit that arrives within ``_TRIAL_S`` seconds. If
    that time is known only roughly, the result is at most this part. Unknown times of the disk or the link count as 0,
    which favours loading.

    Args:
        hit: The hit.
        total: Number of tokens of the prompt.
        costs: Estimates of the time to load and to compute.
        others: Numbers of the requests that wait while this one loads or computes.
        in_memory: The longest hit without pages on disk, if the model has windows, states or several groups. It is
            not a prefix of ``hit``, because it needs other windows and states.
    """
    if not hit.tokens:
        return 0
    coming = costs.coming([key for span in hit.spans for key in span.keys]) if below_memory(hit) else 0
    queues, (engine, reads, moves) = costs.queues(coming), others or Others()

    def waits_s(end: _End) -> float:
        computing = costs.compute_s(hit.start + end.tokens, total) or 0.0
        reading, moving = queues.read_all_s(end.on_disk), queues.move_all_s(end.pages - end.on_disk)
        busy = reads * reading + moves * moving + (1 + engine) * computing
        return queues.load_s(end.pages, end.on_disk) + busy

    ends = list(_ends(hit, coming, in_memory))
    if costs.to_measure:
        ends = _soon(ends, hit, queues)
    *shorter, whole = ends
    if not shorter or costs.compute_s(hit.start, total) is None:
        return whole.tokens
    least_s, end = min((waits_s(end), end) for end in shorter)
    return end.tokens if waits_s(whole) > _CLEARLY * least_s else whole.tokens


class MeasuredCosts:
    """``Costs`` measured from the recent work of the store and the engine.

    Throughput comes from ``TierStore.rates``: the workers measure each transfer, and concurrent transfers share
    the elapsed time. A rate expires after a minute in which no page has arrived. Loads are then tried again, so a
    slow period has no lasting effect.

    Args:
        store: The store.
        compute_rate: The compute rate of the engine.
        page_nbytes: Size of a page in bytes.
        read_rate: Disk throughput in bytes/s, measured when the store was opened. None if it was not
            measured.
        clock: Returns the current time in seconds.
        promised: Returns the number of pages on disk that accepted loads have yet to request from the store.
    """

    def __init__(
        self,
        store: TierStore,
        compute_rate: ComputeRate,
        page_nbytes: int,
        read_rate: float | None,
        clock: Callable[[], float] = monotonic,
        promised: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store = store
        memory = [tier for tier, each in store.tiers.items() if each.in_memory]
        self._memory = max(memory)
        """The tier that pages are read into from disk."""
        self._reads = tuple((tier, self._memory) for tier in store.tiers if tier not in memory)
        self._compute_rate = compute_rate
        self._page_nbytes = page_nbytes
        self._read_rate = read_rate
        self._clock = clock
        self._promised = promised
        self._seen: dict[Edge, tuple[int, float]] = {}
        """For each edge, the number of pages that have arrived, and when the last one was noticed."""

    def look(self) -> None:
        """Record on which edges pages have arrived since the last call, and when. Call once per step."""
        now = self._clock()
        for edge, traffic in self._store.traffic().items():
            if traffic.arrived != self._seen.get(edge, (0, now))[0]:
                self._seen[edge] = traffic.arrived, now

    def queues(self, coming: int = 0) -> Queues:
        """See ``Costs``."""
        traffic, rates = self._store.traffic(), self._store.rates()
        reads, moves = (
            sum(traffic[edge].in_flight for edge in edges if edge in traffic)
            for edges in (self._reads, (_LOAD,))
        )
        read_s = max((self._page_s(edge, rates, self._read_rate) for edge in self._reads), default=0.0)
        move_s = self._page_s(_LOAD, rates, None)
        waiting = max(0, reads - coming) + self._promised()
        return Queues(waiting * read_s, moves * move_s, read_s, move_s)

    def coming(self, keys: Sequence[PageKey]) -> int:
        """See ``Costs``."""
        return self._store.arriving(keys, self._memory)

    def compute_s(self, start: int, end: int) -> float | None:
        """See ``Costs``."""
        return self._compute_rate.seconds(start, end)

    @property
    def to_measure(self) -> int:
        """See ``Costs``."""
        return 0 if self._compute_rate.known else self._compute_rate.least_tokens

    def _page_s(self, edge: Edge, rates: Mapping[Edge, float], before: float | None) -> float:
        """Return how many seconds one page takes on an edge, or 0 if unknown.

        ``before`` is the rate in bytes/s that is used until the first page has arrived. None if unknown.
        """
        seen = self._seen.get(edge)
        rate = before if seen is None else rates.get(edge)
        if rate is None or (seen is not None and self._clock() - seen[1] > _OLD_S):
            return 0.0
        return self._page_nbytes / rate


def below_memory(hit: Hit) -> int:
    """Return the number of pages of the hit that are only on disk."""
    return sum(
        len(span.tiers) - span.tiers.count(Tier.HOST) - span.tiers.count(Tier.HBM) for span in hit.spans
    )


def _ends(hit: Hit, coming: int, in_memory: Hit | None) -> Iterator[_End]:
    """Yield the possible ends of the loaded part of a hit, in ascending order. The last is the end of the hit.

    With windows or several groups, the only ends are 0, the end of ``in_memory`` and the end of the hit, because
    windows are complete only there. ``coming`` pages of the hit are already being read. They are assumed to be the
    first of the pages on disk, as they usually are.
    """
    spans, on_disk = hit.spans, below_memory(hit)
    whole = _End(hit.tokens, hit.pages, on_disk)
    yield _End(0, 0, 0)
    if len(spans) > 1 or spans[0].group.partial:
        if in_memory is not None and in_memory.tokens:
            yield _End(in_memory.tokens, in_memory.pages, 0)
    elif on_disk:
        tiers, size, before = spans[0].tiers, spans[0].group.block_size, 0
        for first, last in pairwise([*_changes(tiers), len(tiers)]):
            if first:
                yield _End(first * size, first, before)
            if tiers[first] > Tier.HOST:
                if not before and 0 < coming < last - first:
                    yield _End((first + coming) * size, first + coming, coming)
                before += last - first
    yield whole


def _soon(ends: Sequence[_End], hit: Hit, queues: Queues) -> list[_End]:
    """Return those of ``ends`` up to which all pages on disk arrive within ``_TRIAL_S`` seconds.

    If the last end is not among them and the only group has full attention, the result also contains the last page
    boundary up to which all pages on disk arrive in that time.
    """
    page_s, left_s = queues.read_all_s(1), _TRIAL_S - queues.disk_s - queues.link_s
    if not ends[-1].on_disk or left_s >= ends[-1].on_disk * page_s:
        return list(ends)
    most = max(0, int(left_s / page_s))
    soon = [end for end in ends if end.on_disk <= most]
    if len(hit.spans) == 1 and not hit.spans[0].group.partial:
        on_disk = [i for i, tier in enumerate(hit.spans[0].tiers) if tier > Tier.HOST]
        pages = on_disk[most]
        soon.append(_End(pages * hit.spans[0].group.block_size, pages, most))
    return soon


def _changes(tiers: Sequence[Tier]) -> list[int]:
    """Return the position at which each run of pages starts.

    The pages of a run are either all on disk or all in memory.
    """
    return [i for i, tier in enumerate(tiers) if not i or (tier > Tier.HOST) != (tiers[i - 1] > Tier.HOST)]
