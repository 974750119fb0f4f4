"""The metrics of a store: counters in its own registry, and the data of ``stats()`` and ``explain()``.

Counters are named ``tierstore_<noun>_<unit>_total``. ``acquire`` counts every requested page once, either as
a hit in the tier where it was found or as a miss with a reason. Hits and misses therefore add up to the number
of requested pages.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tierstore.types import Tier, exact_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from tierstore.build import Parts
    from tierstore.codecs.host_format import HostFormat
    from tierstore.config import StoreConfig
    from tierstore.directory.directory import Directory
    from tierstore.directory.residency import TierTable
    from tierstore.types import Ack, PageKey, Transfer

_WAIT_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True, slots=True)
class RankHealth:
    """The state of one process that stores page bytes: devices, copy routes, pinned memory, disk and errors.

    Plain data that may be sent to other processes.

    Attributes:
        device: Name of the device that contains HBM.
        copies: Name of the method that copies pages between HBM and host memory.
        pin_nbytes: Bytes of host memory that should be pinned (page-locked).
        pinned_nbytes: Bytes of host memory that are pinned now.
        pinning: Whether memory is being pinned in the background.
        slow_copies: The reason why copies use a slower method, or None.
        refused: The reason why memory is not pinned (page-locked), or None.
        disk: The state of the rank's NVMe tier, or None if it has none.
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
    """Number of unexpected errors in the rank's threads."""
    stalled_steps: int = 0
    """Number of engine steps that waited 10 s or longer until blocks were copied and could be overwritten."""
    failed_pages: int = 0
    """Number of pages that the rank failed to copy."""
    open_transfers: int = 0
    """Number of transfers that the rank has received and not finished."""

    @property
    def unpinned_nbytes(self) -> int:
        """Number of bytes of host memory that should be pinned but are not pinned yet."""
        return max(0, self.pin_nbytes - self.pinned_nbytes)

    @property
    def troubles(self) -> list[str]:
        """Problems that remain until an operator fixes them, as text for a log."""
        found = []
        if self.unpinned_nbytes and not self.pinning:
            found.append(
                f"{exact_size(self.unpinned_nbytes)} of {exact_size(self.pin_nbytes)} of host memory are not "
                f"page-locked, so copies to and from them are slow: {self.refused}"
            )
        if self.slow_copies is not None:
            found.append(f"copies between {self.device} and host memory are slow: {self.slow_copies}")
        if self.disk not in (None, "ok"):
            found.append(f"the NVMe tier is {self.disk}")
        return found

    def stats(self, rank: int) -> dict[str, object]:
        """Return this rank's entry in ``TierStore.stats``."""
        return {"rank": rank, **asdict(self), "unpinned_nbytes": self.unpinned_nbytes}


class _Ranks(Collector):
    """Collector of the metrics that have a label ``rank``. It reads the health of all ranks at each scrape.

    ``apart`` is True if the ranks are other processes; some metrics exist only then.
    """

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
            "Bytes of host memory that should be page-locked but are not, or not yet",
            lambda h: h.unpinned_nbytes,
        )
        yield gauge(
            "slow_copies",
            "1 if copies between HBM and host memory use a slower method than the GPU allows",
            lambda h: float(h.slow_copies is not None),
        )
        if not self._apart:
            return
        yield gauge(
            "rank_disk_trouble",
            "1 while the rank's NVMe tier is read-only or absent",
            lambda h: float(h.disk not in (None, "ok")),
        )
        yield gauge(
            "rank_open_transfers",
            "Transfers in flight on the rank",
            lambda h: h.open_transfers,
        )
        yield counter("rank_failed_pages", "Pages that the rank failed to move", lambda h: h.failed_pages)
        yield counter(
            "rank_stalled_steps",
            "Steps of the engine that waited 10 s or longer for copies on the rank",
            lambda h: h.stalled_steps,
        )
        yield counter("rank_faults", "Unexpected errors in the rank's threads", lambda h: h.faults)


class Metrics:
    """The counters of one store. They are updated under the store's lock. ``text`` is thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._hits = Counter(
            "tierstore_hits_pages",
            "Pages found by acquire, by the fastest tier that had them",
            ["tier"],
            registry=r,
        )
        self._misses = Counter(
            "tierstore_misses_pages", "Pages that acquire did not deliver, by reason", ["reason"], registry=r
        )
        self._dropped = Counter(
            "tierstore_dropped_copies",
            "Copies of pages removed from a tier, by reason",
            ["tier", "reason"],
            registry=r,
        )
        self._bytes = Counter(
            "tierstore_transfer_bytes", "Bytes of pages moved between two tiers", ["src", "dst"], registry=r
        )
        self._seconds = Counter(
            "tierstore_transfer_seconds",
            "Seconds spent in transfers between two tiers",
            ["src", "dst"],
            registry=r,
        )
        self._failures = Counter(
            "tierstore_failed_pages",
            "Pages that could not be moved, by reason",
            ["src", "dst", "reason"],
            registry=r,
        )
        self._hints = Counter("tierstore_hints", "Hints received, by result", ["result"], registry=r)
        self._prefetch = Counter(
            "tierstore_prefetch_bytes",
            "Bytes of pages loaded ahead of a request, by result: useful, late, wasted, cancelled",
            ["result"],
            registry=r,
        )
        self._avoided = Counter(
            "tierstore_prefetch_avoided_seconds",
            "Seconds of loading that requests did not have to wait for, because pages were prefetched",
            registry=r,
        )
        self._abandoned = Counter(
            "tierstore_abandoned_leases",
            "Leases that were garbage-collected without a call to release",
            registry=r,
        )
        self._faults = Counter("tierstore_faults", "Unexpected errors in the store's threads", registry=r)
        self._holds = Gauge(
            "tierstore_lock_longest_hold_seconds",
            "Longest time that the store's lock was held, in elapsed time or CPU time",
            ["clock"],
            registry=r,
        )
        self._pages = Gauge(
            "tierstore_pages", "Current number of pages, by tier and state", ["tier", "state"], registry=r
        )
        self._waiting = Gauge(
            "tierstore_admission_waiting_pages",
            "Pages in memory that the admission policy has not written to NVMe",
            registry=r,
        )
        self._budget = Gauge(
            "tierstore_nvme_day_bytes",
            "Bytes written to NVMe in the last 24 hours, and bytes left of nvme.daily_writes",
            ["state"],
            registry=r,
        )
        self._pinned = Gauge(
            "tierstore_host_pinned_bytes", "Bytes of host memory that are page-locked", registry=r
        )
        self._disk = Gauge(
            "tierstore_nvme_state",
            "1 for the current state of the NVMe tier, 0 for its other states",
            ["state"],
            registry=r,
        )
        self._wait = Histogram(
            "tierstore_lease_wait_seconds",
            "Seconds that calls to Lease.wait took",
            buckets=_WAIT_BUCKETS,
            registry=r,
        )

    def hit(self, tier: Tier, pages: int = 1) -> None:
        """Count pages that ``acquire`` found, under the fastest tier that contained them."""
        self._hits.labels(tier.name).inc(pages)

    def miss(self, reason: str, pages: int = 1) -> None:
        """Count pages that ``acquire`` could not provide, under the given reason."""
        self._misses.labels(reason).inc(pages)

    def dropped(self, tier: Tier, reason: str, number: int) -> None:
        """Count ``number`` copies that were dropped from a tier for the same reason.

        The reason "saved" means that the pages are still readable in another tier.
        """
        self._dropped.labels(tier.name, reason).inc(number)

    def moved(self, transfer: Transfer, ack: Ack, page_nbytes: int) -> None:
        """Count a finished transfer."""
        edge = (transfer.src.name, transfer.dst.name)
        self._bytes.labels(*edge).inc(ack.num_ready * page_nbytes)
        self._seconds.labels(*edge).inc(ack.seconds)
        for _, failure in ack.failures:
            self._failures.labels(*edge, failure.value).inc()
        if ack.late:
            self._failures.labels(*edge, "late").inc(len(ack.late))

    def hinted(self, result: str) -> None:
        """Count a hint by its result."""
        self._hints.labels(result).inc()

    def prefetched(self, result: str, nbytes: int) -> None:
        """Count prefetched bytes by result.

        Args:
            result: "useful": a lease used the pages. "late": a lease requested them while they were in
                flight. "wasted": they were dropped without use. "cancelled": they were dropped without use
                after the hint had ended.
            nbytes: Total size of the pages in bytes.
        """
        self._prefetch.labels(result).inc(nbytes)

    def avoided(self, seconds: float) -> None:
        """Count the seconds that leases did not have to wait, because pages were prefetched."""
        self._avoided.inc(seconds)

    def abandoned(self) -> None:
        """Count a lease that the store released because it was garbage-collected without ``release``."""
        self._abandoned.inc()

    def fault(self) -> None:
        """Count an unexpected error that was caught and logged at the top of a thread."""
        self._faults.inc()

    def waited(self, seconds: float) -> None:
        """Count a call to ``Lease.wait`` or ``Lease.ready`` that took ``seconds``."""
        self._wait.observe(seconds)

    def watch_lock(self, elapsed: Callable[[], float], cpu: Callable[[], float]) -> None:
        """From now on, report the longest hold of the store's lock.

        Args:
            elapsed: Returns the longest hold in seconds of elapsed time.
            cpu: Returns the longest hold in seconds of CPU time.
        """
        self._holds.labels("elapsed").set_function(elapsed)
        self._holds.labels("cpu").set_function(cpu)

    def watch_pinned(self, nbytes: Callable[[], float]) -> None:
        """From now on, report how many bytes of host memory are pinned (page-locked)."""
        self._pinned.set_function(nbytes)

    def watch_ranks(self, ranks: Callable[[], Mapping[int, RankHealth]], *, apart: bool) -> None:
        """From now on, report the health of every rank. ``apart`` is True if the ranks are other processes."""
        self.registry.register(_Ranks(ranks, apart=apart))

    def watch_disk(self, state: Callable[[], str]) -> None:
        """From now on, report the state of the NVMe tier (``NvmeTier.state``)."""

        def is_now(name: str) -> float:
            return float(state() == name)

        for name in ("ok", "read_only", "absent"):
            self._disk.labels(name).set_function(partial(is_now, name))

    def pages(self, tier: Tier, state: str, number: int) -> None:
        """Set the number of pages of a tier in one state: free, resident, pinned, owned or quarantined."""
        self._pages.labels(tier.name, state).set(number)

    def admission(self, waiting_pages: int, written: int, left: int | None) -> None:
        """Set the metrics of admission.

        Args:
            waiting_pages: Number of pages in memory that admission has not allowed to be written to NVMe.
            written: Bytes written to NVMe in the last 24 hours.
            left: Remaining bytes of the daily budget, or None if there is no budget.
        """
        self._waiting.set(waiting_pages)
        self._budget.labels("written").set(written)
        if left is not None:
            self._budget.labels("left").set(left)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the current values of all metrics, by metric and label values.

        Metric names are without the prefix ``tierstore_``. Label values are joined with ``,``.
        """
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
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry).decode()


def occupancy(directory: Directory, tier: Tier) -> str:
    """Return the number of a tier's slots in each state, as text for an error message."""
    states = ", ".join(f"{number} {state}" for state, number in _states(directory, tier).items())
    return f"{states}; {len(directory.leases.open)} leases are open"


def explain_page(directory: Directory, key: PageKey) -> dict[str, object]:
    """Return the state of one page, for ``TierStore.explain``.

    Returns:
        ``copies``: for each tier, whether the copy is "ready" or "arriving", and its number of pins.
            ``being_written``: whether the HBM copy waits for the event of its writer. ``reachable``: whether
            all earlier pages exist. ``not_admitted``: whether admission keeps the page in memory.
            ``going_down_to``: the tier to which a caller has asked to copy the page. ``lost``: why the page
            was evicted, if that happened recently.
    """
    copies = {
        tier.name: {"state": "ready" if copy.ready else "arriving", "pins": copy.pins}
        for tier, table in directory.residency.tables.items()
        if (copy := table.copies.get(key)) is not None
    }
    parent = directory.residency.lineage.parent(key)
    sink = directory.writeback.sinks.open.get(key)
    not_admitted = key in directory.residency.memory_only.refused
    return {
        "key": key.hex(),
        "readable": directory.residency.where(key) is not None,
        "reachable": directory.residency.held(key) and key not in directory.residency.orphans,
        "copies": copies,
        "being_written": key in directory.writeback.unwritten,
        "parent": None if parent is None else parent.hex(),
        "memory_only": key in directory.residency.memory_only and not not_admitted,
        "not_admitted": not_admitted,
        "going_down_to": None if sink is None else sink.target.name,
        "lost": directory.drops.fate(key),
    }


def held_or_retained(directory: Directory) -> list[PageKey]:
    """Return the keys that a lease or a ``retain`` hint covers, without duplicates.

    The pages may be in any tier.
    """
    held = [key for lease in directory.leases.open for key, _ in lease.held]
    leased = [key for lease in directory.leases.open for key in lease.keys[: len(lease.slots)]]
    return list(dict.fromkeys([*held, *leased, *directory.hints.keys_retained]))


def of_hbm(directory: Directory, keys: Sequence[PageKey]) -> list[PageKey]:
    """Return the keys whose pages are in HBM or in flight to it."""
    table = directory.residency.tables.get(Tier.HBM)
    return [] if table is None else [key for key in keys if key in table.copies]


def stats(config: StoreConfig, parts: Parts) -> dict[str, object]:
    """Return the data of ``TierStore.stats``.

    If other processes store the bytes, "hbm" and "host" are totals over all ranks, and "ranks" lists each
    rank.
    """
    directory, layout = parts.directory, parts.layout
    ranks = {} if parts.ranks is None else parts.ranks()
    memory_only = directory.residency.memory_only
    tiers: dict[str, dict[str, object]] = {}
    for tier, table in directory.residency.tables.items():
        states = _states(directory, tier)
        for state, number in states.items():
            parts.metrics.pages(tier, state, number)
        held = layout if tier != Tier.HOST or parts.arena is None else parts.arena.held
        tiers[tier.name] = {**states, **_sizes(table, held.page_nbytes, held.slot_nbytes)}
    return {
        "config": config.effective(),
        "page_nbytes": layout.page_nbytes,
        "slot_nbytes": layout.slot_nbytes,
        "page_size": layout.page_size,
        "fingerprint": layout.fingerprint,
        "tiers": tiers,
        "memory_only": len(memory_only.keys) - len(memory_only.refused),
        "unreachable": len(directory.residency.orphans),
        "admission": None if parts.nvme is None else _admission(directory, layout.page_nbytes, parts.metrics),
        "leases": len(directory.leases.open),
        "in_flight": {f"{s.name}->{d.name}": n for (s, d), n in directory.transfers.pages.items() if n},
        "bytes_per_s": {f"{s.name}->{d.name}": rate for (s, d), rate in directory.transfers.rates.items()},
        "failing": sorted(tier.name for tier in directory.space.failing),
        "hbm": {**parts.device.stats(), **_hbm_of(ranks)},
        "host": _host_of(ranks, config, parts.held) if parts.arena is None else parts.arena.stats(),
        "nvme": None if parts.nvme is None else parts.nvme.stats(),
        "ranks": [found.stats(rank) for rank, found in sorted(ranks.items())],
        "counters": parts.metrics.snapshot(),
    }


def _hbm_of(ranks: Mapping[int, RankHealth]) -> dict[str, object]:
    """Return the devices and copy routes of all ranks, in the form of ``HbmDevice.stats``."""
    if not ranks:
        return {}
    slow = {rank: found.slow_copies for rank, found in ranks.items()}
    return {
        "device": ", ".join(sorted({found.device for found in ranks.values()})),
        "copies": ", ".join(sorted({found.copies for found in ranks.values()})),
        "slow_copies": _reasons(slow),
    }


def _host_of(
    ranks: Mapping[int, RankHealth], config: StoreConfig, held: HostFormat
) -> dict[str, object] | None:
    """Return the totals of all ranks' host memory, in the form of ``HostArena.stats``.

    Returns:
        None if there are no ranks or no host tier.
    """
    if not ranks or config.host is None:
        return None
    return {
        "pin_nbytes": sum(found.pin_nbytes for found in ranks.values()),
        "pinned_nbytes": sum(found.pinned_nbytes for found in ranks.values()),
        "unpinned_nbytes": sum(found.unpinned_nbytes for found in ranks.values()),
        "pinning": any(found.pinning for found in ranks.values()),
        "refused": _reasons({rank: found.refused for rank, found in ranks.items()}),
        "codec": config.host.codec,
        "slot_nbytes": held.slot_nbytes,
    }


def _reasons(by_rank: Mapping[int, str | None]) -> str | None:
    """Join the reasons of the ranks that have one into a single line. Return None if no rank has one."""
    return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(by_rank.items()) if why) or None


def _admission(directory: Directory, page_nbytes: int, metrics: Metrics) -> dict[str, object]:
    """Return the number of pages that admission kept off the disk, and the state of the write budget.

    Also set the metrics of admission.
    """
    refused = directory.drops.refused
    found = directory.admission.stats()
    metrics.admission(found["waiting_pages"] or 0, found["written_last_24h"] or 0, found["left_today"])
    return {"refused_pages": refused, "refused_nbytes": refused * page_nbytes, **found}


def _states(directory: Directory, tier: Tier) -> dict[str, int]:
    tables = directory.residency.tables
    table, lowest = tables[tier], tier == max(tables)
    return {
        "free": len(table.free),
        "resident": len(table.copies) - table.arriving,
        "arriving": table.arriving,
        "pinned": table.pinned,
        "mirrors" if lowest else "unsaved": len(table.mirrors if lowest else table.dirty),
        "droppable": len(table.droppable),
        "owned": len(table.owned),
        "quarantined": len(table.quarantine),
    }


def _sizes(table: TierTable, page_nbytes: int, slot_nbytes: int) -> dict[str, object]:
    if table.num_slots is None:
        return {"budget_nbytes": table.budget_nbytes, "used_nbytes": table.used_nbytes}
    return {
        "num_slots": table.num_slots,
        "payload_nbytes": table.num_slots * page_nbytes,
        "allocated_nbytes": table.num_slots * slot_nbytes,
    }
