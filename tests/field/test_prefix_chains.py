"""Tests that a hit is a prefix: later pages are evicted first, a gap ends a hit, unreachable pages are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    page_tensor,
    read,
    read_soon,
    same,
    tiers,
    where,
    write,
    write_each,
)
from tierstore.config import StoreConfig
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

EVERYWHERE = (Tier.HBM, Tier.HOST, Tier.NVME)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(8, 8, tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def leave_only(store: TierStore, key: PageKey, tier: Tier) -> None:
    for other in set(EVERYWHERE) - {tier}:
        store.evict([key], other)
    assert where(store, key) == {tier: "ready"}


# -- F077 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_gap_ends_the_hit_until_the_page_is_put_again(bench: Bench, gone: int) -> None:
    # F077: evict one page, keep the others, put it again
    keys = chain(4)
    write(bench.store, keys)
    bench.store.flush()
    bench.store.evict([keys[gone]])
    assert bench.store.match(keys).num_pages == gone
    assert read(bench.store, keys) == gone
    with bench.store.acquire(keys[:gone]) as lease:
        lease.wait(PATIENCE_S)
        write(bench.store, [keys[gone]], lease)
    bench.store.flush()
    assert read(bench.store, keys) == 4
    parents = [page["parent"] for page in bench.store.explain(keys)]
    assert parents == [None, *(key.hex() for key in keys[:3])]


@pytest.mark.parametrize(
    "places",
    [
        (Tier.HBM, Tier.HOST, Tier.HBM, Tier.HBM),
        (Tier.HBM, Tier.NVME, Tier.HOST, Tier.HBM),
        (Tier.NVME, Tier.HBM, Tier.HOST, Tier.NVME),
        (Tier.HOST, Tier.NVME, Tier.NVME, Tier.HBM),
    ],
)
def test_a_prefix_scattered_over_the_tiers_is_one_hit_in_order(
    bench: Bench, places: tuple[Tier, ...]
) -> None:
    # F077: a page that is missing in one tier is no gap if another tier has it
    keys = chain(4)
    write(bench.store, keys)
    bench.store.flush()
    for key, tier in zip(keys, places, strict=True):
        leave_only(bench.store, key, tier)
    assert bench.store.match(keys).tiers == places
    assert read(bench.store, keys) == 4


def small(shape: str, tmp_path: Path) -> StoreConfig:
    return {
        "hbm": tiers(6, None),
        "host": tiers(3, 6),
        "nvme": tiers(3, 3, tmp_path, nvme_pages=6),
    }[shape]


@pytest.mark.parametrize("shape", ["hbm", "host", "nvme"])
def test_under_pressure_tails_are_evicted_first_and_the_beginning_of_a_sequence_is_kept(
    shape: str, tmp_path: Path
) -> None:
    # F077: for each kind of lowest tier
    with TierStore.open(small(shape, tmp_path), SPEC) as store:
        long = chain(5, "long")
        write_each(store, long)
        cut = False
        for i in range(200):
            write(store, chain(1, f"other{i}"))
            assert store.drain(PATIENCE_S)
            there = [bool(where(store, key)) for key in long]
            assert there == sorted(there, reverse=True), (
                "a page is still stored although the page before it was evicted"
            )
            cut |= not there[-1]
            if not there[0]:
                break
        assert cut
        store.check()


@pytest.mark.parametrize("shape", ["hbm", "host", "nvme"])
def test_pages_without_their_prefix_are_evicted_before_all_others(shape: str, tmp_path: Path) -> None:
    # F077: unreachable pages are evicted first, although they are the newest
    with TierStore.open(small(shape, tmp_path), SPEC) as store:
        kept = [chain(1, f"kept{i}")[0] for i in range(3)]
        for key in kept:
            write(store, [key])
        cut = chain(3, "cut")
        write_each(store, cut)
        assert store.drain(PATIENCE_S)
        store.evict(cut[:1])
        store.poll()
        capacity = store._directory.residency.tables[max(store._directory.residency.tables)]
        for i in range(400):
            if not any(where(store, key) for key in cut):
                break
            assert all(store.match([key]).num_pages for key in kept), (
                "a reachable page was evicted before an unreachable one"
            )
            write(store, chain(1, f"new{i}"))
            assert store.drain(PATIENCE_S)
        assert not any(where(store, key) for key in cut), f"{len(capacity.copies)} pages, none reclaimed"
        store.check()


def test_a_sequence_put_again_over_its_unreachable_rest_takes_no_more_space(tmp_path: Path) -> None:
    # F077: the pages after the gap are hits again, and are not written twice
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        keys = chain(4)
        write(store, keys)
        store.flush()
        store.evict(keys[:1])
        store.flush()
        write(store, keys)
        store.flush()
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert nvme["records"] == 4
        assert nvme["bytes_written"] == 5 * SPEC.page_nbytes
        assert read(store, keys) == 4


@pytest.mark.parametrize("gone", [0, 2])
def test_after_a_restart_a_gap_ends_the_hit_too(tmp_path: Path, gone: int) -> None:
    # F077
    config = tiers(8, 8, tmp_path)
    keys = chain(4)
    with TierStore.open(config, SPEC) as store:
        write(store, keys)
        store.flush()
        store.evict([keys[gone]])
    with TierStore.open(config, SPEC) as store:
        assert store.match(keys).num_pages == gone
        assert read(store, keys) == gone
        write(store, keys)
        assert read(store, keys) == 4


# -- F079 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["hbm", "host", "nvme"])
def test_refilled_slots_are_never_found_under_their_old_keys(shape: str, tmp_path: Path) -> None:
    # F079: slots are filled, evicted and filled with other pages. Then the old pages are looked up.
    with TierStore.open(small(shape, tmp_path), SPEC) as store:
        old = [key for i in range(3) for key in chain(2, f"old{i}")]
        for i in range(0, 6, 2):
            write(store, old[i : i + 2])
        store.flush()
        assert store.drain(PATIENCE_S)
        assert store.evict(old) == 6
        new = [key for i in range(3) for key in chain(2, f"new{i}")]
        for i in range(0, 6, 2):
            write(store, new[i : i + 2])
        assert store.drain(PATIENCE_S)
        assert [store.match([key]).num_pages for key in old] == [0] * 6
        for key in old:
            with store.acquire([key]) as lease:
                assert (lease.num_pages, lease.slots, lease.missing) == (0, [], [key])
        assert sum(read_soon(store, new[i : i + 2]) for i in range(0, 6, 2)) == 6


@pytest.mark.parametrize("shape", ["hbm", "host", "nvme"])
def test_every_page_found_under_pressure_has_its_own_bytes(shape: str, tmp_path: Path) -> None:
    # F079: the slots of evicted pages are reused all the time. The bytes of every hit are compared.
    with TierStore.open(small(shape, tmp_path), SPEC) as store:
        hits = 0
        for i in range(60):
            write(store, chain(2, str(i)))
            for j in range(max(0, i - 5), i):
                hits += read(store, chain(2, str(j)))
        assert hits > 0
        resident = {
            (tier, copy.slot): key
            for tier, table in store._directory.residency.tables.items()
            for key, copy in table.copies.items()
        }
        assert len(resident) == sum(len(t.copies) for t in store._directory.residency.tables.values())
        store.check()


def test_an_owned_slot_freed_unsealed_is_found_under_no_key(bench: Bench) -> None:
    # F079
    keys = chain(2)
    slots = write(bench.store, keys)
    bench.store.evict(keys)
    mine = bench.store.allocate(8)
    assert set(slots) <= set(mine)
    page_tensor(bench.store)[mine[0]].fill_(7)
    bench.store.free(mine)
    assert bench.store.match(keys).num_pages == 0
    write(bench.store, keys[:1])
    assert read(bench.store, keys) == 1
    assert not same(page_tensor(bench.store)[mine[0]], keys[1])
