"""Eviction orders, one per tier: which evictable page leaves first. They see only ranks, keys and records.

A rank is an integer assigned when a page enters a tier and renewed when it is used; the evictable page with the lowest
rank leaves first. Ranks are unique and form four bands: unreachable pages first, then unwanted ones, then ordinary
ones, and retained pages last, those of higher priority after the others. The order does not decide which pages are
evictable: a reachable page with readable children never is, so every order evicts leaves first.

``VictimQueue`` holds the evictable pages by rank. ``Fifo`` ranks by arrival, ``Lru`` by last use, ``Priority`` by the
priority of hints, ``Gdsf`` by the number of uses and the cost of computing a page again.

``Session`` keeps a page as long as waiting for it pays, with times to live learnt from how soon similar pages were
requested again. Used pages are of one kind if their chats had made equally many requests (turn and uses together), new
ones if their run began alike and has about the same length. For each kind the history gives how many pages are
requested again at which age. Keeping a page until age ``a`` earns the probability of a request by then, and costs a
slot until then or until the request. With a price per slot and moment there is a best ``a`` for each kind, and the
price is the one at which the kept pages just fit the tier. So a kind that is rarely requested again, or too late, is
not kept at all. Ages are in requested pages, like capacities. Estimates are those of Kaplan and Meier (1958), because a
page that has not been requested again may still be. No constant depends on a workload: half-lives and periods are in
capacities.

``Adaptive`` is ``Session`` while that hits more often than LRU, as judged by small ghost caches of both that run beside
it. A ghost cache holds keys of a sample of the pages, chosen by key, with a capacity that is smaller in proportion
(SHARDS, Waldspurger 2015), so it has the hit rate of the whole.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.policy.history import History, Record
    from tierstore.types import PageKey


class VictimQueue:
    """The evictable pages of a tier, lowest rank first. Offering is O(log n), finding the first amortized O(log n).

    Ranks are unique while offered. Withdrawn ranks stay in the heap until they surface or outnumber the live ones.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, PageKey] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[PageKey]:
        """Iterate over the keys in victim order. O(n log n)."""
        return (self._keys[rank] for rank in sorted(self._keys))

    def offer(self, rank: int, key: PageKey) -> None:
        """Make the page evictable. No effect if it already is."""
        if rank in self._keys:
            return
        self._keys[rank] = key
        heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = list(self._keys)
            heapify(self._heap)

    def withdraw(self, rank: int) -> bool:
        """Make the page not evictable. Returns whether it was."""
        return self._keys.pop(rank, None) is not None

    def shift(self, rank: int, key: PageKey, *, offered: bool) -> None:
        """Make the page evictable or not, as ``offered`` says."""
        if offered:
            self.offer(rank, key)
        else:
            self.withdraw(rank)

    def first(self) -> PageKey | None:
        """Return the next victim without removing it, or None."""
        heap, keys = self._heap, self._keys
        while heap:
            key = keys.get(heap[0])
            if key is not None:
                return key
            heappop(heap)
        return None

    def first_where(self, allowed: Callable[[PageKey], bool]) -> PageKey | None:
        """Return the first victim for which ``allowed`` is true, or None. O(n) plus O(log n) per rejected victim."""
        heap, keys = self._heap.copy(), self._keys
        while heap:
            key = keys.get(heappop(heap))
            if key is not None and allowed(key):
                return key
        return None


BAND = 1 << 120
"""Ranks of retained pages begin here, with one band per priority."""
SHIFT = 48
"""Low bits of a rank, which keep ranks unique and put tails before heads among pages of equal value."""

_LEVEL = 1 << 64
_HIGHEST = (1 << 32) - 1
"""Largest distinct priority. After a retention has ended, higher priorities count as this one."""


def band(rank: int) -> int:
    """Return the part of a retained page's rank that its priority gives; 0 for other pages."""
    return rank // BAND * BAND if rank >= BAND else 0


class Fifo:
    """First in, first out: use does not renew a rank."""

    def __init__(self) -> None:
        self._next = count()

    def enter(self, key: PageKey) -> int:
        """Return the rank of a page that enters the tier now."""
        return next(self._next)

    def touch(self, key: PageKey, rank: int) -> int:
        """Return the rank after the page was used. An unwanted page becomes ordinary, a retained one stays retained."""
        return rank if rank >= 0 else next(self._next)

    def unwanted(self) -> int:
        """Return a rank before every ordinary page, for a page that nobody will request again."""
        return next(self._next) - BAND

    def unreachable(self, key: PageKey) -> int:
        """Return a rank before all others.

        It is also before pages that became unreachable earlier, so deeper pages leave first.
        """
        return -BAND - 1 - next(self._next)

    def retained(self, priority: int = 0) -> int:
        """Return a rank after every ordinary page and after retained pages of lower priority.

        Priorities below 0 count as 0.
        """
        return next(self._next) + (1 + max(0, priority)) * BAND

    def ordinary(self, key: PageKey, rank: int) -> int:
        """Return the rank of a page whose retention ended; other ranks are unchanged."""
        return self.enter(key) if rank >= BAND else rank

    def left(self, key: PageKey, rank: int) -> None:
        """Note that the page left the tier."""


class Lru(Fifo):
    """Least recently used first."""

    def touch(self, key: PageKey, rank: int) -> int:
        return next(self._next) + band(rank)


class Priority(Lru):
    """By the priority of the last hint that retained the page, even after that hint has ended; ties are LRU."""

    def touch(self, key: PageKey, rank: int) -> int:
        return next(self._next) + max(0, rank // _LEVEL * _LEVEL)

    def retained(self, priority: int = 0) -> int:
        return super().retained(priority) + min(max(0, priority), _HIGHEST) * _LEVEL

    def ordinary(self, key: PageKey, rank: int) -> int:
        return next(self._next) + rank % BAND // _LEVEL * _LEVEL if rank >= BAND else rank


class Scored(Fifo):
    """By a value of at least 0 computed from the page's record; ties are LRU."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def enter(self, key: PageKey) -> int:
        return (self._value(key, self._history.get(key)) << SHIFT) + next(self._next)

    def touch(self, key: PageKey, rank: int) -> int:
        return self.enter(key) + band(rank)

    def _value(self, key: PageKey, record: Record | None) -> int:
        raise NotImplementedError


class Gdsf(Scored):
    """Greedy dual size frequency (Cherkasova, 1998) with pages of equal size.

    The value is uses times the cost of computing the page again, added to the value of the page that left last, so that
    old popularity fades. The cost grows with the depth: 1 for the first page of a sequence, 2 at ``doubling_depth``.
    """

    def __init__(self, history: History, doubling_depth: float) -> None:
        super().__init__(history)
        self._doubling = max(1.0, doubling_depth)
        self._inflation = 0

    def left(self, key: PageKey, rank: int) -> None:
        """Raise the floor for new pages to the value of the page that left."""
        if 0 <= rank < BAND:
            self._inflation = max(self._inflation, rank >> SHIFT)

    def _value(self, key: PageKey, record: Record | None) -> int:
        uses, depth = (1, 0) if record is None else (record.uses + 1, record.depth)
        return self._inflation + int(1024 * uses * (1 + depth / self._doubling))


_USED = 8
_SHORT, _LONG = 8, 64
"""Run lengths in pages: from ``_SHORT`` on longer than most chat turns, from ``_LONG`` on a document."""
KINDS = _USED + 3 * 3
_BUCKETS = 72
"""Bucket edges of ages, in half powers of two."""
_EDGES = [0.0, *(2 ** (i / 2) for i in range(_BUCKETS))]
_EPOCHS = 8
"""Resolution of the start times of waits, per capacity."""
_HORIZON = 32
"""Capacities after which a page counts as not requested again."""
_PERIODS = 2
"""Plans made per capacity."""
_HALF_LIFE = 64
"""Capacities after which observations count half."""
_FEW = 8

_Point = tuple[float, float, float]
"""Age, probability of a request by then, slot time used by then."""
_Curve = list[_Point]


class Returns:
    """How soon pages of one kind were requested again, as far as is known."""

    def __init__(self, pages: int) -> None:
        self.begun = 0.0
        self._epoch = max(1, pages // _EPOCHS)
        self._waiting: dict[int, int] = {}
        """Pages not requested again yet, by the time of their last request."""
        self._ended = [0.0] * _BUCKETS
        """Number of ended waits by age, whether or not the page was requested."""
        self._back = [0.0] * _BUCKETS

    def begin(self, now: int) -> None:
        """Count the start of a wait."""
        epoch = now // self._epoch
        self._waiting[epoch] = self._waiting.get(epoch, 0) + 1
        self.begun += 1

    def end(self, since: int, now: int, *, back: bool) -> None:
        """Count the end of a wait. No effect if the wait had been given up."""
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
        """Return benefit and cost of keeping a page up to each age. Only the origin if too little is known."""
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
        """Reduce the weight of observations, and give up waits beyond the horizon."""
        self.begun *= factor
        self._ended = [x * factor for x in self._ended]
        self._back = [x * factor for x in self._back]
        last = _bucket(horizon)
        for epoch in [e for e in self._waiting if (e + 1) * self._epoch < now - horizon]:
            self._ended[last] += self._waiting.pop(epoch)


class Lifetimes:
    """How long to keep a page of each kind in a tier of ``pages``. A watcher of a history."""

    def __init__(self, pages: int) -> None:
        self.pages = max(1, pages)
        self.kept = [0.0] * KINDS
        """Age up to which pages of each kind are kept, smoothed."""
        self._returns = [Returns(self.pages) for _ in range(KINDS)]
        self._span = 0.0
        self._next = self._period = max(64, self.pages // _PERIODS)

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """End a wait with a request."""
        self._returns[record.kind].end(record.last, now, back=True)

    def began(self, record: Record, now: int) -> None:
        """Begin a wait, and make a new plan once per period."""
        record.kind = kind = kind_of(record)
        self._returns[kind].begin(record.last)
        self._span += 1
        if now >= self._next:
            self._next = now + self._period
            self._plan(now)

    def forgotten(self, record: Record, now: int) -> None:
        """End a wait without a request."""
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
    """By the time until which the page is worth its slot."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history)
        self.lifetimes = Lifetimes(pages)
        history.watchers.append(self.lifetimes)

    def _value(self, key: PageKey, record: Record | None) -> int:
        return self._history.now + (0 if record is None else int(self.lifetimes.kept[record.kind]))


def kind_of(record: Record) -> int:
    """Return the kind of a page. Pages of one kind are expected to be requested again alike.

    New pages are grouped by how their run began and its length, used ones by the number of requests of their chat.
    """
    if record.uses:
        return min(record.turn + record.uses, _USED) - 1
    began = 1 if record.steps else 2 if record.branch else 0
    length = 0 if record.span < _SHORT else 1 if record.span < _LONG else 2
    return _USED + 3 * began + length


def _best_ages(curves: list[_Curve], rates: list[float], pages: int) -> list[float]:
    """Return the ages to keep at the lowest price at which the kept pages fit, by bisection of log(price)."""
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
    """Return the points of a curve that are optimal at some price: its upper convex hull."""
    hull = curve[:1]
    for point in curve[1:]:
        if point[1] <= hull[-1][1]:
            continue
        while len(hull) > 1 and not _bends(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _bends(a: _Point, b: _Point, c: _Point) -> bool:
    """Return whether a slot earns more between a and b than between b and c."""
    return (b[1] - a[1]) * (c[2] - b[2]) > (c[1] - b[1]) * (b[2] - a[2])


def _bucket(age: float) -> int:
    return 0 if age < 1 else min(_BUCKETS - 1, int(2 * log2(age)) + 1)


_GHOST_PAGES = 512
_DEEPEST = (1 << 32) - 1
_FADING = 2
"""Capacities after which a hit of a ghost cache counts half."""


class Ghost:
    """A cache of keys only, each with a value; the lowest value is evicted beyond ``pages`` keys.

    ``hits`` counts the first pages of each request, up to a missing one.
    """

    def __init__(self, pages: int) -> None:
        self.hits = 0.0
        self._request = -1
        self._whole = True
        self._pages = max(1, pages)
        self._values: dict[PageKey, int] = {}
        self._heap: list[tuple[int, PageKey]] = []

    def ask(self, page: PageKey, value: int, request: int) -> None:
        """Request a page and give it a value."""
        if request != self._request:
            self._request, self._whole = request, True
        self._whole = self._whole and page in self._values
        self.hits += self._whole
        self._values[page] = value
        heappush(self._heap, (value, page))
        while len(self._values) > self._pages:
            lowest, victim = heappop(self._heap)
            if self._values.get(victim) == lowest:
                del self._values[victim]
        if len(self._heap) > 4 * self._pages + 64:
            self._heap = sorted((value, page) for page, value in self._values.items())


class Rivals:
    """Serves a sample of the requests by both orders in ghost caches, and says which one hits more."""

    def __init__(self, session: Session, pages: int) -> None:
        self.follow_session = True
        self._session = session
        self._every = max(1, pages // _GHOST_PAGES)
        self._ghost, self._lru = Ghost(pages // self._every), Ghost(pages // self._every)
        self._next = self._period = max(64, pages // 2)
        self._fade = 0.5 ** (self._period / max(1, pages) / _FADING)

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Do nothing: the ghost caches know what they hold."""

    def forgotten(self, record: Record, now: int) -> None:
        """Do nothing: the ghost caches know what they hold."""

    def began(self, record: Record, now: int) -> None:
        """Request the page from the ghost caches."""
        if self._every == 1 or int.from_bytes(record.key[:4]) % self._every == 0:
            # All pages of a request have the same time, and tails come before heads, as in residency.
            request, place = now - record.depth, _DEEPEST - min(record.depth, _DEEPEST)
            kept = int(self._session.lifetimes.kept[record.kind])
            self._ghost.ask(record.key, ((request + kept) << 32) + place, request)
            self._lru.ask(record.key, (request << 32) + place, request)
        if now >= self._next:
            self._next = now + self._period
            self.follow_session = self._ghost.hits > self._lru.hits
            self._ghost.hits *= self._fade
            self._lru.hits *= self._fade


class Adaptive(Session):
    """``session`` or LRU, whichever would hit more often at present."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history, pages)
        self.rivals = Rivals(self, pages)
        self._followed_session = True
        self._head_start = self._longest = 0
        history.watchers.append(self.rivals)

    def _value(self, key: PageKey, record: Record | None) -> int:
        follow_session = self.rivals.follow_session
        if follow_session != self._followed_session:
            # What the other order promised counts from its last use only; otherwise old pages would outlive new ones.
            self._followed_session = follow_session
            self._head_start += self._longest
            self._longest = 0
        kept = int(self.lifetimes.kept[record.kind]) if follow_session and record is not None else 0
        if kept > self._longest:
            self._longest = kept
        return self._history.now + self._head_start + kept
