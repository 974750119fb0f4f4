"""Tests of how often the prefetcher plans, and of the times at which it must not start copies."""

from __future__ import annotations

from pathlib import Path

from tests.prefetch.rig import NBYTES, Clock, need, prefetcher_of, run, stored
from tests.support.bench import Bench
from tests.support.pages import SPEC, tiers, where
from tests.support.stalls import IN
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier


def test_first_pages_of_a_large_document_are_promoted_before_planning_ends(
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


def test_prefetcher_pauses_while_a_lease_waits(bench: Bench, clock: Clock) -> None:
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


def test_prefetcher_does_not_replan_while_a_lease_waits_for_all_pages(bench: Bench, clock: Clock) -> None:
    """Frequent planning would delay a model that computes in the same process."""
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
    """A clock that advances by ``tick`` seconds whenever it is read, so that a plan takes at least one tick."""

    tick = 0.005

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_planning_takes_at_most_a_tenth_of_the_time_when_all_is_in_flight(bench: Bench) -> None:
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


def test_slow_plans_are_not_made_more_often_because_promotions_could_start(bench: Bench) -> None:
    clock = Ticking()
    clock.tick = 0.05
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, max_in_flight=NBYTES)
    keys = stored(store, "a", 8, Tier.HOST)
    need(store, "r", keys)
    prefetcher.turn(0.0)
    begin, before = clock.now, int(str(prefetcher.stats()["plans"]))
    while store.match(keys).tiers[-1] != Tier.HBM:
        assert store.drain(60.0)
        prefetcher.turn(0.0)
    plans = int(str(prefetcher.stats()["plans"])) - before
    assert plans <= (clock.now - begin) / (10 * clock.tick)
