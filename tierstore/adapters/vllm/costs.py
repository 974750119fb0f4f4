"""Estimate the time to load and to compute tokens on this machine, and how much of a hit is worth loading.

A request computes nothing while it loads, and computes every token behind the last loaded page. Each token
takes longer to compute than the previous one, while each page of a run on disk takes the same time to read.
So either all pages of such a run are worth loading or none, and the loaded part of a hit ends before a run or
includes all of it. ``MeasuredCosts`` learns the disk's throughput from the store's traffic, ``ComputeRate``
the engine's from its own steps.
"""

from __future__ import annotations

from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tierstore.adapters.vllm.hit import Hit
    from tierstore.adapters.vllm.requests import Step
    from tierstore.store import TierStore
    from tierstore.types import PageKey, Traffic

_CLEARLY = 1.25
"""Fraction of time that a shorter hit must save before it is preferred, because the figures are rough."""
_LOAD = (Tier.HOST, Tier.HBM)
_OLD_S = 60.0
_LEAST_S = 0.05
"""Smaller reads are dominated by their start and end, and are not measured."""
_MOST_S = 0.25
"""If more time has passed between two measurements, it is unknown how much of it was spent reading."""
_READS_KEPT = 0.8
"""Weight of the previous estimate of the disk's throughput."""


class Costs(Protocol):
    """Estimates of the time to load and to compute tokens on this machine, in seconds."""

    def load_s(self, pages: int, on_disk: int, coming: int = 0) -> float:
        """Return the time to load ``pages`` pages, of which ``on_disk`` are read from disk; 0 if unknown.

        Args:
            coming: Number of pages of this hit among the reads in flight. Their time counts once.
        """
        ...

    def coming(self, keys: Sequence[PageKey]) -> int:
        """Return how many of these pages are being read from disk already."""
        ...

    def compute_s(self, start: int, end: int) -> float | None:
        """Return the time to compute the tokens from ``start`` to ``end``; None if unknown."""
        ...


class _Read(NamedTuple):
    """Number of pages that the disk delivered, and the seconds that it took to read them."""

    pages: float
    seconds: float


_NOTHING = _Read(0, 0.0)


class _End(NamedTuple):
    """A possible end of a hit: its numbers of tokens, of pages, and of pages on disk up to there."""

    tokens: int
    pages: int
    on_disk: int


def worth_loading(hit: Hit, total: int, costs: Costs) -> int:
    """Return the number of tokens of ``hit`` to load, for a prompt of ``total``. All of them if a cost is unknown."""
    *shorter, whole = _ends(hit)
    if not whole.on_disk:
        return whole.tokens

    coming = costs.coming([key for span in hit.spans for key in span.keys])

    def done_s(end: _End) -> float | None:
        computing = costs.compute_s(hit.start + end.tokens, total)
        return None if computing is None else costs.load_s(end.pages, end.on_disk, coming) + computing

    all_s = done_s(whole)
    if all_s is None:
        return whole.tokens
    least_s, end = min((seconds, end) for end in shorter if (seconds := done_s(end)) is not None)
    return end.tokens if all_s > _CLEARLY * least_s else whole.tokens


class MeasuredCosts:
    """``Costs`` measured from the store's and the engine's recent work.

    The disk's throughput is measured while it reads, but not during steps that compute: the end of a read is
    noticed, and a new read started, only when such a step has ended. Figures older than a minute are dropped,
    so that loads are tried again and a slow moment has no lasting effect.

    Args:
        read_rate: Bytes/s that the disk gave when it was measured at opening; None if it was not measured.
    """

    def __init__(
        self,
        store: TierStore,
        compute_rate: ComputeRate,
        page_nbytes: int,
        read_rate: float | None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        memory = [tier for tier, each in store.tiers.items() if each.in_memory]
        self._memory = max(memory)
        """The tier into which pages are read from disk."""
        self._reads = tuple((tier, self._memory) for tier in store.tiers if tier not in memory)
        self._compute_rate = compute_rate
        self._page_nbytes = page_nbytes
        self._page_s = page_nbytes / read_rate if read_rate else 0.0
        self._clock = clock
        self._at = 0.0
        self._seen = 0
        self._reading = False
        self._new = self._known = _NOTHING
        self._known_at: float | None = None

    def look(self, *, computes: bool = False) -> None:
        """Account for the pages read since the last call. Call it at least once per step.

        ``computes`` says whether this step computes.
        """
        now, reads = self._clock(), self._reads_of(self._store.traffic())
        arrived = sum(edge.arrived for edge in reads)
        if self._reading:
            self._new = _Read(self._new.pages + arrived - self._seen, self._new.seconds + now - self._at)
            if now - self._at > _MOST_S:
                self._new = _NOTHING
        if computes:
            self._new = _NOTHING
        self._at, self._seen = now, arrived
        self._reading = not computes and any(edge.in_flight for edge in reads)
        if self._new.pages and self._new.seconds >= _LEAST_S:
            known = self._known if self._is_fresh(now) else _NOTHING
            self._known = _Read(
                known.pages * _READS_KEPT + self._new.pages, known.seconds * _READS_KEPT + self._new.seconds
            )
            self._known_at, self._new = now, _NOTHING

    def load_s(self, pages: int, on_disk: int, coming: int = 0) -> float:
        """See ``Costs``. Pages cross the link while others are read from disk."""
        traffic, rate = self._store.traffic(), self._store.rates().get(_LOAD)
        page_s = 0.0 if rate is None else self._page_nbytes / rate
        before = traffic[_LOAD].in_flight if _LOAD in traffic else 0
        crossing_s = (before + pages - on_disk) * page_s
        if not on_disk:
            return crossing_s
        before = sum(edge.in_flight for edge in self._reads_of(traffic)) - coming
        return crossing_s + max(on_disk * page_s, (before + on_disk) * self._read_s())

    def coming(self, keys: Sequence[PageKey]) -> int:
        """See ``Costs``."""
        return self._store.arriving(keys, self._memory)

    def compute_s(self, start: int, end: int) -> float | None:
        """See ``Costs``."""
        return self._compute_rate.seconds(start, end)

    def _read_s(self) -> float:
        """Return the time to read a page from disk; 0 while it is unknown."""
        if self._known_at is None:
            return self._page_s
        return self._known.seconds / self._known.pages if self._is_fresh(self._clock()) else 0.0

    def _reads_of(self, traffic: Mapping[tuple[Tier, Tier], Traffic]) -> list[Traffic]:
        """Return the traffic of the edges along which pages are read from disk."""
        return [traffic[edge] for edge in self._reads if edge in traffic]

    def _is_fresh(self, now: float) -> bool:
        return self._known_at is not None and now - self._known_at <= _OLD_S


def _ends(hit: Hit) -> Iterator[_End]:
    """Yield the possible ends, shortest first, the whole hit last.

    With windows or several groups these are 0 and the whole hit, because windows are complete only at its
    end.
    """
    spans = hit.spans
    if len(spans) == 1 and not spans[0].group.partial:
        tiers, size, on_disk = spans[0].tiers, spans[0].group.block_size, 0
        for first, last in pairwise([*_changes(tiers), len(tiers)]):
            if tiers[first] > Tier.HOST:
                yield _End(first * size, first, on_disk)
                on_disk += last - first
    else:
        yield _End(0, 0, 0)
    pages = [tier for span in spans for tier in span.tiers]
    yield _End(hit.tokens, len(pages), sum(tier > Tier.HOST for tier in pages))


def _changes(tiers: Sequence[Tier]) -> list[int]:
    """Return the positions at which runs of pages on disk, and runs of other pages, begin."""
    return [i for i, tier in enumerate(tiers) if not i or (tier > Tier.HOST) != (tiers[i - 1] > Tier.HOST)]


_LEAST_TOKENS = 512
"""In steps with fewer tokens, most of the time is spent launching kernels."""
_OF_A_PROMPT = 16
"""A request with fewer tokens in a step counts as decoding."""
_MOSTLY = 0.9
_STEPS_KEPT = 0.9
"""Weight of the previous estimate against a new step."""
_MOST_UNDER_WAY = 64
_SPREAD = 1e-3
"""If the contexts' variance is below this fraction of their squared mean, it shows nothing about their cost."""


class _Step(NamedTuple):
    ordered: float
    tokens: int
    context: float


class ComputeRate:
    """Measures the time to compute tokens. Steps end in order, whether their end is reported or not.

    The first step is ignored because it compiles and allocates.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, _Step] = {}
        self._ended = 0.0
        self._warm = False
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def ordered(self, number: int, steps: Sequence[Step], now: float) -> bool:
        """Record that step ``number`` is about to run.

        Returns whether its end should be reported because it is informative.
        """
        prompts = [step for step in steps if step.scheduled >= _OF_A_PROMPT]
        tokens = sum(step.scheduled for step in prompts)
        if tokens < _LEAST_TOKENS or tokens < _MOSTLY * sum(step.scheduled for step in steps):
            return False
        context = sum(step.scheduled * (step.computed + step.scheduled / 2) for step in prompts) / tokens
        self._under_way[number] = _Step(now, tokens, context)
        if len(self._under_way) > _MOST_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        return True

    def ended(self, number: int, now: float) -> None:
        """Record that step ``number`` has ended. It ran from its order, or from the end of the previous step."""
        step = self._under_way.pop(number, None)
        if step is not None:
            begin = max(step.ordered, self._ended)
            if self._warm and now > begin:
                self._learn(step.tokens, step.context, (now - begin) / step.tokens)
            self._warm = True
        self._ended = now

    def seconds(self, start: int, end: int) -> float | None:
        """Return the time to compute the tokens from ``start`` to ``end`` of a prompt; None if unknown."""
        if not self._weight:
            return None
        each, before = self._line()
        return each * (end - start) + before * (end * end - start * start) / 2

    def _learn(self, weight: float, context: float, token_s: float) -> None:
        self._weight = self._weight * _STEPS_KEPT + weight
        self._x = self._x * _STEPS_KEPT + weight * context
        self._xx = self._xx * _STEPS_KEPT + weight * context * context
        self._y = self._y * _STEPS_KEPT + weight * token_s
        self._xy = self._xy * _STEPS_KEPT + weight * context * token_s

    def _line(self) -> tuple[float, float]:
        """Return offset and slope of the fitted line. Neither is negative, because no prompt takes negative time."""
        mean, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean * mean
        if spread <= _SPREAD * mean * mean:
            return mean_y, 0.0
        before = max(0.0, (self._xy / self._weight - mean * mean_y) / spread)
        each = mean_y - before * mean
        return (each, before) if each >= 0 else (0.0, self._xy / self._xx)
