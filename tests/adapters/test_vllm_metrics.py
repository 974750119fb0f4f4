"""Test the connector's metrics: the increments of its counters since the last read, and the log line."""

from __future__ import annotations

import pytest

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm import metrics


def test_metrics_are_increments_that_add_up_to_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "monotonic", lambda: now[0])
    total: dict[str, dict[str, float]] = {"hits_pages": {"HOST": 3.0}, "pages": {"HOST,free": 5.0}}
    taker = metrics.MetricsReader(lambda: total)
    first = taker.take()
    assert first == total
    total = {"hits_pages": {"HOST": 4.0, "NVME": 2.0}, "pages": {"HOST,free": 1.0}, "lock": {"x": 1.0}}
    assert taker.take() is None  # too early
    now[0] = 1.5
    second = taker.take()
    assert second == {"hits_pages": {"HOST": 1.0, "NVME": 2.0}, "pages": {"HOST,free": 1.0}}
    assert first is not None
    both = metrics.summed(first, second)
    assert both == {"hits_pages": {"HOST": 4.0, "NVME": 2.0}, "pages": {"HOST,free": 1.0}}
    now[0] = 3.0
    assert taker.take() is None  # nothing new


def test_log_line_shows_transferred_bytes_and_throughput() -> None:
    words = metrics.in_words(
        {
            "hits_pages": {"NVME": 7.0},
            "transfer_bytes": {"HBM,HOST": 2e9},
            "transfer_seconds": {"HBM,HOST": 0.5},
            "failed_pages": {"NVME,HOST,integrity": 2.0},
        }
    )
    assert words == {
        "Pages loaded from NVME": 7,
        "HBM->HOST (MB)": 2000.0,
        "HBM->HOST (GB/s)": 4.0,
        "Pages not moved": 2,
    }


def test_connector_reports_transferred_bytes_and_pages() -> None:
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    found = engine.half.figures()
    assert found["transfer_bytes"] == {"HBM,HOST": 4 * 64 + 64}
    assert found["pages"]["HOST,resident"] == 5
    engine.close()
