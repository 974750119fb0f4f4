"""Chunks of an engine's host memory on the NVMe tier: bounded, checked, and found again after a restart.

For engines that have a host tier of their own and allow another tier below it. A chunk is one row of the
engine's memory; its content is not interpreted. The least recently used chunks are evicted first. Of chunks
used together, the later ones are evicted first, because a chunk is useless without those before it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Event
from typing import TYPE_CHECKING

from tierstore.errors import TierStoreError
from tierstore.keys import KEY_NBYTES
from tierstore.types import Failure, PageKey, Tier, Transfer, seconds_to_wait

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.nvme.tier import NvmeTier
    from tierstore.types import Ack

_KEPT = frozenset({Failure.UNAVAILABLE, Failure.CLOSED})
"""Failures after which the chunk's record is still valid, because it was not read."""

_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job.

    Attributes:
        arrived: Keys whose chunks reached their destination, in the job's order.
        complete: Whether all chunks of the job did.
        seconds: Time from the submission of the job to its end.
        nbytes: Size of the arrived chunks in the engine's memory.
    """

    job: int
    is_load: bool
    arrived: tuple[bytes, ...]
    complete: bool
    seconds: float
    nbytes: int


@dataclass(slots=True)
class _Job:
    job: int
    is_load: bool
    keys: list[bytes]
    began: float
    moving: list[bytes] = field(default_factory=list)
    lost: set[bytes] = field(default_factory=set)


class Chunks:
    """The index of the chunks on disk, and the jobs in flight.

    Not thread-safe: one call at a time, from any thread. Only ``drain`` and ``close`` block.
    """

    def __init__(self, tier: NvmeTier, memory: NDArray[np.uint8], woken: Event) -> None:
        """Take over the tier and list the chunks that it holds.

        Args:
            tier: The tier, owned by this object from now on.
            memory: The engine's memory, ``[chunks, bytes]``, which must stay valid until ``close``.
            woken: The event that the tier was opened to set.
        """
        self._tier = tier
        self._memory = memory
        self._woken = woken
        self._held: OrderedDict[PageKey, int] = OrderedDict()
        for key, _, nbytes in tier.records():
            self._held[key] = nbytes
        self._used = sum(self._held.values())
        self._writing: set[PageKey] = set()
        self._reading: Counter[PageKey] = Counter()
        self._jobs: dict[int, _Job] = {}
        self._done: list[Done] = []
        self._removed: list[PageKey] = []
        self._counts: Counter[str] = Counter()
        self._last_id = 0
        self._probed = 0.0

    def holds(self, key: bytes) -> bool:
        """Return whether a load of this chunk would be tried. O(1).

        While the disk hangs or fails, at most one call per half second returns True, so that a recovery is
        noticed.
        """
        if _page_key(key) not in self._held:
            return False
        if self._tier.state != "absent":
            return True
        now = time.monotonic()
        if now - self._probed < _PROBE_S:
            return False
        self._probed = now
        return True

    def used(self, keys: Sequence[bytes]) -> None:
        """Mark these chunks as used. They belong to one request and are in its order."""
        for key in reversed(list(keys)):
            if (mine := _page_key(key)) in self._held:
                self._held.move_to_end(mine)

    def store(self, job: int, keys: Iterable[bytes], places: Iterable[int]) -> None:
        """Write rows ``places`` under ``keys``. The rows must not change until the job is done.

        Chunks that are on disk or being written are not written again. The least recently used chunks are
        evicted to make space. Chunks for which there is still no space are left out, and the job ends as not
        complete.
        """
        found = _Job(job, False, list(keys), time.monotonic())
        wanted = [(key, place) for key, place in zip(found.keys, places, strict=True) if self._is_new(key)]
        rows = []
        for key, place in wanted:
            if self._make_room():
                self._writing.add(_page_key(key))
                found.moving.append(key)
                rows.append(self._memory[int(place)])
            else:
                found.lost.add(key)
                self._counts["no_room"] += 1
        if not found.moving:
            self._end(found)
            return
        self._tier.submit_write(self._transfer(found, Tier.HOST, self._tier.tier), rows)

    def load(self, job: int, keys: Iterable[bytes], places: Iterable[int]) -> None:
        """Fill rows ``places`` with the chunks of ``keys``. The rows are undefined until the job is done."""
        found = _Job(job, True, list(keys), time.monotonic())
        rows = [self._memory[int(place)] for place in places]
        found.moving = list(found.keys)
        if not found.moving:
            self._end(found)
            return
        self._reading.update(_page_key(key) for key in found.moving)
        self._tier.submit_read(self._transfer(found, self._tier.tier, Tier.HOST), rows)

    def finished(self) -> list[Done]:
        """Return the jobs that ended since the last call. Nothing accesses their rows any more.

        A load whose read hangs ends only when the disk answers, because until then the disk may write to its
        row.
        """
        for ack in self._tier.poll():
            self._take(ack)
        done, self._done = self._done, []
        return done

    def drain(self) -> None:
        """Wait until every job has ended; ``finished`` returns them afterwards."""
        while True:
            self._woken.clear()
            for ack in self._tier.poll():
                self._take(ack)
            if not self._jobs:
                return
            self._woken.wait()

    def removed(self) -> list[PageKey]:
        """Return the tier's keys of chunks that were removed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def close(self, timeout_s: float) -> None:
        """Finish writes in flight, and release the directory and the engine's memory.

        Raises:
            TierStoreError: The disk does not answer in time. A thread may still use the memory.
        """
        if not self._tier.close(seconds_to_wait("timeout_s", timeout_s)):
            raise TierStoreError(f"the disk did not answer within {timeout_s} s: its memory is still in use")
        for ack in self._tier.poll():
            self._take(ack)
        self._memory = self._memory[:0].copy()

    def stats(self) -> dict[str, object]:
        """Return the tier's ``stats`` with ``chunks``, ``used_nbytes``, ``under_way`` and counters added."""
        mine = {"chunks": len(self._held), "used_nbytes": self._used, "under_way": len(self._jobs)}
        return {
            **self._tier.stats(),
            **mine,
            "evicted": self._counts["evicted"],
            "no_room": self._counts["no_room"],
        }

    def _is_new(self, key: bytes) -> bool:
        return (mine := _page_key(key)) not in self._held and mine not in self._writing

    def _make_room(self) -> bool:
        """Evict chunks to make space for one more record. False if too many chunks are being read."""
        cost = self._tier.record_nbytes
        limit = self._tier.budget_nbytes - (len(self._writing) + 1) * cost
        if self._used <= limit:
            return True
        victims = []
        freed = 0
        for key, nbytes in self._held.items():
            if key in self._reading:
                continue
            victims.append(key)
            freed += nbytes
            if self._used - freed <= limit:
                self._forget(victims)
                self._counts["evicted"] += len(victims)
                return True
        return False

    def _forget(self, keys: Sequence[PageKey]) -> None:
        gone = [key for key in keys if key in self._held]
        for key in gone:
            self._used -= self._held.pop(key)
        self._removed += gone
        self._tier.submit_erase(gone)

    def _transfer(self, job: _Job, src: Tier, dst: Tier) -> Transfer:
        self._last_id += 1
        self._jobs[self._last_id] = job
        keys = tuple(_page_key(key) for key in job.moving)
        return Transfer(self._last_id, keys, src, (), dst, (), 0, (None,) * len(keys))

    def _take(self, ack: Ack) -> None:
        job = self._jobs[ack.transfer_id]
        failures, late = dict(ack.failures), set(ack.late)
        sizes = iter(ack.sizes or (ack.nbytes // max(1, ack.num_ready),) * ack.num_ready)
        ended = [(key, failures.get(place)) for place, key in enumerate(job.moving) if place not in late]
        arrived = [(_page_key(key), next(sizes)) for key, failure in ended if failure is None]
        job.lost.update(key for key, failure in ended if failure is not None)
        if job.is_load:
            self._was_read(ended)
        else:
            self._writing.difference_update(_page_key(key) for key, _ in ended)
            for key, nbytes in reversed(arrived):
                self._used += nbytes - self._held.pop(key, 0)
                self._held[key] = nbytes
        job.moving = [job.moving[place] for place in ack.late]
        if not job.moving:
            del self._jobs[ack.transfer_id]
            self._end(job)

    def _was_read(self, ended: Sequence[tuple[bytes, Failure | None]]) -> None:
        """Forget chunks that could not be read, unless the read was not tried."""
        self._reading.subtract(_page_key(key) for key, _ in ended)
        self._reading = +self._reading
        self._forget(
            [_page_key(key) for key, failure in ended if failure is not None and failure not in _KEPT]
        )

    def _end(self, job: _Job) -> None:
        arrived = tuple(key for key in job.keys if key not in job.lost)
        self._done.append(
            Done(
                job.job,
                job.is_load,
                arrived,
                not job.lost,
                time.monotonic() - job.began,
                len(arrived) * self._memory.shape[1],
            )
        )


def is_whole(key: bytes) -> bool:
    """Return whether the tier uses this key as it is: 36 bytes, like vLLM's SHA-256. Others are hashed."""
    return len(key) == KEY_NBYTES


def _page_key(key: bytes) -> PageKey:
    return PageKey(key if is_whole(key) else sha256(key).digest() + bytes(4))
