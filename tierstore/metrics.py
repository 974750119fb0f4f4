"""Counters of one store, in a registry of its own: snapshot for ``stats()``, Prometheus text for a scraper.

Names: ``tierstore_<noun>_<unit>_total``. Every page asked of ``acquire`` is counted once, as a hit in the tier it was
found in or as a miss with its reason, so that hits and misses add up to pages asked.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.types import Ack, Tier, Transfer

_WAIT_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)


class Metrics:
    """Counts of one store. Written under the store's lock; ``text`` may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._hits = Counter("tierstore_hits_pages", "Pages found, by tier", ["tier"], registry=r)
        self._misses = Counter(
            "tierstore_misses_pages", "Pages not served, by reason", ["reason"], registry=r
        )
        self._dropped = Counter("tierstore_dropped_copies", "Copies dropped", ["tier", "reason"], registry=r)
        self._bytes = Counter("tierstore_transfer_bytes", "Payload bytes moved", ["src", "dst"], registry=r)
        self._seconds = Counter("tierstore_transfer_seconds", "Time in transfers", ["src", "dst"], registry=r)
        self._failures = Counter(
            "tierstore_failed_pages", "Pages not moved", ["src", "dst", "reason"], registry=r
        )
        self._hints = Counter("tierstore_hints", "Hints, by what became of them", ["result"], registry=r)
        self._prefetch = Counter(
            "tierstore_prefetch_bytes",
            "Payload bytes brought up ahead of need, by use",
            ["result"],
            registry=r,
        )
        self._avoided = Counter(
            "tierstore_prefetch_avoided_seconds", "Load time that leases found behind them", registry=r
        )
        self._abandoned = Counter(
            "tierstore_abandoned_leases", "Leases dropped without release, and taken back", registry=r
        )
        self._faults = Counter("tierstore_faults", "Unexpected errors in the store's threads", registry=r)
        self._holds = Gauge(
            "tierstore_lock_longest_hold_seconds", "Longest hold of the store's lock", ["clock"], registry=r
        )
        self._pages = Gauge("tierstore_pages", "Pages now, by tier and state", ["tier", "state"], registry=r)
        self._waiting = Gauge(
            "tierstore_admission_waiting_pages", "Pages in memory that admission keeps from NVMe", registry=r
        )
        self._budget = Gauge(
            "tierstore_nvme_day_bytes", "NVMe writes of 24 hours: written, left", ["state"], registry=r
        )
        self._pinned = Gauge("tierstore_host_pinned_bytes", "Host memory that is page-locked", registry=r)
        self._disk = Gauge(
            "tierstore_nvme_state",
            "1 for the state of the NVMe tier: ok, read_only, absent",
            ["state"],
            registry=r,
        )
        self._wait = Histogram(
            "tierstore_lease_wait_seconds", "Time in Lease.wait", buckets=_WAIT_BUCKETS, registry=r
        )

    def hit(self, tier: Tier, pages: int = 1) -> None:
        """Pages that an acquire found, in the fastest tier that held them."""
        self._hits.labels(tier.name).inc(pages)

    def miss(self, reason: str, pages: int = 1) -> None:
        """Pages that an acquire could not serve."""
        self._misses.labels(reason).inc(pages)

    def dropped(self, tier: Tier, reason: str, number: int) -> None:
        """Copies left a tier. Reason "saved": their pages are still readable elsewhere."""
        self._dropped.labels(tier.name, reason).inc(number)

    def moved(self, transfer: Transfer, ack: Ack, page_nbytes: int) -> None:
        """A transfer ended."""
        edge = (transfer.src.name, transfer.dst.name)
        self._bytes.labels(*edge).inc(ack.num_ready * page_nbytes)
        self._seconds.labels(*edge).inc(ack.seconds)
        for _, failure in ack.failures:
            self._failures.labels(*edge, failure.value).inc()
        if ack.late:
            self._failures.labels(*edge, "late").inc(len(ack.late))

    def hinted(self, result: str) -> None:
        """A hint was answered."""
        self._hints.labels(result).inc()

    def prefetched(self, result: str, nbytes: int) -> None:
        """A page brought up ahead of need was used ("useful"; "late": on its way still), or left its tier unused
        ("wasted"; "cancelled": after its hint had ended)."""
        self._prefetch.labels(result).inc(nbytes)

    def avoided(self, seconds: float) -> None:
        """A lease took in a page of which so much load time had already happened."""
        self._avoided.inc(seconds)

    def abandoned(self) -> None:
        """A lease that was dropped without release was taken back."""
        self._abandoned.inc()

    def fault(self) -> None:
        """An error reached a thread's top; it was logged there."""
        self._faults.inc()

    def waited(self, seconds: float) -> None:
        """A ``Lease.wait`` returned."""
        self._wait.observe(seconds)

    def watch_lock(self, elapsed: Callable[[], float], cpu: Callable[[], float]) -> None:
        """Reports a lock's longest hold, in seconds, from now on: elapsed, and CPU time of its holder."""
        self._holds.labels("elapsed").set_function(elapsed)
        self._holds.labels("cpu").set_function(cpu)

    def watch_pinned(self, nbytes: Callable[[], float]) -> None:
        """Reports how much of the host tier is page-locked, from now on."""
        self._pinned.set_function(nbytes)

    def watch_disk(self, state: Callable[[], str]) -> None:
        """Reports the state of the NVMe tier from now on, by ``NvmeTier.state``."""

        def is_now(name: str) -> float:
            return float(state() == name)

        for name in ("ok", "read_only", "absent"):
            self._disk.labels(name).set_function(partial(is_now, name))

    def pages(self, tier: Tier, state: str, number: int) -> None:
        """Pages of a tier in a state now: free, resident, pinned, owned, quarantined."""
        self._pages.labels(tier.name, state).set(number)

    def admission(self, waiting_pages: int, written: int, left: int | None) -> None:
        """Pages kept from NVMe now; bytes written there in 24 hours, and left of the budget (None: there is none)."""
        self._waiting.set(waiting_pages)
        self._budget.labels("written").set(written)
        if left is not None:
            self._budget.labels("left").set(left)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Totals since open by metric (without the prefix), then by label values joined with ``,``."""
        found: dict[str, dict[str, float]] = {}
        for metric in self.registry.collect():
            rows: dict[str, float] = {}
            for sample in metric.samples:
                if sample.name.endswith(("_created", "_bucket")):
                    continue
                labels = ",".join(sample.labels.values())
                rows[labels or sample.name.rsplit("_", 1)[-1]] = sample.value
            found[metric.name.removeprefix("tierstore_")] = rows
        return found

    def text(self) -> str:
        """The Prometheus exposition of all counters."""
        return generate_latest(self.registry).decode()
