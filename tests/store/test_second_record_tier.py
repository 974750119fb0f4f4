"""Tests of an additional tier below NVMe: pages are moved to it, found in it, loaded from it, and evicted from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from prefetch import Prefetcher
from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    read_soon,
    require_nothing_held,
    tier_stats,
    tiers,
    where,
    write,
    write_down,
    write_each,
)
from tests.support.stalls import Lane
from tierstore.store import TierStore
from tierstore.types import Hint, PageKey, Tier, TierDescription

DOWN: Lane = (Tier.NVME, Tier.REMOTE)
UP: Lane = (Tier.REMOTE, Tier.HOST)
HOST_PAGES = 8


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(4, HOST_PAGES, tmp_path, nvme_pages=1), SPEC, spill=True, kept_pages=400)
    yield bench
    bench.store.check()
    bench.close()


def nvme_pages(bench: Bench) -> int:
    """Return how many pages fit on NVMe."""
    table = bench.directory.residency.tables[Tier.NVME]
    assert table.budget_nbytes is not None
    return table.budget_nbytes // table.record_nbytes


def fill_up(bench: Bench, more: int) -> list[list[PageKey]]:
    """Write sequences of three pages, in total ``more`` pages more than fit into HOST and NVMe. Return their keys."""
    number = (nvme_pages(bench) + more + HOST_PAGES) // 3
    found = [chain(3, f"sequence {i}") for i in range(number)]
    for keys in found:
        write(bench.store, keys)
        assert bench.store.drain(PATIENCE_S)
    return found


def test_directory_describes_the_second_record_tier(bench: Bench) -> None:
    assert bench.directory.hierarchy.tiers == {
        Tier.HBM: TierDescription("slots", below=Tier.HOST),
        Tier.HOST: TierDescription("slots", below=Tier.NVME),
        Tier.NVME: TierDescription("records", durable=True, below=Tier.REMOTE),
        Tier.REMOTE: TierDescription("records"),
    }


def test_pages_that_do_not_fit_on_nvme_move_to_the_second_tier_and_are_served_from_it(bench: Bench) -> None:
    sequences = fill_up(bench, more=40)
    store = bench.store
    fallen = [keys for keys in sequences if store.match(keys).tiers == (Tier.REMOTE,) * 3]
    assert len(fallen) >= 10
    assert sum(key in bench.dictionary.kept for keys in sequences for key in keys) >= 30
    for keys in sequences:
        assert store.match(keys).num_pages == 3, "a page was lost"
        assert read_soon(store, keys) == 3  # read_soon compares every byte
    store.check()
    require_nothing_held(store)


def test_one_sequence_longer_than_memory_and_nvme_is_found_whole(bench: Bench) -> None:
    keys = chain(nvme_pages(bench) + 30)
    for start in range(0, len(keys), 8):
        write_each(bench.store, keys[start : start + 8])
        assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys).num_pages == len(keys)
    assert Tier.REMOTE in bench.store.match(keys).tiers
    for start in range(0, len(keys), 4):
        assert read_soon(bench.store, keys[start : start + 4]) == len(keys[start : start + 4])


def test_pages_are_demoted_past_nvme_to_the_second_tier(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.REMOTE)
    assert bench.store.match(keys).tiers == (Tier.REMOTE,) * 3
    assert sorted(bench.dictionary.kept) == sorted(keys)
    assert tier_stats(bench.store, Tier.REMOTE)["resident"] == 3
    assert read_soon(bench.store, keys) == 3


def test_pages_are_promoted_from_the_second_tier(bench: Bench) -> None:
    keys, store = chain(4), bench.store
    write_down(store, keys[:2], Tier.REMOTE)
    write_down(store, keys[2:], Tier.NVME)
    store.take_hints()
    hint = Hint("request", 1, tuple(keys))
    store.hint(hint)
    assert store.promote(hint, keys, Tier.HOST).keys == tuple(keys)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.HOST,) * 4
    assert store.promote(hint, keys[:3], Tier.HBM).covered == 3
    assert store.drain(PATIENCE_S)
    assert read_soon(store, keys) == 4


def test_evicted_pages_are_erased_from_the_second_tier(bench: Bench) -> None:
    keys, store = chain(3), bench.store
    write_down(store, keys, Tier.REMOTE)
    assert store.evict(keys[2:]) == 1
    assert store.match(keys).num_pages == 2
    store.drain(PATIENCE_S)
    assert sorted(bench.dictionary.kept) == sorted(keys[:2])
    assert store.evict(keys, Tier.REMOTE) == 2
    assert store.match(keys).num_pages == 0


def test_full_second_tier_evicts_the_least_recently_used_pages(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, HOST_PAGES, tmp_path, nvme_pages=1), SPEC, spill=True, kept_pages=9)
    sequences = fill_up(bench, more=60)
    found = [bench.store.match(keys).num_pages for keys in sequences]
    assert found[0] == 0
    assert found[-1] == 3
    assert len(bench.dictionary.kept) <= 9
    require_nothing_held(bench.store)
    bench.close()


def test_volatile_second_tier_is_empty_after_reopen_and_flushed_pages_are_in_nvme(tmp_path: Path) -> None:
    config = tiers(4, HOST_PAGES, tmp_path)
    bench = open_bench(config, SPEC, kept_pages=400)
    deep, kept = chain(2, "deep"), chain(2, "kept")
    write_down(bench.store, deep, Tier.REMOTE)
    write(bench.store, kept)
    assert bench.store.flush().durable == 2
    bench.close()
    again = open_bench(config, SPEC, kept_pages=400)
    assert again.store.match(kept).tiers == (Tier.NVME,) * 2
    assert again.store.match(deep).num_pages == 0
    again.store.check()
    again.close()


def test_memory_only_pages_never_reach_the_second_tier(bench: Bench) -> None:
    keys, store = chain(2), bench.store
    slots = store.allocate(2)
    store.put(keys, slots, memory_only=True)
    store.demote(keys, Tier.REMOTE)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.HOST,) * 2


def test_pages_stay_in_nvme_while_the_second_tier_refuses_them(bench: Bench) -> None:
    bench.dictionary.refuses = True
    keys, store = chain(3), bench.store
    write_down(store, keys, Tier.NVME)
    store.demote(keys, Tier.REMOTE)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.NVME,) * 3, "the source of a failed write was dropped"
    assert store.stats()["failing"] == ["REMOTE"]
    bench.dictionary.refuses = False
    store.demote(keys, Tier.REMOTE)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.REMOTE,) * 3
    assert read_soon(store, keys) == 3


def test_nvme_record_that_cannot_be_read_is_dropped_when_moved_down(bench: Bench) -> None:
    keys, store = chain(3), bench.store
    write_down(store, keys, Tier.NVME)
    bench.records.fail_next(DOWN, 1)
    store.demote(keys, Tier.REMOTE)
    assert store.drain(PATIENCE_S)
    assert [tuple(where(store, key)) for key in keys] == [(Tier.REMOTE,), (), (Tier.REMOTE,)]
    assert read_soon(store, keys) == 1


@pytest.mark.parametrize("evicted", [False, True])
def test_late_read_while_moving_down_is_harmless(bench: Bench, evicted: bool) -> None:
    keys, store = chain(3), bench.store
    write_down(store, keys, Tier.NVME)
    bench.records.hold(DOWN)
    store.demote(keys, Tier.REMOTE)
    assert bench.records.tell_late(DOWN, {1})
    store.poll()
    if evicted:
        store.evict(keys[1:2])
    bench.records.open()
    assert store.drain(PATIENCE_S)
    kept = {key for key in keys if Tier.REMOTE in where(store, key)}
    assert set(bench.dictionary.kept) == kept, "the record of an abandoned copy was not erased"
    assert read_soon(store, keys) == (1 if evicted else 3)
    require_nothing_held(store)


@pytest.mark.parametrize("host", [HOST_PAGES, None])
def test_page_lost_in_the_second_tier_is_a_miss(tmp_path: Path, host: int | None) -> None:
    bench = open_bench(tiers(4, host, tmp_path), SPEC, kept_pages=20)
    keys = chain(3)
    write_down(bench.store, keys, Tier.REMOTE)
    assert read_soon(bench.store, keys) == 3
    bench.store.demote(keys, Tier.REMOTE)
    bench.store.drain(PATIENCE_S)
    del bench.dictionary.kept[keys[1]]
    with bench.store.acquire(keys) as lease:
        lease.wait(PATIENCE_S)
        assert lease.num_pages == 1
    assert bench.store.match(keys).num_pages == 1
    require_nothing_held(bench.store)
    bench.close()


def test_second_tier_may_be_directly_below_memory(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 4), SPEC, kept_pages=30)
    sequences = [chain(3, f"sequence {i}") for i in range(10)]
    for keys in sequences:
        write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    assert any(bench.store.match(keys).tiers == (Tier.REMOTE,) * 3 for keys in sequences)
    assert all(read_soon(bench.store, keys) == 3 for keys in sequences)
    assert bench.store.flush().durable == 0
    require_nothing_held(bench.store)
    bench.close()


def test_store_with_a_second_tier_runs_its_own_pump(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, HOST_PAGES, tmp_path), SPEC, pump=True, spill=True, kept_pages=40)
    keys = chain(3)
    store: TierStore = bench.store
    write(store, keys)
    store.demote(keys, Tier.REMOTE)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.REMOTE,) * 3
    assert read_soon(store, keys) == 3
    bench.close()


def test_attached_prefetcher_promotes_pages_of_the_second_tier(bench: Bench) -> None:
    store, near, far = bench.store, chain(2, "near"), chain(2, "far")
    write_down(store, near, Tier.NVME)
    write_down(store, far, Tier.REMOTE)
    prefetcher = Prefetcher.attach(store)
    store.hint(Hint("near", 1, tuple(near), deadline_s=0.5))
    store.hint(Hint("far", 1, tuple(far), deadline_s=1.0))
    deadline = monotonic() + PATIENCE_S
    while store.match(near).tiers + store.match(far).tiers != (Tier.HBM,) * 4:
        assert monotonic() < deadline, "the pages were not promoted in time"
        store.poll()
        sleep(0.001)
    prefetcher.close()
    assert read_soon(store, near) == read_soon(store, far) == 2
