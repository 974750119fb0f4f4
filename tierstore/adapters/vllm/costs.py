"""What loading and computing cost on this machine, and how much of a hit is therefore worth loading.

A request computes nothing while it loads, and every token behind the last loaded page is computed. Each token takes
longer to compute than the one before it; each page of a run on disk takes as long to read as the others. So either
all pages of such a run are worth loading or none, and a hit ends before a run or is loaded whole.
``MeasuredCosts`` learns the disk's rate from the store's traffic, ``ComputeRate`` the engine's rate from its own steps.
"""

from __future__ import annotations

from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierstore.adapters.vllm.hit import Hit
    from tierstore.adapters.vllm.requests import Step
    from tierstore.directory.transfers import Transfers
    from tierstore.types import PageKey

_CLEARLY = 1.25
"""A whole hit is loaded unless less of it is done sooner by so much: figures are rough."""
_LOAD = (Tier.HOST, Tier.HBM)
_OLD_S = 60.0
_LEAST_S = 0.05
"""Less reading is a beginning and an end."""
_MOST_S = 0.25
"""Of a longer time between two looks nobody knows how much went by in reading."""
_READS_KEPT = 0.8
"""Weight of what was known of the disk before."""


class Costs(Protocol):
    """What this machine takes, in seconds."""

    def load_s(self, pages: int, on_disk: int, coming: int = 0) -> float:
        """To load so many pages, of which some are read from disk; 0: not known.

        ``coming``: of the reads that are under way already, those of the same hit: nobody waits for these twice.
        """
        ...

    def coming(self, keys: Sequence[PageKey]) -> int:
        """How many of these pages are being read from disk already."""
        ...

    def compute_s(self, start: int, end: int) -> float | None:
        """To compute the tokens from ``start`` to ``end``; None: not known."""
        ...


class _Read(NamedTuple):
    """Pages that the disk gave in so many seconds of reading."""

    pages: float
    seconds: float


_NOTHING = _Read(0, 0.0)


class _End(NamedTuple):
    """Where a hit may end: its tokens, its pages, and those of them on disk."""

    tokens: int
    pages: int
    on_disk: int


def worth_loading(hit: Hit, total: int, costs: Costs) -> int:
    """Tokens of ``hit`` that are to be loaded, for a prompt of ``total``. All of them where something is not known."""
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
    """``Costs`` out of what the store and the engine have done lately. ``read_rate``: bytes a second that the disk was
    found to give at open, None: it was not asked.

    What the disk gives is counted while it has something to read. Not beside steps that compute: what is read meanwhile
    is told of, and more asked for, only when they have ended. What it gave a minute ago says nothing: loads are tried
    again, so that a bad moment is not for ever.
    """

    def __init__(
        self,
        traffic: Transfers,
        compute_rate: ComputeRate,
        page_nbytes: int,
        read_rate: float | None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._traffic = traffic
        self._compute_rate = compute_rate
        self._page_s = page_nbytes / read_rate if read_rate else 0.0
        self._clock = clock
        self._at = 0.0
        self._seen = 0
        self._reading = False
        self._new = self._known = _NOTHING
        self._known_at: float | None = None

    def look(self, *, computes: bool = False) -> None:
        """What was read since the last look. Once a step at least. ``computes``: a step that computes begins now."""
        now, arrived = self._clock(), sum(map(self._traffic.arrived.__getitem__, self._traffic.reads))
        if self._reading:
            self._new = _Read(self._new.pages + arrived - self._seen, self._new.seconds + now - self._at)
            if now - self._at > _MOST_S:
                self._new = _NOTHING
        if computes:
            self._new = _NOTHING
        self._at, self._seen = now, arrived
        self._reading = not computes and any(map(self._traffic.pages.__getitem__, self._traffic.reads))
        if self._new.pages and self._new.seconds >= _LEAST_S:
            known = self._known if self._is_fresh(now) else _NOTHING
            self._known = _Read(
                known.pages * _READS_KEPT + self._new.pages, known.seconds * _READS_KEPT + self._new.seconds
            )
            self._known_at, self._new = now, _NOTHING

    def load_s(self, pages: int, on_disk: int, coming: int = 0) -> float:
        """See ``Costs``. Pages that are read cross the link meanwhile."""
        if not on_disk:
            return self._traffic.seconds_for(_LOAD, pages)
        crossing_s = on_disk * self._traffic.page_seconds(_LOAD)
        return self._traffic.seconds_for(_LOAD, pages - on_disk) + max(
            crossing_s, self._reading_s(on_disk, coming)
        )

    def coming(self, keys: Sequence[PageKey]) -> int:
        """See ``Costs``."""
        return sum(self._traffic.carried(edge, keys) for edge in self._traffic.reads)

    def compute_s(self, start: int, end: int) -> float | None:
        """See ``Costs``."""
        return self._compute_rate.seconds(start, end)

    def _reading_s(self, pages: int, coming: int) -> float:
        """Until these pages are there, after those of others that are read already."""
        page_s = self._page_s
        if self._known_at is not None:
            page_s = self._known.seconds / self._known.pages if self._is_fresh(self._clock()) else 0.0
        under_way = sum(self._traffic.carrying(*edge) for edge in self._traffic.reads)
        return (under_way - coming + pages) * page_s

    def _is_fresh(self, now: float) -> bool:
        return self._known_at is not None and now - self._known_at <= _OLD_S


def _ends(hit: Hit) -> Iterator[_End]:
    """The shortest first, the whole hit last. Of several groups nothing less than all has the windows it needs."""
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
    """Where runs of pages on disk, and of others, begin."""
    return [i for i, tier in enumerate(tiers) if not i or (tier > Tier.HOST) != (tiers[i - 1] > Tier.HOST)]


_LEAST_TOKENS = 512
"""Smaller steps take the time of their launches."""
_OF_A_PROMPT = 16
"""A request with fewer tokens in a step is being answered."""
_MOSTLY = 0.9
_STEPS_KEPT = 0.9
"""Weight of what was known before a step, against that step."""
_MOST_UNDER_WAY = 64
_SPREAD = 1e-3
"""Contexts that vary less than that, squared, of their mean's square say nothing of what context costs."""


class _Step(NamedTuple):
    ordered: float
    tokens: int
    context: float


class ComputeRate:
    """Seconds of computing. Steps end in the order in which they were ordered, whether or not they are told of.

    The first one does not count: it compiles and allocates.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, _Step] = {}
        self._ended = 0.0
        self._warm = False
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def ordered(self, number: int, steps: Sequence[Step], now: float) -> bool:
        """Step ``number`` is about to run; whether it says something, so that its end is to be told."""
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
        """Step ``number`` has ended. It ran from its order on, or from the end of the one before."""
        step = self._under_way.pop(number, None)
        if step is not None:
            begin = max(step.ordered, self._ended)
            if self._warm and now > begin:
                self._learn(step.tokens, step.context, (now - begin) / step.tokens)
            self._warm = True
        self._ended = now

    def seconds(self, start: int, end: int) -> float | None:
        """To compute the tokens from ``start`` to ``end`` of a prompt; None: not known yet."""
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
        """Neither is below zero: no prompt is computed in less than no time."""
        mean, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean * mean
        if spread <= _SPREAD * mean * mean:
            return mean_y, 0.0
        before = max(0.0, (self._xy / self._weight - mean * mean_y) / spread)
        each = mean_y - before * mean
        return (each, before) if each >= 0 else (0.0, self._xy / self._xx)
