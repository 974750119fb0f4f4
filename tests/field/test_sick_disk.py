"""Tests of a disk that hangs, fails or is slow under a running store (docs/field-reports.md, kind K14).

The store returns pages from memory, or reports misses. No slot is reused before its read has ended. When the disk works
again, the store recovers by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    counter,
    read,
    require_nothing_held,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.sick_disk import (
    Failing,
    Hanging,
    Slow,
    ask_again,
    disk_of,
    hold_clock,
    replace_preadv,
    time_is_up,
)
from tierstore.config import StoreConfig, load_config
from tierstore.gpu.engine_pages import EnginePages
from tierstore.nvme.read_breaker import LIMIT
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

EXTENTS = {"payload": "extents"}


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return tiers(8, 8, tmp_path / "disk", nvme_more=EXTENTS)


@pytest.fixture
def store(config: StoreConfig) -> Iterator[TierStore]:
    with TierStore.open(config, SPEC) as store:
        hold_clock(disk_of(store))
        yield store


def nvme(store: TierStore) -> dict[str, object]:
    found = store.stats()["nvme"]
    assert isinstance(found, dict)
    return found


def send_down(store: TierStore, length: int, name: str) -> None:
    """Put pages and move them to disk, so that no other tier has them."""
    keys = chain(length, name)
    write(store, keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    assert {tuple(where(store, key)) for key in keys} == {(Tier.NVME,)}


def require_served(store: TierStore, name: str, length: int) -> None:
    """Assert, page by page, that the pages are hits. The first read lets the store detect that the disk works again."""
    assert [read(store, [key]) for key in chain(length, name)] == [1] * length


def test_wait_for_a_page_on_a_hung_disk_ends_in_time_with_a_miss(
    store: TierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F056, F028: the caller gives no deadline, but the tier has a timeout
    send_down(store, 3, "below")
    disk = Hanging(1)
    replace_preadv(monkeypatch, disk)
    with store.acquire(chain(3, "below")) as lease:
        disk.wait(1)
        time_is_up(disk_of(store), reads=1)
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
        assert lease.num_pages < 3
        missing = lease.missing
    assert nvme(store)["state"] == "absent"
    assert store.metrics.text().count('tierstore_nvme_state{state="absent"} 1.0') == 1
    assert read(store, missing) == 0  # at once, because no further read is started
    write(store, missing)
    assert read(store, chain(3, "below")) == 3
    disk.go_on.set()
    replace_preadv(monkeypatch, None)
    assert store.drain(PATIENCE_S)
    require_nothing_held(store)


def test_slot_of_a_hung_read_is_quarantined_until_it_ends_and_others_are_used(
    store: TierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F024, F026: the late read writes only into its own slot, even if other pages need slots
    send_down(store, 8, "below")
    disk = Hanging(2)
    replace_preadv(monkeypatch, disk)
    with store.acquire(chain(8, "below")) as lease:
        disk.wait(2)
        time_is_up(disk_of(store), reads=2)
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
    assert tier_stats(store, Tier.HOST)["quarantined"] == 2
    assert nvme(store)["hung_reads"] == 2
    for i in range(20):  # these pages use the other six slots of HOST
        keys = chain(3, f"other{i}")
        write(store, keys)
        store.demote(keys, Tier.HOST)
        assert read(store, keys) == 3
    assert tier_stats(store, Tier.HOST)["quarantined"] == 2
    store.check()
    disk.go_on.set()
    for i in range(20):
        read(store, chain(3, f"other{i}"))
    assert store.drain(PATIENCE_S)
    assert tier_stats(store, Tier.HOST)["quarantined"] == 0
    require_served(store, "below", 8)
    assert nvme(store)["state"] == "ok"
    require_nothing_held(store)


def test_without_host_memory_the_slot_of_a_hung_read_is_one_of_hbm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F024
    with TierStore.open(tiers(4, None, tmp_path, nvme_more=EXTENTS), SPEC) as store:
        hold_clock(disk_of(store))
        send_down(store, 2, "below")
        disk = Hanging(1)
        replace_preadv(monkeypatch, disk)
        with store.acquire(chain(2, "below")[:1]) as lease:
            disk.wait(1)
            time_is_up(disk_of(store), reads=1)
            assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert tier_stats(store, Tier.HBM)["quarantined"] == 1
        for i in range(6):
            write(store, chain(3, f"other{i}"))
            assert read(store, chain(3, f"other{i}")) == 3
        store.check()
        disk.go_on.set()
        assert store.drain(PATIENCE_S)
        assert tier_stats(store, Tier.HBM)["quarantined"] == 0
        require_served(store, "below", 2)
        require_nothing_held(store)


def test_an_engine_gets_its_slots_back_from_a_hung_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F037: the hanging read writes only a slot of HOST, and no slot of the engine
    capacity = 8 * SPEC.page_nbytes
    source = {
        "hbm": {"device": "cpu", "owner": "engine"},
        "host": {"capacity": capacity},
        "nvme": {"path": tmp_path, "capacity": "4MiB", "flush": "10ms", **EXTENTS},
    }
    tensor = torch.zeros(
        (SPEC.num_layers, 2, 8, SPEC.page_size, SPEC.num_kv_heads, SPEC.head_dim), dtype=torch.float16
    )
    with TierStore.open(load_config(source), SPEC) as store:
        hold_clock(disk_of(store))
        store.register(EnginePages([tensor[0], tensor[1]], "KBNHD"))
        keys = chain(1, "below")
        for layer in range(SPEC.num_layers):
            tensor[layer][:, 3] = content(keys[0])[layer]
        store.put(keys, [3])
        assert store.drain(PATIENCE_S)
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
        store.poll()
        disk = Hanging(1)
        replace_preadv(monkeypatch, disk)
        with store.acquire(keys, into=[5]) as lease:
            disk.wait(1)
            time_is_up(disk_of(store), reads=1)
            assert lease.wait(PATIENCE_S) is LeaseState.FAILED
            assert lease.missing == keys
        tensor[:, :, 5] = 1.0
        disk.go_on.set()
        assert store.drain(PATIENCE_S)
        assert bool((tensor[:, :, 5] == 1.0).all())


def test_disk_that_fails_every_read_loses_few_records_and_is_then_not_read(
    store: TierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F056: records that were not tried are kept, and are hits again when the disk works
    names = [f"below{i}" for i in range(4)]
    for name in names:
        send_down(store, 6, name)
    disk = Failing()
    replace_preadv(monkeypatch, disk)
    for _ in range(3):
        for name in names:
            assert read(store, chain(6, name)) == 0
    assert nvme(store)["state"] == "absent"
    tried = disk.calls
    # when the limit was reached, the other reader may already have started one more read
    assert LIMIT <= tried <= LIMIT + 1
    assert counter(store, "failed_pages", "NVME,HOST,unavailable") > 0
    fresh = chain(4, "fresh")
    write(store, fresh)
    assert read(store, fresh) == 4
    replace_preadv(monkeypatch, None)
    ask_again(disk_of(store))
    held = [key for name in names for key in chain(6, name) if store.match([key]).num_pages]
    assert len(held) >= 24 - disk.calls
    for key in held:
        assert read(store, [key]) == 1
    assert nvme(store)["state"] == "ok"
    require_nothing_held(store)


def test_a_slow_disk_is_waited_for_while_memory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F056: a slow disk does not count as hung: no read is late, and every page arrives
    with TierStore.open(tiers(8, 8, tmp_path, nvme_more=EXTENTS), SPEC) as store:
        send_down(store, 4, "below")
        disk = Slow()
        replace_preadv(monkeypatch, disk)
        with store.acquire(chain(4, "below")) as lease:
            for left in range(4, 0, -1):
                assert lease.wait(0.0) is LeaseState.PENDING
                write(store, chain(2, f"{left}"))
                assert read(store, chain(2, f"{left}")) == 2
                disk.let_one_go()
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 4
        assert nvme(store)["read_late"] == 0
        assert nvme(store)["state"] == "ok"
        require_nothing_held(store)


def test_a_store_over_a_disk_whose_reads_hang_closes_within_its_timeout(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F056
    store = TierStore.open(config, SPEC)
    hold_clock(disk_of(store))
    send_down(store, 4, "below")
    disk = Hanging(4)
    replace_preadv(monkeypatch, disk)
    with store.acquire(chain(4, "below")) as lease:
        disk.wait(2)
        time_is_up(disk_of(store), reads=2)
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
    write(store, chain(2, "fresh"))
    store.close(timeout_s=0.2)
    disk.go_on.set()
