"""Admission: which pages are worth writing to the tier below, and how many bytes may be written per day.

``all`` admits every page. ``second_hit`` admits a page that was requested after it was put, or that is put again while
a bounded memory still knows it. ``cost`` admits the better half of all pages, by their chance of being needed from
below, learnt from similar pages. Policies are pure: they are asked at each put and hit, and the budget takes the time
as an argument.

A page is useless without the pages before it; the caller writes those, too, when it writes a page.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.policy.history import History, Record


class Admission(Protocol):
    """An admission policy, asked before a page is written.

    ``gone``: used fraction of the daily write budget, 0 to 1.
    """

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return whether to write a page that no tier holds and that is being put, ``again`` or for the first time."""
        ...

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return whether to write a page that is held and was requested or put again, if it was not written yet."""
        ...

    def wrote(self) -> None:
        """Count a page that was written, whether this policy chose it or not."""
        ...


class All:
    """Admits every page."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return True."""
        return True

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return True."""
        return True

    def wrote(self) -> None:
        """Do nothing: writes are not counted."""


class SecondHit:
    """Admits a page that is requested a second time, or put a second time while it is remembered."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return whether the page is remembered."""
        return again

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return True."""
        return True

    def wrote(self) -> None:
        """Do nothing: writes are not counted."""


_SHARE = 0.48
"""Share of the pages put that is written: half the bytes of ``all``, because refused pages are put again more often."""
_PERIOD = 64
"""Number of puts after which the kinds are weighed again."""
_HALF_LIFE = 1 << 13
"""Number of pages after which older observations count half."""
_HORIZON = 4096
"""Number of puts within which excess or missing writes are compensated, by at most a quarter."""
_FEW = 32
"""Weight, in pages, of the assumption that a kind is average."""
_LEAST = 0.25
"""Fraction of the mean benefit below which a kind is not written at all, however few writes there are."""
_USED, _BEGINNINGS, _SPANS = 8, 5, 10
_KINDS = _USED + _BEGINNINGS * _SPANS


class Cost:
    """Admits the better half of what ``all`` would write. A watcher of ``history``.

    Pages that were used are of one kind if their chats had made equally many requests; new ones if their runs began
    alike and have about the same length. For each kind it learns how many pages were requested again and found in the
    tier below, or were gone and put again before they were forgotten: for these a write has paid. The kinds that pay
    most often are written until a share of the pages put is used up. At the limit, some runs of a kind are chosen by
    lot, because half a run is worth little. Kinds that pay far less than the others are not written at all, and nothing
    is until a page has been needed from below: what memory holds is not worth a write.

    The cost of computing a page again is not considered: deep pages belong to long documents, which are rarely
    requested again.
    """

    def __init__(self, history: History) -> None:
        self._paid, self._asked = [0.0] * _KINDS, [0.0] * _KINDS
        self._wished = [0.0] * _KINDS
        """Pages that the policy was asked about, by kind, decaying like the allowance."""
        self._allowed = self._credit = 0.0
        self._put = 0
        self._lots = [1.0] * _KINDS
        """Runs whose lot is below this are written, by kind."""
        history.watchers.append(self)

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Return whether the page is of a kind whose writes pay."""
        allowed = _SHARE * max(0.0, 1 - gone)
        self._allowed += allowed
        self._credit += allowed
        self._put += 1
        if self._put % _PERIOD == 0:
            self._weigh()
        return record is not None and gone < 1 and self._pays(record)

    def hit(self, record: Record | None, gone: float) -> bool:
        """Return whether the page is of a kind whose writes pay.

        True if it is not remembered, because it was requested again.
        """
        return gone < 1 and (record is None or self._pays(record))

    def wrote(self) -> None:
        """Count a written page against the allowance."""
        self._credit -= 1

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """Count a request of a remembered page."""
        self._paid[_kind(record)] += below

    def began(self, record: Record, now: int) -> None:
        """Count a page that may be requested again."""
        kind = _kind(record)
        self._asked[kind] += 1
        if self._asked[kind] > _HALF_LIFE:
            self._paid[kind] /= 2
            self._asked[kind] /= 2

    def forgotten(self, record: Record, now: int) -> None:
        """Do nothing: a page that was not requested again was counted when it was put."""

    def _pays(self, record: Record) -> bool:
        kind = _kind(record)
        self._wished[kind] += 1
        return record.lot < self._lots[kind]

    def _weigh(self) -> None:
        """Distribute the allowance among the kinds, best first."""
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
    """The bytes that a tier may write within any 24 hours. ``daily_nbytes`` None: unlimited.

    Bytes are counted per quarter of an hour. A quarter counts fully until its last byte is a day old, so the sum is
    never too low.
    """

    def __init__(self, daily_nbytes: int | None) -> None:
        self.daily_nbytes = daily_nbytes
        self.total = 0
        """Bytes written since the store was opened."""
        self._buckets: deque[list[float]] = deque()
        self._sum = 0

    def spend(self, nbytes: int, now: float) -> None:
        """Count bytes that were written."""
        bucket = now // _BUCKET_S
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append([bucket, 0])
        self._buckets[-1][1] += nbytes
        self._sum += nbytes
        self.total += nbytes

    def spent(self, now: float) -> int:
        """Return the bytes written within the last 24 hours."""
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S <= now - DAY_S:
            self._sum -= int(self._buckets.popleft()[1])
        return self._sum

    def left(self, now: float) -> int | None:
        """Return the bytes that may still be written now, at least 0; None without a limit."""
        return None if self.daily_nbytes is None else max(0, self.daily_nbytes - self.spent(now))
