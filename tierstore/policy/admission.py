"""Which pages are worth a write to the tier below. Pure: told of puts and hits, asked at each of them, knows no clock.

``all``: every page. ``second_hit``: a page that was asked for since it was put, or that is put again while a bounded
memory of pages knows it. ``cost``: a page whose chance to be needed from below, learnt from pages like it, times what
it would cost to compute again, is worth the price of a write.

A page is useless without those before it: the caller writes these too when it writes a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tierstore.policy.history import MOST_TURNS, MOST_USES, History, Record

if TYPE_CHECKING:
    from tierstore.types import PageKey


class Admission(Protocol):
    """What a tier asks before it writes a page. ``pressure``: how dear a write is now; 0 where nothing is displaced."""

    def put(self, key: PageKey, parent: PageKey | None, pressure: float) -> bool:
        """A page that no tier holds is being put after ``parent``: whether it is to be written."""
        ...

    def hit(self, key: PageKey, pressure: float, *, below: bool) -> bool:
        """A page that is held was asked for or put again: whether it is to be written now, if it was not.

        ``below``: only the tier below had it.
        """
        ...


class All:
    """Every page."""

    def put(self, key: PageKey, parent: PageKey | None, pressure: float) -> bool:
        """True."""
        return True

    def hit(self, key: PageKey, pressure: float, *, below: bool) -> bool:
        """True."""
        return True


class SecondHit:
    """A page asked for once more, or put once more while it is remembered."""

    def __init__(self, remembered: int) -> None:
        self._history = History(remembered)

    def put(self, key: PageKey, parent: PageKey | None, pressure: float) -> bool:
        """Whether the page is remembered."""
        record = self._history.get(key)
        if record is None:
            self._history.first(key, parent)
            return False
        self._history.again(key, record)
        return True

    def hit(self, key: PageKey, pressure: float, *, below: bool) -> bool:
        """True."""
        record = self._history.get(key)
        if record is not None:
            self._history.again(key, record)
        return True


_HALF_LIFE = 4096
"""Outcomes of a kind of page after which older ones count half."""
_SMOOTHING = 1 / 1024


class Cost:
    """Expected worth against the price of a write.

    Pages are of one kind if they have the same turn and were used as often. Of each kind it learns how often the next
    use found the page in the tier below, or gone and put again before it was forgotten: then a write would have paid.
    The worth is that share times the cost of computing the page: 1 for the first of a sequence, 2 for the page at
    ``doubling_depth``, where attention costs as much as the rest. The price is ``pressure`` times the mean worth of
    the pages asked about lately, so there is no unit to tune.
    """

    def __init__(self, remembered: int, doubling_depth: float) -> None:
        self._doubling = max(1.0, doubling_depth)
        self._history = History(remembered, self._not_needed)
        kinds = (MOST_TURNS + 1) * (MOST_USES + 1)
        self._paid, self._asked = [1.0] * kinds, [2.0] * kinds
        self._mean = 0.5

    def put(self, key: PageKey, parent: PageKey | None, pressure: float) -> bool:
        """Whether the page promises its price; a page that is put again has shown that a write would have paid."""
        record = self._history.get(key)
        if record is None:
            record = self._history.first(key, parent)
        else:
            self._learn(record, paid=True)
            self._history.again(key, record)
        return self._worth_it(record, pressure)

    def hit(self, key: PageKey, pressure: float, *, below: bool) -> bool:
        """Whether the page promises its price now; True if it is not remembered: it was asked for again at all."""
        record = self._history.get(key)
        if record is None:
            return True
        self._learn(record, paid=below)
        self._history.again(key, record)
        return self._worth_it(record, pressure)

    def _worth_it(self, record: Record, pressure: float) -> bool:
        kind = _kind(record)
        worth = self._paid[kind] / self._asked[kind] * (1 + record.depth / self._doubling)
        self._mean += (worth - self._mean) * _SMOOTHING
        return worth >= pressure * self._mean

    def _not_needed(self, record: Record) -> None:
        self._learn(record, paid=False)

    def _learn(self, record: Record, *, paid: bool) -> None:
        kind = _kind(record)
        self._paid[kind] += paid
        self._asked[kind] += 1
        if self._asked[kind] > _HALF_LIFE:
            self._paid[kind] /= 2
            self._asked[kind] /= 2


def make_admission(name: str, *, remembered: int, doubling_depth: float) -> Admission:
    """The admission a configuration names: "all", "second_hit" or "cost".

    ``remembered``: pages whose fate it may remember. ``doubling_depth``: as ``Cost`` takes it, in pages.
    """
    if name == "second_hit":
        return SecondHit(remembered)
    if name == "cost":
        return Cost(remembered, doubling_depth)
    return {"all": All}[name]()


def _kind(record: Record) -> int:
    return record.turn * (MOST_USES + 1) + record.uses
