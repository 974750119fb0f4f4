"""The prefetcher over a real store, a turn at a time: what it starts, when it does not, and what that costs others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from prefetch import Compute, Prefetcher
from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    SPEC,
    chain,
    counter,
    page_tensor,
    read,
    same,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.stalls import IN
from tierstore.config import PrefetchConfig, StoreConfig, load_config
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, LeaseState, PageKey, Tier

UP = (Tier.NVME, Tier.HOST)
NBYTES = SPEC.page_nbytes


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=8, host=16, nvme=tmp_path), SPEC)
    yield bench
    bench.open_gates()
    bench.store.check()
    bench.close()


@pytest.fixture
def store(bench: Bench) -> TierStore:
    return bench.store


def prefetcher_of(
    store: TierStore, clock: Clock, compute: Compute | None = None, **limits: object
) -> Prefetcher:
    return Prefetcher(store, PrefetchConfig.model_validate(limits), compute, clock)


def stored(store: TierStore, name: str, length: int, tier: Tier = Tier.NVME) -> list[PageKey]:
    keys = chain(length, name)
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(60.0)
    return keys


def need(store: TierStore, name: str, keys: list[PageKey], deadline_s: float | None = None) -> None:
    assert store.hint(Hint(name, 1, tuple(keys), deadline_s=deadline_s)) is HintResult.DEFERRED


def run(prefetcher: Prefetcher, store: TierStore, clock: Clock, turns: int = 12) -> None:
    """Turns, each after what the one before has started."""
    for _ in range(turns):
        prefetcher.turn(0.0)
        assert store.drain(60.0)
        clock.now += 0.1


def test_what_is_hinted_is_in_hbm_when_it_is_asked_for_and_is_what_was_put(
    store: TierStore, clock: Clock
) -> None:
    prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 4)
    need(store, "r", keys, 5.0)
    run(prefetcher, store, clock)
    assert store.match(keys).tiers == (Tier.HBM,) * 4
    with store.acquire(keys) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert all(same(page_tensor(store)[slot], key) for key, slot in zip(keys, lease.slots, strict=True))
    assert counter(store, "prefetch_bytes", "useful") == 4 * NBYTES
    assert prefetcher.stats()["read_bytes"] == prefetcher.stats()["loaded_bytes"] == 4 * NBYTES


def test_nothing_moves_without_a_hint(store: TierStore, clock: Clock) -> None:
    prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 4)
    run(prefetcher, store, clock, 3)
    assert store.match(keys).tiers == (Tier.NVME,) * 4


def test_who_is_needed_sooner_is_brought_first(bench: Bench, clock: Clock) -> None:
    store = bench.store
    prefetcher = prefetcher_of(store, clock, max_in_flight=2 * NBYTES)
    later, sooner = stored(store, "later", 2, Tier.HOST), stored(store, "sooner", 2, Tier.HOST)
    need(store, "later", later, 50.0)
    need(store, "sooner", sooner, 5.0)
    bench.copies.hold(IN)
    prefetcher.turn(0.0)
    assert not any(Tier.HBM in where(store, key) for key in later)
    assert [where(store, key)[Tier.HBM] for key in sooner] == ["arriving"] * 2


def test_the_first_pages_of_a_large_document_go_up_before_all_of_it_is_planned(
    tmp_path: Path, clock: Clock
) -> None:
    with TierStore.open(tiers(hbm=610, host=610), SPEC) as store:
        prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 600, Tier.HOST)
        later = stored(store, "later", 2, Tier.HOST)
        need(store, "r", keys, 5.0)
        need(store, "later", later, 50.0)
        assert prefetcher.turn(0.0) == 0.0
        first = prefetcher.stats()
        assert (first["plans"], first["expected"]) == (0, 2)
        assert 0 < int(str(first["loaded_bytes"])) <= 256 * NBYTES
        assert store.match(later).tiers == (Tier.HOST,) * 2
        for _ in range(60):
            prefetcher.turn(0.0)
            assert store.drain(60.0)
            clock.now += 0.1
        assert store.match(keys).tiers + store.match(later).tiers == (Tier.HBM,) * 602
        store.check()


def test_the_first_pages_of_a_large_document_push_out_none_of_its_others(
    tmp_path: Path, clock: Clock
) -> None:
    with TierStore.open(tiers(hbm=600, host=1000), SPEC) as store:
        prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 560, Tier.HOST)
        others = stored(store, "others", 340, Tier.HOST)
        for some in (
            keys[300:],
            others,
        ):  # in this order: who looks for room finds the document's pages first
            with store.acquire(some) as lease:
                assert lease.wait(60.0) is LeaseState.READY
        need(store, "r", keys, 5.0)
        prefetcher.turn(0.0)
        assert set(store.match(keys[300:]).tiers) == {Tier.HBM}
        run(prefetcher, store, clock, 60)
        assert set(store.match(keys).tiers) == {Tier.HBM}


def test_no_more_is_in_flight_than_is_allowed(bench: Bench, clock: Clock) -> None:
    store = bench.store
    prefetcher = prefetcher_of(store, clock, max_in_flight=3 * NBYTES)
    keys = stored(store, "a", 8)
    need(store, "r", keys)
    bench.records.hold(UP)
    for _ in range(5):
        prefetcher.turn(0.0)
        clock.now += 0.1
    assert prefetcher.stats()["in_flight_pages"] == 3
    assert sum("arriving" in where(store, key).values() for key in keys) == 3


def test_no_more_of_host_memory_is_taken_than_its_share(store: TierStore, clock: Clock) -> None:
    prefetcher = prefetcher_of(store, clock, share_of_host=0.125)
    keys = [key for name in "ab" for key in stored(store, name, 8)]
    taken = store.allocate(8)
    need(store, "a", keys[:8])
    need(store, "b", keys[8:])
    run(prefetcher, store, clock)
    assert sum(min(where(store, key)) == Tier.HOST for key in keys) == 2
    store.free(taken)


def test_a_document_of_many_pages_goes_through_a_small_window_of_host_memory(
    tmp_path: Path, clock: Clock
) -> None:
    bench = open_bench(tiers(hbm=12, host=4, nvme=tmp_path), SPEC)
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, share_of_host=0.25)
    keys = chain(12, "document")
    write(store, keys)
    store.flush()
    store.evict(keys, Tier.HBM)
    store.evict(keys, Tier.HOST)
    need(store, "r", keys)
    run(prefetcher, store, clock, 40)
    assert store.match(keys).tiers == (Tier.HBM,) * 12
    bench.close()


def test_no_copy_starts_after_the_call_that_cancelled_returned(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, max_in_flight=NBYTES)
    keys = stored(store, "a", 4, Tier.HOST)
    need(store, "r", keys)
    prefetcher.turn(0.0)
    store.hint(Hint("r", 2, ()))
    before = [where(store, key) for key in keys[1:]]
    for tier in list(prefetcher._bringing._ahead):  # what was planned before the cancel was heard of
        prefetcher._bringing._start(tier)
    run(prefetcher, store, clock, 3)
    assert [where(store, key) for key in keys[1:]] == before
    assert prefetcher.stats()["expected"] == 0


def test_it_keeps_away_while_a_lease_waits(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    asked, expected = stored(store, "asked", 2, Tier.HOST), stored(store, "expected", 2, Tier.HOST)
    bench.copies.hold(IN)
    need(store, "r", expected)
    with store.acquire(asked) as lease:
        for _ in range(3):
            prefetcher.turn(0.0)
            clock.now += 0.1
        assert all(Tier.HBM not in where(store, key) for key in expected)
        bench.open_gates()
        assert lease.wait(60.0) is LeaseState.READY
        assert lease.num_pages == 2
    run(prefetcher, store, clock)
    assert store.match(expected).tiers == (Tier.HBM, Tier.HBM)


def test_it_does_not_plan_again_and_again_while_a_lease_waits_for_all_of_it(
    bench: Bench, clock: Clock
) -> None:
    """What a model that answers meanwhile would have to wait for."""
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys = stored(store, "a", 4, Tier.HOST)
    bench.copies.hold(IN)
    need(store, "r", keys)
    prefetcher.turn(0.0)
    with store.acquire(keys) as lease:
        clock.now += 0.01
        prefetcher.turn(0.0)
        assert (prefetcher.stats()["plans"], prefetcher.stats()["in_flight_pages"]) == (2, 4)
        for _ in range(20):
            clock.now += 0.01
            prefetcher.turn(0.0)
        assert prefetcher.stats()["plans"] == 2
        clock.now += 0.1
        prefetcher.turn(0.0)
        assert prefetcher.stats()["plans"] == 3
        bench.open_gates()
        assert lease.wait(60.0) is LeaseState.READY


class Ticking(Clock):
    """Goes on by so much whenever it is read: a plan takes one tick at least."""

    tick = 0.005

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_a_plan_takes_a_tenth_of_its_time_at_most_though_all_is_under_way(bench: Bench) -> None:
    clock = Ticking()
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys = stored(store, "a", 4, Tier.HOST)
    bench.copies.hold(IN)
    need(store, "r", keys)
    begin = clock.now
    for _ in range(100):
        prefetcher.turn(0.0)
    plans = int(str(prefetcher.stats()["plans"]))
    assert prefetcher.stats()["in_flight_pages"] == 4
    assert 5 < plans < 1 + (clock.now - begin) / (10 * clock.tick)


def test_a_sooner_request_takes_the_room_of_a_later_one(store: TierStore, clock: Clock) -> None:
    prefetcher = prefetcher_of(store, clock)
    later, sooner = stored(store, "later", 6, Tier.HOST), stored(store, "sooner", 6, Tier.HOST)
    need(store, "later", later, 50.0)
    run(prefetcher, store, clock, 4)
    assert store.match(later).tiers.count(Tier.HBM) == 6
    need(store, "sooner", sooner, 5.0)
    run(prefetcher, store, clock)
    assert store.match(sooner).tiers == (Tier.HBM,) * 6
    assert store.match(later).tiers == (Tier.HBM,) * 2 + (Tier.HOST,) * 4
    for _ in range(3):
        run(prefetcher, store, clock, 2)
        assert store.match(sooner).tiers == (Tier.HBM,) * 6


def test_what_was_in_hbm_when_it_was_hinted_is_not_displaced_by_what_is_needed_later(
    store: TierStore, clock: Clock
) -> None:
    prefetcher = prefetcher_of(store, clock)
    sooner, later = stored(store, "sooner", 4, Tier.HOST), stored(store, "later", 8, Tier.HOST)
    read(store, sooner)
    write(store, chain(4, "asked for since"))
    assert store.drain(60.0)
    need(store, "sooner", sooner, 5.0)
    need(store, "later", later, 50.0)
    for _ in range(6):
        run(prefetcher, store, clock, 1)
        assert store.match(sooner).tiers == (Tier.HBM,) * 4
    assert store.match(later).tiers.count(Tier.HBM) == 4


def test_what_waits_in_host_memory_when_it_is_hinted_is_not_displaced_by_what_is_needed_later(
    tmp_path: Path, clock: Clock
) -> None:
    bench = open_bench(tiers(hbm=4, host=4, nvme=tmp_path), SPEC)
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, share_of_host=1.0)
    later, sooner = stored(store, "later", 4), stored(store, "sooner", 2, Tier.HOST)
    stored(store, "asked for since", 2, Tier.HOST)
    store.flush()
    taken = store.allocate(4)
    need(store, "sooner", sooner, 5.0)
    need(store, "later", later, 50.0)
    for _ in range(6):
        run(prefetcher, store, clock, 1)
        assert store.match(sooner).tiers == (Tier.HOST,) * 2
    assert store.match(later).tiers == (Tier.HOST,) * 2 + (Tier.NVME,) * 2
    store.free(taken)
    bench.close()


def test_pages_that_a_lease_holds_already_take_no_room_from_the_request_that_shares_them(
    store: TierStore, clock: Clock
) -> None:
    prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 8, Tier.HOST)
    with store.acquire(keys[:5]) as lease:
        assert lease.wait(60.0) is LeaseState.READY
        need(store, "r", keys, 5.0)
        run(prefetcher, store, clock)
        assert store.match(keys).tiers == (Tier.HBM,) * 8


def test_no_room_is_counted_on_that_retained_pages_take(store: TierStore, clock: Clock) -> None:
    prefetcher, kept = prefetcher_of(store, clock), chain(5, "kept")
    expected = stored(store, "expected", 6)
    write(store, kept)
    store.hint(Hint("session", 1, tuple(kept), "retain"))
    need(store, "r", expected, 5.0)
    run(prefetcher, store, clock)
    assert store.match(kept).tiers == (Tier.HBM,) * 5
    assert store.match(expected).tiers == (Tier.HBM,) * 3 + (Tier.HOST,) * 3
    assert not any(prefetcher._bringing._ahead.values()), "it waits for room that nobody will give"


def test_what_computing_beats_stays_where_it_is(store: TierStore, clock: Clock) -> None:
    prefetcher = prefetcher_of(store, clock, Compute(1e-12))
    keys = stored(store, "a", 4)
    with store.acquire(stored(store, "to learn the rates", 1)) as lease:
        lease.wait(60.0)
    need(store, "r", keys, 0.0)
    run(prefetcher, store, clock, 3)
    assert store.match(keys).tiers == (Tier.NVME,) * 4


def test_a_deadline_that_comes_too_soon_is_counted_once(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys = stored(store, "a", 2, Tier.HOST)
    bench.copies.hold(IN)
    need(store, "r", keys, 1.0)
    prefetcher.turn(0.0)
    assert prefetcher.stats()["deadline_misses"] == 0
    clock.now += 1.0
    prefetcher.turn(0.0)
    prefetcher.turn(0.0)
    assert prefetcher.stats()["deadline_misses"] == 1


def test_a_read_that_fails_is_not_tried_for_ever(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys = stored(store, "a", 3)
    bench.records.fail_next(UP, 1)
    need(store, "r", keys)
    run(prefetcher, store, clock)
    assert store.match(keys).tiers == (Tier.HBM,)
    assert prefetcher.stats()["read_bytes"] == 3 * NBYTES


def test_pages_are_the_same_with_it_and_without(tmp_path: Path, clock: Clock) -> None:
    """The same requests, with hints before each and without: every page served is checked, and as many are."""
    served: dict[bool, list[int]] = {}
    for hinted in (True, False):
        bench = open_bench(tiers(hbm=8, host=4, nvme=tmp_path / str(hinted)), SPEC)
        store = bench.store
        documents = [stored(store, name, 5) for name in "abcd"]
        prefetcher = prefetcher_of(store, clock) if hinted else None
        for turn, keys in enumerate(documents * 2):
            if prefetcher is not None:
                need(store, f"{turn}", keys, 1.0)
                run(prefetcher, store, clock, 6)
            served.setdefault(hinted, []).append(read(store, keys))
            store.hint(Hint(f"{turn}", 2, ()))
            store.drain(60.0)
        bench.close()
    assert served[True] == served[False] == [5] * 8


def test_an_engine_that_owns_hbm_has_pages_waiting_in_host_memory(tmp_path: Path, clock: Clock) -> None:
    config = load_config(
        {
            "host": {"capacity": 8 * NBYTES, "pin": "never"},
            "nvme": {"path": tmp_path, "capacity": "64MiB", "flush": "10ms"},
        }
    )
    from tests.support.engine import page_major

    bench, engine = open_bench(config, SPEC), page_major()
    store, keys = bench.store, chain(3)
    store.register(engine.pages)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    store.put(keys, [0, 1, 2])
    store.flush()
    store.evict(keys, Tier.HOST)
    prefetcher = prefetcher_of(store, clock, share_of_host=1.0)
    need(store, "r", keys)
    run(prefetcher, store, clock)
    assert store.match(keys).tiers == (Tier.HOST,) * 3
    bench.close()


# -- its thread ---------------------------------------------------------------------------------------------------


def running(tmp_path: Path, **sections: object) -> tuple[TierStore, StoreConfig]:
    config = tiers(hbm=8, host=8, nvme=tmp_path)
    config = config.model_copy(update={"prefetch": PrefetchConfig.model_validate(sections)})
    return TierStore.open(config, SPEC), config


def test_the_section_of_the_configuration_sets_its_limits(tmp_path: Path) -> None:
    store, _ = running(tmp_path, max_in_flight=3 * NBYTES, share_of_host=0.5)
    with store, Prefetcher.attach(store) as prefetcher:
        figures = prefetcher.stats()
        assert (figures["max_in_flight"], figures["share_of_host"]) == (3 * NBYTES, 0.5)


def test_its_thread_brings_pages_up_and_ready_tells_when_they_are_there(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    keys = stored(store, "a", 6)

    async def wait(prefetcher: Prefetcher) -> int:
        loop = asyncio.get_running_loop()
        assert await prefetcher.ready(keys, by=loop.time()) == 0
        need(store, "r", keys, 1.0)
        return await prefetcher.ready(keys, by=loop.time() + 60.0)

    with store, Prefetcher.attach(store) as prefetcher:
        assert asyncio.run(wait(prefetcher)) == 6
        assert store.match(keys).tiers == (Tier.HBM,) * 6
        assert prefetcher.stats()["faults"] == 0


def test_it_ends_by_itself_when_the_store_closes_and_closing_twice_is_nothing(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    prefetcher = Prefetcher.attach(store)
    store.close()
    assert prefetcher._thread is not None
    prefetcher._thread.join(30.0)
    assert not prefetcher._thread.is_alive()
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(StoreClosed):
        asyncio.run(prefetcher.ready(chain(1), by=0.0))


def test_once_it_is_closed_the_store_goes_on_without_it_and_another_may_come(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    keys = stored(store, "a", 4)
    first = Prefetcher.attach(store)
    first.close()
    assert store.hint(Hint("r", 1, tuple(keys))) is HintResult.REJECTED
    assert read(store, keys) == 4
    with Prefetcher.attach(store) as second:
        first.close()
        store.demote(keys, Tier.NVME)
        store.drain(60.0)
        need(store, "r", keys, 1.0)

        async def wait() -> int:
            return await second.ready(keys, by=asyncio.get_running_loop().time() + 60.0)

        assert asyncio.run(wait()) == 4
    assert store.hint(Hint("r", 2, tuple(keys))) is HintResult.REJECTED
    store.close()


def test_a_second_one_is_refused_while_a_store_has_one_and_the_first_goes_on(tmp_path: Path) -> None:
    store, _ = running(tmp_path / "a")
    other, _ = running(tmp_path / "b")
    keys = stored(store, "a", 4)
    with store, other, Prefetcher.attach(store) as first, Prefetcher.attach(other):
        with pytest.raises(ValueError, match="the store has a prefetcher; allowed: one at a time"):
            Prefetcher.attach(store)
        need(store, "r", keys, 1.0)

        async def wait() -> int:
            return await first.ready(keys, by=asyncio.get_running_loop().time() + 60.0)

        assert asyncio.run(wait()) == 4
        first.close()
        Prefetcher.attach(store).close()


def test_once_its_thread_has_ended_hints_are_rejected_though_closing_did_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = running(tmp_path)
    looking, go_on = Event(), Event()
    take = store.take_hints

    def late(timeout_s: float = 0.0) -> list[Hint]:
        looking.set()
        assert go_on.wait(30.0)
        return take(timeout_s)

    with store:
        prefetcher = Prefetcher.attach(store)
        monkeypatch.setattr(store, "take_hints", late)
        assert looking.wait(30.0)
        prefetcher.close(timeout_s=0.0)
        go_on.set()
        assert prefetcher._thread is not None
        prefetcher._thread.join(30.0)
        assert store.hint(Hint("r", 1, tuple(chain(1)))) is HintResult.REJECTED


def test_nothing_is_left_of_what_it_kept_once_it_is_closed(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys, others = stored(store, "a", 8, Tier.HOST), stored(store, "b", 8, Tier.HOST)
    need(store, "r", keys)
    run(prefetcher, store, clock)
    assert bench.directory.promoting.num_kept == 8
    prefetcher.close()
    store.poll()
    assert bench.directory.promoting.num_kept == 0
    assert read(store, others) == 8


def test_a_closing_store_has_nothing_brought_up_any_more(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its close would wait for every page that a prefetcher goes on to start."""
    bench = open_bench(tiers(hbm=8, host=16, nvme=tmp_path), SPEC)
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, max_in_flight=NBYTES)
    keys, wait_idle = stored(store, "a", 8, Tier.HOST), store._wait_idle
    need(store, "r", keys)
    prefetcher.turn(0.0)
    started: list[object] = []

    def turn_meanwhile(deadline: float) -> bool:
        before = prefetcher.stats()["loaded_bytes"]
        for _ in range(3):
            prefetcher.turn(0.0)
            clock.now += 0.1
        started.append((before, prefetcher.stats()["loaded_bytes"]))
        assert store.hint(Hint("late", 1, tuple(keys))) is HintResult.REJECTED
        return wait_idle(deadline)

    monkeypatch.setattr(store, "_wait_idle", turn_meanwhile)
    store.close()
    assert started == [(NBYTES, NBYTES)]
    prefetcher.close()


def test_a_store_closes_with_a_running_prefetcher_that_has_much_to_do_and_its_thread_ends(
    tmp_path: Path,
) -> None:
    config = tiers(hbm=8, host=8, nvme=tmp_path)
    store = TierStore.open(config, SPEC)
    documents = [stored(store, name, 8) for name in "abcd"]
    prefetcher = Prefetcher.attach(store)
    for revision in range(1, 4):
        for number, keys in enumerate(documents):
            store.hint(Hint(f"r{number}", revision, tuple(keys), deadline_s=1.0))
    store.close()
    assert prefetcher._thread is not None
    prefetcher._thread.join(60.0)
    assert not prefetcher._thread.is_alive()
    assert prefetcher.stats()["faults"] == 0
    prefetcher.close()
    with TierStore.open(config, SPEC) as again:
        assert [read(again, keys) for keys in documents] == [8] * 4


def test_an_error_is_counted_and_logged_once_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = running(tmp_path)
    keys = stored(store, "a", 2)
    prefetcher = Prefetcher(store)
    turn, broken = prefetcher.turn, [True, True]

    def break_twice(timeout_s: float) -> float:
        if broken:
            broken.pop()
            raise RuntimeError("planted")
        if store.match(keys).tiers == (Tier.HBM,) * 2:
            prefetcher._closing.set()
        return turn(timeout_s)

    monkeypatch.setattr(prefetcher, "turn", break_twice)
    need(store, "r", keys)
    prefetcher._run()
    assert prefetcher.stats()["faults"] == 2
    assert [record.message for record in caplog.records] == ["the prefetcher met an unexpected error"]
    store.close()


def test_a_storm_of_hints_leaves_memory_and_queues_bounded_and_no_lease_cut(tmp_path: Path) -> None:
    """100,000 hints, cancels and expiries against a store of a few pages, with leases all the while."""
    bench = open_bench(tiers(hbm=8, host=4, nvme=tmp_path), SPEC, pump=True)
    store, directory = bench.store, bench.directory
    documents = [stored(store, name, 3) for name in "abcdef"]
    with Prefetcher.attach(store) as prefetcher:
        for number in range(100_000):
            keys, revision = tuple(documents[number % 6]), number // 500 + 1
            need_s, ttl_s = (number % 7) / 10, 0.0 if number % 5 == 0 else None
            name = f"r{number % 500}"
            store.hint(Hint(name, revision, () if number % 3 == 0 else keys, deadline_s=need_s, ttl_s=ttl_s))
            if number % 2_000 == 0:
                with store.acquire(keys) as lease:
                    assert lease.wait(60.0) is not LeaseState.PENDING
                    assert not lease._record.cut
                    assert all(
                        same(page_tensor(store)[slot], key)
                        for key, slot in zip(keys, lease.slots, strict=False)
                    )
                assert len(prefetcher._bringing.intake) <= 500
        for name in {f"r{number}" for number in range(500)}:
            store.hint(Hint(name, 1000, ()))
    assert store.drain(60.0)
    store.take_hints()
    store.poll()
    assert prefetcher.stats()["faults"] == 0
    hints, promoting = directory.hints, directory.promoting
    assert (len(hints._queue), len(hints._needed), len(hints.ended), promoting.num_kept) == (0, 0, 0, 0)
    assert len(hints._expiries) <= 2 * 500 + 64
    assert len(hints._revisions) == 500
    assert len(promoting._brought) <= 12
    assert len(promoting._moving) <= 12
    assert tier_stats(store, Tier.HBM)["pinned"] == 0
    bench.close()
