"""Tests of demote and of copies in flight: what the store promises while a transfer is stalled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    fill,
    read,
    require_right,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.stalls import DOWN, IN, OUT, UP
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_demote_moves_pages_to_the_tier_and_drops_upper_copies(store: TierStore, tier: Tier) -> None:
    keys = chain(3)
    write(store, keys)
    assert store.demote([*keys, *chain(2, "missing")], tier) == 3
    assert store.drain(PATIENCE_S)
    assert [tuple(where(store, key)) for key in keys] == [(tier,)] * 3
    assert read(store, keys) == 3


def test_demote_does_not_wait(bench: Bench) -> None:
    keys = chain(2)
    bench.copies.hold(OUT)
    write(bench.store, keys)
    assert bench.store.demote(keys, Tier.NVME) == 2
    assert bench.store.match(keys).tiers == (Tier.HBM, Tier.HBM)
    assert bench.store.explain(keys)[0]["going_down_to"] == "NVME"
    assert bench.store.drain(0.02) is False
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys).tiers == (Tier.NVME, Tier.NVME)


def test_a_leased_page_stays_up_until_released(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    with store.acquire(keys) as lease:
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        assert where(store, keys[0]) == {Tier.HBM: "ready", Tier.HOST: "ready"}
        require_right(store, lease)
    assert store.match(keys).tiers == (Tier.HOST, Tier.HOST)


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.REMOTE])
def test_demote_to_a_tier_that_is_not_below_is_a_value_error(store: TierStore, tier: Tier) -> None:
    with pytest.raises(ValueError, match="HOST, NVME"):
        store.demote(chain(1), tier)


def test_a_failed_demotion_leaves_the_source_readable(bench: Bench) -> None:
    keys = chain(3)
    bench.copies.hold(OUT)
    bench.copies.fail_next(OUT, 1)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    bench.copies.holding.clear()
    bench.copies.let_go(OUT)
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys).tiers == (Tier.HOST, Tier.HBM, Tier.HOST)
    assert read(bench.store, keys) == 3


def test_demotion_continues_when_another_copy_arrived_below(bench: Bench) -> None:
    # The page is put again while its promotion is in flight. Then it must be demoted past the copy arriving in HOST.
    keys = chain(1)
    store = bench.store
    write(store, keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    bench.records.hold(UP)
    with store.acquire(keys) as lease:
        write(store, keys)
        assert lease.wait(0.0) is LeaseState.READY
    store.evict(keys, Tier.NVME)
    store.demote(keys, Tier.NVME)
    bench.records.open()
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.NVME,)
    assert read(store, keys) == 1


def test_a_demotion_ends_when_the_copy_it_waits_for_is_evicted(bench: Bench) -> None:
    keys = chain(2)
    bench.copies.hold(OUT)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    bench.store.poll()
    bench.store.evict(keys, Tier.HOST)
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys).tiers == (Tier.HOST, Tier.HOST)


def test_a_load_does_not_wait_forever_for_a_copy_from_above(bench: Bench) -> None:
    # HOST receives its copy from HBM, and NVMe receives an older copy from HOST. Then the copy in HBM is evicted.
    keys = chain(1)
    store = bench.store
    write(store, keys)
    assert store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.copies.hold(OUT)
    store.demote(keys, Tier.NVME)
    store.evict(keys, Tier.HOST)
    store.demote(keys, Tier.HOST)
    bench.records.open()
    bench.settle()
    store.evict(keys, Tier.HBM)
    assert where(store, keys[0]) == {Tier.HOST: "arriving", Tier.NVME: "ready"}
    with store.acquire(keys) as lease:
        assert lease.num_pages == 1
        bench.copies.open()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)


def test_a_source_stays_until_its_load_is_acknowledged(bench: Bench) -> None:
    # F022: HOST needs space while the copy is stalled
    keys = chain(4)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.store.flush()
    bench.copies.hold(IN)
    lease = bench.store.acquire(keys[:2])
    lease.release()
    for i in range(8):
        write(bench.store, chain(2, f"other{i}"))
        bench.store.flush()
    bench.store.check()
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert read(bench.store, keys) == 4


def test_a_page_is_served_from_above_while_its_record_is_being_written(bench: Bench) -> None:
    # F028
    keys = chain(2)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.demote(keys, Tier.NVME)
    bench.store.poll()
    assert read(bench.store, keys) == 2
    bench.store.evict(keys, Tier.HBM)
    bench.store.evict(keys, Tier.HOST)
    assert read(bench.store, keys) == 0
    bench.records.open()
    assert bench.store.drain(PATIENCE_S)
    assert read(bench.store, keys) in (0, 2)


def test_slots_swapped_between_tiers_under_random_stalls_keep_their_bytes(bench: Bench) -> None:
    # F005: demote a->h1, promote h1->g2, demote b->h1, promote h1->g3, without waiting for any of them
    a, b = chain(2, "a"), chain(2, "b")
    store = bench.store
    bench.copies.hold(OUT, IN)
    write(store, a)
    store.demote(a, Tier.HOST)
    write(store, b)
    bench.copies.let_go(OUT, 1)
    bench.settle()
    lease = store.acquire(a)
    store.demote(b, Tier.HOST)
    bench.copies.let_go(OUT)
    bench.settle()
    other = store.acquire(b)
    bench.copies.let_go(IN)
    bench.copies.open()
    for held in (lease, other):
        assert held.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, held)
        held.release()
    assert store.drain(PATIENCE_S)
    assert read(store, a) == 2
    assert read(store, b) == 2


def test_page_is_copied_unchanged_though_its_slot_was_reused(bench: Bench) -> None:
    # F008: a slot is not handed out while it is the source of a copy in flight
    keys = chain(2)
    bench.copies.hold(OUT)
    write(bench.store, keys)
    bench.store.poll()
    bench.store.evict(keys, Tier.HBM)
    others = chain(2, "other")
    slots = bench.store.allocate(2, timeout_s=0.0)
    fill(bench.store, others, slots)
    bench.copies.open()
    bench.settle()
    found = read(bench.store, keys)
    assert found in (0, 2)
    assert tier_stats(bench.store, Tier.HBM)["quarantined"] == 0
    bench.store.free(slots)


def test_demoting_more_pages_than_the_lowest_tier_holds_ends(tmp_path: Path) -> None:
    bench = open_bench(tiers(hbm=4, host=2), SPEC)
    keys = [chain(1, str(i))[0] for i in range(4)]
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys[-1:]).num_pages + bench.store.match(keys[:1]).num_pages > 0
    bench.store.check()
    bench.close()
