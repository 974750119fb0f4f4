"""Tests of put: sealed pages, duplicates, adopted pages, pins of a lease, and the event that ends a write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    fill,
    page_tensor,
    read,
    require_right,
    same,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.stalls import IN
from tierstore.errors import CapacityError, LeaseError
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=6, host=12), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def push_down(bench: Bench, keys: list[PageKey]) -> None:
    """Write pages and demote them, so that they are only in HOST."""
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    assert {tuple(where(bench.store, key)) for key in keys} == {(Tier.HOST,)}


def test_pages_match_once_put_returns(store: TierStore) -> None:
    keys = chain(3)
    slots = store.allocate(3)
    assert store.match(keys).num_pages == 0
    assert store.put(keys, slots) == slots
    match = store.match(keys)
    assert (match.num_pages, match.tiers, match.exact) == (3, (Tier.HBM,) * 3, True)
    assert store.match([*keys, *chain(1, "other")]).num_pages == 3


def test_a_gap_ends_the_match(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys[:1])
    write(store, keys[2:])
    assert store.match(keys).num_pages == 1
    assert store.match(keys[1:]).num_pages == 0


def test_sealed_slots_no_longer_belong_to_the_caller(store: TierStore) -> None:
    slots = write(store, chain(2))
    with pytest.raises(LeaseError):
        store.free(slots)
    with pytest.raises(LeaseError):
        store.put(chain(2, "again"), slots)


def test_unequal_lengths_are_a_value_error_and_change_nothing(store: TierStore) -> None:
    slots = store.allocate(2)
    with pytest.raises(ValueError, match="3 keys and 2 slots"):
        store.put(chain(3), slots)
    assert store.match(chain(3)).num_pages == 0
    store.free(slots)


def test_a_slot_of_another_owner_is_a_lease_error_and_changes_nothing(store: TierStore) -> None:
    keys = chain(3)
    slots = store.allocate(2)
    for wrong in (99, -1, slots[0]):
        with pytest.raises(LeaseError):
            store.put(keys, [*slots, wrong])
    assert store.match(keys).num_pages == 0
    assert tier_stats(store, Tier.HBM)["owned"] == 2
    store.free(slots)


def test_a_key_that_is_too_short_is_a_value_error_and_changes_nothing(store: TierStore) -> None:
    slots = store.allocate(2)
    with pytest.raises(ValueError, match="36 bytes"):
        store.put([chain(1)[0], PageKey(b"short")], slots)
    assert store.match(chain(1)).num_pages == 0
    store.free(slots)


def test_a_duplicate_returns_the_first_copy_and_frees_yours(store: TierStore) -> None:
    keys = chain(2)
    first = write(store, keys)
    slots = store.allocate(3)
    fill(store, [*keys, *chain(1, "new")], slots)
    kept = store.put([*keys, *chain(1, "new")], slots)
    assert kept == [*first, slots[2]]
    assert tier_stats(store, Tier.HBM)["owned"] == 0
    assert tier_stats(store, Tier.HBM)["free"] == 3
    assert read(store, keys) == 2


def test_a_duplicate_is_freed_only_after_the_event(store: TierStore) -> None:
    keys = chain(1)
    write(store, keys)
    mine = store.allocate(1)
    event = ManualEvent()
    assert store.put(keys, mine, after=event) != mine
    assert store.drain(0.02) is False
    store.check()
    assert tier_stats(store, Tier.HBM)["free"] == 4
    event.happen()
    assert store.drain(PATIENCE_S)
    assert tier_stats(store, Tier.HBM)["free"] == 5


def test_the_same_key_twice_in_one_put_keeps_the_first_slot(store: TierStore) -> None:
    key = chain(1)[0]
    slots = store.allocate(2)
    fill(store, [key, key], slots)
    assert store.put([key, key], slots) == [slots[0], slots[0]]
    assert tier_stats(store, Tier.HBM)["free"] == 5


def test_no_copy_starts_before_the_writing_event(bench: Bench) -> None:
    # F001: the CPU continues before the kernel that writes the page has run
    keys = chain(2)
    slots = bench.store.allocate(2)
    event = ManualEvent()
    bench.store.put(keys, slots, after=event)
    bench.store.demote(keys, Tier.HOST)
    with pytest.raises(CapacityError):
        bench.store.allocate(5, timeout_s=0.05)
    assert set(where(bench.store, keys[0])) == {Tier.HBM}
    fill(bench.store, keys, slots)
    event.happen()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys).tiers == (Tier.HOST, Tier.HOST)
    assert read(bench.store, keys) == 2


def test_unwritten_page_has_the_event_of_its_writer(store: TierStore) -> None:
    keys = chain(2)
    slots = store.allocate(2)
    event = ManualEvent()
    store.put(keys, slots, after=event)
    with store.acquire(keys) as lease:
        assert lease.wait(0.0) is LeaseState.PENDING
        ready = lease.ready(0)
        assert ready is not None
        assert not ready.query()
        fill(store, keys, slots)
        event.happen()
        ready.synchronize()
        assert ready.query()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)
        assert lease.ready(0) is None


def test_an_unwritten_page_that_was_evicted_keeps_its_slot_until_the_event(store: TierStore) -> None:
    keys = chain(1)
    slots = store.allocate(1)
    event = ManualEvent()
    store.put(keys, slots, after=event)
    assert store.evict(keys) == 1
    assert store.match(keys).num_pages == 0
    others = store.allocate(5)
    assert slots[0] not in others
    with pytest.raises(CapacityError):
        store.allocate(1, timeout_s=0.02)
    event.happen()
    assert store.allocate(1, timeout_s=PATIENCE_S) == slots


def test_write_behind_copies_to_host_while_host_has_space(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys)
    assert store.drain(PATIENCE_S)
    assert where(store, keys[0]) == {Tier.HBM: "ready", Tier.HOST: "ready"}


def test_write_behind_never_drops_another_pages_last_copy_below() -> None:
    with TierStore.open(tiers(hbm=8, host=2), SPEC) as store:
        first, second = chain(2, "a"), chain(4, "b")
        write(store, first)
        assert store.drain(PATIENCE_S)
        store.demote(first, Tier.HOST)
        assert store.drain(PATIENCE_S)
        write(store, second)
        assert store.drain(PATIENCE_S)
        assert store.match(first).tiers == (Tier.HOST, Tier.HOST)
        assert store.match(second).tiers == (Tier.HBM,) * 4


def test_page_present_only_below_is_adopted_as_clean(bench: Bench) -> None:
    keys = chain(2)
    push_down(bench, keys)
    before = counter(bench.store, "transfer_bytes", "HBM,HOST")
    slots = write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    assert where(bench.store, keys[0]) == {Tier.HBM: "ready", Tier.HOST: "ready"}
    assert counter(bench.store, "transfer_bytes", "HBM,HOST") == before
    assert len(bench.store.allocate(6, timeout_s=0.0)) == 6
    assert bench.store.match(keys).tiers == (Tier.HOST, Tier.HOST)
    assert len(set(slots)) == 2


def test_a_page_being_loaded_adopts_the_slot_and_its_lease_is_ready(bench: Bench) -> None:
    # F041: the late copy of the earlier load arrives in a slot that is not in use
    keys = chain(2)
    push_down(bench, keys)
    bench.copies.hold(IN)
    lease = bench.store.acquire(keys)
    old = lease.slots
    assert lease.wait(0.0) is LeaseState.PENDING
    mine = write(bench.store, keys)
    assert not set(mine) & set(old)
    assert lease.wait(0.0) is LeaseState.READY
    assert lease.slots == mine
    bench.store.check()
    assert len(bench.store.allocate(2, timeout_s=0.0)) == 2
    with pytest.raises(CapacityError):
        bench.store.allocate(1, timeout_s=0.02)
    bench.copies.open()
    bench.settle()
    require_right(bench.store, lease)
    lease.release()
    assert bench.store.drain(PATIENCE_S)
    assert tier_stats(bench.store, Tier.HBM)["quarantined"] == 0


def test_pages_put_under_a_lease_stay_until_its_release(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys[:2])
    with store.acquire(keys[:2]) as lease:
        lease.wait(PATIENCE_S)
        slots = write(store, keys[2:], lease)
        assert store.drain(PATIENCE_S)
        store.allocate(2)
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.05)
        assert all(same(page_tensor(store)[s], k) for s, k in zip(slots, keys[2:], strict=True))
        assert lease.num_pages == 2
    assert len(store.allocate(4)) == 4


def test_put_under_a_released_lease_is_a_lease_error_and_changes_nothing(store: TierStore) -> None:
    lease = store.acquire([])
    lease.release()
    slots = store.allocate(1)
    with pytest.raises(LeaseError):
        store.put(chain(1), slots, lease=lease)
    assert store.match(chain(1)).num_pages == 0
    store.free(slots)


def test_a_duplicate_under_a_lease_pins_the_copy_that_stays(store: TierStore) -> None:
    keys = chain(1)
    first = write(store, keys)
    with store.acquire([]) as lease:
        assert write(store, keys, lease) == first
        assert store.drain(PATIENCE_S)
        assert set(store.allocate(5)).isdisjoint(first)
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.02)


def test_pages_rewritten_under_one_lease_do_not_become_their_own_ancestors() -> None:
    with TierStore.open(tiers(hbm=6, host=None), SPEC) as store:
        a, b = chain(2)
        with store.acquire([]) as lease:
            write(store, [a, b], lease)
            for key in (a, b, a):
                store.evict([key])
                write(store, [key], lease)
        store.check()
        assert len(store.allocate(6, timeout_s=1.0)) == 6


def test_a_lease_of_another_store_is_refused_and_nothing_is_changed(store: TierStore) -> None:
    keys = chain(2)
    with TierStore.open(tiers(), SPEC) as other, other.acquire([]) as lease:
        slots = store.allocate(2)
        with pytest.raises(LeaseError, match="another store"):
            store.put(keys, slots, lease=lease)
        other.check()
    store.check()
    assert store.match(keys).num_pages == 0
    store.free(slots)


@pytest.mark.parametrize("strange", ["a" * 36, b"a" * 35, [0] * 36])
def test_every_kind_of_invalid_key_is_a_value_error_and_changes_nothing(
    store: TierStore, strange: PageKey
) -> None:
    slots = store.allocate(2)
    with pytest.raises(ValueError, match="must be 36 bytes"):
        store.put([chain(1)[0], strange], slots)
    assert store.match(chain(1)).num_pages == 0
    store.free(slots)


@pytest.mark.parametrize("strange", ["a" * 36, b"a" * 35, 0])
def test_invalid_parent_is_a_value_error_and_changes_nothing(store: TierStore, strange: PageKey) -> None:
    """An invalid parent would make a whole batch of disk writes fail, including pages of other callers."""
    slots = store.allocate(1)
    with pytest.raises(ValueError, match=r"a parent must be a page key of 36 bytes"):
        store.put(chain(1), slots, parent=strange)
    assert store.match(chain(1)).num_pages == 0
    store.free(slots)
