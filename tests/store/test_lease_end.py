"""Tests of how a lease ends: by release, with and without an event, and at its deadline."""

from __future__ import annotations

from time import monotonic

import pytest

from tests.support.bench import Bench
from tests.support.events import ManualEvent, capturing
from tests.support.pages import (
    PATIENCE_S,
    chain,
    let_deadline_come,
    read,
    require_right,
    tier_stats,
    write,
    write_down,
)
from tests.support.stalls import IN, UP
from tierstore.errors import CapacityError, LeaseError
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier


def test_lease_fields_are_final_after_wait_and_kept_after_release(store: TierStore) -> None:
    keys = chain(3)
    slots = write(store, keys[:2])
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert (lease.num_pages, lease.slots, lease.missing) == (2, slots, [keys[2]])
    assert lease.tiers == [Tier.HBM, Tier.HBM]


def test_a_second_release_and_any_use_after_it_is_a_lease_error(store: TierStore) -> None:
    write(store, chain(1))
    lease = store.acquire(chain(1))
    lease.release()
    for use in (lease.release, lambda: lease.wait(0.0), lambda: lease.ready(0)):
        with pytest.raises(LeaseError):
            use()
    with store.acquire(chain(1)) as lease:
        lease.release()


def test_released_slots_are_reused_only_after_the_event(bench: Bench) -> None:
    # F004: the last work launched on the device still reads the pages
    store = bench.store
    keys = chain(4)
    write(store, keys)
    assert store.drain(PATIENCE_S)
    lease = store.acquire(keys)
    event = ManualEvent()
    lease.release(after=event)
    store.check()
    with pytest.raises(CapacityError):
        store.allocate(1, timeout_s=0.02)
    assert store.drain(0.02) is False
    event.happen()
    assert len(store.allocate(4, timeout_s=PATIENCE_S)) == 4


def test_event_that_cannot_be_queried_during_graph_capture_is_pending(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query(event: ManualEvent) -> bool:
        raise capturing()

    store, event = bench.store, ManualEvent()
    write(store, chain(4))
    assert store.drain(PATIENCE_S)
    lease = store.acquire(chain(4))
    with monkeypatch.context() as patch:
        patch.setattr(ManualEvent, "query", query)
        lease.release(after=event)
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.02)
    with pytest.raises(CapacityError):
        store.allocate(1, timeout_s=0.0)
    event.happen()
    assert len(store.allocate(4, timeout_s=PATIENCE_S)) == 4


def test_leaving_the_block_with_an_error_releases_too(store: TierStore) -> None:
    write(store, chain(2))
    with pytest.raises(KeyError), store.acquire(chain(2)):
        raise KeyError
    assert store.drain(PATIENCE_S)
    assert tier_stats(store, Tier.HBM)["pinned"] == 0


def test_passed_deadline_leaves_lower_pages_missing(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.HOST)
    top = write(bench.store, keys[:1])
    with bench.store.acquire(keys, deadline_s=0.0) as lease:
        assert lease.slots == top
        assert lease.missing == list(keys[1:])
        assert lease.wait(0.0) is LeaseState.READY


def test_pages_that_are_late_cut_the_lease_at_the_deadline(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.HOST)
    top = write(bench.store, keys[:1])
    bench.copies.hold(IN)
    with bench.store.acquire(keys, deadline_s=3600.0) as lease:
        assert lease.num_pages == 3
        let_deadline_come(bench.store, lease)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.slots == top
        assert lease.missing == list(keys[1:])
        bench.store.check()
        with pytest.raises(CapacityError):
            bench.store.allocate(2, timeout_s=0.02)
        bench.copies.open()
        bench.settle()
        require_right(bench.store, lease)
    assert read(bench.store, keys) == 3


def test_a_lease_released_while_pages_are_in_flight_leaks_nothing(bench: Bench) -> None:
    # F037: abort during an async load, in both orders of release and completion
    keys = chain(4)
    write_down(bench.store, keys, Tier.NVME)
    for turn in range(6):
        bench.records.hold(UP)
        bench.copies.hold(IN)
        lease = bench.store.acquire(keys)
        if turn % 3 == 0:
            lease.release()
        bench.records.open()
        bench.settle()
        if turn % 3 == 1:
            lease.release()
        bench.copies.open()
        bench.settle()
        if turn % 3 == 2:
            lease.release()
        assert bench.store.drain(PATIENCE_S)
        bench.store.check()
        bench.store.evict(keys, Tier.HBM)
        bench.store.evict(keys, Tier.HOST)
        assert tier_stats(bench.store, Tier.HBM)["free"] == 4
        assert tier_stats(bench.store, Tier.HOST)["free"] == 8


def test_deadline_wakes_waiting_callers(bench: Bench) -> None:
    """Nothing else wakes the pump, so it must not pause beyond the lease's deadline."""
    keys = chain(2)
    write_down(bench.store, keys, Tier.NVME)
    bench.records.hold(UP)
    begin = monotonic()
    with bench.store.acquire(keys, deadline_s=0.2) as lease:
        bench.store.poll()
        pause = bench.store._pump._pause()
        assert (
            pause <= 0.2 or monotonic() >= begin + 0.2
        )  # on a busy machine the deadline may already have passed
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
    with bench.store.acquire(keys, deadline_s=3600.0):
        bench.store.poll()
        assert bench.store._pump._pause() > 0.1
    bench.open_gates()
