"""Tests of allocate and free: who owns a slot, what frees space, and the error if HBM is exhausted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    page_tensor,
    read,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.stalls import OUT
from tierstore.errors import CapacityError, LeaseError
from tierstore.store import TierStore
from tierstore.types import Tier


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=8), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def test_allocated_slots_are_distinct_and_owned_by_the_caller(store: TierStore) -> None:
    slots = store.allocate(3) + store.allocate(1)
    assert sorted(slots) == [0, 1, 2, 3]
    assert tier_stats(store, Tier.HBM)["owned"] == 4
    store.free(slots)
    assert tier_stats(store, Tier.HBM)["free"] == 4


def test_allocate_none_is_allowed_and_takes_nothing(store: TierStore) -> None:
    assert store.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        store.allocate(-1)


def test_a_slot_has_the_shape_of_the_page(store: TierStore) -> None:
    assert page_tensor(store).shape == (4, 2, 2, 4, 2, 8)
    assert page_tensor(store)[3].is_contiguous()


def test_more_than_hbm_holds_is_refused_at_once_with_both_sizes(store: TierStore) -> None:
    with pytest.raises(CapacityError, match=r"cannot allocate 5 pages of .*: HBM has only 4 slots"):
        store.allocate(5, timeout_s=60.0)


def test_slots_owned_by_callers_end_in_capacity_error_and_nothing_is_taken(store: TierStore) -> None:
    slots = store.allocate(3)
    with pytest.raises(CapacityError):
        store.allocate(2, timeout_s=0.0)
    assert len(store.allocate(1, timeout_s=0.0)) == 1
    assert tier_stats(store, Tier.HBM)["owned"] == 4
    store.free(slots)


def test_leased_pages_are_never_taken(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys)
    with store.acquire(keys) as lease:
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.05)
        assert lease.num_pages == 4
    assert len(store.allocate(4)) == 4


def test_free_slots_are_used_before_pages_are_evicted(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    assert store.drain(PATIENCE_S)
    store.allocate(2, timeout_s=0.0)
    assert store.match(keys).tiers == (Tier.HBM, Tier.HBM)


def test_pages_saved_below_free_space_at_once_and_stay_readable(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys)
    assert store.drain(PATIENCE_S)
    slots = store.allocate(4, timeout_s=0.0)
    assert store.match(keys).tiers == (Tier.HOST,) * 4
    store.free(slots)
    assert read(store, keys) == 4


def test_pages_not_yet_saved_are_saved_first_while_the_caller_waits(bench: Bench) -> None:
    keys = chain(4)
    bench.copies.hold(OUT)
    write(bench.store, keys)
    with pytest.raises(CapacityError):
        bench.store.allocate(1, timeout_s=0.0)
    assert bench.store.match(keys).num_pages == 4
    bench.open_gates()
    assert len(bench.store.allocate(4, timeout_s=PATIENCE_S)) == 4
    assert bench.store.match(keys).tiers == (Tier.HOST,) * 4


def test_a_stalled_save_ends_in_capacity_error_not_in_a_hang(bench: Bench) -> None:
    keys = chain(4)
    bench.copies.hold(OUT)
    write(bench.store, keys)
    with pytest.raises(CapacityError):
        bench.store.allocate(2, timeout_s=0.1)
    bench.store.check()
    assert bench.store.match(keys).num_pages == 4


def test_the_least_recently_used_sequence_is_evicted_first_and_its_tail_before_its_head() -> None:
    with TierStore.open(tiers(hbm=4, host=None), SPEC) as store:
        old, new = chain(2, "old"), chain(2, "new")
        write(store, old)
        write(store, new)
        assert read(store, old) == 2
        store.allocate(1)
        assert (store.match(old).num_pages, store.match(new).num_pages) == (2, 1)
        store.allocate(1)
        assert (store.match(old).num_pages, store.match(new).num_pages) == (2, 0)
        store.allocate(1)
        assert store.match(old).num_pages == 1


@pytest.mark.parametrize("host", [1, 3])
def test_all_of_hbm_can_be_allocated_although_the_tier_below_is_smaller(host: int) -> None:
    # F034: saving every page would evict the saved copies of the others without end
    with TierStore.open(tiers(hbm=4, host=host), SPEC) as store:
        for i in range(6):
            write(store, chain(2, str(i)), timeout_s=PATIENCE_S)
            store.check()
        assert len(store.allocate(4, timeout_s=PATIENCE_S)) == 4
        assert sum(store.match(chain(2, str(i))).num_pages for i in range(6)) > 0


def test_fifo_ignores_use() -> None:
    config = tiers(hbm=4, host=None, hbm_more={"policy": "fifo"})
    with TierStore.open(config, SPEC) as store:
        first, second = chain(1, "a"), chain(1, "b")
        write(store, first)
        write(store, second)
        assert read(store, first) == 1
        store.allocate(3)
        assert store.match(first).num_pages == 0
        assert store.match(second).num_pages == 1


def test_a_freed_slot_is_reused_only_after_its_event(store: TierStore) -> None:
    slots = store.allocate(4)
    event = ManualEvent()
    store.free(slots[:1], after=event)
    with pytest.raises(CapacityError):
        store.allocate(1, timeout_s=0.02)
    store.check()
    event.happen()
    assert store.allocate(1, timeout_s=PATIENCE_S) == slots[:1]


def test_free_of_slots_not_owned_raises_and_changes_nothing(store: TierStore) -> None:
    sealed = write(store, chain(1))
    assert store.drain(PATIENCE_S)
    slots = store.allocate(2)
    before = store.stats()["tiers"]
    for wrong in (99, -1, slots[0], sealed[0]):
        with pytest.raises(LeaseError):
            store.free([*slots, wrong])
        assert store.stats()["tiers"] == before
    store.free(slots)
    with pytest.raises(LeaseError):
        store.free(slots)


def test_contents_survive_moves_through_every_tier(tmp_path: Path) -> None:
    with TierStore.open(tiers(hbm=2, host=2, nvme=tmp_path), SPEC) as store:
        sequences = [chain(2, str(i)) for i in range(8)]
        for keys in sequences:
            write(store, keys)
        assert store.drain(PATIENCE_S)
        for keys in reversed(sequences):
            assert read(store, keys) == 2
        assert set(where(store, sequences[3][0])) >= {Tier.NVME}
    assert content(sequences[0][0]).shape == SPEC.shape


def test_full_lower_tier_evicts_its_oldest_pages_for_newer_ones() -> None:
    """Fill HOST, the lowest tier, with older pages. Pages evicted from HBM must be saved there, not dropped."""
    with TierStore.open(tiers(4, 8), SPEC) as store:
        old, middle, new = chain(4, "old"), chain(4, "middle"), chain(4, "new")
        for keys in (old, middle, new):
            write(store, keys)
            store.drain(PATIENCE_S)
        store.free(store.allocate(4, PATIENCE_S))
        assert store.match(new).num_pages == 4
        assert store.match(middle).num_pages == 4
        store.check()


def test_a_sequence_longer_than_all_tiers_keeps_its_beginning() -> None:
    with TierStore.open(tiers(4, 2), SPEC) as store:
        keys = chain(6)
        write(store, keys[:4])
        store.demote(keys[:4], Tier.HOST)
        store.drain(PATIENCE_S)
        assert store.match(keys).num_pages == 4
        for key in keys[4:]:
            write(store, [key])
        assert store.match(keys).num_pages >= 2
        store.check()
