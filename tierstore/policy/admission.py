"""Which pages are worth a write to the tier below, and how many bytes may be written in a day.

``all``: every page. ``second_hit``: a page that was asked for since it was put, or that is put again while a bounded
memory of pages knows it. ``cost``: the better half of all pages, by their chance to be needed from below, learnt from
pages like them. Pure: asked at each put and hit; the budget takes the time as an argument.

A page is useless without those before it: the caller writes these too when it writes a page.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tierstore.policy.history import History, Record


class Admission(Protocol):
    """What a tier asks before it writes a page. ``gone``: how much of what may be written in a day has been, 0 to 1."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """A page that no tier holds is being put, ``again`` or for the first time: whether it is to be written."""
        ...

    def hit(self, record: Record | None, gone: float) -> bool:
        """A page that is held was asked for or put again: whether it is to be written now, if it was not."""
        ...

    def wrote(self) -> None:
        """A page was written, asked about or not."""
        ...


class All:
    """Every page."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """True."""
        return True

    def hit(self, record: Record | None, gone: float) -> bool:
        """True."""
        return True

    def wrote(self) -> None:
        """Nothing: it does not count."""


class SecondHit:
    """A page asked for once more, or put once more while it is remembered."""

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Whether the page is remembered."""
        return again

    def hit(self, record: Record | None, gone: float) -> bool:
        """True."""
        return True

    def wrote(self) -> None:
        """Nothing: it does not count."""


_SHARE = 0.48
"""What is refused is missed a little more often, and put again: so the bytes are half of those of ``all``."""
_PERIOD = 64
"""Pages put after which kinds are weighed anew."""
_HALF_LIFE = 1 << 13
"""Pages after which what was learnt of older ones counts half."""
_HORIZON = 4096
"""Pages put in which what was written too much or too little is made up for: at most as many, and a quarter."""
_FEW = 32
"""Pages that a kind is thought to be as all are."""
_LEAST = 0.25
"""Of the mean: a kind that pays more seldom is not written, however few writes there are."""
_USED, _BEGINNINGS, _SPANS = 8, 5, 10
_KINDS = _USED + _BEGINNINGS * _SPANS


class Cost:
    """The better half of what ``all`` would write. A watcher of ``history``.

    Pages are of one kind if their runs began alike and are about as long, or, once used, if their chats had made as
    many requests. Of each kind it learns how many were asked for again and found in the tier below, or gone and put
    again before they were forgotten: then a write has paid. The kinds that pay most often are written until a share of
    the pages put is used up; of the kind where that happens some runs, by lot, for half a run is worth little. Kinds
    that pay far less than the others are not written at all, nor is anything as long as no page has been needed from
    below: what memory holds is not worth a write.

    What a page costs to compute again is not weighed: deep pages are of long documents, which few come back to.
    """

    def __init__(self, history: History) -> None:
        self._paid, self._asked = [0.0] * _KINDS, [0.0] * _KINDS
        self._wished = [0.0] * _KINDS
        """Pages asked about, by kind; fading, as what they are allowed."""
        self._allowed = self._credit = 0.0
        self._put = 0
        self._lots = [1.0] * _KINDS
        """Runs of lots below this are written, by kind."""
        history.watchers.append(self)

    def put(self, record: Record | None, gone: float, *, again: bool) -> bool:
        """Whether the page is of a kind that pays."""
        allowed = _SHARE * max(0.0, 1 - gone)
        self._allowed += allowed
        self._credit += allowed
        self._put += 1
        if self._put % _PERIOD == 0:
            self._weigh()
        return record is not None and gone < 1 and self._pays(record)

    def hit(self, record: Record | None, gone: float) -> bool:
        """Whether the page is of a kind that pays; True if it is not remembered: it was asked for again at all."""
        return gone < 1 and (record is None or self._pays(record))

    def wrote(self) -> None:
        """It is one page less that may be written."""
        self._credit -= 1

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        """The next use of the page has come."""
        self._paid[_kind(record)] += below

    def began(self, record: Record, now: int) -> None:
        """The page may be asked for again, or not."""
        kind = _kind(record)
        self._asked[kind] += 1
        if self._asked[kind] > _HALF_LIFE:
            self._paid[kind] /= 2
            self._asked[kind] /= 2

    def forgotten(self, record: Record, now: int) -> None:
        """It was not asked for again: it has only been counted when it was put."""

    def _pays(self, record: Record) -> bool:
        kind = _kind(record)
        self._wished[kind] += 1
        return record.lot < self._lots[kind]

    def _weigh(self) -> None:
        """Shares out among the kinds, the best first, what may be written."""
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
    """What a tier may write in any 24 hours; ``daily_nbytes`` None: as much as it likes.

    Counted in quarters of an hour. A quarter counts whole until its last byte is a day old: the sum is never too low.
    """

    def __init__(self, daily_nbytes: int | None) -> None:
        self.daily_nbytes = daily_nbytes
        self.total = 0
        """Bytes written since the beginning."""
        self._buckets: deque[list[float]] = deque()
        self._sum = 0

    def spend(self, nbytes: int, now: float) -> None:
        """Bytes were written."""
        bucket = now // _BUCKET_S
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append([bucket, 0])
        self._buckets[-1][1] += nbytes
        self._sum += nbytes
        self.total += nbytes

    def spent(self, now: float) -> int:
        """Bytes written in the last 24 hours."""
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S <= now - DAY_S:
            self._sum -= int(self._buckets.popleft()[1])
        return self._sum

    def left(self, now: float) -> int | None:
        """Bytes that may still be written now, at least 0; None without a limit."""
        return None if self.daily_nbytes is None else max(0, self.daily_nbytes - self.spent(now))
