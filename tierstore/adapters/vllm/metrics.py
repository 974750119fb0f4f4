"""Metrics of the scheduler half, for vLLM's log and for Prometheus.

Counters are reported as increments since the last read, gauges as current values.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Rows = dict[str, float]


class Metric(NamedTuple):
    """Labels and description of one metric. ``gauge`` is True for a gauge, False for a counter."""

    labels: tuple[str, ...]
    says: str
    gauge: bool = False


METRICS: dict[str, Metric] = {
    "hits_pages": Metric(("tier",), "Pages found for loads, by the fastest tier that had them"),
    "misses_pages": Metric(("reason",), "Pages to load that were not delivered, by reason"),
    "left_pages": Metric(
        ("tier",), "Pages that were found but not loaded, because computing them is faster, by tier"
    ),
    "transfer_bytes": Metric(("src", "dst"), "Bytes of pages moved between two tiers"),
    "transfer_seconds": Metric(("src", "dst"), "Seconds spent in transfers between two tiers"),
    "failed_pages": Metric(("src", "dst", "reason"), "Pages that could not be moved, by reason"),
    "dropped_copies": Metric(("tier", "reason"), "Copies of pages removed from a tier, by reason"),
    "pages": Metric(("tier", "state"), "Current number of pages, by tier and state", gauge=True),
    "unpinned_bytes": Metric(
        ("rank",), "Bytes of host memory that should be page-locked but are not, or not yet", gauge=True
    ),
    "slow_copies": Metric(
        ("rank",), "1 if copies to and from HBM use a slower method than the GPU allows", gauge=True
    ),
    "rank_disk_trouble": Metric(("rank",), "1 while the rank's NVMe tier is read-only or absent", gauge=True),
    "rank_open_transfers": Metric(("rank",), "Transfers in flight on the rank", gauge=True),
    "rank_failed_pages": Metric(("rank",), "Pages that the rank failed to move"),
    "rank_stalled_steps": Metric(
        ("rank",), "Steps of the engine that waited 10 s or longer for copies on the rank"
    ),
    "rank_faults": Metric(("rank",), "Unexpected errors in the rank's threads"),
}
"""Metrics by their names in ``tierstore.metrics``. In Prometheus, they are named ``vllm:tierstore_<name>``."""

_EVERY_S = 1.0


class MetricsReader:
    """Reads counters as increments and gauges as current values. Used only by the scheduler's thread."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._snapshot = snapshot
        self._before: dict[str, Rows] = {}
        self._told: dict[str, Rows] = {}
        """Last reported values of the gauges that have a label ``rank``."""
        self._next = 0.0

    def take(self) -> dict[str, Rows] | None:
        """Return the increment of each counter and the value of each gauge.

        Each metric maps label values, joined with ``,``, to numbers. The result is None if nothing is new, or
        if the last call was less than a second ago.
        """
        now = monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY_S
        found = self._snapshot()
        added = {name: self._added(name, dict(found.get(name, {}))) for name in METRICS}
        by_rank = {name: added[name] for name in METRICS if METRICS[name].gauge and name != "pages"}
        moved = any(rows for name, rows in added.items() if not METRICS[name].gauge)
        # A changed gauge is reported even if no page has moved. On a rank without pinned memory, none may ever move.
        news = {n: r for n, r in by_rank.items() if r != self._told.get(n, dict.fromkeys(r, 0.0))}
        if not (moved or news):
            return None
        self._told = by_rank
        return {name: rows for name, rows in added.items() if rows}

    def _added(self, name: str, rows: Rows) -> Rows:
        if METRICS[name].gauge:
            return rows
        before, self._before[name] = self._before.get(name, {}), rows
        added = {labels: value - before.get(labels, 0.0) for labels, value in rows.items()}
        return {labels: value for labels, value in added.items() if value}


def summed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Rows]:
    """Combine two results of ``take``: add counters, and take gauges from ``other``, the later result."""
    found = {name: dict(rows) for name, rows in one.items()}
    for name, rows in other.items():
        if METRICS[name].gauge:
            found[name] = dict(rows)
            continue
        mine = found.setdefault(name, {})
        for labels, value in rows.items():
            mine[labels] = mine.get(labels, 0.0) + value
    return found


def in_words(figures: Mapping[str, Mapping[str, float]]) -> dict[str, int | float]:
    """Return the values for a log line: pages by tier, MB and GB/s by edge, ranks with problems, and failed pages."""
    words: dict[str, int | float] = {}
    for tier, pages in figures.get("hits_pages", {}).items():
        words[f"Pages loaded from {tier}"] = int(pages)
    for tier, pages in figures.get("left_pages", {}).items():
        words[f"Pages left in {tier}"] = int(pages)
    seconds = figures.get("transfer_seconds", {})
    for edge, nbytes in figures.get("transfer_bytes", {}).items():
        name = edge.replace(",", "->")
        words[f"{name} (MB)"] = round(nbytes / 1e6, 1)
        if seconds.get(edge):
            words[f"{name} (GB/s)"] = round(nbytes / 1e9 / seconds[edge], 2)
    for rank, nbytes in figures.get("unpinned_bytes", {}).items():
        if nbytes:
            words[f"Host memory not pinned on rank {rank} (MB)"] = round(nbytes / 1e6, 1)
    for name, says in (("slow_copies", "Slow copies"), ("rank_disk_trouble", "Disk trouble")):
        ranks = [rank for rank, value in figures.get(name, {}).items() if value]
        if ranks:
            words[f"{says} on ranks"] = len(ranks)
    failed = sum(figures.get("failed_pages", {}).values())
    if failed:
        words["Pages not moved"] = int(failed)
    return words
