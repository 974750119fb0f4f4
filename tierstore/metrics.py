"""Counters of one store, in a registry of its own: snapshot for ``stats()``, Prometheus text for a scraper.

Names: ``tierstore_<noun>_<unit>_total``. Every page asked of ``acquire`` is counted once, as a hit in the tier it was
found in or as a miss with its reason, so that hits and misses add up to pages asked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from tierstore.types import Ack, Tier, Transfer

_WAIT_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True, slots=True)
class RankHealth:
    """What one process that holds bytes of pages got of what it asked for. Plain data: it travels between processes.

    ``slow_copies``, ``refused``: why copies take a slower route, why memory is not page-locked; None: they do not, it
    is. ``disk``: the state of its NVMe tier; None: it has none.
    """

    device: str = "cpu"
    copies: str = "threads"
    slow_copies: str | None = None
    pin_nbytes: int = 0
    pinned_nbytes: int = 0
    pinning: bool = False
    refused: str | None = None
    disk: str | None = None
    faults: int = 0
    """Unexpected errors in its threads."""
    stalled_steps: int = 0
    """Steps of the engine that waited 10 s or longer for copies out of the blocks that they overwrite."""
    failed_pages: int = 0
    """Pages that it did not move."""
    open_transfers: int = 0
    """Transfers that it was given and has not ended."""

    @property
    def unpinned_nbytes(self) -> int:
        """Bytes of host memory that were to be page-locked and are not, or not yet."""
        return max(0, self.pin_nbytes - self.pinned_nbytes)

    @property
    def troubles(self) -> list[str]:
        """What lasts until somebody does something about it, in words for a log."""
        found = []
        if self.unpinned_nbytes and not self.pinning:
            found.append(
                f"{self.unpinned_nbytes} of {self.pin_nbytes} bytes of host memory are not page-locked, copies to and "
                f"from them are slow: {self.refused}"
            )
        if self.slow_copies is not None:
            found.append(f"copies between {self.device} and host memory are slow: {self.slow_copies}")
        if self.disk not in (None, "ok"):
            found.append(f"the NVMe tier is {self.disk}")
        return found

    def stats(self, rank: int) -> dict[str, object]:
        """For ``TierStore.stats``."""
        return {"rank": rank, **asdict(self), "unpinned_nbytes": self.unpinned_nbytes}


class _Ranks(Collector):
    """Figures by rank, looked up at each scrape. ``apart``: the ranks are other processes."""

    def __init__(self, ranks: Callable[[], Mapping[int, RankHealth]], *, apart: bool) -> None:
        self._ranks = ranks
        self._apart = apart

    def collect(self) -> Iterator[Metric]:
        found = {str(rank): health for rank, health in sorted(self._ranks().items())}

        def gauge(name: str, says: str, value: Callable[[RankHealth], float]) -> Metric:
            family = GaugeMetricFamily(f"tierstore_{name}", says, labels=["rank"])
            for rank, health in found.items():
                family.add_metric([rank], value(health))
            return family

        def counter(name: str, says: str, value: Callable[[RankHealth], float]) -> Metric:
            family = CounterMetricFamily(f"tierstore_{name}", says, labels=["rank"])
            for rank, health in found.items():
                family.add_metric([rank], value(health))
            return family

        yield gauge(
            "unpinned_bytes",
            "Host memory that was to be page-locked and is not, or not yet",
            lambda h: h.unpinned_nbytes,
        )
        yield gauge(
            "slow_copies",
            "1 where copies between HBM and host memory take a slower route than the card allows",
            lambda h: float(h.slow_copies is not None),
        )
        if not self._apart:
            return
        yield gauge(
            "rank_disk_trouble",
            "1 while the NVMe tier of the rank is read-only or absent",
            lambda h: float(h.disk not in (None, "ok")),
        )
        yield gauge(
            "rank_open_transfers",
            "Transfers that the rank was given and has not ended",
            lambda h: h.open_transfers,
        )
        yield counter("rank_failed_pages", "Pages that the rank did not move", lambda h: h.failed_pages)
        yield counter(
            "rank_stalled_steps",
            "Steps of the engine that waited 10 s or longer for copies on the rank",
            lambda h: h.stalled_steps,
        )
        yield counter("rank_faults", "Unexpected errors in the rank's threads", lambda h: h.faults)


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

    def watch_ranks(self, ranks: Callable[[], Mapping[int, RankHealth]], *, apart: bool) -> None:
        """Report the health of every rank from now on. ``apart``: the ranks are other processes."""
        self.registry.register(_Ranks(ranks, apart=apart))

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
