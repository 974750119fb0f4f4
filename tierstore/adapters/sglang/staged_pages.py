"""Pages of an engine's host memory on the NVMe tier, copied through staging buffers, and kept in our own memory.

This module serves engines whose host memory must not be touched after a call has returned. A page is copied to the
engine's memory only after its checksum was verified, and a read that hangs can only write to a staging buffer. Calls
block, but never longer than their deadline.

With a host cache, a page that was stored or read stays in its staging buffer, and another buffer takes the place of
that buffer (``HostCache``). Such a page is not copied a second time, and not verified again, because it has not left
our memory since it was verified or taken from the engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tierstore.adapters.chunks import Chunks, FollowedChunks
from tierstore.adapters.sglang.host_cache import HostCache
from tierstore.errors import TierStoreError
from tierstore.nvme.direct_io import padded
from tierstore.nvme.follower import Follower
from tierstore.nvme.tier import NvmeTier
from tierstore.page import buffer
from tierstore.threads import Worker
from tierstore.types import exact_size

LOADING_SHARE = 4
"""One in this many staging buffers is for reads. The others are for writes, of which many are made durable together."""

CLOSE_S = 30.0
"""Longest time in seconds that closing may take."""

_RETRY_S = 1.0
_PROBE_S = 0.5
_LEAST_ROWS = 8
_GROUP_NBYTES = 8 << 20
_LEAST_GROUPS = 4
"""A call moves its pages in groups, so that one group is copied while the disk reads or writes the next ones.

A group has at most ``_GROUP_NBYTES`` bytes, and a call that reads has at least ``_LEAST_GROUPS`` groups.
"""

OUTCOMES = ("hit", "miss", "stored", "refused", "timeout")
"""Names of the counters of pages."""

Copy = Callable[[Sequence[int], NDArray[np.uint8], Sequence[int]], None]
"""Function ``copy(pages, memory, rows)`` that copies pages of the engine from or to rows of the staging buffers."""


@dataclass(slots=True)
class _Rows:
    """The staging buffers for one direction."""

    free: list[int]
    busy: dict[int, list[int]] = field(default_factory=dict)
    """Rows by the job that uses them."""

    def take(self, most: int) -> list[int]:
        taken = self.free[-most:]
        del self.free[-most:]
        return taken


@dataclass(slots=True)
class _Put:
    """The pages of one call of ``put``, and the number of its writes in flight, plus 1 while the call runs."""

    keys: list[bytes]
    number: int
    left: int = 1


class StagedPages:
    """Pages of one size, kept for an engine on an NVMe tier, in our own memory, or in both. Thread-safe.

    The tier's I/O threads report completions through ``_wake``. Callers wait for them on ``_changed``.
    """

    def __init__(
        self,
        page_nbytes: int,
        open_tier: Callable[[Callable[[], None]], NvmeTier | Follower | None] | None,
        is_writer: bool,
        staging_nbytes: int,
        host_nbytes: int = 0,
        *,
        is_followed: bool = False,
    ) -> None:
        """Open the tier.

        Args:
            page_nbytes: Size of a page in bytes, or 0 if there are no pages.
            open_tier: Function that opens the tier, given the function that the tier calls when work has completed. If
                it returns None, because the process that writes the pages has not created the directory yet, it is
                called again later. None if pages are kept in host memory only, or if there are no pages.
            is_writer: Whether this process writes the pages. If not, it follows the process that does.
            staging_nbytes: Size of all staging buffers in bytes.
            host_nbytes: Size in bytes of the memory in which pages are kept, in addition to the staging buffers.
            is_followed: Whether other processes read the pages that this process writes to disk. If so, ``exist``
                counts only pages on disk, because other processes do not find the others.
        """
        self.page_nbytes = page_nbytes
        self.is_writer = is_writer
        self._is_followed = is_followed
        self._changed = threading.Condition()
        self._jobs = count(1)
        self._arrived: dict[int, frozenset[bytes]] = {}
        """The keys that arrived, for each load that has ended while its caller is still waiting for it."""
        self._waiting: set[int] = set()
        self._puts: dict[int, _Put] = {}
        """The call that each job in ``_storing.busy`` belongs to."""
        self._counts: Counter[str] = Counter()
        self._chunks: Chunks | None = None
        self._memory = np.empty((0, 0), dtype=np.uint8)
        self._tier: NvmeTier | Follower | None = None
        self._open_tier = open_tier
        self._opening: Worker | None = None
        self._tried = self._probed = -math.inf
        self._closed = False
        self._cleared = 0
        """Number of calls of ``clear``. A call that began before the last ``clear`` moves no more pages."""
        self._cache: HostCache | None = None
        self._row_nbytes = row_nbytes = padded(page_nbytes)
        self._loading, self._storing = _Rows([]), _Rows([])
        self._staging_rows = (0, 0)
        if page_nbytes == 0:
            return
        rows, kept = max(_LEAST_ROWS, staging_nbytes // row_nbytes), host_nbytes // row_nbytes
        loading = max(_LEAST_ROWS // 2, rows // LOADING_SHARE)
        self._memory = buffer((rows + kept) * row_nbytes).reshape(rows + kept, row_nbytes)
        self._most = max(1, min(_GROUP_NBYTES // row_nbytes, loading // 2))
        self._loading, self._storing = _Rows([*range(loading)]), _Rows([*range(loading, rows)])
        self._staging_rows = (loading, rows - loading)
        if kept:
            self._cache = HostCache(range(rows, rows + kept))
        if open_tier is None:
            return
        if is_writer:
            self._take_over(open_tier(self._wake))
        else:
            self._begin_opening()

    @property
    def is_logical(self) -> bool:
        """Whether the pool only counts tokens and has no pages."""
        return self.page_nbytes == 0

    @property
    def num_pages(self) -> int:
        """Number of pages on disk."""
        return 0 if self._chunks is None else self._chunks.figures()["chunks"]

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are in our own host memory, on disk or being written. Does not wait for the disk."""
        with self._changed:
            works, chunks = self._works(keys), self._chunks
            if self._is_followed:
                # Other ranks read from disk. Before a write has ended, they may find the page from before a ``clear``.
                usable = works and not self._closed
                return [usable and chunks is not None and chunks.holds(key) for key in keys]
            return [(works and self._has(key)) or self._keeps(key) for key in keys]

    def get(self, keys: Sequence[bytes], copy: Copy, deadline: float) -> list[bool]:
        """Read pages, and call ``copy`` for the pages that arrived, on the calling thread.

        Pages in our own host memory come first. The disk reads the next pages while ``copy`` runs. Does not wait after
        ``deadline`` (time.monotonic()).
        """
        with self._changed:
            began = self._cleared
            call = next(self._jobs)
        found = self._get_kept(keys, copy, began, call)
        kept, wanted = sum(found), list[int]()
        lacking = [index for index, is_found in enumerate(found) if not is_found]
        with self._changed:
            chunks, memory = self._chunks, self._memory
            if chunks is not None:
                if lacking and self._works([keys[index] for index in lacking]):
                    self._wait(lambda: not any(chunks.writes(keys[index]) for index in lacking), deadline)
                    wanted = [index for index in lacking if chunks.holds(keys[index])]
                chunks.used(keys)
        group = max(1, min(self._most, -(-len(wanted) // _LEAST_GROUPS)))
        ahead: deque[tuple[int, list[int], list[int]]] = deque()
        begun = 0
        try:
            while begun < len(wanted) or ahead:
                with self._changed:
                    while (
                        begun < len(wanted)
                        and not self._closed
                        and self._chunks is chunks
                        and (rows := self._loading.take(min(group, len(wanted) - begun)))
                    ):
                        places = wanted[begun : begun + len(rows)]
                        ahead.append((self._load([keys[place] for place in places], rows), places, rows))
                        begun += len(rows)
                    if not ahead:  # other calls use all rows
                        usable = not self._closed and self._chunks is chunks
                        if usable and self._wait(lambda: bool(self._loading.free), deadline):
                            continue
                        break
                    job, places, rows = ahead[0]
                    if not self._wait(lambda job=job: job in self._arrived, deadline):  # type: ignore[misc]
                        break
                    arrived = self._arrived[job]
                    if self._cleared != began:
                        break
                whole = [each for each in zip(places, rows, strict=True) if keys[each[0]] in arrived]
                copy([place for place, _ in whole], memory, [row for _, row in whole])
                for place, _ in whole:
                    found[place] = True
                with self._changed:
                    if self._cleared == began:
                        self._keep_read(job, [keys[place] for place in places], arrived, call)
                    self._abandon(job)
                ahead.popleft()
        finally:
            with self._changed:
                for job, _, _ in ahead:
                    self._abandon(job)
        hits = sum(found)
        if hits > kept:
            self._mark_used(keys)
        timeout = hits < len(found) and time.monotonic() >= deadline
        self._count({"timeout": timeout, "hit": hits, "host_hit": kept, "miss": len(found) - hits})
        return found

    def _get_kept(self, keys: Sequence[bytes], copy: Copy, began: int, call: int) -> list[bool]:
        """Call ``copy`` for the pages in our own host memory. Their rows are pinned until they were copied."""
        found = [False] * len(keys)
        with self._changed:
            cache, memory = self._cache, self._memory
            if cache is None or self._closed or self._cleared != began:
                return found
            rows = cache.pin(keys, call)
        places = sorted(rows)
        try:
            for start in range(0, len(places), self._most):
                if self._cleared != began:
                    break
                group = places[start : start + self._most]
                copy(group, memory, [rows[place] for place in group])
                for place in group:
                    found[place] = True
        finally:
            with self._changed:
                for row in rows.values():
                    cache.unpin(row)
        return found

    def put(self, keys: Sequence[bytes], copy: Copy, deadline: float) -> list[bool]:
        """Call ``copy`` for the pages that are not on disk yet, and queue writes of the rows.

        Waits for staging buffers until ``deadline`` (time.monotonic()). If the disk refuses writes or there is none,
        pages are kept in our own host memory only. Returns which pages are there, on disk or being written.
        """
        with self._changed:
            memory, began, writes = self._memory, self._cleared, self._takes_writes()
            wanted = [
                index
                for index, key in enumerate(keys)
                if not (self._has(key) or (not writes and self._keeps(key)))
            ]
            wanted = [*{keys[index]: index for index in reversed(wanted)}.values()][::-1]
            call, done = _Put([keys[index] for index in wanted], next(self._jobs)), 0
            if self._cache is not None:
                self._cache.used(keys, call.number)
        while done < len(wanted):
            with self._changed:
                if self._closed or self._cleared != began:
                    break
                if self._cache is None and not self._takes_writes():
                    break
                if not self._wait(lambda: bool(self._storing.free), deadline):
                    break
                rows = self._storing.take(min(self._most, len(wanted) - done))
            places = wanted[done : done + len(rows)]
            done += len(rows)
            stored = False
            try:
                copy(places, memory, rows)
                with self._changed:
                    if not self._closed and self._cleared == began:
                        stored = True
                        self._store(call, [keys[place] for place in places], rows)
            finally:
                if not stored:
                    with self._changed:
                        self._storing.free += rows
                        self._changed.notify_all()
        self._mark_used(keys)
        with self._changed:
            self._part_ended(call)
            kept = [self._cleared == began and (self._has(key) or self._keeps(key)) for key in keys]
        timeout = not all(kept) and time.monotonic() >= deadline
        self._count({"timeout": timeout, "stored": sum(kept), "refused": len(kept) - sum(kept)})
        return kept

    def clear(self) -> None:
        """Remove all pages, including those that are being copied or written by calls in progress."""
        with self._changed:
            self._cleared += 1
            if self._cache is not None:
                self._cache.clear()
            if self._chunks is not None and self.is_writer and not self._closed:
                self._chunks.clear()

    def flush(self, deadline: float) -> bool:
        """Wait for all queued writes, but at most until ``deadline`` (time.monotonic())."""
        with self._changed:
            return self._chunks is None or self._wait(lambda: not self._storing.busy, deadline)

    def close(self, timeout_s: float) -> None:
        """Close the tier and free the staging buffers. Calls in progress get misses.

        Raises:
            TierStoreError: The disk did not respond in time. A thread closes the tier once it does; until then, the
                directory stays locked.
        """
        with self._changed:
            self._closed = True
            chunks = self._chunks
            self._changed.notify_all()
        if chunks is None:
            self._let_go(None)
            return
        try:
            chunks.close(timeout_s)
        except TierStoreError:
            Worker(self._keep_closing, chunks, name="tierstore-pages-close").start()
            raise
        self._let_go(chunks)

    def figures(self) -> dict[str, object]:
        """Return counters, the number and size of pages, and the state of the disk. Does not access the disk."""
        with self._changed:
            found: dict[str, object] = {f"pages_{name}": self._counts[name] for name in OUTCOMES}
            if (cache := self._cache) is not None:
                found |= {
                    "pages_host_hit": self._counts["host_hit"],
                    "host_pages": len(cache),
                    "host_nbytes": len(cache) * self._row_nbytes,
                    "host_evicted": cache.evicted,
                }
            if self._chunks is not None and self._tier is not None:
                found |= {**self._tier.counters(), "state": self._tier.state, **self._chunks.figures()}
            return found

    def stats(self) -> dict[str, object]:
        """Return the figures of this object and of the tier, which may access the disk."""
        found, tier = self.figures(), self._tier
        return found if tier is None else {**tier.stats(), **found}

    def check(self) -> list[str]:
        """Return a description of each broken invariant."""
        with self._changed:
            if self._closed:
                return []
            self._collect()
            cache = self._cache
            faults = [] if cache is None else cache.check()
            owned = [] if cache is None else cache.rows()
            idle = self._waiting == set() and not self._arrived
            for rows, count in zip((self._loading, self._storing), self._staging_rows, strict=True):
                mine = [*rows.free, *(row for busy in rows.busy.values() for row in busy)]
                mine = [row for row in mine if cache is None or not cache.owns(row)]
                owned += mine
                if idle and len(mine) != count:
                    faults.append(f"{len(mine)} of {count} staging rows are free or in use")
            if idle and sorted(owned) != [*range(len(self._memory))]:
                missing = sorted(set(range(len(self._memory))) - set(owned))
                faults.append(f"rows {missing} are neither free nor in use")
            chunks, tier = self._chunks, self._tier
            if chunks is None or tier is None:
                return faults
            used_nbytes = chunks.figures()["used_nbytes"]
            if used_nbytes > tier.budget_nbytes:
                in_use, budget = exact_size(used_nbytes), exact_size(tier.budget_nbytes)
                faults.append(f"{in_use} are in use, more than the budget of {budget}")
            return faults

    # -- with the lock held --------------------------------------------------------------------------------

    def _works(self, keys: Sequence[bytes]) -> bool:
        """Return whether reads are worth trying, and probe a disk that does not read.

        While the disk hangs or fails reads, all pages count as missing, and one page at a time is read to find out
        whether the disk has recovered. If the writer had not created the directory yet, opening it is tried again.
        """
        chunks, tier, now = self._chunks, self._tier, time.monotonic()
        if chunks is None or tier is None:
            if not self.is_writer and not self._closed and now - self._tried >= _RETRY_S:
                self._begin_opening()
            return False
        self._collect()
        if isinstance(tier, Follower) and now - self._tried >= _RETRY_S:
            self._begin_opening()  # the writer may have begun with new files
        if tier.state != "absent":
            return True
        key = chunks.newest() if self.is_writer else next(iter(keys), None)
        if key is not None and not self._closed and now - self._probed >= _PROBE_S and self._loading.free:
            self._probed = now
            job = self._load([key], self._loading.take(1))
            self._waiting.discard(job)  # nobody waits for it
        return False

    def _has(self, key: bytes) -> bool:
        chunks, tier = self._chunks, self._tier
        if chunks is None or tier is None or self._closed:
            return False
        return chunks.holds(key) or (tier.state == "ok" and chunks.writes(key))

    def _keeps(self, key: bytes) -> bool:
        return self._cache is not None and not self._closed and key in self._cache

    def _takes_writes(self) -> bool:
        """Return whether the disk accepts writes. If only reads fail ("absent"), writes are still tried."""
        tier = self._tier
        return tier is not None and not (tier.read_only or tier.state == "read_only")

    def _store(self, call: _Put, keys: Sequence[bytes], rows: list[int]) -> None:
        """Keep pages in our own host memory, and queue writes of their rows if the disk accepts them.

        A page is pinned until its write has ended, so it is not evicted before. Frees the rows that the cache returns
        in exchange. A row that the cache did not take is freed when its write has ended.
        """
        chunks, cache = self._chunks, self._cache
        writes = chunks is not None and self._takes_writes()
        if cache is not None:
            given = [
                cache.keep(key, row, call.number, pinned=writes) for key, row in zip(keys, rows, strict=True)
            ]
            self._storing.free += [row for row in given if not (writes and row in rows)]
        elif not writes:
            self._storing.free += rows
        if chunks is not None and writes:
            job = next(self._jobs)
            self._storing.busy[job] = rows
            self._puts[job] = call
            call.left += 1
            chunks.store(job, keys, rows)
        self._changed.notify_all()
        self._collect()

    def _keep_read(self, job: int, keys: Sequence[bytes], arrived: frozenset[bytes], call: int) -> None:
        """Keep the pages of a load that has ended in our own host memory."""
        if self._cache is not None and not self._closed:
            rows = self._loading.busy[job]
            self._loading.busy[job] = [
                self._cache.keep(key, row, call) if key in arrived else row
                for key, row in zip(keys, rows, strict=True)
            ]

    def _load(self, keys: Sequence[bytes], rows: list[int]) -> int:
        assert self._chunks is not None
        job = next(self._jobs)
        self._loading.busy[job] = rows
        self._waiting.add(job)
        self._chunks.load(job, keys, rows)
        return job

    def _abandon(self, job: int) -> None:
        """Free the rows of a load now or, if the disk may still write to them, when the load ends."""
        self._waiting.discard(job)
        if self._arrived.pop(job, None) is not None:
            self._loading.free += self._loading.busy.pop(job)
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``ready()``. Return False at the deadline, or if the pool is closed first."""
        self._collect()
        while not ready():
            if self._closed and self._chunks is None:
                return False
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(left)
            self._collect()
        return True

    def _collect(self) -> None:
        """Take the results of jobs that have ended, and free the rows that no caller waits for."""
        if self._chunks is not None:
            self._settle(self._chunks)

    def _settle(self, chunks: Chunks) -> None:
        for done in chunks.finished():
            if not done.is_load:
                self._end_store(done.job)
            elif done.job in self._waiting:
                self._waiting.discard(done.job)
                self._arrived[done.job] = frozenset(done.arrived)
            else:
                self._loading.free += self._loading.busy.pop(done.job)
        chunks.removed()
        self._changed.notify_all()

    def _end_store(self, job: int) -> None:
        self._part_ended(self._puts.pop(job))
        for row in self._storing.busy.pop(job):
            if self._cache is not None and self._cache.owns(row):
                self._cache.unpin(row)
            else:
                self._storing.free.append(row)

    def _part_ended(self, call: _Put) -> None:
        """Once all pages of a call were written, mark them as used together. The last ones are then evicted first."""
        call.left -= 1
        if call.left == 0 and self._chunks is not None:
            self._chunks.used(call.keys)

    # -- without the lock ----------------------------------------------------------------------------------

    def _keep_closing(self, chunks: Chunks) -> None:
        _close_at_last(chunks)
        self._let_go(chunks)

    def _let_go(self, chunks: Chunks | None) -> None:
        """Free the memory after the tier has closed."""
        with self._changed:
            if chunks is not None:
                self._settle(chunks)
            self._cache = None
            self._chunks = self._tier = self._open_tier = None  # part of a cycle of references with the tier
            self._memory = self._memory[:0].copy()

    def _begin_opening(self) -> None:
        """Open the tier on a thread of its own, because the disk may hang."""
        if self._opening is None or not self._opening.is_alive():
            self._tried = time.monotonic()
            self._opening = Worker(self._open, name="tierstore-sglang-open")
            self._opening.start()

    def _open(self) -> None:
        """Open the writer's files, unless they are open already."""
        tier, chunks, open_tier = self._tier, self._chunks, self._open_tier
        if tier is not None and chunks is not None:
            if not (isinstance(tier, Follower) and tier.is_stale()):
                return
            with self._changed:
                self._tier = self._chunks = None
            _close_at_last(chunks)
            with self._changed:
                self._settle(chunks)
        if open_tier is not None:
            self._take_over(open_tier(self._wake))

    def _take_over(self, tier: NvmeTier | Follower | None) -> None:
        if tier is None:
            return
        kind = Chunks if self.is_writer else FollowedChunks
        with self._changed:
            if not self._closed:
                self._tier, self._chunks = tier, kind(tier, self._memory, threading.Event())
                return
        tier.close(CLOSE_S)

    def _wake(self) -> None:
        """Called by the tier's I/O threads, with none of their locks held."""
        with self._changed:
            self._collect()

    def _mark_used(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            if self._cache is not None:
                self._cache.used(keys)

    def _count(self, pages: dict[str, int]) -> None:
        with self._changed:
            self._counts.update(pages)


def _close_at_last(chunks: Chunks) -> None:
    """Close chunks, however long the disk hangs."""
    while True:
        try:
            chunks.close(CLOSE_S)
        except TierStoreError:
            continue
        return
