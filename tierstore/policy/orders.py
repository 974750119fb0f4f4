"""Eviction policies, one per tier: they decide which evictable page is evicted first.

A policy sees only ranks, keys and records. A page gets a rank, which is an integer, when it enters a tier, and
a new rank whenever it is used. The evictable page with the lowest rank is evicted first. Ranks are unique and
form four bands. Unreachable pages are evicted first, then unwanted, ordinary and retained pages. Among
retained pages, those with a higher priority are evicted later. The policy does not decide which pages are
evictable. The last copy of a reachable page with children is never evictable, so every policy evicts the last
pages of sequences first.

``VictimQueue`` contains the evictable pages by rank. ``Fifo`` ranks pages by arrival, ``Lru`` by last use,
``Priority`` by the priority of hints, and ``Gdsf`` by the number of uses and the cost of computing the page
again.

``Session`` keeps a page as long as the expected benefit exceeds the cost. It learns how long to keep pages
from how soon similar pages were requested again. Pages that were requested again are of one kind if their
chats had made the same number of requests. New pages are of one kind if their runs started in the same manner
and have about the same length. For each kind, the history shows how many pages are requested again at each age.
The benefit of keeping a page until age ``a`` is the probability of a request by then. The cost is the time for
which the page takes a slot: until age ``a``, or until the request if it comes earlier. For a given price per
slot and unit of time, each kind has an optimal ``a``. The price is chosen so that the kept pages just fit into
the tier. As a result, pages of a kind that is rarely requested again, or only after a long time, are not kept
at all. Ages are measured in requested pages, like capacities. The probabilities are estimated by the method of
Kaplan and Meier (1958), because a page that has not been requested again yet may be requested later. No
constant depends on a workload: half-lives and periods are multiples of the capacity.

``Adaptive`` behaves like ``Session`` while ``Session`` has a higher hit rate than LRU, and otherwise like LRU.
To compare them, a small ghost cache of each policy runs alongside the tier. A ghost cache contains only the
keys of a sample of the pages. The sample is chosen by key, and the capacity of the ghost cache is reduced in
proportion, so its hit rate is about that of the full cache (SHARDS, Waldspurger 2015).
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
    """The evictable pages of a tier, lowest rank first.

    Adding a page takes O(log n) time, and finding the first page amortized O(log n). No two pages have the
    same rank. Ranks that were withdrawn remain in the heap until they reach the top or outnumber the others.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, PageKey] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[PageKey]:
        """Iterate over the keys in the order of eviction. Takes O(n log n) time."""
        return (self._keys[rank] for rank in sorted(self._keys))

    def offer(self, rank: int, key: PageKey) -> None:
        """Add the page with its rank. No effect if the rank is in the queue already."""
        if rank in self._keys:
            return
        self._keys[rank] = key
        heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = list(self._keys)
            heapify(self._heap)

    def withdraw(self, rank: int) -> bool:
        """Remove the page with this rank. Return whether it was in the queue."""
        return self._keys.pop(rank, None) is not None

    def shift(self, rank: int, key: PageKey, *, offered: bool) -> None:
        """Add the page if ``offered``, else remove it."""
        if offered:
            self.offer(rank, key)
        else:
            self.withdraw(rank)

    def first(self) -> PageKey | None:
        """Return the page with the lowest rank without removing it, or None if the queue is empty."""
        heap, keys = self._heap, self._keys
        while heap:
            key = keys.get(heap[0])
            if key is not None:
                return key
            heappop(heap)
        return None

    def first_where(self, allowed: Callable[[PageKey], bool]) -> PageKey | None:
        """Return the page with the lowest rank for which ``allowed`` returns True, or None.

        Takes O(n) time, plus O(log n) per rejected page.
        """
        heap, keys = self._heap.copy(), self._keys
        while heap:
            key = keys.get(heappop(heap))
            if key is not None and allowed(key):
                return key
        return None


BAND = 1 << 120
"""The lowest rank of retained pages. The ranks of each priority form a band of this size."""
SHIFT = 48
"""Number of low bits of a rank that make the rank unique. The bits above contain the page's value.

The low bits rank pages of equal value, children before parents.
"""

_LEVEL = 1 << 64
_HIGHEST = (1 << 32) - 1
"""The highest priority that ``Priority`` still distinguishes after a retention has ended."""


def band(rank: int) -> int:
    """Return the part of a retained page's rank that encodes its priority, or 0 if the page is not retained."""
    return rank // BAND * BAND if rank >= BAND else 0


class Fifo:
    """Evicts pages in the order of their arrival. Using a page does not change its rank."""

    def __init__(self) -> None:
        self._next = count()

    def enter(self, key: PageKey) -> int:
        """Return the rank of a page that enters the tier now."""
        return next(self._next)

    def touch(self, key: PageKey, rank: int) -> int:
        """Return the rank of a page after it was used.

        An unwanted page becomes ordinary, and a retained page remains retained.
        """
        return rank if rank >= 0 else next(self._next)

    def unwanted(self) -> int:
        """Return a rank below those of all ordinary pages, for a page that is not expected to be requested again."""
        return next(self._next) - BAND

    def unreachable(self, key: PageKey) -> int:
        """Return a rank lower than that of any other page, even of one that became unreachable earlier.

        Pages of a sequence become unreachable from first to last, so the last page is evicted first.
        """
        return -BAND - 1 - next(self._next)

    def retained(self, priority: int = 0) -> int:
        """Return a rank above those of all ordinary pages and of all retained pages with lower priority.

        Negative priorities count as 0.
        """
        return next(self._next) + (1 + max(0, priority)) * BAND

    def ordinary(self, key: PageKey, rank: int) -> int:
        """Return the new rank of a page whose retention has ended. A page that was not retained keeps its rank."""
        return self.enter(key) if rank >= BAND else rank

    def left(self, key: PageKey, rank: int) -> None:
        """Record that the page was removed from the tier."""


class Lru(Fifo):
    """Evicts the least recently used page first."""

    def touch(self, key: PageKey, rank: int) -> int:
        return next(self._next) + band(rank)


class Priority(Lru):
    """Evicts the page with the lowest priority first and, among equal priorities, the least recently used page.

    The priority of a page is that of the last hint that retained it, even after that hint has ended.
    """

    def touch(self, key: PageKey, rank: int) -> int:
        return next(self._next) + max(0, rank // _LEVEL * _LEVEL)

    def retained(self, priority: int = 0) -> int:
        return super().retained(priority) + min(max(0, priority), _HIGHEST) * _LEVEL

    def ordinary(self, key: PageKey, rank: int) -> int:
        return next(self._next) + rank % BAND // _LEVEL * _LEVEL if rank >= BAND else rank


class Scored(Fifo):
    """Evicts the page with the lowest value first and, among equal values, the least recently used page.

    Subclasses compute the value, an integer of at least 0, from the page's record.
    """

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
    """Greedy dual size frequency (Cherkasova, 1998), for pages of equal size.

    The value of a page is the number of its uses times the cost of computing it again, plus the highest value
    of the pages evicted so far. Because of this addition, pages that are no longer used are evicted
    eventually. The cost increases with depth: it is 1 for the first page of a sequence, and 2 at ``doubling_depth``.
    """

    def __init__(self, history: History, doubling_depth: float) -> None:
        super().__init__(history)
        self._doubling = max(1.0, doubling_depth)
        self._inflation = 0

    def left(self, key: PageKey, rank: int) -> None:
        """Update the highest value of the pages evicted so far. It is added to new values."""
        if 0 <= rank < BAND:
            self._inflation = max(self._inflation, rank >> SHIFT)

    def _value(self, key: PageKey, record: Record | None) -> int:
        uses, depth = (1, 0) if record is None else (record.uses + 1, record.depth)
        return self._inflation + int(1024 * uses * (1 + depth / self._doubling))


_USED = 8
_SHORT, _LONG = 8, 64
"""Limits of run lengths, in pages.

Most turns of chats are shorter than ``_SHORT``. Runs of ``_LONG`` pages or more are mostly documents.
"""
KINDS = _USED + 3 * 3
_BUCKETS = 72
"""Number of buckets for ages. Their edges are powers of the square root of two."""
_EDGES = [0.0, *(2 ** (i / 2) for i in range(_BUCKETS))]
_EPOCHS = 8
"""Resolution of the start times of waits: the number of steps in a period of one capacity.

A period of one capacity lasts until as many pages have been requested as fit into the tier.
"""
_HORIZON = 32
"""Age after which a page is assumed not to be requested again, as a multiple of the tier's capacity."""
_PERIODS = 2
"""Number of plans made in a period of one capacity."""
_HALF_LIFE = 64
"""Half-life of observations, as a multiple of the tier's capacity."""
_FEW = 8

_Point = tuple[float, float, float]
"""An age, the probability of a request up to this age, and the expected time in a slot up to this age."""
_Curve = list[_Point]


class Returns:
    """Statistics on how soon the pages of one kind are requested again.

    A wait starts when a page is requested or put. It ends with the next request for the page, or when the
    history forgets the page.
    """

    def __init__(self, pages: int) -> None:
        self.begun = 0.0
        self._epoch = max(1, pages // _EPOCHS)
        self._waiting: dict[int, int] = {}
        """Number of waits that have not ended, by their start time."""
        self._ended = [0.0] * _BUCKETS
        """Number of waits that ended at each age, with or without a request."""
        self._back = [0.0] * _BUCKETS

    def begin(self, now: int) -> None:
        """Count the start of a wait."""
        epoch = now // self._epoch
        self._waiting[epoch] = self._waiting.get(epoch, 0) + 1
        self.begun += 1

    def end(self, since: int, now: int, *, back: bool) -> None:
        """Count the end of a wait that started at time ``since``. No effect if ``age`` has already ended the wait.

        ``back`` is True if the page was requested again.
        """
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
        """Return the benefit and the cost of keeping a page, for several ages in ascending order.

        If there are too few observations, the curve contains only the point (0, 0, 0).
        """
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
        """Multiply the weight of past observations by ``factor``, and end waits that have exceeded ``horizon``."""
        self.begun *= factor
        self._ended = [x * factor for x in self._ended]
        self._back = [x * factor for x in self._back]
        last = _bucket(horizon)
        for epoch in [e for e in self._waiting if (e + 1) * self._epoch < now - horizon]:
            self._ended[last] += self._waiting.pop(epoch)


class Lifetimes:
    """Learns from a history how long to keep pages of each kind in a tier of ``pages`` pages."""

    def __init__(self, pages: int) -> None:
        self.pages = max(1, pages)
        self.kept = [0.0] * KINDS
        """Age up to which pages of each kind are kept, as a moving average."""
        self._returns = [Returns(self.pages) for _ in range(KINDS)]
        self._span = 0.0
        self._next = self._period = max(64, self.pages // _PERIODS)

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Count a wait that ended with a request."""
        self._returns[record.kind].end(record.last, now, back=True)

    def began(self, record: Record, now: int) -> None:
        """Start the wait for the page's next request. Once per period, update the ages up to which pages are kept."""
        record.kind = kind = kind_of(record)
        self._returns[kind].begin(record.last)
        self._span += 1
        if now >= self._next:
            self._next = now + self._period
            self._plan(now)

    def forgotten(self, record: Record, now: int) -> None:
        """Count a wait that ended without a request."""
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
    """Evicts the page that expires first. A page expires when it is no longer expected to be worth its slot."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history)
        self.lifetimes = Lifetimes(pages)
        history.watchers.append(self.lifetimes)

    def _value(self, key: PageKey, record: Record | None) -> int:
        return self._history.now + (0 if record is None else int(self.lifetimes.kept[record.kind]))


def kind_of(record: Record) -> int:
    """Return the kind of a page. Pages of one kind are expected to be requested again equally soon.

    The kind of a new page depends on the start and the length of its run. The kind of a page that was requested
    again depends on the number of requests of its chat.
    """
    if record.uses:
        return min(record.turn + record.uses, _USED) - 1
    began = 1 if record.steps else 2 if record.branch else 0
    length = 0 if record.span < _SHORT else 1 if record.span < _LONG else 2
    return _USED + 3 * began + length


def _best_ages(curves: list[_Curve], rates: list[float], pages: int) -> list[float]:
    """Return, for each kind, the age up to which to keep its pages, so that the kept pages just fit.

    The ages are optimal for the lowest price (per slot and unit of time) at which ``pages`` slots suffice.
    That price is found by bisection of its logarithm.
    """
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
    """Return those points of a curve that are optimal at some price. They form its upper convex hull."""
    hull = curve[:1]
    for point in curve[1:]:
        if point[1] <= hull[-1][1]:
            continue
        while len(hull) > 1 and not _bends(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _bends(a: _Point, b: _Point, c: _Point) -> bool:
    """Return whether the benefit per time in a slot is higher from a to b than from b to c."""
    return (b[1] - a[1]) * (c[2] - b[2]) > (c[1] - b[1]) * (b[2] - a[2])


def _bucket(age: float) -> int:
    return 0 if age < 1 else min(_BUCKETS - 1, int(2 * log2(age)) + 1)


_GHOST_PAGES = 512
_DEEPEST = (1 << 32) - 1
_FADING = 2
"""Half-life of the hits of a ghost cache, as a multiple of the tier's capacity."""


class Ghost:
    """A cache of up to ``pages`` keys, each with a value. The key with the lowest value is evicted first.

    ``hits`` counts the pages in the cached prefix of each request.
    """

    def __init__(self, pages: int) -> None:
        self.hits = 0.0
        self._request = -1
        self._whole = True
        self._pages = max(1, pages)
        self._values: dict[PageKey, int] = {}
        self._heap: list[tuple[int, PageKey]] = []

    def ask(self, page: PageKey, value: int, request: int) -> None:
        """Request a page and set its value. ``request`` identifies the request that the page belongs to."""
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
    """Compares the hit rates of ``Session`` and ``Lru``, in ghost caches that get a sample of the requests."""

    def __init__(self, session: Session, pages: int) -> None:
        self.follow_session = True
        self._session = session
        self._every = max(1, pages // _GHOST_PAGES)
        self._ghost, self._lru = Ghost(pages // self._every), Ghost(pages // self._every)
        self._next = self._period = max(64, pages // 2)
        self._fade = 0.5 ** (self._period / max(1, pages) / _FADING)

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Do nothing, because ``began`` handles every request."""

    def forgotten(self, record: Record, now: int) -> None:
        """Do nothing, because the ghost caches track their contents themselves."""

    def began(self, record: Record, now: int) -> None:
        """Request the page from both ghost caches, and compare their hits once per period."""
        if self._every == 1 or int.from_bytes(record.key[:4]) % self._every == 0:
            # All pages of a request get the same time. Among them, children are evicted before parents, as in
            # the tier.
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
    """Behaves like ``Session`` or like ``Lru``, whichever has the higher hit rate at present."""

    def __init__(self, history: History, pages: int) -> None:
        super().__init__(history, pages)
        self.rivals = Rivals(self, pages)
        self._followed_session = True
        self._head_start = self._longest = 0
        history.watchers.append(self.rivals)

    def _value(self, key: PageKey, record: Record | None) -> int:
        follow_session = self.rivals.follow_session
        if follow_session != self._followed_session:
            # After a change of policy, new values must exceed all values given before. Otherwise old pages
            # would outlive new ones.
            self._followed_session = follow_session
            self._head_start += self._longest
            self._longest = 0
        kept = int(self.lifetimes.kept[record.kind]) if follow_session and record is not None else 0
        if kept > self._longest:
            self._longest = kept
        return self._history.now + self._head_start + kept
