"""Tests of pages that are put before they are written: they are not read until their writer's event has occurred."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    fill,
    page_tensor,
    read,
    require_right,
    tier_stats,
    tiers,
    where,
    write,
    write_down,
)
from tests.support.stalls import IN
from tests.support.waiting import wait_for
from tierstore.errors import CapacityError, StoreClosed
from tierstore.gpu.events import AllOf
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Event, LeaseState, PageKey, Tier


@pytest.fixture(params=[False, True], ids=["polled", "pump"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=6, host=8, nvme=tmp_path / "disk"), SPEC, pump=request.param)
    yield bench
    bench.store.check()
    bench.close()


@pytest.fixture
def store(bench: Bench) -> TierStore:
    return bench.store


def put_late(
    store: TierStore, keys: list[PageKey], lease: Lease | None = None
) -> tuple[list[int], ManualEvent]:
    """Put pages that contain rubbish until the test calls ``finish``.

    Return the slots that ``put`` returned, and the event that ``finish`` completes.
    """
    slots, event = store.allocate(len(keys)), ManualEvent()
    page_tensor(store)[slots] = 7.0
    return store.put(keys, slots, after=event, lease=lease), event


def ends_with(found: Event | None, event: ManualEvent) -> bool:
    """Return whether ``ready`` returned this event.

    On a GPU, no CUDA stream can wait for this event, so ``ready`` returns an AllOf that contains it.
    """
    return found is event or (isinstance(found, AllOf) and found.events == (event,))


def finish(store: TierStore, keys: list[PageKey], slots: list[int], event: ManualEvent) -> None:
    fill(store, keys, slots)
    event.happen()


def test_wait_is_pending_until_the_writer_event_completes(store: TierStore) -> None:
    keys = chain(2)
    slots, event = put_late(store, keys)
    with store.acquire(keys) as lease:
        assert lease.slots == slots
        assert lease.wait(0.0) is LeaseState.PENDING
        assert lease.wait(0.02) is LeaseState.PENDING
        assert [page["being_written"] for page in store.explain(keys)] == [True, True]
        assert ends_with(lease.ready(1), event)
        finish(store, keys, slots, event)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.ready(1) is None
        assert [page["being_written"] for page in store.explain(keys)] == [False, False]
        require_right(store, lease)


def test_a_blocked_wait_returns_once_the_event_completes_and_holds_no_lock(store: TierStore) -> None:
    keys = chain(2)
    slots, event = put_late(store, keys)
    found: list[LeaseState] = []
    with store.acquire(keys) as lease:
        waiter = Thread(target=lambda: found.append(lease.wait(PATIENCE_S)))
        waiter.start()
        write(store, chain(1, "other"))
        assert read(store, chain(1, "other")) == 1
        assert not found
        finish(store, keys, slots, event)
        waiter.join(PATIENCE_S)
        assert found == [LeaseState.READY]


def test_closing_ends_a_wait_for_a_writer_that_never_finishes(tmp_path: Path) -> None:
    store = TierStore.open(tiers(4, 4, tmp_path), SPEC)
    put_late(store, chain(1))
    lease = store.acquire(chain(1))
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(lease.wait(None))
        except StoreClosed as error:
            found.append(error)

    waiter = Thread(target=wait)
    waiter.start()
    store.close(timeout_s=0.1)
    waiter.join(PATIENCE_S)
    assert isinstance(found[0], StoreClosed)


def test_wait_without_writers_is_ready_once_all_copies_have_arrived(bench: Bench) -> None:
    store, keys = bench.store, chain(3)
    write_down(store, keys[:1], Tier.HOST)
    slots, event = put_late(store, keys[1:])
    bench.copies.hold(IN)
    with store.acquire(keys) as lease:
        assert lease.wait(0.0, written=False) is LeaseState.PENDING
        bench.open_gates()
        assert lease.wait(PATIENCE_S, written=False) is LeaseState.READY
        assert lease.wait(0.0) is LeaseState.PENDING
        assert ends_with(lease.ready(0), event)
        finish(store, keys[1:], slots, event)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)


def test_wait_refuses_a_written_that_is_neither_true_nor_false(store: TierStore) -> None:
    with store.acquire([]) as lease, pytest.raises(TypeError, match="written"):
        lease.wait(0.0, written="no")  # type: ignore[arg-type]


def test_the_lease_of_a_duplicate_put_waits_for_the_writer_of_the_stored_page(store: TierStore) -> None:
    keys = chain(1)
    slots, event = put_late(store, keys)
    mine = store.allocate(1)
    fill(store, keys, mine)
    with store.acquire([]) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert store.put(keys, mine, lease=lease) == slots
        assert lease.wait(0.0) is LeaseState.PENDING
        assert ends_with(lease.ready(0), event)
        finish(store, keys, slots, event)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.ready(0) is None


def test_a_lease_waits_for_its_own_put_too(store: TierStore) -> None:
    keys = chain(2)
    with store.acquire([]) as lease:
        slots, event = put_late(store, keys, lease)
        assert lease.wait(0.0) is LeaseState.PENDING
        assert ends_with(lease.ready(0), event)
        finish(store, keys, slots, event)
        assert lease.wait(PATIENCE_S) is LeaseState.READY


def test_ready_returns_one_event_for_all_writers_in_any_finish_order(store: TierStore) -> None:
    keys = chain(4)
    parts = [put_late(store, keys[i : i + 1]) for i in range(4)]
    with store.acquire(keys[:3]) as lease:
        late = store.allocate(1)
        fill(store, keys[3:], late)
        assert store.put(keys[3:], late, lease=lease) == parts[3][0]
        ready = lease.ready(0)
        assert ready is not None
        for i in (3, 1, 0, 2):
            assert not ready.query()
            assert lease.wait(0.0) is LeaseState.PENDING
            finish(store, keys[i : i + 1], *parts[i])
        ready.synchronize()
        assert ready.query()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)


@pytest.mark.parametrize("held", [False, True], ids=["free", "leased"])
@pytest.mark.parametrize("late", [False, True], ids=["written", "late"])
def test_put_without_a_lease_replaces_a_page_still_being_written(
    store: TierStore, held: bool, late: bool
) -> None:
    """The new page replaces the old one, because a caller without a lease cannot wait until the old one is written.

    Open leases keep the old slot.
    """
    keys = chain(1)
    old, event = put_late(store, keys)
    lease = store.acquire(keys if held else [])
    mine, own = store.allocate(1), ManualEvent()
    if not late:
        fill(store, keys, mine)
    assert store.put(keys, mine, after=own if late else None) == mine
    store.check()
    with store.acquire(keys) as other:
        assert other.slots == mine
        if late:
            assert ends_with(other.ready(0), own)
            assert other.wait(0.0) is LeaseState.PENDING
            finish(store, keys, mine, own)
        assert other.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, other)
    if held:
        assert lease.slots == old
        assert lease.wait(0.0) is LeaseState.PENDING
        assert ends_with(lease.ready(0), event)
    others = store.allocate(4)
    assert old[0] not in others, "the writer is still writing the slot"
    store.free(others)
    finish(store, keys, old, event)
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    require_right(store, lease)
    lease.release()
    assert store.drain(PATIENCE_S)
    assert tier_stats(store, Tier.HBM)["quarantined"] == 0
    store.evict(keys, Tier.HBM)
    assert read(store, keys) == 1


def test_the_same_key_twice_in_one_late_put_keeps_the_first_slot(store: TierStore) -> None:
    (key,) = chain(1)
    slots, event = store.allocate(2), ManualEvent()
    assert store.put([key, key], slots, after=event) == [slots[0]] * 2
    finish(store, [key], slots[:1], event)
    assert store.drain(PATIENCE_S)
    assert read(store, [key]) == 1


def test_a_lease_that_switches_to_an_adopted_slot_waits_for_its_writer(bench: Bench) -> None:
    store, keys = bench.store, chain(2)
    write_down(store, keys, Tier.HOST)
    bench.copies.hold(IN)
    with store.acquire(keys) as lease:
        slots, event = put_late(store, keys)
        assert lease.slots == slots
        assert lease.wait(0.0) is LeaseState.PENDING
        assert ends_with(lease.ready(0), event)
        bench.open_gates()
        finish(store, keys, slots, event)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)


def test_an_evicted_page_that_is_put_again_leaves_its_lease_waiting_for_the_first_writer(
    store: TierStore,
) -> None:
    keys = chain(1)
    first, one = put_late(store, keys)
    with store.acquire(keys) as lease:
        store.evict(keys)
        second, other = put_late(store, keys)
        finish(store, keys, second, other)
        assert read(store, keys) == 1
        assert lease.slots == first
        assert lease.wait(0.0) is LeaseState.PENDING
        assert ends_with(lease.ready(0), one)
        finish(store, keys, first, one)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)


def test_a_lease_ends_before_a_page_whose_writer_failed(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys[:1])
    slots, event = put_late(store, keys[1:])
    with store.acquire(keys) as lease, store.acquire(keys[1:]) as nothing:
        assert ends_with(lease.ready(0), event)
        event.fail()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert (lease.num_pages, lease.missing) == (1, keys[1:])
        assert lease.missing_because == "failed"
        assert nothing.wait(PATIENCE_S) is LeaseState.FAILED
        require_right(store, lease)
    assert store.match(keys).num_pages == 1
    assert not set(slots) & set(store.explain(keys)[1]["copies"])  # type: ignore[call-overload]
    assert store.drain(PATIENCE_S)


def test_lease_fails_if_the_page_put_under_it_is_never_written(store: TierStore) -> None:
    keys = chain(1)
    _, event = put_late(store, keys)
    mine = store.allocate(1)
    fill(store, keys, mine)
    with store.acquire([]) as lease:
        store.put(keys, mine, lease=lease)
        event.fail()
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        ready = lease.ready(0)
        assert ready is not None
        with pytest.raises(RuntimeError, match="device"):
            ready.synchronize()
    assert store.match(keys).num_pages == 0
    assert store.drain(PATIENCE_S)


class ClosedEvent(ManualEvent):
    """An event whose owner closes it too early: once it has occurred, ``query`` raises the device library's error."""

    def query(self) -> bool:
        happened = super().query()
        if happened:
            raise ValueError("the event is closed")
        return happened


def test_event_error_loses_its_pages_and_affects_no_other_call(store: TierStore) -> None:
    keys, others = chain(1), chain(2, "other")
    theirs, other = put_late(store, others)
    slots, event = store.allocate(1), ClosedEvent()
    store.put(keys, slots, after=event)
    with store.acquire(keys) as lease, store.acquire(others) as unharmed:
        finish(store, others, theirs, other)
        event.happen()
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert unharmed.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, unharmed)
    assert store.match(keys).num_pages == 0
    assert read(store, others) == 2
    assert store.drain(PATIENCE_S)


def test_a_page_with_a_copy_below_is_read_from_there_when_its_writer_fails(store: TierStore) -> None:
    keys = chain(1)
    write_down(store, keys, Tier.HOST)
    _, event = put_late(store, keys)
    event.fail()
    assert store.drain(PATIENCE_S)
    assert read(store, keys) == 1


def test_a_deadline_ends_the_wait_for_a_writer(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys[:1])
    slots, event = put_late(store, keys[1:])
    with store.acquire(keys, deadline_s=0.0) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert (lease.num_pages, lease.missing_because) == (1, "deadline")
    finish(store, keys[1:], slots, event)
    assert read(store, keys) == 2


def test_deadline_does_not_cut_pages_whose_event_was_returned(store: TierStore) -> None:
    keys = chain(1)
    slots, event = put_late(store, keys)
    with store.acquire(keys, deadline_s=3600.0) as lease:
        assert ends_with(lease.ready(0), event)
        record = lease._record
        record.deadline = 0.0
        store.poll()
        assert lease.slots == slots
        finish(store, keys, slots, event)
        assert lease.wait(PATIENCE_S) is LeaseState.READY


def _demoted(store: TierStore, keys: list[PageKey]) -> None:
    store.demote(keys, Tier.NVME)


def _pushed_out(store: TierStore, keys: list[PageKey]) -> None:
    with pytest.raises(CapacityError):
        store.allocate(6, timeout_s=0.0)


def _left_alone(store: TierStore, keys: list[PageKey]) -> None:
    store.poll()


@pytest.mark.parametrize("send_down", [_demoted, _pushed_out, _left_alone])
def test_no_copy_of_a_page_starts_before_its_writer_has_finished(
    store: TierStore, send_down: Callable[[TierStore, list[PageKey]], None]
) -> None:
    keys = chain(2)
    slots, event = put_late(store, keys)
    send_down(store, keys)
    assert store.drain(0.0) is False
    assert {tuple(where(store, key)) for key in keys} == {(Tier.HBM,)}
    finish(store, keys, slots, event)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    assert {tuple(where(store, key)) for key in keys} == {(Tier.NVME,)}
    assert read(store, keys) == 2


def test_an_archive_has_the_bytes_of_a_page_that_was_being_written(store: TierStore, tmp_path: Path) -> None:
    keys = chain(1)
    slots, event = put_late(store, keys)
    found: list[int] = []
    path = tmp_path / "pages"
    exporting = Thread(target=lambda: found.append(asyncio.run(store.export_pages(keys, path)).pages))
    exporting.start()
    wait_for(lambda: store.stats()["leases"] == 1)
    finish(store, keys, slots, event)
    exporting.join(PATIENCE_S)
    assert found == [1]
    store.evict(keys)
    asyncio.run(store.import_pages(path))
    assert read(store, keys) == 1
