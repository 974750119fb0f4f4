"""Which pages of a hit are worth loading: those with which the request is done with its prompt first.

A request computes nothing while it loads, and what follows a page that is not loaded is computed. Each token takes
longer to compute than the one before it, each page of a run on disk as long to read: so of such a run either all are
worth it or none, and a hit ends before one, or is loaded whole.
"""

from __future__ import annotations

from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierstore.adapters.vllm.pace import Pace
    from tierstore.adapters.vllm.plans import Plan
    from tierstore.directory.transfers import Traffic
    from tierstore.types import PageKey

_CLEARLY = 1.25
"""A whole hit is loaded unless less of it is done sooner by so much: figures are rough."""
_READ, _LOAD = (Tier.NVME, Tier.HOST), (Tier.HOST, Tier.HBM)
_OLD_S = 60.0
_LEAST_S = 0.05
"""Less reading is a beginning and an end."""
_MOST_S = 0.25
"""Of a longer time between two looks nobody knows how much went by in reading."""
_KEPT = 0.8
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


def worth_loading(plan: Plan, total: int, costs: Costs) -> int:
    """Tokens of ``plan`` that are to be loaded, for a prompt of ``total``. All of them where something is not known."""
    *shorter, whole = _ends(plan)
    if not whole.on_disk:
        return whole.tokens

    coming = costs.coming([key for span in plan.spans for key in span.keys])

    def done_s(end: _End) -> float | None:
        computing = costs.compute_s(plan.start + end.tokens, total)
        return None if computing is None else costs.load_s(end.pages, end.on_disk, coming) + computing

    all_s = done_s(whole)
    if all_s is None:
        return whole.tokens
    least_s, end = min((seconds, end) for end in shorter if (seconds := done_s(end)) is not None)
    return end.tokens if all_s > _CLEARLY * least_s else whole.tokens


class Measured:
    """``Costs`` out of what the store and the engine have done lately. ``read_rate``: bytes a second that the disk was
    found to give at open, None: it was not asked.

    What the disk gives is counted while it has something to read. Not beside steps that compute: what is read meanwhile
    is told of, and more asked for, only when they have ended. What it gave a minute ago says nothing: loads are tried
    again, so that a bad moment is not for ever.
    """

    def __init__(
        self,
        traffic: Traffic,
        pace: Pace,
        page_nbytes: int,
        read_rate: float | None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._traffic = traffic
        self._pace = pace
        self._page_s = page_nbytes / read_rate if read_rate else 0.0
        self._clock = clock
        self._at = 0.0
        self._seen = 0
        self._reading = False
        self._new = self._known = _NOTHING
        self._known_at: float | None = None

    def look(self, *, computes: bool = False) -> None:
        """What was read since the last look. Once a step at least. ``computes``: a step that computes begins now."""
        now, arrived = self._clock(), self._traffic.arrived[_READ]
        if self._reading:
            self._new = _Read(self._new.pages + arrived - self._seen, self._new.seconds + now - self._at)
            if now - self._at > _MOST_S:
                self._new = _NOTHING
        if computes:
            self._new = _NOTHING
        self._at, self._seen = now, arrived
        self._reading = not computes and self._traffic.pages[_READ] > 0
        if self._new.pages and self._new.seconds >= _LEAST_S:
            known = self._known if self._is_fresh(now) else _NOTHING
            self._known = _Read(
                known.pages * _KEPT + self._new.pages, known.seconds * _KEPT + self._new.seconds
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
        return self._traffic.carried(_READ, keys)

    def compute_s(self, start: int, end: int) -> float | None:
        """See ``Costs``."""
        return self._pace.seconds(start, end)

    def _reading_s(self, pages: int, coming: int) -> float:
        """Until these pages are there, after those of others that are read already."""
        page_s = self._page_s
        if self._known_at is not None:
            page_s = self._known.seconds / self._known.pages if self._is_fresh(self._clock()) else 0.0
        return (self._traffic.carrying(*_READ) - coming + pages) * page_s

    def _is_fresh(self, now: float) -> bool:
        return self._known_at is not None and now - self._known_at <= _OLD_S


def _ends(plan: Plan) -> Iterator[_End]:
    """The shortest first, the whole plan last. Of several groups nothing less than all has the windows it needs."""
    spans = plan.spans
    if len(spans) == 1 and not spans[0].group.partial:
        tiers, size, on_disk = spans[0].tiers, spans[0].group.block_size, 0
        for first, last in pairwise([*_changes(tiers), len(tiers)]):
            if tiers[first] == Tier.NVME:
                yield _End(first * size, first, on_disk)
                on_disk += last - first
    else:
        yield _End(0, 0, 0)
    pages = [tier for span in spans for tier in span.tiers]
    yield _End(plan.tokens, len(pages), pages.count(Tier.NVME))


def _changes(tiers: Sequence[Tier]) -> list[int]:
    """Where runs of pages on disk, and of others, begin."""
    return [i for i, tier in enumerate(tiers) if not i or (tier == Tier.NVME) != (tiers[i - 1] == Tier.NVME)]
