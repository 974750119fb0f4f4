"""Acks of submitted transfers, which the I/O threads queue for the thread that polls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tierstore.types import Ack, Failure, Transfer

Outcome = int | Failure
"""Result for one page: its size at the destination in bytes, or why it failed."""


class Job:
    """One transfer and the state of its pages.

    Not thread-safe: protected by the lock of the queue it is in.

    Pages that take too long can be reported in a second ack, so the first ack does not have to wait for them.
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
        """Add ``seconds`` to the time that the I/O threads have spent on this transfer.

        Transfers in progress at the same time share the elapsed time. Time in the queue is not counted,
        because it says nothing about the disk's throughput.
        """
        self._spent += seconds

    def done(self, index: int, outcome: Outcome) -> bool:
        """Record the result of page ``index``. Return whether an ack is due."""
        self._outcomes[index] = outcome
        if index in self._late and not self._acked:
            self._late.remove(index)  # marked as late, but finished before the first ack
            return False
        self._left -= 1
        return self._left == 0

    def late(self, index: int) -> bool:
        """Mark page ``index``, which is still in progress, as late. The first ack does not wait for it.

        Return whether the first ack is due.
        """
        self._late.append(index)
        self._left -= 1
        return self._left == 0

    def ack(self) -> Ack:
        """Return the ack that is due. Call this once whenever ``done`` or ``late`` has returned True.

        The first ack covers all pages that are not late, the second the late pages.
        """
        late = sorted(self._late)
        places: Sequence[int]
        seconds = 0.0
        if self._acked:  # the late pages; their duration says nothing about the disk's throughput
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
    """A clock that divides elapsed time equally among the work items in progress.

    The shares of concurrent items add up to the time during which at least one item was in progress. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._number = 0
        self._at = 0.0
        self._each = 0.0
        """Share, in seconds, of an item that has been in progress since the clock was created."""

    def begin(self, now: float) -> float:
        """Register a work item as started. Return the value that ``end`` needs as ``begun``."""
        self._advance(now)
        self._number += 1
        return self._each

    def end(self, begun: float, now: float) -> float:
        """Register a work item as finished, and return its share of the elapsed time in seconds."""
        self._advance(now)
        self._number -= 1
        return self._each - begun

    def _advance(self, now: float) -> None:
        """Advance the clock to ``now``, unless another thread has already advanced it further."""
        if self._number and now > self._at:
            self._each += (now - self._at) / self._number
        self._at = max(self._at, now)


class Outbox:
    """Queue of acks that have not been polled yet, and the counters of the I/O threads. Thread-safe."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._acks: list[Ack] = []
        self._counts: Counter[str] = Counter()

    def add(self, ack: Ack) -> None:
        """Queue ``ack``, then call the ``wake`` callback with no lock held. Only I/O threads may call this."""
        self.add_quietly(ack)
        self._wake()

    def wake(self) -> None:
        """Call the ``wake`` callback for acks that ``add_quietly`` queued.

        Only I/O threads may call this, with no lock held.
        """
        self._wake()

    def add_quietly(self, ack: Ack) -> None:
        """Queue ``ack`` without calling the ``wake`` callback.

        An I/O thread uses this while it holds a lock, and calls ``wake`` after releasing the lock. ``submit_*`` uses
        this because the caller of ``submit_*`` may hold a lock that the callback takes.
        """
        with self._lock:
            self._acks.append(ack)

    def take(self) -> list[Ack]:
        """Remove and return all queued acks, oldest first."""
        with self._lock:
            acks, self._acks = self._acks, []
            return acks

    def count(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``name``."""
        with self._lock:
            self._counts[name] += amount

    def counts(self) -> dict[str, int]:
        """Return a copy of the counters. A counter that was never used is missing from it."""
        with self._lock:
            return dict(self._counts)


def failed(transfer: Transfer, failure: Failure) -> Ack:
    """Return the ack of a transfer in which every page failed with ``failure``."""
    failures = tuple((index, failure) for index in range(len(transfer.keys)))
    return Ack(transfer_id=transfer.id, ok=not failures, num_ready=0, nbytes=0, failures=failures)
