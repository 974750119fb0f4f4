"""Tests of flush and drain: which pages are durable and which transfers have ended when they return."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bench import Bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    fill,
    read_soon,
    records,
    tier_stats,
    tiers,
    where,
    write,
    write_each,
)
from tests.support.stalls import DOWN, OUT
from tierstore.config import StoreConfig
from tierstore.store import TierStore
from tierstore.types import Tier


def test_flush_makes_every_page_durable_and_keeps_the_upper_copies(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys)
    store.flush()
    assert where(store, keys[0]) == {Tier.HBM: "ready", Tier.HOST: "ready", Tier.NVME: "ready"}
    assert records(store) == 4


def test_flush_returns_when_writes_fail_and_loses_nothing(bench: Bench) -> None:
    keys = chain(4)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    for _ in range(4):
        bench.records.fail_next(DOWN, 0, 1, 2, 3)
    bench.store.flush()
    assert bench.store.match(keys).tiers == (Tier.HBM,) * 4
    assert counter(bench.store, "failed_pages", "HOST,NVME,io_error") > 0
    bench.open_gates()
    bench.store.flush()
    assert records(bench.store) == 4


def test_flush_gives_up_on_a_stalled_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.store._FLUSH_STALL_S", 0.2)
    write(bench.store, chain(2))
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.flush()
    assert bench.store.match(chain(2)).num_pages == 2


def test_flush_without_a_disk_returns(tmp_path: Path) -> None:
    with TierStore.open(tiers(hbm=2, host=2), SPEC) as store:
        write(store, chain(2))
        store.flush()
        assert store.match(chain(2)).num_pages == 2


def test_every_page_reaches_the_disk_without_a_flush(tmp_path: Path) -> None:
    # F088: pages are put faster than the timed spill writes them
    with TierStore.open(tiers(hbm=4, host=8, nvme=tmp_path), SPEC) as store:
        keys = [key for i in range(30) for key in chain(2, str(i))]
        for i in range(0, 60, 2):
            write(store, keys[i : i + 2])
        assert store.match(keys[-2:]).num_pages == 2
        assert sum(read_soon(store, keys[i : i + 2]) for i in range(0, 60, 2)) == 60


def test_drain_waits_for_transfers_in_flight_and_returns_whether_they_ended(bench: Bench) -> None:
    assert bench.store.drain(0.0) is True
    bench.copies.hold(OUT)
    write(bench.store, chain(2))
    assert bench.store.drain(0.02) is False
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S) is True


def test_a_sequence_longer_than_hbm_is_read_back_whole_page_by_page(store: TierStore) -> None:
    keys = chain(20)
    write_each(store, keys)
    assert store.match(keys).num_pages == 20
    for key in reversed(keys):
        assert read_soon(store, [key]) == 1


LARGE = replace(SPEC, num_kv_heads=64, head_dim=64)


def small_disk(directory: Path, host: int | None, payload: str = "lmdb") -> StoreConfig:
    """Return the configuration of a store with space for 32 pages in memory, but for only a few of them on disk."""
    more: dict[str, object] = {"capacity": "1500KiB", "payload": payload}
    return tiers(32, host, directory, page_nbytes=LARGE.page_nbytes, nvme_more=more)


@pytest.mark.parametrize("host", [None, 32], ids=["no-host", "host"])
@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_disk_smaller_than_memory_keeps_the_beginning_and_flush_counts_the_rest_as_failed(
    tmp_path: Path, host: int | None, payload: str
) -> None:
    config, keys = small_disk(tmp_path, host, payload), chain(24)
    with TierStore.open(config, LARGE) as store:
        slots = store.allocate(len(keys), PATIENCE_S)
        fill(store, keys, slots, LARGE)
        store.put(keys, slots)
        first, second = store.flush(), store.flush()
        assert store.match(keys).num_pages == len(keys)
        assert first.durable == records(store)
    assert first.durable + first.failed == len(keys)
    assert 0 < first.durable < len(keys)
    assert second == first
    with TierStore.open(config, LARGE) as store:
        # A catalogue that has grown may take the space of one page.
        assert first.durable - 1 <= store.match(keys).num_pages == tier_stats(store, Tier.NVME)["resident"]


def test_timed_writes_to_a_disk_smaller_than_memory_keep_the_beginning(tmp_path: Path) -> None:
    config, keys = small_disk(tmp_path, 32), chain(24)
    with TierStore.open(config, LARGE) as store:
        slots = store.allocate(len(keys), PATIENCE_S)
        fill(store, keys, slots, LARGE)
        store.put(keys, slots)
        assert store.drain(PATIENCE_S)
    with TierStore.open(config, LARGE) as store:
        assert 0 < store.match(keys).num_pages == tier_stats(store, Tier.NVME)["resident"] < len(keys)
