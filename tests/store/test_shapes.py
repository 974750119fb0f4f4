"""Tests of stores of every shape: without some tiers, with tiers of one slot, without a pump, with tiny pools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.bench import open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    nvme_capacity,
    read,
    read_soon,
    require_right,
    tier_stats,
    tiers,
    write,
    write_each,
)
from tests.support.waiting import wait_for
from tierstore.config import StoreConfig
from tierstore.errors import CapacityError
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier, exact_size

Shape = tuple[int, int | None, bool]

SHAPES: list[Shape] = [
    (1, 1, True),
    (1, None, True),
    (1, 1, False),
    (2, 1, True),
    (1, 3, True),
    (3, None, True),
    (3, 2, True),
    (4, 8, False),
]


def config_of(shape: Shape, tmp_path: Path) -> StoreConfig:
    hbm, host, nvme = shape
    return tiers(hbm, host, tmp_path if nvme else None)


@pytest.mark.parametrize("pump", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_single_pages_are_read_back_from_a_store_of_any_shape(
    shape: Shape, pump: bool, tmp_path: Path
) -> None:
    with TierStore.open(config_of(shape, tmp_path), SPEC, pump=pump) as store:
        keys = [chain(1, str(i))[0] for i in range(12)]
        for key in keys:
            write(store, [key])
        found = sum(read_soon(store, [key]) for key in reversed(keys))
        store.check()
        assert store.drain(PATIENCE_S)
        hbm, host, nvme = shape
        assert found == 12 if nvme else found >= max(hbm, host or 0)


@pytest.mark.parametrize("shape", [(2, 1, True), (2, None, True), (3, 2, True), (3, 12, False)])
def test_sequence_much_longer_than_hbm_is_kept_whole(shape: Shape, tmp_path: Path) -> None:
    with TierStore.open(config_of(shape, tmp_path), SPEC) as store:
        keys = chain(14)
        write_each(store, keys)
        assert store.match(keys).num_pages == 14
        served = read_soon(store, keys[: shape[0]])
        assert served == shape[0]
        store.check()


def test_with_only_hbm_pages_that_do_not_fit_are_dropped_and_counted() -> None:
    with TierStore.open(tiers(4, None), SPEC) as store:
        for i in range(3):
            write(store, chain(2, str(i)), timeout_s=0.0)
        assert [store.match(chain(2, str(i))).num_pages for i in range(3)] == [0, 2, 2]
        assert store.explain(chain(1, "0"))[0]["lost"] == "capacity"
        assert counter(store, "dropped_copies", "HBM,capacity") == 2
        assert store.drain(0.0)
        store.flush()
        with pytest.raises(ValueError, match="no tier"):
            store.demote(chain(1, "1"), Tier.HOST)


@pytest.mark.parametrize("host", [1, 2])
def test_a_lease_of_any_size_streams_through_a_tiny_host(tmp_path: Path, host: int) -> None:
    # F030
    with TierStore.open(tiers(10, host, tmp_path), SPEC) as store:
        keys = chain(10)
        write(store, keys)
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 10
            require_right(store, lease)


def test_host_smaller_than_hbm_passes_every_page_to_disk(tmp_path: Path) -> None:
    # F034
    with TierStore.open(tiers(8, 2, tmp_path), SPEC) as store:
        sequences = [chain(4, str(i)) for i in range(8)]
        for keys in sequences:
            write(store, keys)
        store.flush()
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert nvme["records"] == 32
        assert all(read(store, keys) == 4 for keys in sequences)


def test_returning_sessions_get_their_own_bytes(tmp_path: Path) -> None:
    # F021: eight sessions return in another order; HOST has space for two of them, NVMe for all
    with TierStore.open(tiers(5, 10, tmp_path), SPEC) as store:
        sessions = [chain(5, str(i)) for i in range(8)]
        for i, keys in enumerate(sessions):
            write(store, keys)
            write(store, chain(1, f"short{i}"))
        for i in (3, 0, 7, 5, 1, 6, 2, 4):
            assert read_soon(store, sessions[i]) == 5
            assert read_soon(store, chain(1, f"short{i}")) == 1


def test_a_disk_too_small_keeps_to_its_budget_and_serves_what_it_has(tmp_path: Path) -> None:
    # F052
    with TierStore.open(tiers(4, 4, tmp_path, nvme_pages=6), SPEC) as store:
        sequences = [chain(2, str(i)) for i in range(100)]
        for keys in sequences:
            write(store, keys)
            store.check()
        store.flush()
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert nvme["disk_nbytes"] <= nvme_capacity(6)
        found = [read_soon(store, keys) for keys in sequences]
        assert found[-1] == 2
        assert 0 < sum(found) < 200


def test_without_a_pump_nothing_moves_between_calls(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    write(bench.store, chain(2))
    moving = dict(bench.directory.transfers.open)
    assert moving
    bench.copies.settle()
    assert bench.directory.transfers.open == moving
    bench.store.poll()
    assert not set(bench.directory.transfers.open) & set(moving)
    bench.close()


def test_with_a_pump_pages_move_without_any_call(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 4, tmp_path), SPEC, pump=True, spill=True)
    keys = chain(2)
    write(bench.store, keys)
    wait_for(lambda: all(bench.directory.residency.tables[Tier.NVME].ready(key) for key in keys))
    bench.close()


def test_a_request_larger_than_hbm_is_refused_naming_the_sizes() -> None:
    wanted = f"cannot allocate 3 pages of {exact_size(SPEC.page_nbytes)}: HBM has only 2 slots"
    with (
        TierStore.open(tiers(2, 4), SPEC) as store,
        pytest.raises(CapacityError, match=re.escape(wanted)),
    ):
        store.allocate(3)


def test_capacities_are_payload_bytes_and_stats_report_allocated_bytes() -> None:
    # F094, F100
    with TierStore.open(tiers(3, 7), SPEC) as store:
        for tier, slots in ((Tier.HBM, 3), (Tier.HOST, 7)):
            figures = tier_stats(store, tier)
            assert figures["num_slots"] == slots
            assert figures["payload_nbytes"] == slots * SPEC.page_nbytes
            assert figures["allocated_nbytes"] == slots * 4096
