"""Tests of acquire and wait: covered and missing pages, when a lease is ready, and how a failure truncates it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.bench import Bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    read,
    require_right,
    tier_stats,
    tiers,
    write,
    write_down,
    write_each,
)
from tests.support.stalls import IN, UP
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier


def test_acquire_of_missing_pages_returns_an_empty_lease(store: TierStore) -> None:
    keys = chain(3)
    with store.acquire(keys) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert (lease.num_pages, lease.slots, lease.missing) == (0, [], list(keys))


def test_acquire_without_keys_returns_an_empty_lease(store: TierStore) -> None:
    with store.acquire([]) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert (lease.num_pages, lease.missing) == (0, [])


def test_pages_in_hbm_are_ready_at_once_and_the_rest_is_missing(store: TierStore) -> None:
    keys = chain(4)
    slots = write(store, keys[:3])
    with store.acquire(keys) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert lease.slots == slots
        assert lease.missing == [keys[3]]
        assert lease.ready(0) is None
        require_right(store, lease)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_pages_from_below_arrive_with_their_bytes(store: TierStore, tier: Tier) -> None:
    keys = chain(3)
    write_down(store, keys, tier)
    with store.acquire(keys) as lease:
        assert lease.tiers == [tier] * 3
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 3
        require_right(store, lease)
    assert store.match(keys).tiers == (Tier.HBM,) * 3


def test_a_page_read_from_disk_is_in_host_for_the_next_time(store: TierStore) -> None:
    # F093
    keys = chain(2)
    write_down(store, keys, Tier.NVME)
    assert read(store, keys) == 2
    store.evict(keys, Tier.HBM)
    assert store.match(keys).tiers == (Tier.HOST, Tier.HOST)


def test_wait_that_times_out_is_pending_and_changes_nothing(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.HOST)
    bench.copies.hold(IN)
    lease = bench.store.acquire(keys)
    slots = lease.slots
    for timeout_s in (0.0, 0.02):
        assert lease.wait(timeout_s) is LeaseState.PENDING
        assert (lease.num_pages, lease.slots, lease.missing) == (3, slots, [])
    with pytest.raises(TimeoutError):
        lease.ready(1, timeout_s=0.0)
    bench.copies.open()
    event = lease.ready(1, timeout_s=PATIENCE_S)
    if event is not None:  # on a GPU, where the copy may still be in flight
        event.synchronize()
    bench.settle()  # the bytes arrive before the store has processed the ack
    assert lease.wait(0.0) is LeaseState.READY
    require_right(bench.store, lease)
    lease.release()


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_ready_of_a_missing_layer_is_a_value_error(store: TierStore, layer: int) -> None:
    with store.acquire([]) as lease, pytest.raises(ValueError, match="layer"):
        lease.ready(layer)


def test_pages_without_space_are_missing_and_acquire_does_not_wait(bench: Bench) -> None:
    keys = chain(4)
    write_down(bench.store, keys, Tier.HOST)
    mine = bench.store.allocate(2)
    with bench.store.acquire(keys) as lease:
        assert lease.num_pages == 2
        assert lease.missing == list(keys[2:])
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(bench.store, lease)
    bench.store.free(mine)
    assert read(bench.store, keys) == 4


def test_two_leases_share_the_pages_and_one_load(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.HOST)
    bench.copies.hold(IN)
    first, second = bench.store.acquire(keys), bench.store.acquire(keys)
    assert first.slots == second.slots
    first.release()
    bench.store.check()
    bench.copies.open()
    assert second.wait(PATIENCE_S) is LeaseState.READY
    require_right(bench.store, second)
    second.release()
    assert counter(bench.store, "transfer_bytes", "HOST,HBM") == 3 * SPEC.page_nbytes


def test_a_leased_page_keeps_its_slot_under_pressure(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    with store.acquire(keys) as lease:
        for i in range(6):
            write(store, chain(2, f"other{i}"))
            require_right(store, lease)
    assert store.drain(PATIENCE_S)


@pytest.mark.parametrize("lane", [IN, UP])
def test_a_page_that_fails_cuts_the_lease_before_it(bench: Bench, lane: tuple[Tier, Tier]) -> None:
    # F017, F019: pages from the failed one on are not exposed, and no stale bytes are readable
    keys = chain(4)
    write_down(bench.store, keys, lane[0])
    gate = bench.copies if lane == IN else bench.records
    gate.fail_next(lane, 2)
    with bench.store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 2
        assert lease.missing == list(keys[2:])
        require_right(bench.store, lease)
    bench.store.check()
    found = read(bench.store, keys)
    assert found == (4 if lane == IN else 2)


@pytest.mark.parametrize("lane", [IN, UP])
def test_a_lease_whose_first_page_fails_is_failed(bench: Bench, lane: tuple[Tier, Tier]) -> None:
    keys = chain(2)
    write_down(bench.store, keys, lane[0])
    (bench.copies if lane == IN else bench.records).fail_next(lane, 0)
    with bench.store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert (lease.num_pages, lease.slots, lease.missing) == (0, [], list(keys))
        assert lease.wait(0.0) is LeaseState.FAILED
    assert bench.store.drain(PATIENCE_S)
    assert tier_stats(bench.store, Tier.HBM)["pinned"] == 0


def test_a_page_that_failed_its_read_is_removed_from_the_catalogue_and_reported(bench: Bench) -> None:
    keys = chain(2)
    write_down(bench.store, keys, Tier.NVME)
    bench.records.fail_next(UP, 0)
    assert read(bench.store, keys) == 0
    assert bench.store.match(keys).num_pages == 0
    assert bench.store.explain(keys)[0]["lost"] == "io_error"
    assert read(bench.store, keys) == 0
    assert counter(bench.store, "misses_pages", "io_error") == 1
    write(bench.store, keys)
    assert read(bench.store, keys) == 2


def test_acquire_reports_how_many_matched_pages_are_left(store: TierStore) -> None:
    # F044
    keys = chain(4)
    write(store, keys)
    for victim, left in ((3, 3), (1, 1), (0, 0)):
        assert store.match(keys).num_pages > left
        store.evict([keys[victim]])
        assert read(store, keys) == left


def test_hits_and_misses_add_up_to_the_pages_asked(bench: Bench) -> None:
    # F110, F112
    keys = chain(4)
    write_down(bench.store, keys[:2], Tier.HOST)
    write(bench.store, keys[:1])
    assert read(bench.store, keys) == 2
    store = bench.store
    hits = [counter(store, "hits_pages", tier.name) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]
    assert hits == [1, 1, 0]
    assert counter(store, "misses_pages", "not_found") == 1
    assert counter(store, "misses_pages", "after_gap") == 1


def test_requested_pages_are_not_evicted_to_make_space_for_the_request() -> None:
    """HBM is full of unsaved pages. Saving them to HOST must not evict the pages that are requested again and again."""
    with TierStore.open(tiers(4, 8), SPEC) as store:
        wanted, other, last = chain(3, "wanted"), chain(4, "other"), chain(4, "last")
        for keys in (wanted, other, last):
            write(store, keys)
            store.drain(PATIENCE_S)
        assert store.match(wanted).num_pages == 3
        for _ in range(3):
            served = read(store, wanted)
            store.drain(PATIENCE_S)
        assert served == 3


def test_lease_reports_why_its_first_missing_page_is_missing(tmp_path: Path) -> None:
    with TierStore.open(tiers(2, 8, tmp_path / "store"), SPEC) as store:
        keys = chain(4)
        write_each(store, keys)
        store.flush()
        with store.acquire(keys) as all_that_fits:
            assert all_that_fits.wait(PATIENCE_S) is LeaseState.READY
            assert (all_that_fits.num_pages, all_that_fits.missing_because) == (2, "no_room")
        with store.acquire(chain(1, "unknown")) as lease:
            assert lease.missing_because == "not_found"
        with store.acquire(keys[:2]) as lease:
            assert lease.missing_because is None
        store.evict(keys)
        with store.acquire(keys) as lease:
            assert lease.missing_because == "evicted"


def test_an_invalid_list_of_keys_is_refused_and_not_counted_as_a_miss() -> None:
    with TierStore.open(tiers(2, 2), SPEC) as store:
        (key,) = chain(1)
        wrong_keys: list[Any] = [key, [1, 2], "text"]
        for call in (store.match, store.acquire, store.evict, store.explain):
            for wrong in wrong_keys:
                with pytest.raises(TypeError, match="a sequence of page keys"):
                    call(wrong)


@pytest.mark.parametrize("flag", ["yes", 1, 0, None])
def test_non_bool_flag_is_refused_and_nothing_changes(store: TierStore, flag: Any) -> None:
    keys = chain(1)
    (slot,) = store.allocate(1)
    for name, call in (
        ("exact", lambda: store.acquire(keys, exact=flag)),
        ("exact", lambda: store.match(keys, exact=flag)),
        ("memory_only", lambda: store.put(keys, [slot], memory_only=flag)),
    ):
        with pytest.raises(TypeError, match=rf"{name} must be True or False, got {flag!r}"):
            call()
    assert store.match(keys).num_pages == 0
    store.free([slot])  # still the caller's
    with pytest.raises(TypeError, match=rf"pump must be True or False, got {flag!r}"):
        TierStore.open(tiers(hbm=1, host=None, nvme=None), SPEC, pump=flag)
