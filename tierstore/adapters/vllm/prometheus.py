"""``metrics`` as vLLM's classes: aggregated between log lines, and exported as ``vllm:tierstore_*``.

Imports vLLM; ``metrics`` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tierstore.adapters.vllm.metrics import METRICS, in_words, summed


@dataclass
class TierStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Figures between two log lines. ``data``: by name, then by label values joined with ``,``."""

    def reset(self) -> None:
        """Start counting again."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later figures."""
        self.data = summed(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of a log line."""
        return in_words(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class TierStorePrometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter or gauge per figure, with vLLM's labels before its own."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[Gauge if figure.gauge else Counter](
                name=f"vllm:tierstore_{name}",
                documentation=f"TierStore: {figure.says}.",
                labelnames=[*labelnames, *figure.labels],
            )
            for name, figure in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Export a set of figures."""
        of_engine = self.per_engine_labelvalues[engine_idx]
        for name, rows in transfer_stats_data.items():
            for labels, value in rows.items():
                metric = self._metrics[name].labels(*of_engine, *labels.split(","))
                if METRICS[name].gauge:
                    metric.set(value)
                else:
                    metric.inc(value)
