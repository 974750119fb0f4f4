"""Which pages are worth a write to the tier below. Pure: asked at each put and hit, knows no clock.

``all``: every page. ``second_hit``: a page that was asked for since it was put, or that is put again while a bounded
memory of pages knows it. ``cost``: a page whose chance to be needed from below, learnt from pages like it, times what
it would cost to compute again, is worth the price of a write.

A page is useless without those before it: the caller writes these too when it writes a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.policy.history import History, Record


class Admission(Protocol):
    """What a tier asks before it writes a page. ``pressure``: how dear a write is now; 0 where nothing is displaced."""

    def put(self, record: Record | None, pressure: float, *, again: bool) -> bool:
        """A page that no tier holds is being put, ``again`` or for the first time: whether it is to be written."""
        ...

    def hit(self, record: Record | None, pressure: float) -> bool:
        """A page that is held was asked for or put again: whether it is to be written now, if it was not."""
        ...


class All:
    """Every page."""

    def put(self, record: Record | None, pressure: float, *, again: bool) -> bool:
        """True."""
        return True

    def hit(self, record: Record | None, pressure: float) -> bool:
        """True."""
        return True


class SecondHit:
    """A page asked for once more, or put once more while it is remembered."""

    def put(self, record: Record | None, pressure: float, *, again: bool) -> bool:
        """Whether the page is remembered."""
        return again

    def hit(self, record: Record | None, pressure: float) -> bool:
        """True."""
        return True


_HALF_LIFE = 1 << 15
"""Pages of a kind after which what was learnt of older ones counts half."""
_SMOOTHING = 1 / 1024
_TURNS, _USES = 8, 4


class Cost:
    """Expected worth against the price of a write. A watcher of ``history``.

    Pages are of one kind if they have the same turn and were used as often. Of each kind it learns how many were asked
    for again and found in the tier below, or gone and put again before they were forgotten: then a write has paid. The
    worth is that share times the cost of computing the page: 1 for the first of a sequence, 2 for the page at
    ``doubling_depth``, where attention costs as much as the rest. The price is ``pressure`` times the mean worth of the
    pages asked for lately, so there is no unit to tune.
    """

    def __init__(self, history: History, doubling_depth: float) -> None:
        self._doubling = max(1.0, doubling_depth)
        self._paid, self._asked = [1.0] * (_TURNS * _USES), [2.0] * (_TURNS * _USES)
        self._mean = 0.5
        history.watchers.append(self)

    def put(self, record: Record | None, pressure: float, *, again: bool) -> bool:
        """Whether the page promises its price."""
        return record is not None and self._worth(record) >= pressure * self._mean

    def hit(self, record: Record | None, pressure: float) -> bool:
        """Whether the page promises its price now; True if it is not remembered: it was asked for again at all."""
        return record is None or self._worth(record) >= pressure * self._mean

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """The next use of the page has come."""
        self._paid[_kind(record)] += below

    def began(self, record: Record, now: int) -> None:
        """The page may be asked for again, or not."""
        kind = _kind(record)
        self._mean += (self._worth(record) - self._mean) * _SMOOTHING
        self._asked[kind] += 1
        if self._asked[kind] > _HALF_LIFE:
            self._paid[kind] /= 2
            self._asked[kind] /= 2

    def forgotten(self, record: Record, now: int) -> None:
        """It was not asked for again: it has only been counted when it was put."""

    def _worth(self, record: Record) -> float:
        kind = _kind(record)
        return self._paid[kind] / self._asked[kind] * (1 + record.depth / self._doubling)


def _kind(record: Record) -> int:
    return min(record.turn, _TURNS - 1) * _USES + min(record.uses, _USES - 1)
