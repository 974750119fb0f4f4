"""Tests of evict: pages stop matching at once, leases keep them until release, and flush erases them from disk."""

from __future__ import annotations

import pytest

from tests.support.bench import Bench
from tests.support.pages import (
    PATIENCE_S,
    chain,
    fill,
    read,
    records,
    require_right,
    write,
)
from tests.support.stalls import DOWN, IN
from tests.support.waiting import wait_for
from tierstore.errors import CapacityError
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier


def test_evict_removes_matches_at_once_in_one_tier_or_all(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys)
    store.flush()
    assert store.drain(PATIENCE_S)
    assert store.evict([*keys, *chain(1, "missing")], Tier.HBM) == 3
    assert store.match(keys).tiers == (Tier.HOST,) * 3
    assert store.evict(keys[2:]) == 1
    assert store.match(keys).num_pages == 2
    assert store.evict(keys) == 2
    assert store.evict(keys) == 0
    assert store.match(keys).num_pages == 0
    assert store.explain(keys)[0]["lost"] == "evicted"


def test_an_evicted_leased_page_keeps_its_bytes_until_released(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    with store.acquire(keys) as lease:
        assert store.evict(keys) == 2
        assert store.match(keys).num_pages == 0
        store.allocate(2)
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.02)
        require_right(store, lease)
    assert len(store.allocate(2)) == 2


def test_an_evicted_page_can_be_written_again_under_the_old_lease(store: TierStore) -> None:
    # F079
    keys = chain(1)
    write(store, keys)
    with store.acquire(keys) as lease:
        store.evict(keys)
        assert write(store, keys) != lease.slots
        store.check()
        require_right(store, lease)
    assert read(store, keys) == 1


def test_evicted_pages_are_gone_from_disk_after_flush(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys)
    store.flush()
    assert records(store) == 4
    store.evict(keys[2:])
    store.flush()
    assert records(store) == 2


def test_a_page_evicted_while_it_is_written_is_gone_from_disk_after_flush(bench: Bench) -> None:
    keys = chain(2)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.demote(keys, Tier.NVME)
    wait_for(lambda: not bench.store.drain(0.0) and bench.records.waiting(DOWN) > 0)
    assert bench.store.evict(keys) == 2
    bench.records.open()
    bench.store.flush()
    assert records(bench.store) == 0


def test_evict_during_a_load_cuts_the_lease_and_nothing_lands_elsewhere(bench: Bench) -> None:
    # F022, F024
    keys = chain(3)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.copies.hold(IN)
    lease = bench.store.acquire(keys)
    bench.store.evict(keys[1:])
    assert lease.num_pages == 1
    others = chain(1, "other")
    mine = bench.store.allocate(1, timeout_s=0.0)
    fill(bench.store, others, mine)
    with pytest.raises(CapacityError):
        bench.store.allocate(1, timeout_s=0.02)
    bench.copies.open()
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    require_right(bench.store, lease)
    lease.release()
    bench.store.put(others, mine)
    assert read(bench.store, others) == 1


def test_evict_refuses_an_invalid_tier(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    with pytest.raises(
        ValueError, match=r"cannot evict from 'HBM'; choose one of HBM, HOST, .* or None for all"
    ):
        store.evict(keys, "HBM")  # type: ignore[arg-type]
    assert store.match(keys).num_pages == 2
