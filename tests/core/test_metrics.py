"""Tests of a store's counters: they appear in the snapshot and in the text, and stores do not share them."""

from __future__ import annotations

from tierstore.metrics import Metrics
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer

TRANSFER = Transfer(
    id=1,
    keys=(PageKey(b"a"), PageKey(b"b"), PageKey(b"c")),
    src=Tier.NVME,
    src_slots=(0, 1, 2),
    dst=Tier.HOST,
    dst_slots=(0, 1, 2),
    nbytes=0,
    parents=(None, None, None),
)


def test_counted_events_are_in_the_snapshot() -> None:
    metrics = Metrics()
    metrics.hit(Tier.HBM)
    metrics.hit(Tier.HBM, 4)
    metrics.hit(Tier.NVME)
    metrics.miss("not_found", 2)
    metrics.dropped(Tier.HOST, "saved", 3)
    metrics.hinted("deferred")
    metrics.fault()
    metrics.waited(0.5)
    metrics.pages(Tier.HOST, "resident", 7)
    found = metrics.snapshot()
    assert found["hits_pages"] == {"HBM": 5.0, "NVME": 1.0}
    assert found["misses_pages"] == {"not_found": 2.0}
    assert found["dropped_copies"] == {"HOST,saved": 3.0}
    assert found["hints"] == {"deferred": 1.0}
    assert found["faults"] == {"total": 1.0}
    assert found["lease_wait_seconds"] == {"count": 1.0, "sum": 0.5}
    assert found["pages"] == {"HOST,resident": 7.0}


def test_a_transfer_counts_what_arrived_and_why_the_rest_did_not() -> None:
    metrics = Metrics()
    failures = ((0, Failure.INTEGRITY), (2, Failure.INTEGRITY))
    metrics.moved(TRANSFER, Ack(1, False, 1, 100, 0.25, failures), page_nbytes=100)
    found = metrics.snapshot()
    assert found["transfer_bytes"] == {"NVME,HOST": 100.0}
    assert found["transfer_seconds"] == {"NVME,HOST": 0.25}
    assert found["failed_pages"] == {"NVME,HOST,integrity": 2.0}


def test_text_is_in_prometheus_format() -> None:
    metrics = Metrics()
    metrics.hit(Tier.HOST, 3)
    assert 'tierstore_hits_pages_total{tier="HOST"} 3.0' in metrics.text().splitlines()


def test_two_stores_in_a_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.fault()
    assert other.snapshot()["faults"] == {"total": 0.0}


def test_longest_lock_hold_is_read_on_demand() -> None:
    metrics, held = Metrics(), [0.0]
    metrics.watch_lock(lambda: held[0], lambda: held[0] / 2)
    held[0] = 4.0
    assert metrics.snapshot()["lock_longest_hold_seconds"] == {"elapsed": 4.0, "cpu": 2.0}
