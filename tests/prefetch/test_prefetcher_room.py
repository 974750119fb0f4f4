"""Tests of how much memory the prefetcher uses, and of which pages it evicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetch import prefetcher as prefetcher_module
from tests.prefetch.rig import NBYTES, UP, Clock, need, prefetcher_of, run, stored
from tests.support.bench import Bench, open_bench
from tests.support.pages import SPEC, chain, read, tiers, where, write
from tests.support.planting import Bug, install
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, Tier


def test_pages_in_flight_stay_within_max_in_flight(bench: Bench, clock: Clock) -> None:
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


def test_copies_in_flight_for_a_withdrawn_hint_are_watched_until_they_finish(
    bench: Bench, clock: Clock
) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    need(store, "r", stored(store, "a", 4))
    bench.records.hold(UP)
    prefetcher.turn(0.0)
    store.hint(Hint("r", 2, ()))
    prefetcher.turn(0.0)
    assert prefetcher.stats()["in_flight_pages"] == 4
    bench.open_gates()
    assert store.drain(60.0)
    prefetcher.turn(0.0)
    assert prefetcher.stats()["in_flight_pages"] == 0


def test_host_memory_used_stays_within_share_of_host(store: TierStore, clock: Clock) -> None:
    prefetcher = prefetcher_of(store, clock, share_of_host=0.125)
    keys = [key for name in "ab" for key in stored(store, name, 8)]
    taken = store.allocate(8)
    need(store, "a", keys[:8])
    need(store, "b", keys[8:])
    run(prefetcher, store, clock)
    assert sum(min(where(store, key)) == Tier.HOST for key in keys) == 2
    store.free(taken)


def test_a_document_of_many_pages_is_loaded_through_a_small_window_of_host_memory(
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


def test_the_first_pages_of_a_large_document_push_out_none_of_its_others(
    tmp_path: Path, clock: Clock
) -> None:
    with TierStore.open(tiers(hbm=600, host=1000), SPEC) as store:
        prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 560, Tier.HOST)
        others = stored(store, "others", 340, Tier.HOST)
        # in this order, so that the document's pages are the first in the eviction order
        for some in (keys[300:], others):
            with store.acquire(some) as lease:
                assert lease.wait(60.0) is LeaseState.READY
        need(store, "r", keys, 5.0)
        prefetcher.turn(0.0)
        assert set(store.match(keys[300:]).tiers) == {Tier.HBM}
        run(prefetcher, store, clock, 60)
        assert set(store.match(keys).tiers) == {Tier.HBM}


def test_earlier_request_displaces_pages_of_a_later_one(store: TierStore, clock: Clock) -> None:
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


def test_hinted_pages_in_hbm_are_not_displaced_by_pages_needed_later(store: TierStore, clock: Clock) -> None:
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


def test_hinted_pages_in_host_memory_are_not_displaced_by_pages_needed_later(
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


def test_leased_pages_take_no_space_from_a_request_that_shares_them(store: TierStore, clock: Clock) -> None:
    prefetcher, keys = prefetcher_of(store, clock), stored(store, "a", 8, Tier.HOST)
    with store.acquire(keys[:5]) as lease:
        assert lease.wait(60.0) is LeaseState.READY
        need(store, "r", keys, 5.0)
        run(prefetcher, store, clock)
        assert store.match(keys).tiers == (Tier.HBM,) * 8


def test_space_of_retained_pages_is_not_planned_for(store: TierStore, clock: Clock) -> None:
    require_no_wait_for_what_stays(store, clock)


@pytest.mark.deep
def test_planning_with_the_space_of_staying_pages_is_detected(
    store: TierStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a bug that the state machine misses, because the store itself never evicts pages that must stay."""
    bug = Bug("staying pages take no space", "staying = tuple(self._store.staying())", "staying = ()")
    install(monkeypatch, prefetcher_module, bug)
    with pytest.raises(AssertionError, match="room that nobody will give"):
        require_no_wait_for_what_stays(store, clock)


def require_no_wait_for_what_stays(store: TierStore, clock: Clock) -> None:
    prefetcher, kept = prefetcher_of(store, clock), chain(5, "kept")
    expected = stored(store, "expected", 6)
    write(store, kept)
    store.hint(Hint("session", 1, tuple(kept), "retain"))
    need(store, "r", expected, 5.0)
    run(prefetcher, store, clock)
    assert store.match(kept).tiers == (Tier.HBM,) * 5
    assert store.match(expected).tiers == (Tier.HBM,) * 3 + (Tier.HOST,) * 3
    assert not prefetcher._loop._promotions, "it waits for room that nobody will give"


def test_closing_releases_all_pages_that_it_kept(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys, others = stored(store, "a", 8, Tier.HOST), stored(store, "b", 8, Tier.HOST)
    need(store, "r", keys)
    run(prefetcher, store, clock)
    assert len(bench.directory.residency.queues.kept) == 8
    prefetcher.close()
    store.poll()
    assert len(bench.directory.residency.queues.kept) == 0
    assert read(store, others) == 8
