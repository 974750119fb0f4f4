"""What became of submitted transfers, on its way from the I/O threads to whoever polls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tierstore.types import Ack, Failure, Transfer

Outcome = int | Failure
"""Of a page: the bytes that it takes where it arrived, or why it did not."""


class Job:
    """One transfer and its pages while it is worked on. Not thread-safe: its room's lock guards it.

    Pages that take too long may be left to an ack of their own, so that nobody waits for them.
    """

    __slots__ = ("_acked", "_late", "_left", "_outcomes", "_spent", "next", "pages", "transfer")

    def __init__(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        self.transfer = transfer
        self.pages = pages
        self.next = 0
        self._left = len(transfer.keys)
        self._late: list[int] = []
        self._acked = False
        self._outcomes: list[Outcome] = [0] * self._left
        self._spent = 0.0

    def spent(self, seconds: float) -> None:
        """Its share of the time in which pages were worked on, its own and others' at once.

        Not the time that it waited behind others, which says nothing of the disk's rate.
        """
        self._spent += seconds

    def done(self, index: int, outcome: Outcome) -> bool:
        """Note what became of page ``index``; whether an ack is due."""
        self._outcomes[index] = outcome
        if index in self._late and not self._acked:
            self._late.remove(index)  # late, but before the others
            return False
        self._left -= 1
        return self._left == 0

    def late(self, index: int) -> bool:
        """Page ``index`` is still worked on, and nobody is to wait for it; whether an ack is due: of the others."""
        self._late.append(index)
        self._left -= 1
        return self._left == 0

    def ack(self) -> Ack:
        """The ack that is due: of all pages but the late ones, or then of these."""
        late = sorted(self._late)
        places: Sequence[int]
        seconds = 0.0
        if (
            self._acked
        ):  # the late pages, which are the transfer now; how long they took tells nothing of the disk's rate
            pages, places, late = late, range(len(late)), []
        else:
            seconds = self._spent
            pages = places = [index for index in range(len(self._outcomes)) if index not in late]
        self._acked, self._left = True, len(late)
        outcomes = [self._outcomes[index] for index in pages]
        sizes = tuple(outcome for outcome in outcomes if isinstance(outcome, int))
        ended = zip(places, outcomes, strict=True)
        failures = [(place, outcome) for place, outcome in ended if isinstance(outcome, Failure)]
        return Ack(
            transfer_id=self.transfer.id,
            ok=not failures and not late,
            num_ready=len(sizes),
            nbytes=sum(sizes),
            seconds=seconds,
            failures=tuple(failures),
            sizes=sizes if len(set(sizes)) > 1 else (),
            late=tuple(late),
        )


class Shares:
    """The time in which anything is worked on, each moment of it shared among all that is worked on then.

    So what is done side by side takes no longer together than the clock says. Not thread-safe.
    """

    def __init__(self) -> None:
        self._number = 0
        self._at = 0.0
        self._each = 0.0
        """What one that was worked on ever since would have by now."""

    def begin(self, now: float) -> float:
        """One more is worked on; for its ``end``."""
        self._advance(now)
        self._number += 1
        return self._each

    def end(self, begun: float, now: float) -> float:
        """It is worked on no more; its share, in seconds."""
        self._advance(now)
        self._number -= 1
        return self._each - begun

    def _advance(self, now: float) -> None:
        """A thread may come with a time from before another's."""
        if self._number and now > self._at:
            self._each += (now - self._at) / self._number
        self._at = max(self._at, now)


class Outbox:
    """Acks nobody has polled yet, and the counters of the I/O threads. Any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._acks: list[Ack] = []
        self._counts: Counter[str] = Counter()

    def add(self, ack: Ack) -> None:
        """Queue ``ack``, then call ``wake`` with no lock held. I/O threads only."""
        self.add_quietly(ack)
        self._wake()

    def wake(self) -> None:
        """Say that acks were queued quietly. I/O threads only, with no lock held."""
        self._wake()

    def add_quietly(self, ack: Ack) -> None:
        """Queue ``ack`` with a lock held, or from a submitting thread, which may hold one that ``wake`` takes."""
        with self._lock:
            self._acks.append(ack)

    def take(self) -> list[Ack]:
        """All acks since the last call, oldest first."""
        with self._lock:
            acks, self._acks = self._acks, []
            return acks

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += amount

    def counts(self) -> dict[str, int]:
        """A copy of the counters; a missing one reads as absent."""
        with self._lock:
            return dict(self._counts)


def failed(transfer: Transfer, failure: Failure) -> Ack:
    """The ack of a transfer of which no page arrived."""
    failures = tuple((index, failure) for index in range(len(transfer.keys)))
    return Ack(transfer_id=transfer.id, ok=not failures, num_ready=0, nbytes=0, failures=failures)
