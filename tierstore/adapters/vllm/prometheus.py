"""The metrics in vLLM's classes: aggregated for the log, and exported as ``vllm:tierstore_*``.

This module imports vLLM; ``metrics`` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tierstore.adapters.vllm.metrics import METRICS, in_words, summed


@dataclass
class TierStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Metrics collected between two log lines.

    ``data`` maps each metric's name to its values, by label values joined with ``,``.
    """

    def reset(self) -> None:
        """Clear the metrics."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add metrics that were collected later to these, and return the sum."""
        self.data = summed(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for a log line."""
        return in_words(self.data)

    def is_empty(self) -> bool:
        """Return whether there are no metrics."""
        return not self.data


class TierStorePrometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exports each metric as a counter or gauge. vLLM's labels come before the metric's own labels."""

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
        """Increase the counters of one engine by the new increments, and set its gauges."""
        of_engine = self.per_engine_labelvalues[engine_idx]
        for name, rows in transfer_stats_data.items():
            for labels, value in rows.items():
                metric = self._metrics[name].labels(*of_engine, *labels.split(","))
                if METRICS[name].gauge:
                    metric.set(value)
                else:
                    metric.inc(value)
