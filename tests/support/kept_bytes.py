"""The smallest possible tier of records: a dictionary in memory, whose contents are lost when it is closed.

It implements everything that a new tier must implement. The directory knows only its ``DESCRIPTION``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from tierstore.mover import RecordTier, SyncMark
from tierstore.types import Ack, Failure, PageKey, TierDescription, Transfer

DESCRIPTION = TierDescription("records")


@dataclass
class Mark:
    """A sync mark that is reached immediately, because the dictionary has no queue."""

    done: Event
    synced: bool = True
    ok: bool = True


class KeptBytes(RecordTier):
    """A tier for ``pages`` pages of ``page_nbytes`` bytes. It calls ``wake`` when ``poll`` has an ack to return."""

    def __init__(self, pages: int, page_nbytes: int, wake: Callable[[], None] = lambda: None) -> None:
        self.record_nbytes = page_nbytes + 64
        self.budget_nbytes = pages * self.record_nbytes
        self.kept: dict[PageKey, bytes] = {}
        self.refuses = False
        """Whether writes fail, as on a disk that was removed."""
        self._wake = wake
        self._acks: list[Ack] = []
        self._lock = Lock()
        self._changes = 0

    def records(self) -> Iterable[tuple[PageKey, PageKey | None, int]]:
        """Return nothing, because the dictionary is empty at first."""
        return ()

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        if self.refuses:
            self._end(transfer, [(i, Failure.IO_ERROR) for i in range(len(pages))], self.record_nbytes)
            return
        self.kept |= {key: page.tobytes() for key, page in zip(transfer.keys, pages, strict=True)}
        self._changes += 1
        assert len(self.kept) * self.record_nbytes <= self.budget_nbytes, (
            "the tier was given more pages than its budget allows"
        )
        self._end(transfer, [], self.record_nbytes)

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        failures = []
        for i, (key, page) in enumerate(zip(transfer.keys, out, strict=True)):
            if key in self.kept:
                page[:] = np.frombuffer(self.kept[key], dtype=np.uint8)
            else:
                failures.append((i, Failure.NOT_FOUND))
        self._end(transfer, failures, self.record_nbytes - 64)

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def poll(self) -> list[Ack]:
        with self._lock:
            acks, self._acks = self._acks, []
        return acks

    def sync(self, timeout_s: float) -> bool:
        return True

    def begin_sync(self) -> SyncMark:
        mark = Mark(Event())
        mark.done.set()
        return mark

    def give_up_waiting(self) -> None:
        """Do nothing, because no call ever waits."""

    @property
    def pending_erases(self) -> int:
        return 0

    @property
    def progress(self) -> object:
        return self._changes

    def close(self, timeout_s: float) -> bool:
        self.kept.clear()
        return True

    def _end(self, transfer: Transfer, failures: list[tuple[int, Failure]], nbytes: int) -> None:
        arrived = len(transfer.keys) - len(failures)
        ack = Ack(
            transfer.id, not failures, arrived, arrived * nbytes, seconds=1e-6, failures=tuple(failures)
        )
        with self._lock:
            self._acks.append(ack)
        self._wake()
