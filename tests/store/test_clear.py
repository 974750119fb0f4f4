"""Test ``clear``: it removes every page, even in flight, and afterwards only newly put pages are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import Engine, open_engine_bench, page_major, save
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    fill,
    read,
    read_soon,
    records,
    require_nothing_held,
    require_right,
    tiers,
    where,
    write,
    write_down,
)
from tests.support.stalls import DOWN, IN, OUT, UP
from tests.support.waiting import wait_for
from tierstore.errors import StoreClosed
from tierstore.store import Flush, TierStore
from tierstore.types import FlushResult, Hint, LeaseState, PageKey, Tier


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=8, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.open_gates()
    bench.store.check()
    bench.close()


@pytest.fixture
def store(bench: Bench) -> TierStore:
    return bench.store


@pytest.fixture
def engine() -> Engine:
    return page_major()


@pytest.fixture
def engines(engine: Engine, tmp_path: Path) -> Iterator[Bench]:
    """Yield a store whose HBM belongs to an engine and whose HOST has two slots."""
    bench = open_engine_bench(engine, host=2, nvme=tmp_path / "disk")
    yield bench
    bench.open_gates()
    bench.store.check()
    bench.close()


def require_none_found(bench: Bench, keys: Sequence[PageKey]) -> None:
    """Assert that no page is found: now, after all transfers have ended, and on disk after a flush."""
    assert not any(bench.store.match([key]).num_pages for key in keys)
    bench.open_gates()
    assert bench.store.drain(PATIENCE_S)
    assert not any(bench.store.match([key]).num_pages for key in keys)
    assert bench.store.flush().complete
    assert records(bench.store) == 0


# -- HBM that belongs to the store --------------------------------------------------------------------------------


def test_clear_removes_every_page_of_every_tier(bench: Bench, store: TierStore) -> None:
    on_disk, in_memory, in_hbm = chain(3, "disk"), chain(2, "memory"), chain(4, "hbm")
    write_down(store, on_disk, Tier.NVME)
    write_down(store, in_memory, Tier.HOST)
    write(store, in_hbm)
    assert store.clear() == 9
    assert store.explain(in_hbm)[0]["lost"] == "evicted"
    require_none_found(bench, [*on_disk, *in_memory, *in_hbm])
    assert store.clear() == 0
    require_nothing_held(store)


def test_clear_removes_more_pages_than_one_lock_hold_handles(tmp_path: Path) -> None:
    bench = open_bench(tiers(hbm=80, host=100, nvme=tmp_path), SPEC)
    keys = chain(80)
    write(bench.store, keys)
    bench.store.flush()
    assert bench.store.clear() == 80
    require_none_found(bench, keys)
    bench.store.check()
    bench.close()


def test_reopened_directory_has_no_cleared_page(tmp_path: Path) -> None:
    config = tiers(4, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, chain(3))
        store.flush()
        write(store, chain(1, "unsaved"))
        store.clear()
        write(store, chain(2, "later"))
    with TierStore.open(config, SPEC) as store:
        assert not store.match(chain(3)).num_pages
        assert not store.match(chain(1, "unsaved")).num_pages
        assert read(store, chain(2, "later")) == 2
        assert records(store) == 2


def test_flush_evictions_makes_only_erases_durable(store: TierStore) -> None:
    write(store, chain(4))
    store.flush()
    store.clear()
    assert store.flush_evictions() == 0
    assert records(store) == 0


def test_page_put_again_after_a_clear_is_kept(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys)
    store.flush()
    store.clear()
    write(store, keys)
    assert store.flush() == FlushResult(durable=3)
    store.evict(keys, Tier.HBM)
    store.evict(keys, Tier.HOST)
    assert read_soon(store, keys) == 3


def test_a_lease_keeps_its_bytes_until_release_and_no_other_request_finds_them(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    with store.acquire(keys) as lease:
        store.clear()
        assert store.match(keys).num_pages == 0
        with store.acquire(keys) as other:
            assert other.num_pages == 0
        slots = store.allocate(2)
        assert set(slots).isdisjoint(lease.slots)
        assert lease.num_pages == 2
        require_right(store, lease)
        store.free(slots)
    require_nothing_held(store)


def test_clear_cuts_leases_at_the_first_page_in_flight_and_hides_late_arrivals(bench: Bench) -> None:
    here, coming = chain(1), chain(2, "coming")
    write_down(bench.store, coming, Tier.HOST)
    write(bench.store, here)
    bench.copies.hold(IN)
    with bench.store.acquire([*here, *coming]) as lease:
        bench.store.clear()
        assert lease.num_pages == 1
        assert lease.missing == coming
        require_none_found(bench, [*here, *coming])
        require_right(bench.store, lease)
    require_nothing_held(bench.store)


def test_a_page_in_flight_from_disk_is_not_found_after_a_clear(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.NVME)
    bench.records.hold(UP)
    with bench.store.acquire(keys) as lease:
        assert bench.records.waiting(UP)
        bench.store.clear()
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        require_none_found(bench, keys)
    require_nothing_held(bench.store)


def test_a_page_in_flight_to_disk_is_not_found_when_the_disk_continues(bench: Bench) -> None:
    keys = chain(3)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.demote(keys, Tier.NVME)
    assert bench.records.waiting(DOWN)
    assert bench.store.clear() == 3
    require_none_found(bench, keys)
    require_nothing_held(bench.store)


def test_a_page_put_again_while_its_old_copies_are_in_flight_has_its_new_bytes(
    bench: Bench,
) -> None:
    keys = chain(2)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.demote(keys, Tier.NVME)
    bench.store.clear()
    write(bench.store, keys)
    bench.open_gates()
    assert bench.store.flush() == FlushResult(durable=2)
    bench.store.evict(keys, Tier.HBM)
    bench.store.evict(keys, Tier.HOST)
    assert read_soon(bench.store, keys) == 2


def test_running_flush_does_not_wait_for_cleared_pages_or_count_them_as_failed(bench: Bench) -> None:
    write(bench.store, chain(3))
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    found: list[FlushResult] = []
    flushing = Thread(target=lambda: found.append(bench.store.flush()))
    flushing.start()
    wait_for(lambda: bench.records.waiting(DOWN) > 0)
    bench.store.clear()
    bench.open_gates()
    flushing.join(PATIENCE_S)
    assert found == [FlushResult()]
    require_none_found(bench, chain(3))


def test_slot_being_written_is_not_reused_until_its_event(bench: Bench, store: TierStore) -> None:
    keys, event = chain(2), ManualEvent()
    slots = store.allocate(2)
    store.put(keys, slots, after=event)
    store.clear()
    assert store.match(keys).num_pages == 0
    others = store.allocate(2)
    assert set(others).isdisjoint(slots)
    store.free(others)
    event.happen()
    require_none_found(bench, keys)
    require_nothing_held(store)


def test_page_put_again_before_the_first_writer_ends_belongs_to_the_second(
    store: TierStore,
) -> None:
    keys, first, second = chain(1), ManualEvent(), ManualEvent()
    store.put(keys, store.allocate(1), after=first)
    store.clear()
    again = store.allocate(1)
    assert store.put(keys, again, after=second) == again
    first.fail()
    store.poll()
    assert store.match(keys).num_pages == 1
    with store.acquire(keys) as lease:
        assert lease.wait(0.0) is LeaseState.PENDING
        fill(store, keys, again)
        second.happen()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)
    require_nothing_held(store)


def test_cleared_memory_only_page_may_be_stored_when_put_again(store: TierStore) -> None:
    keys = chain(2)
    slots = store.allocate(2)
    fill(store, keys, slots)
    store.put(keys, slots, memory_only=True)
    store.clear()
    assert store.match(keys).num_pages == 0
    write(store, keys)
    assert store.flush() == FlushResult(durable=2)


def test_cleared_retained_pages_are_retained_when_put_again(store: TierStore) -> None:
    keys = chain(2)
    store.hint(Hint("r", 1, tuple(keys), "retain"))
    write(store, keys)
    assert sorted(store.staying()) == sorted(keys)
    store.clear()
    assert store.match(keys).num_pages == 0
    assert store.staying() == []
    write(store, keys)
    assert sorted(store.staying()) == sorted(keys)


def test_hint_promotes_no_cleared_page(store: TierStore) -> None:
    keys = chain(2)
    store.take_hints()
    write_down(store, keys, Tier.NVME)
    hint = Hint("r", 1, tuple(keys))
    store.hint(hint)
    store.clear()
    found = store.promote(hint, keys, Tier.HOST)
    assert (found.keys, found.covered, found.in_force) == ((), 0, True)


def test_callers_keep_the_slots_that_they_own(store: TierStore) -> None:
    slots = store.allocate(2)
    store.clear()
    fill(store, chain(2), slots)
    store.put(chain(2), slots)
    assert read(store, chain(2)) == 2


def test_several_threads_may_clear_and_put_at_once(tmp_path: Path) -> None:
    store = TierStore.open(tiers(hbm=8, host=8, nvme=tmp_path), SPEC)
    failed: list[BaseException] = []

    def put_and_clear(name: str) -> None:
        try:
            for number in range(20):
                keys = chain(3, f"{name}{number}")
                write(store, keys)
                assert read(store, keys) in range(4)
                store.clear()
                assert store.match(keys).num_pages == 0
        except BaseException as error:
            failed.append(error)
            raise

    threads = [Thread(target=put_and_clear, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    store.check()
    assert store.clear() == 0
    store.flush()
    assert records(store) == 0
    store.close()


def test_a_closed_store_cannot_be_cleared() -> None:
    store = TierStore.open(tiers(2, 2), SPEC)
    store.close()
    with pytest.raises(StoreClosed):
        store.clear()


# -- HBM that belongs to an engine --------------------------------------------------------------------------------


def put_six(bench: Bench, engine: Engine, after: ManualEvent | None = None) -> list[PageKey]:
    """Put six pages from slots 0 to 5. HOST has space for two pages at a time."""
    keys = chain(6)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, range(6), after=after)
    return keys


def test_pages_waiting_in_engine_slots_are_dropped(engines: Bench, engine: Engine) -> None:
    engines.copies.hold(OUT)
    keys = put_six(engines, engine)
    before = counter(engines.store, "dropped_copies", "HBM,evicted")
    engines.store.clear()
    assert sorted(engines.store.poll()) == [2, 3, 4, 5], "no copy reads the other four slots"
    assert counter(engines.store, "dropped_copies", "HBM,evicted") == before + 4
    require_none_found(engines, keys)
    assert sorted(engines.store.poll()) == [0, 1]
    save(engines, engine, keys, list(range(6)))
    assert engines.store.match(keys).num_pages == 6


@pytest.mark.parametrize("fails", [False, True])
def test_pages_with_a_pending_writer_are_dropped_and_their_slots_reported_later(
    engines: Bench, engine: Engine, fails: bool
) -> None:
    event = ManualEvent()
    keys = put_six(engines, engine, event)
    engines.store.clear()
    assert engines.store.poll() == []
    assert engines.store.withdraw([0, 1]) == [0, 1], "the engine is still writing these slots"
    assert Flush.of_unsaved(engines.store._pump).ticket.open == 0, "a flush must not wait for removed pages"
    if fails:
        event.fail()
    else:
        event.happen()
    assert sorted(engines.store.poll()) == list(range(6))
    require_none_found(engines, keys)
    assert counter(engines.store, "dropped_copies", "HBM,no_room") == 0


def test_engine_page_put_again_is_kept_though_the_first_was_dropped(engines: Bench, engine: Engine) -> None:
    key, event = chain(1), ManualEvent()
    engines.store.put(key, [0], after=event)
    engines.store.clear()
    engine.fill(1, key[0])
    engines.store.put(key, [1])
    assert engines.store.flush().failed == 0
    event.happen()
    assert engines.store.drain(PATIENCE_S)
    assert sorted(engines.store.poll()) == [0, 1]
    assert where(engines.store, key[0])[Tier.NVME] == "ready"
    with engines.store.acquire(key, into=[3]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert engine.holds(3, key[0])


def test_memory_only_engine_page_is_dropped_by_clear(engines: Bench, engine: Engine) -> None:
    event = ManualEvent()
    engines.store.put(chain(1), [0], after=event, memory_only=True)
    engines.store.clear()
    event.happen()
    assert engines.store.drain(PATIENCE_S)
    assert engines.store.poll() == [0]
    assert engines.store.match(chain(1)).num_pages == 0


def test_a_load_into_an_engines_slots_that_has_begun_ends_with_right_bytes(
    engines: Bench, engine: Engine
) -> None:
    keys = chain(2)
    save(engines, engine, keys, [0, 1])
    engines.store.evict(keys, Tier.NVME)
    engine.wipe()
    engines.copies.hold(IN)
    with engines.store.acquire(keys, into=[2, 3]) as lease:
        engines.store.clear()
        require_none_found(engines, keys)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 2
        assert all(engine.holds(slot, key) for slot, key in zip((2, 3), keys, strict=True))


def test_a_load_that_waits_for_its_page_from_disk_ends_without_it(engines: Bench, engine: Engine) -> None:
    keys = chain(4)
    save(engines, engine, keys, [0, 1, 2, 3])
    engines.store.demote(keys, Tier.NVME)
    assert engines.store.drain(PATIENCE_S)
    engine.wipe()
    engines.records.hold(UP)
    with engines.store.acquire(keys, into=[0, 1, 2, 3]) as lease:
        engines.store.clear()
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        require_none_found(engines, keys)
        assert not any(engine.holds(slot, key) for slot, key in enumerate(keys))
