"""Metrics of the scheduler's half, for vLLM's log and Prometheus.

Counters are increments since the last read; gauges are present values.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Rows = dict[str, float]


class Metric(NamedTuple):
    """A metric: its labels and its description. ``gauge``: a present value, not a sum."""

    labels: tuple[str, ...]
    says: str
    gauge: bool = False


METRICS: dict[str, Metric] = {
    "hits_pages": Metric(("tier",), "Pages found for loads, by the fastest tier that had them"),
    "misses_pages": Metric(("reason",), "Pages of loads that did not come, by reason"),
    "left_pages": Metric(("tier",), "Pages of hits that were computed, since that is quicker, by their tier"),
    "transfer_bytes": Metric(("src", "dst"), "Payload bytes moved"),
    "transfer_seconds": Metric(("src", "dst"), "Time in transfers"),
    "failed_pages": Metric(("src", "dst", "reason"), "Pages not moved"),
    "dropped_copies": Metric(("tier", "reason"), "Copies dropped"),
    "pages": Metric(("tier", "state"), "Pages now", gauge=True),
    "unpinned_bytes": Metric(
        ("rank",), "Host memory that was to be page-locked and is not, or not yet", gauge=True
    ),
    "slow_copies": Metric(
        ("rank",), "1 where copies to and from HBM take a slower route than the card allows", gauge=True
    ),
    "rank_disk_trouble": Metric(("rank",), "1 while the rank's disk is read-only or absent", gauge=True),
    "rank_open_transfers": Metric(("rank",), "Transfers that the rank has not ended", gauge=True),
    "rank_failed_pages": Metric(("rank",), "Pages that the rank did not move"),
    "rank_stalled_steps": Metric(("rank",), "Steps that waited 10 s or longer for copies on the rank"),
    "rank_faults": Metric(("rank",), "Unexpected errors in the rank's threads"),
}
"""Metrics by their names in ``tierstore.metrics``. In Prometheus they are ``vllm:tierstore_<name>``."""

_EVERY_S = 1.0


class MetricsReader:
    """Reads metrics as increments and present values. Use it from the scheduler's thread only."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._snapshot = snapshot
        self._before: dict[str, Rows] = {}
        self._told: dict[str, Rows] = {}
        """Gauges by rank, as last reported."""
        self._next = 0.0

    def take(self) -> dict[str, Rows] | None:
        """Return the increment of each counter and the value of each gauge, by label values joined with ``,``.

        Returns None if nothing is new, or if the last call was less than a second ago.
        """
        now = monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY_S
        found = self._snapshot()
        added = {name: self._added(name, dict(found.get(name, {}))) for name in METRICS}
        by_rank = {name: added[name] for name in METRICS if METRICS[name].gauge and name != "pages"}
        moved = any(rows for name, rows in added.items() if not METRICS[name].gauge)
        # A changed gauge is reported even without a hit: a rank without pinned memory may never have one.
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
    """Combine two results of ``take``, the second being the later one."""
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
    """Return the figures of a log line: pages by tier, megabytes and rates by edge, failures."""
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
