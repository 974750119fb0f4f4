"""Metrics of SGLang's storage backend: TierStore's own by pool and rank, and the rates that SGLang asks for."""

from __future__ import annotations

import threading
from collections import Counter, deque
from functools import cache
from typing import Any, NamedTuple

from tierstore.adapters.sglang.staged_pages import OUTCOMES


class PoolMetrics:
    """TierStore's metrics by pool and rank, in the registry that SGLang exports."""

    def __init__(self) -> None:
        from prometheus_client import (
            Counter as Series,
        )  # after SGLang has chosen the folder for several processes
        from prometheus_client import Gauge

        by = ("pool", "rank")
        self._pages = Series(
            "tierstore_sglang_pages", "Pages that SGLang read or wrote, by outcome.", (*by, "outcome")
        )
        self._evicted = Series("tierstore_sglang_evicted_pages", "Pages evicted from disk.", by)
        self._damaged = Series("tierstore_sglang_damaged_pages", "Pages found damaged on disk.", by)
        self._held = Gauge(
            "tierstore_sglang_disk_pages", "Pages on disk.", by, multiprocess_mode="livemostrecent"
        )
        self._nbytes = Gauge(
            "tierstore_sglang_disk_bytes",
            "Size of the pages on disk.",
            by,
            multiprocess_mode="livemostrecent",
        )
        self._host_hits = Series(
            "tierstore_sglang_host_hit_pages", "Pages that were read from host memory of TierStore.", by
        )
        self._host_evicted = Series(
            "tierstore_sglang_host_evicted_pages", "Pages evicted from host memory of TierStore.", by
        )
        self._host_held = Gauge(
            "tierstore_sglang_host_pages",
            "Pages in host memory of TierStore.",
            by,
            multiprocess_mode="livemostrecent",
        )
        self._host_nbytes = Gauge(
            "tierstore_sglang_host_bytes",
            "Size of the pages in host memory of TierStore.",
            by,
            multiprocess_mode="livemostrecent",
        )
        self._works = Gauge(
            "tierstore_sglang_disk_ok",
            "1 if the disk reads and writes, 0 if it hangs, fails or refuses writes.",
            by,
            multiprocess_mode="livemostrecent",
        )
        self._seen: Counter[tuple[Any, tuple[str, ...]]] = Counter()
        self._sizes: set[tuple[Any, tuple[str, ...]]] = set()
        self._lock = threading.Lock()

    def update(self, pool: str, rank: str, figures: dict[str, object]) -> None:
        """Export the figures of a pool. Counters only grow, even if SGLang detaches and attaches again."""
        mine = (pool, rank)
        with self._lock:
            for outcome in OUTCOMES:
                self._count(self._pages, (*mine, outcome), figures[f"pages_{outcome}"])
            if "host_pages" in figures:
                self._count(self._host_hits, mine, figures["pages_host_hit"])
                self._count(self._host_evicted, mine, figures["host_evicted"])
                self._size(self._host_held, mine, figures["host_pages"])
                self._size(self._host_nbytes, mine, figures["host_nbytes"])
            if "state" not in figures:
                return  # this process keeps no pages of the pool on disk
            self._count(self._evicted, mine, figures["evicted"])
            self._count(self._damaged, mine, figures["read_integrity"])
            self._size(self._held, mine, figures["chunks"])
            self._size(self._nbytes, mine, figures["used_nbytes"])
            self._works.labels(*mine).set(figures["state"] == "ok")

    def detached(self, pool: str, rank: str) -> None:
        """Export sizes of 0 for a pool that was closed. Its figures will start again from 0."""
        with self._lock:
            for gauge, labels in self._sizes:
                if labels == (pool, rank):
                    gauge.labels(*labels).set(0)
            for series, labels in [*self._seen]:
                if labels[:2] == (pool, rank):
                    del self._seen[series, labels]

    def _size(self, gauge: Any, labels: tuple[str, ...], value: object) -> None:
        self._sizes.add((gauge, labels))
        gauge.labels(*labels).set(int(str(value)))

    def _count(self, series: Any, labels: tuple[str, ...], value: object) -> None:
        """Increase a counter by as much as ``value``, which may have started again from 0, has grown."""
        now, before = int(str(value)), self._seen[series, labels]
        self._seen[series, labels] = now
        series.labels(*labels).inc(now - before if now >= before else now)


_making = threading.Lock()


def pool_metrics() -> PoolMetrics:
    """Return the metrics of this process, created at the first call. Thread-safe."""
    with _making:  # a second series of the same name would be refused
        return _made()


@cache
def _made() -> PoolMetrics:
    return PoolMetrics()


class Rate(NamedTuple):
    """The pages of a transfer, and how fast they were transferred."""

    pages: int
    gigabytes_per_s: float


class Rates:
    """The transfers since SGLang last asked. Thread-safe."""

    _MOST = 1024

    def __init__(self) -> None:
        self._by = {"read": deque[Rate](maxlen=self._MOST), "write": deque[Rate](maxlen=self._MOST)}
        self._lock = threading.Lock()

    def add(self, what: str, pages: int, nbytes: int, seconds: float) -> None:
        """Record a transfer of ``pages`` pages of ``nbytes`` bytes. ``what`` is "read" or "write"."""
        with self._lock:
            self._by[what].append(Rate(pages, pages * nbytes / max(seconds, 1e-9) / 1e9))

    def take(self, what: str) -> list[Rate]:
        """Remove and return the transfers of one kind."""
        with self._lock:
            found = [*self._by[what]]
            self._by[what].clear()
            return found
