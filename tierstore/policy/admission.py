"""Admission policies: decide which pages are worth writing to disk, within a daily write budget.

``all`` admits every page. ``second_hit`` admits a page that is requested after it was put, or that is put
again while a bounded history still contains it. ``cost`` admits the half of all pages that is most likely to
be needed from disk, judged by the past use of similar pages. A policy is asked at each put and hit. It reads no
clock; the budget gets the time as an argument.

A page on disk is useless without the pages before it. The caller of a policy writes those as well.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.policy.history import History, Record


class Admission(Protocol):
    """An admission policy: decides whether to write a page to disk.

    In its methods, ``record`` is the page's record in the history, or None if the history does not remember
    the page. ``gone`` is the fraction of the daily write budget that is used, 0 to 1.
    """

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return whether to write a page that is being put and was in no tier.

        ``again`` is True if the history remembers the page, which means that it was put before.
        """
        ...

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return whether to write a page that was refused before, and is now requested or put again."""
        ...

    def wrote(self) -> None:
        """Count a page that was written, whether or not this policy admitted it."""
        ...


class All:
    """Policy ``all``: admits every page."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return True."""
        return True

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return True."""
        return True

    def wrote(self) -> None:
        """Do nothing, because this policy does not count writes."""


class SecondHit:
    """Policy ``second_hit``: admits a page that is requested, or put again while the history remembers it."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return ``again``: whether the page was put before and is remembered."""
        return again

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return True."""
        return True

    def wrote(self) -> None:
        """Do nothing, because this policy does not count writes."""


_SHARE = 0.48
"""Fraction of put pages that may be written.

As a result, half as many bytes are written as with ``all``. The fraction is less than 0.5 because refused pages
are put again more often.
"""
_PERIOD = 64
"""Number of puts after which the kinds of pages are compared again."""
_HALF_LIFE = 1 << 13
"""Half-life of observations, in put pages."""
_HORIZON = 4096
"""Number of puts over which too many or too few writes are compensated.

Missing writes are compensated only up to a quarter of this number.
"""
_FEW = 32
"""Weight, in pages, of the initial assumption that a kind of pages pays off as often as the average."""
_LEAST = 0.25
"""Kinds that pay off less often than this fraction of the mean are never written."""
_USED, _BEGINNINGS, _SPANS = 8, 5, 10
_KINDS = _USED + _BEGINNINGS * _SPANS


class Cost:
    """Policy ``cost``: admits the more useful half of the pages that ``all`` would write.

    It learns from a history. Pages are grouped into kinds. The kind of a page that was requested again depends
    on the number of requests that its chat has made. The kind of a new page depends on how its run started and
    on the run's approximate length. For each kind, the policy learns how often a write pays off. A write pays off
    if the page is requested again and is only on disk, or if the page was evicted and is put again while the
    history remembers it.

    The kinds that pay off most often are written, until a fixed fraction of the puts is used up. If the
    next kind does not fit completely, whole runs of it are selected at random, because half a run is of little
    use. Kinds that pay off much less often than the average are never written. Nothing is written before the
    first page has been needed from disk: while all requested pages are in memory, writes do not pay off.

    The cost of computing a page again is not considered. The last pages of a long sequence cost the most, but
    they belong to long documents, which are rarely requested again.
    """

    def __init__(self, history: History) -> None:
        self._paid, self._asked = [0.0] * _KINDS, [0.0] * _KINDS
        self._wished = [0.0] * _KINDS
        """Number of pages of each kind that the policy was asked about. Older pages count less."""
        self._allowed = self._credit = 0.0
        self._put = 0
        self._lots = [1.0] * _KINDS
        """For each kind, a run is written if its ``lot`` is below this value."""
        history.watchers.append(self)

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return whether to write the page. The decision depends on the page's kind."""
        allowed = _SHARE * max(0.0, 1 - gone)
        self._allowed += allowed
        self._credit += allowed
        self._put += 1
        if self._put % _PERIOD == 0:
            self._weigh()
        return record is not None and gone < 1 and self._pays(record)

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return whether to write the page. The decision depends on the page's kind.

        A page that the history does not remember is written, because it was requested again.
        """
        return gone < 1 and (record is None or self._pays(record))

    def wrote(self) -> None:
        """Subtract one page from the number of pages that may be written."""
        self._credit -= 1

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Count a request for a remembered page. If ``below``, the request shows that writing such a page pays off."""
        self._paid[_kind(record)] += below

    def began(self, record: Record, now: int) -> None:
        """Count a page that may be requested again."""
        kind = _kind(record)
        self._asked[kind] += 1
        if self._asked[kind] > _HALF_LIFE:
            self._paid[kind] /= 2
            self._asked[kind] /= 2

    def forgotten(self, record: Record, now: int) -> None:
        """Do nothing, because ``began`` has already counted the page."""

    def _pays(self, record: Record) -> bool:
        kind = _kind(record)
        self._wished[kind] += 1
        return record.lot < self._lots[kind]

    def _weigh(self) -> None:
        """Decide which runs of each kind are written, starting with the kind that pays off most often."""
        self._credit = max(-_HORIZON, min(_HORIZON / 4, self._credit))
        left = self._allowed * max(0.0, 1 + self._credit / (_SHARE * _HORIZON))
        mean = sum(self._paid) / max(1.0, sum(self._asked))
        worth = [(p + _FEW * mean) / (n + _FEW) for p, n in zip(self._paid, self._asked, strict=True)]
        for kind in sorted(range(_KINDS), key=worth.__getitem__, reverse=True):
            wished = self._wished[kind]
            worthless = worth[kind] <= _LEAST * mean
            self._lots[kind] = 0.0 if worthless else 1.0 if wished <= left else left / wished
            left = max(0.0, left - wished)
        fade = 0.5 ** (_PERIOD / _HALF_LIFE)
        self._allowed *= fade
        self._wished = [wished * fade for wished in self._wished]


def _kind(record: Record) -> int:
    if record.uses:
        return min(record.uses + record.turn, _USED) - 1
    began = 4 if record.branch else min(record.steps, 3)
    return _USED + began * _SPANS + min(record.span.bit_length(), _SPANS - 1)


DAY_S = 86_400.0
_BUCKET_S = 900.0


class WriteBudget:
    """A limit on the bytes that are written to a tier within 24 hours.

    If ``daily_nbytes`` is None, there is no limit. Bytes are counted in intervals of 15 minutes, and an interval
    counts in full until 24 hours after its end. The sum may therefore be too high, but is never too low.
    """

    def __init__(self, daily_nbytes: int | None) -> None:
        self.daily_nbytes = daily_nbytes
        self.total = 0
        """Number of bytes written since the store was opened."""
        self._buckets: deque[list[float]] = deque()
        self._sum = 0

    def spend(self, nbytes: int, now: float) -> None:
        """Count bytes that were written at the monotonic time ``now``, in seconds."""
        bucket = now // _BUCKET_S
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append([bucket, 0])
        self._buckets[-1][1] += nbytes
        self._sum += nbytes
        self.total += nbytes

    def spent(self, now: float) -> int:
        """Return the number of bytes written within the last 24 hours."""
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S <= now - DAY_S:
            self._sum -= int(self._buckets.popleft()[1])
        return self._sum

    def left(self, now: float) -> int | None:
        """Return how many more bytes may be written now, or None if there is no limit."""
        return None if self.daily_nbytes is None else max(0, self.daily_nbytes - self.spent(now))
