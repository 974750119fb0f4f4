"""Keep a page as long as waiting for it pays: times to live learnt from how soon pages like it came back.

Pages that were used are of one kind if their chat had made as many requests (turn and uses together), new ones if the
run of pages that they came with began alike and is about as long. Of each kind the history tells how many are asked for
again at which age. A page kept until age ``a`` earns the chance that it is asked for by then and
costs a place until then or until it is used; with a price a place and a moment there is a best ``a`` for each kind, and
the price is the one at which what is kept just fits the tier. So a kind that seldom comes back, or comes back too late,
is not kept at all. The next to leave is the page whose time is up first.

Ages are in pages asked for; capacities too. Estimates are those of Kaplan and Meier (1958), for what has not come back
yet has only not come back so far. No constant belongs to a workload: half lives and periods are in capacities.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from tierstore.policy.orders import Scored

if TYPE_CHECKING:
    from tierstore.policy.history import History, Record
    from tierstore.types import PageKey

_USED = 8
_SHORT, _LONG = 8, 64
"""Pages of a run from which on it is longer than most turns of a chat, and a document."""
KINDS = _USED + 3 * 3
_BUCKETS = 72
"""Ages by half powers of two."""
_EDGES = [0.0, *(2 ** (i / 2) for i in range(_BUCKETS))]
_EPOCHS = 8
"""Beginnings of one capacity's time are told apart this finely."""
_HORIZON = 32
"""Capacities of pages after which one counts as not coming back."""
_PERIODS = 2
"""Plans made in one capacity's time."""
_HALF_LIFE = 64
"""Capacities after which what was seen counts half."""
_FEW = 8

_Point = tuple[float, float, float]
"""Age, chance to be asked for by then, time in place by then."""
_Curve = list[_Point]


class Returns:
    """How soon pages of one kind came back, as far as is known."""

    def __init__(self, pages: int) -> None:
        self.begun = 0.0
        self._epoch = max(1, pages // _EPOCHS)
        self._waiting: dict[int, int] = {}
        """Pages not asked for again yet, by when they were last."""
        self._ended = [0.0] * _BUCKETS
        """Waits that ended, by age, well or not."""
        self._back = [0.0] * _BUCKETS

    def begin(self, now: int) -> None:
        """A wait begins."""
        epoch = now // self._epoch
        self._waiting[epoch] = self._waiting.get(epoch, 0) + 1
        self.begun += 1

    def end(self, since: int, now: int, *, back: bool) -> None:
        """A wait ends; no effect if it had been given up."""
        epoch = since // self._epoch
        if epoch not in self._waiting:
            return
        self._waiting[epoch] -= 1
        if not self._waiting[epoch]:
            del self._waiting[epoch]
        bucket = _bucket(now - since)
        self._ended[bucket] += 1
        self._back[bucket] += back

    def curve(self, now: int) -> _Curve:
        """What keeping a page up to each age earns and costs; only nothing if too little is known."""
        ended = self._ended.copy()
        for epoch, number in self._waiting.items():
            ended[_bucket(now - epoch * self._epoch)] += number
        at_risk, still, place = sum(ended), 1.0, 0.0
        points = [(0.0, 0.0, 0.0)]
        if at_risk < _FEW:
            return points
        for bucket in range(_BUCKETS):
            if at_risk < _FEW / 2:
                break
            exposed = at_risk - (ended[bucket] - self._back[bucket]) / 2
            left = still * (1 - min(1.0, self._back[bucket] / max(exposed, 1.0)))
            place += (_EDGES[bucket + 1] - _EDGES[bucket]) * (still + left) / 2
            still, at_risk = left, at_risk - ended[bucket]
            points.append((_EDGES[bucket + 1], 1 - still, place))
        return points

    def age(self, factor: float, horizon: int, now: int) -> None:
        """What was seen counts less; waits beyond the horizon are given up."""
        self.begun *= factor
        self._ended = [x * factor for x in self._ended]
        self._back = [x * factor for x in self._back]
        last = _bucket(horizon)
        for epoch in [e for e in self._waiting if (e + 1) * self._epoch < now - horizon]:
            self._ended[last] += self._waiting.pop(epoch)


class Lifetimes:
    """The plan of one tier of ``pages``: how long to keep a page of each kind. A watcher of a history."""

    def __init__(self, pages: int) -> None:
        self.pages = max(1, pages)
        self.kept = [0.0] * KINDS
        """Ages up to which pages of each kind are kept, smoothed."""
        self._returns = [Returns(self.pages) for _ in range(KINDS)]
        self._span = 0.0
        self._next = self._period = max(64, self.pages // _PERIODS)

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """A wait has ended well."""
        self._returns[record.kind].end(record.last, now, back=True)

    def began(self, record: Record, now: int) -> None:
        """A wait begins; now and then a plan is made."""
        record.kind = kind = kind_of(record)
        self._returns[kind].begin(record.last)
        self._span += 1
        if now >= self._next:
            self._next = now + self._period
            self._plan(now)

    def forgotten(self, record: Record, now: int) -> None:
        """A wait has come to nothing."""
        self._returns[record.kind].end(record.last, now, back=False)

    def _plan(self, now: int) -> None:
        curves = [returns.curve(now) for returns in self._returns]
        rates = [returns.begun / self._span for returns in self._returns]
        best = _best_ages(curves, rates, self.pages)
        weight = 1 / (5 * _PERIODS)
        self.kept = [old + (new - old) * weight for old, new in zip(self.kept, best, strict=True)]
        factor = 0.5 ** (self._period / self.pages / _HALF_LIFE)
        self._span *= factor
        for returns in self._returns:
            returns.age(factor, _HORIZON * self.pages, now)


class Session(Scored):
    """By the time up to which the page is worth its place."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history)
        self.lifetimes = Lifetimes(pages)
        history.watchers.append(self.lifetimes)

    def _value(self, key: PageKey, record: Record | None) -> int:
        return self._history.now + (0 if record is None else int(self.lifetimes.kept[record.kind]))


def kind_of(record: Record) -> int:
    """Pages of one kind are expected to come back alike.

    New ones by how their run began and how long it is, used ones by how many requests their chat had made.
    """
    if record.uses:
        return min(record.turn + record.uses, _USED) - 1
    began = 1 if record.steps else 2 if record.branch else 0
    length = 0 if record.span < _SHORT else 1 if record.span < _LONG else 2
    return _USED + 3 * began + length


def _best_ages(curves: list[_Curve], rates: list[float], pages: int) -> list[float]:
    """The ages at the lowest price at which what is kept fits: by bisection of the price's logarithm."""
    corners = [_corners(curve) for curve in curves]

    def choose(price: float) -> tuple[float, list[float]]:
        used, ages = 0.0, []
        for points, rate in zip(corners, rates, strict=True):
            age, _, place = max(points, key=lambda point: point[1] - price * point[2])
            used += rate * place
            ages.append(age)
        return used, ages

    low, high = 1e-12, 1.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        if choose(middle)[0] > pages:
            low = middle
        else:
            high = middle
    return choose(high)[1]


def _corners(curve: _Curve) -> _Curve:
    """Those points of a curve that are the best at some price: its upper hull."""
    hull = curve[:1]
    for point in curve[1:]:
        if point[1] <= hull[-1][1]:
            continue
        while len(hull) > 1 and not _bends(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _bends(a: _Point, b: _Point, c: _Point) -> bool:
    """Whether a place brings more between a and b than between b and c."""
    return (b[1] - a[1]) * (c[2] - b[2]) > (c[1] - b[1]) * (b[2] - a[2])


def _bucket(age: float) -> int:
    return 0 if age < 1 else min(_BUCKETS - 1, int(2 * log2(age)) + 1)
