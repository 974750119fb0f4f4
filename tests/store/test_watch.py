"""Tests of watch: callbacks get the pages that enter and leave tiers, in order and without holding the lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest

from tests.support.bench import Bench
from tests.support.engine import Engine, open_engine_bench, page_major, save
from tests.support.pages import PATIENCE_S, SPEC, chain, read, tiers, write
from tests.support.stalls import IN, OUT
from tests.support.waiting import wait_for
from tierstore import watch as watch_module
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.types import PageChange, PageKey, Tier

Told = list[PageChange]


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[TierStore]:
    """Yield a store with its own pump thread."""
    with TierStore.open(tiers(4, 8, tmp_path / "own"), SPEC) as store:
        yield store


def came(key: PageKey, tier: Tier) -> PageChange:
    return PageChange(key, tier, came=True)


def left(key: PageKey, tier: Tier) -> PageChange:
    return PageChange(key, tier, came=False)


def test_a_page_is_reported_in_every_tier_in_the_order_in_which_it_entered_and_left(bench: Bench) -> None:
    told: Told = []
    bench.store.watch(told.append)
    [key] = chain(1)
    write(bench.store, [key])
    bench.store.demote([key], Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    bench.store.poll()
    down = [t for t in told if t.came]
    assert down == [came(key, Tier.HBM), came(key, Tier.HOST), came(key, Tier.NVME)]
    assert sorted(told[len(down) :], key=lambda t: t.tier) == [left(key, Tier.HBM), left(key, Tier.HOST)]
    told.clear()
    assert read(bench.store, [key]) == 1
    bench.store.poll()
    assert told == [came(key, Tier.HOST), came(key, Tier.HBM)]
    told.clear()
    bench.store.evict([key])
    bench.store.poll()
    assert told == [left(key, tier) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]


def test_pages_in_flight_are_reported_once_readable_and_not_if_dropped(
    bench: Bench,
) -> None:
    write(bench.store, chain(2))
    bench.store.demote(chain(2), Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    told: Told = []
    bench.store.watch(told.append)
    bench.copies.hold(IN)
    with bench.store.acquire(chain(2)) as lease:
        bench.store.poll()
        assert told == []
        bench.store.evict(chain(2)[1:], Tier.HBM)
        bench.open_gates()
        assert lease.wait(PATIENCE_S)
        bench.store.poll()
    assert told == [came(chain(1)[0], Tier.HBM)]


def test_pages_that_tiers_had_before_the_watch_are_not_reported(tmp_path: Path) -> None:
    config = tiers(4, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, chain(2))
    with TierStore.open(config, SPEC, pump=False) as store:
        told: Told = []
        store.watch(told.append)
        store.poll()
        assert told == []
        store.evict(chain(2)[1:])
        store.poll()
        assert told == [left(chain(2)[1], Tier.NVME)]


def test_slots_that_an_engine_owns_are_not_reported(tmp_path: Path) -> None:
    engine: Engine = page_major()
    bench = open_engine_bench(engine, nvme=tmp_path)
    told: Told = []
    bench.store.watch(told.append)
    save(bench, engine, chain(2), [0, 1])
    with bench.store.acquire(chain(2), into=[2, 3]) as lease:
        lease.wait(PATIENCE_S)
    bench.store.poll()
    assert {t.tier for t in told if t.came} == {Tier.HOST}
    bench.close()


def test_without_a_thread_the_store_reports_only_in_poll(bench: Bench) -> None:
    told: Told = []
    bench.store.watch(told.append)
    write(bench.store, chain(2))
    assert bench.store.drain(PATIENCE_S)
    bench.store.stats()
    assert told == []
    bench.store.poll()
    assert told[:2] == [came(key, Tier.HBM) for key in chain(2)]


def test_the_stores_thread_reports_without_a_call(threaded: TierStore) -> None:
    told: list[tuple[PageChange, str]] = []
    threaded.watch(lambda change: told.append((change, current_thread().name)))
    [key] = chain(1)
    write(threaded, [key])
    wait_for(lambda: any(t.tier is Tier.NVME for t, _ in told))
    assert {name for _, name in told} == {"tierstore-pump"}
    assert [t for t, _ in told] == [came(key, tier) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]


def test_a_drop_without_a_transfer_is_reported_by_the_stores_thread(threaded: TierStore) -> None:
    told: Told = []
    write(threaded, chain(2))
    threaded.flush()
    threaded.watch(told.append)
    threaded.evict(chain(2)[1:])
    wait_for(lambda: len(told) == 3)


def test_a_callback_may_call_the_store(bench: Bench) -> None:
    found: list[int] = []

    def look(change: PageChange) -> None:
        found.append(bench.store.match([change.key]).num_pages)
        bench.store.poll()
        bench.store.evict([change.key], Tier.HOST)
        bench.store.check()

    bench.store.watch(look)
    write(bench.store, chain(3))
    assert bench.store.drain(PATIENCE_S)
    bench.store.poll()
    assert found[:3] == [1, 1, 1]


def test_changes_made_by_a_callback_are_reported_after_earlier_ones(bench: Bench) -> None:
    told: Told = []
    keys = chain(3)

    def drop_the_last(change: PageChange) -> None:
        told.append(change)
        if change.came:
            bench.store.evict(keys[2:], Tier.HBM)

    bench.copies.hold(OUT)
    bench.store.watch(drop_the_last)
    write(bench.store, keys)
    bench.store.poll()
    assert told == [*(came(key, Tier.HBM) for key in keys), left(keys[2], Tier.HBM)]


def test_callback_error_is_raised_by_poll_once_and_loses_no_change_or_slot(
    tmp_path: Path,
) -> None:
    engine = page_major()
    bench = open_engine_bench(engine, nvme=tmp_path)
    keys = chain(2)
    told: Told = []
    others: Told = []

    def stumble(change: PageChange) -> None:
        told.append(change)
        if len(told) == 1:
            raise LookupError("the mirror is full")

    bench.store.watch(stumble)
    bench.store.watch(others.append)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, [0, 1])
    assert bench.store.drain(PATIENCE_S)
    with pytest.raises(LookupError, match="the mirror is full"):
        bench.store.poll()
    assert sorted(bench.store.poll()) == [0, 1]
    assert told == others == [came(key, Tier.HOST) for key in keys]
    bench.close()


def test_an_error_of_a_callback_on_the_stores_thread_is_counted_and_later_changes_are_reported(
    threaded: TierStore, caplog: pytest.LogCaptureFixture
) -> None:
    told: Told = []

    def stumble(change: PageChange) -> None:
        told.append(change)
        raise StoreClosed("another store")

    with caplog.at_level(logging.ERROR):
        threaded.watch(stumble)
        write(threaded, chain(2))
        wait_for(lambda: sum(t.tier is Tier.NVME for t in told) == 2)
        wait_for(lambda: f"tierstore_faults_total {len(told)}.0" in threaded.metrics.text())
    assert "a callback of TierStore.watch raised an exception" in caplog.text


def test_after_its_end_nothing_is_reported_and_end_is_idempotent(bench: Bench) -> None:
    told: Told = []
    watch = bench.store.watch(told.append)
    others: Told = []
    bench.store.watch(others.append)
    write(bench.store, chain(1))
    watch.end()
    watch.end()
    bench.store.poll()
    assert told == []
    assert others
    bench.store.evict(chain(1))
    bench.store.poll()
    assert told == []


def test_a_callback_may_end_its_own_watch(bench: Bench) -> None:
    told: Told = []

    def once(change: PageChange) -> None:
        told.append(change)
        watch.end()

    watch = bench.store.watch(once)
    write(bench.store, chain(3))
    bench.store.poll()
    assert told == [came(chain(1)[0], Tier.HBM)]
    assert bench.directory.residency.changed is None, "changes must not be recorded without a watch"


def test_a_watch_started_in_a_callback_reports_later_changes(bench: Bench) -> None:
    later: Told = []
    bench.copies.hold(OUT)
    watches = [bench.store.watch(lambda change: watches.append(bench.store.watch(later.append)))]
    write(bench.store, chain(1))
    bench.store.poll()
    assert len(watches) == 2, "one change was reported, so one watch must have begun"
    assert later == []
    watches[0].end()
    bench.store.evict(chain(1), Tier.HBM)
    bench.store.poll()
    assert later == [left(chain(1)[0], Tier.HBM)]


@pytest.mark.parametrize("pump", [True, False])
def test_a_callback_may_close_the_store(pump: bool) -> None:
    store = TierStore.open(tiers(4, None), SPEC, pump=pump)
    closed = Event()

    def close(change: PageChange) -> None:
        store.close()
        closed.set()

    store.watch(close)
    write(store, chain(2))
    if not pump:
        store.poll()
    assert closed.wait(PATIENCE_S)
    with pytest.raises(StoreClosed):
        store.poll()


def test_close_ends_every_watch_and_a_closed_store_has_none() -> None:
    store = TierStore.open(tiers(2, 2), SPEC)
    watch = store.watch(print)
    store.close()
    assert store._directory.residency.changed is None
    watch.end()
    with pytest.raises(StoreClosed):
        store.watch(print)


def test_a_callback_that_is_not_callable_is_refused(store: TierStore) -> None:
    with pytest.raises(TypeError, match=r"callback must be callable, got \[\]"):
        store.watch([])  # type: ignore[arg-type]


def test_undelivered_changes_are_bounded_and_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_MOST_UNTOLD", 3)
    told: Told = []
    watch = bench.store.watch(told.append)
    bench.copies.hold(OUT)
    write(bench.store, chain(4))
    bench.store.evict(chain(4), Tier.HBM)
    bench.store.poll()
    assert told == [came(key, Tier.HBM) for key in chain(3)]
    assert watch.lost == 5


def test_several_threads_report_each_change_once_and_in_order(threaded: TierStore) -> None:
    last: dict[tuple[PageKey, Tier], bool] = {}
    telling: list[str] = []
    wrong: list[object] = []

    def note(change: PageChange) -> None:
        telling.append(current_thread().name)
        if len(set(telling)) > 1 or last.get((change.key, change.tier), False) == change.came:
            wrong.append((change, list(telling)))
        last[change.key, change.tier] = change.came
        telling.remove(current_thread().name)

    threaded.watch(note)

    def work(act: Callable[[], object]) -> None:
        for _ in range(100):
            act()

    def put_and_drop() -> None:
        write(threaded, chain(2))
        threaded.evict(chain(2))

    threads = [Thread(target=work, args=(act,)) for act in (put_and_drop, threaded.poll, threaded.poll)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    threaded.evict(chain(2))
    assert threaded.drain(PATIENCE_S)
    threaded.poll()
    wait_for(lambda: not any(last.values()))
    assert not wrong
    assert last
