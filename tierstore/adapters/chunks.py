"""Stores chunks of an engine's host memory on the NVMe tier.

This module serves engines that have their own host tier and accept another tier below it. A chunk is one row of
the engine's host memory; its content is opaque. Chunks on disk are checksummed, limited in total size, and found
again after a restart.

The least recently used chunks are evicted first. Among chunks that were used together, the later ones are evicted
first, because a chunk is useless without the chunks before it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Event
from typing import TYPE_CHECKING

from tierstore.config import load_config
from tierstore.errors import ConfigError, TierStoreError
from tierstore.keys import KEY_NBYTES
from tierstore.types import Failure, PageKey, Tier, Transfer, seconds_to_wait

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.config import NvmeConfig
    from tierstore.nvme.follower import Follower
    from tierstore.nvme.tier import NvmeTier
    from tierstore.types import Ack

_KEPT = frozenset({Failure.UNAVAILABLE, Failure.CLOSED})
"""Failures after which a chunk's record is kept: the record was not read, so it may be intact."""

_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job.

    Attributes:
        job: The ID of the job.
        is_load: Whether the job was a load.
        arrived: Keys of the job's chunks that did not fail, in the job's order. For a store, they include chunks
            that were already on disk or being written.
        complete: Whether no chunk of the job failed.
        seconds: Time in seconds from the submission of the job to its end.
        nbytes: Size of the ``arrived`` chunks in the engine's memory, in bytes.
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
    """Keeps the index of the chunks on disk, and runs the jobs that store and load chunks.

    Not thread-safe: callers on different threads must serialize their calls. Only ``drain`` and ``close``
    block.
    """

    def __init__(self, tier: NvmeTier | Follower, memory: NDArray[np.uint8], woken: Event) -> None:
        """Take ownership of the tier, and list the chunks in it.

        Args:
            tier: The NVMe tier. ``close`` closes it.
            memory: The engine's host memory, ``[chunks, bytes]``. It must stay valid until ``close`` returns.
            woken: The event that the tier sets when ``tier.poll`` may return something.
        """
        self._tier = tier
        self._memory = memory
        self._woken = woken
        self._held: OrderedDict[PageKey, int] = OrderedDict()
        for key, _, nbytes in tier.records():
            self._held[key] = nbytes
        self._used = sum(self._held.values())
        self._writing: dict[PageKey, int] = {}
        """The transfer that writes each chunk. A write that was in flight at a ``clear`` is not in it."""
        self._in_flight = 0
        """Number of chunks that are being written, including those from before a ``clear``."""
        self._reading: Counter[PageKey] = Counter()
        self._jobs: dict[int, _Job] = {}
        self._done: list[Done] = []
        self._removed: list[PageKey] = []
        self._counts: Counter[str] = Counter()
        self._last_id = 0
        self._probed = 0.0

    def holds(self, key: bytes) -> bool:
        """Return whether the chunk is on disk and a load of it is worth trying. O(1).

        While the disk hangs or fails, at most one call per half second returns True. The load that follows shows
        whether the disk has recovered.
        """
        if not self._is_held(_page_key(key)):
            return False
        if self._tier.state != "absent":
            return True
        now = time.monotonic()
        if now - self._probed < _PROBE_S:
            return False
        self._probed = now
        return True

    def writes(self, key: bytes) -> bool:
        """Return whether the chunk is not on disk yet, but a write of it is in flight. O(1)."""
        mine = _page_key(key)
        return mine in self._writing and mine not in self._held

    def clear(self) -> None:
        """Remove all chunks, including those that are still being written. Does not wait for the disk."""
        self._forget(list(self._held))
        self._tier.submit_erase(list(self._writing))
        self._writing.clear()

    def used(self, keys: Sequence[bytes]) -> None:
        """Mark these chunks as just used. Pass the chunks of one request, in the order of its tokens."""
        for key in reversed(list(keys)):
            if (mine := _page_key(key)) in self._held:
                self._held.move_to_end(mine)

    def store(self, job: int, keys: Iterable[bytes], places: Iterable[int]) -> None:
        """Queue writes of the memory rows ``places`` under ``keys``.

        The rows must not change until ``finished`` returns the job. Chunks that are already on disk or being
        written are not written again. The least recently used chunks are evicted to make space. Chunks for which
        there is still no space are skipped, and the job is reported as incomplete.
        """
        found = _Job(job, False, list(keys), time.monotonic())
        wanted = [(key, place) for key, place in zip(found.keys, places, strict=True) if self._is_new(key)]
        rows = []
        for key, place in wanted:
            if self._make_room():
                self._writing[_page_key(key)] = self._last_id + 1
                self._in_flight += 1
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
        """Queue reads of the chunks ``keys`` into the memory rows ``places``.

        The contents of the rows are undefined until ``finished`` returns the job.
        """
        found = _Job(job, True, list(keys), time.monotonic())
        rows = [self._memory[int(place)] for place in places]
        found.moving = list(found.keys)
        if not found.moving:
            self._end(found)
            return
        self._reading.update(_page_key(key) for key in found.moving)
        self._tier.submit_read(self._transfer(found, self._tier.tier, Tier.HOST), rows)

    def finished(self) -> list[Done]:
        """Return the jobs that have finished since the last call. Their rows are no longer accessed.

        If a read hangs, its load finishes only when the disk responds: until then, the read may still write to
        its row.
        """
        for ack in self._tier.poll():
            self._take(ack)
        done, self._done = self._done, []
        return done

    def drain(self) -> None:
        """Wait, without a timeout, until every job has finished. ``finished`` then returns the jobs."""
        while True:
            self._woken.clear()
            for ack in self._tier.poll():
                self._take(ack)
            if not self._jobs:
                return
            self._woken.wait()

    def removed(self) -> list[PageKey]:
        """Return the tier's keys of the chunks that were evicted or found unreadable since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def close(self, timeout_s: float) -> None:
        """Finish writes in flight, close the tier, and stop using the engine's memory.

        Args:
            timeout_s: Maximum time to wait, in seconds.

        Raises:
            TierStoreError: The disk did not respond in time. A thread may still access the engine's memory.
        """
        if not self._tier.close(seconds_to_wait("timeout_s", timeout_s)):
            raise TierStoreError(
                f"the disk did not respond within {timeout_s} s; the engine's memory is still in use, so do not free it"
            )
        for ack in self._tier.poll():
            self._take(ack)
        self._memory = self._memory[:0].copy()

    def stats(self) -> dict[str, object]:
        """Return the tier's ``stats`` and some figures of this object.

        The figures are ``chunks`` and ``used_nbytes`` (number and size of the records on disk), ``under_way``
        (jobs in flight), ``evicted`` (chunks evicted so far) and ``no_room`` (chunks skipped for lack of space).
        """
        return {**self._tier.stats(), **self.figures()}

    def figures(self) -> dict[str, int]:
        """Return the figures of this object, without those of the tier. Does not access the disk."""
        mine = {"chunks": len(self._held), "used_nbytes": self._used, "under_way": len(self._jobs)}
        return {**mine, "evicted": self._counts["evicted"], "no_room": self._counts["no_room"]}

    def newest(self) -> bytes | None:
        """Return the key of the most recently used chunk on disk, or None if there is none. O(1)."""
        return next(reversed(self._held), None)

    def _is_held(self, key: PageKey) -> bool:
        return key in self._held

    def _is_new(self, key: bytes) -> bool:
        return (mine := _page_key(key)) not in self._held and mine not in self._writing

    def _make_room(self) -> bool:
        """Evict chunks until one more record fits into the capacity.

        Return False, without evicting anything, if chunks that are being read or written leave too little space.
        """
        cost = self._tier.record_nbytes
        limit = self._tier.budget_nbytes - (self._in_flight + 1) * cost
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
            self._in_flight -= len(ended)
            pages = (_page_key(key) for key, _ in ended)
            mine = {page for page in pages if self._writing.get(page) == ack.transfer_id}
            for page in mine:
                del self._writing[page]
            for key, nbytes in reversed(arrived):
                if key in mine:
                    self._used += nbytes - self._held.pop(key, 0)
                    self._held[key] = nbytes
        job.moving = [job.moving[place] for place in ack.late]
        if not job.moving:
            del self._jobs[ack.transfer_id]
            self._end(job)

    def _was_read(self, ended: Sequence[tuple[bytes, Failure | None]]) -> None:
        """Remove chunks whose read failed. Keep chunks whose read was not attempted."""
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


class FollowedChunks(Chunks):
    """Chunks that another process stores. This process has no index of them.

    Every chunk counts as on disk. Only a load shows whether it is. This suits an engine that takes the minimum of what
    its ranks find, because the rank that stores the chunks has the index.
    """

    def _is_held(self, key: PageKey) -> bool:
        return True


def nvme_section(
    config: str | Mapping[str, object], below: str, codecs: Sequence[str] = ("none", "exp")
) -> NvmeConfig:
    """Return the section ``nvme`` of a configuration for a tier below a host tier of an engine.

    ``below`` names that host tier in error messages.

    Raises:
        ConfigError: The section is missing, or has a setting that has no meaning below another host tier.
    """
    nvme = load_config(config).nvme
    if nvme is None:
        raise ConfigError("nvme is missing: the configuration needs an nvme section with path and capacity")
    fixed = {"admission": ("all",), "policy": ("lru",), "codec": tuple(codecs), "daily_writes": (None,)}
    for name, allowed in fixed.items():
        value = getattr(nvme, name)
        if value not in allowed:
            known = " or ".join(map(str, allowed))
            raise ConfigError(f"nvme.{name} must be {known} for an NVMe tier below {below}, got {value}")
    return nvme


def is_whole(key: bytes) -> bool:
    """Return whether the tier uses this key unchanged.

    Keys of 36 bytes, such as vLLM's SHA-256 keys, are used unchanged. Other keys are hashed.
    """
    return len(key) == KEY_NBYTES


def _page_key(key: bytes) -> PageKey:
    return PageKey(key if is_whole(key) else sha256(key).digest() + bytes(4))
