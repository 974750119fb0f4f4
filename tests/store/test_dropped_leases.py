"""Test that a lease dropped without release causes a warning, and that its pages and slots are freed."""

from __future__ import annotations

import gc
from threading import Thread
from typing import Any

import pytest

from tests.support.bench import Bench
from tests.support.engine import open_engine_bench, page_major, save
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, SPEC, chain, read, tier_stats, tiers, write, write_down
from tests.support.stalls import IN
from tierstore.errors import CapacityError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Tier


def drop(store: TierStore, num_pages: int = 4) -> None:
    """Acquire pages that are in the store, and drop the lease without releasing it."""
    lease = store.acquire(chain(num_pages))
    assert lease.num_pages == num_pages
    with pytest.warns(ResourceWarning, match=f"a lease of {num_pages} pages was dropped without release"):
        del lease


def collect_elsewhere() -> None:
    thread = Thread(target=gc.collect)
    thread.start()
    thread.join()


def taken_back(store: TierStore) -> float:
    counters: Any = store.stats()["counters"]
    found = counters["abandoned_leases"]["total"]
    assert isinstance(found, float)
    return found


def test_pages_of_a_dropped_lease_are_freed_for_the_next_request(store: TierStore) -> None:
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    drop(store)
    assert tier_stats(store, Tier.HBM)["pinned"] == 4
    assert len(store.allocate(4, timeout_s=0.0)) == 4
    assert taken_back(store) == 1
    assert store.stats()["leases"] == 0


def test_pages_sealed_under_a_dropped_lease_are_released_too(store: TierStore) -> None:
    lease = store.acquire([])
    write(store, chain(4), lease)
    with pytest.warns(ResourceWarning):
        del lease
    assert store.drain(PATIENCE_S)
    assert tier_stats(store, Tier.HBM)["pinned"] == 0
    assert read(store, chain(4)) == 4


def test_a_lease_dropped_while_its_pages_are_in_flight_leaks_nothing(bench: Bench) -> None:
    keys = chain(4)
    write_down(bench.store, keys, Tier.HOST)
    bench.copies.hold(IN)
    drop(bench.store)
    with bench.store.acquire([]):
        bench.store.check()
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert tier_stats(bench.store, Tier.HBM)["pinned"] == 0
    assert read(bench.store, keys) == 4


def test_pages_of_a_dropped_lease_are_reused_only_after_all_device_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, event = bench.store, ManualEvent()
    monkeypatch.setattr(bench.parts.device, "all_work", lambda: event)
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    drop(store)
    with pytest.raises(CapacityError):
        store.allocate(1, timeout_s=0.02)
    store.check()
    event.happen()
    assert len(store.allocate(4, timeout_s=PATIENCE_S)) == 4


def test_release_is_retried_if_the_device_cannot_record_an_event(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    drop(store)

    def captures() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(bench.parts.device, "all_work", captures)
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.0)
        assert taken_back(store) == 0
    assert len(store.allocate(4, timeout_s=0.0)) == 4


def test_a_lease_may_be_dropped_in_the_middle_of_a_change(store: TierStore) -> None:
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    lease = store.acquire(chain(4))
    with store._lock, store._guard, pytest.warns(ResourceWarning):
        del lease
    assert not store._guard.broken
    assert len(store.allocate(4, timeout_s=0.0)) == 4


def test_lease_in_a_cycle_is_released_by_any_thread_that_collects_it(store: TierStore) -> None:
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    gc.disable()
    try:
        cycle: list[object] = [store.acquire(chain(4))]
        cycle.append(cycle)
        del cycle
        with pytest.warns(ResourceWarning):
            collect_elsewhere()
    finally:
        gc.enable()
    assert len(store.allocate(4, timeout_s=0.0)) == 4


def test_slots_a_dropped_lease_would_fill_return_to_the_engine() -> None:
    engine = page_major()
    bench = open_engine_bench(engine, nvme=None)
    keys = chain(2)
    save(bench, engine, keys, [0, 1])
    bench.copies.hold(IN)
    lease = bench.store.acquire(keys, into=[2, 3])
    with pytest.warns(ResourceWarning):
        del lease
    assert bench.store.drain(0.0) is False
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert sorted(bench.store.poll()) == [2, 3]
    bench.close()


def test_an_acquire_that_fails_halfway_holds_nothing(
    store: TierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    directory = store._directory
    extend = directory.extend_lease

    def fails(*arguments: Any) -> None:
        extend(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(directory, "extend_lease", fails)
        with pytest.raises(MemoryError):
            store.acquire(chain(4))
    assert store.stats()["leases"] == 1
    assert len(store.allocate(4, timeout_s=0.0)) == 4
    assert store.stats()["leases"] == 0


def test_a_released_lease_or_one_of_a_closed_store_is_collected_silently(tmp_path: Any) -> None:
    def leases() -> list[Lease]:
        with TierStore.open(tiers(4, 8, tmp_path), SPEC) as store:
            write(store, chain(2))
            released, left = store.acquire(chain(2)), store.acquire(chain(2))
            released.release()
            return [released, left]

    found = leases()
    found.clear()  # a warning would fail the test
    gc.collect()
