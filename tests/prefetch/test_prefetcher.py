"""Tests of the prefetcher with a real store, turn by turn: which pages it promotes, and in which order."""

from __future__ import annotations

from pathlib import Path

from prefetch import Compute
from tests.prefetch.rig import NBYTES, UP, Clock, need, prefetcher_of, run, stored
from tests.support.bench import Bench, open_bench
from tests.support.engine import page_major
from tests.support.pages import SPEC, chain, counter, page_tensor, read, same, tiers, where
from tests.support.stalls import IN
from tierstore.config import load_config
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, Tier


def test_hinted_pages_are_in_hbm_when_requested_and_unchanged(store: TierStore, clock: Clock) -> None:
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


def test_the_request_with_the_earliest_deadline_is_promoted_first(bench: Bench, clock: Clock) -> None:
    store = bench.store
    prefetcher = prefetcher_of(store, clock, max_in_flight=2 * NBYTES)
    later, sooner = stored(store, "later", 2, Tier.HOST), stored(store, "sooner", 2, Tier.HOST)
    need(store, "later", later, 50.0)
    need(store, "sooner", sooner, 5.0)
    bench.copies.hold(IN)
    prefetcher.turn(0.0)
    assert not any(Tier.HBM in where(store, key) for key in later)
    assert [where(store, key)[Tier.HBM] for key in sooner] == ["arriving"] * 2


def test_no_copy_starts_after_the_call_that_cancelled_returned(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, max_in_flight=NBYTES)
    keys = stored(store, "a", 4, Tier.HOST)
    need(store, "r", keys)
    prefetcher.turn(0.0)
    store.hint(Hint("r", 2, ()))
    before = [where(store, key) for key in keys[1:]]
    for tier in prefetcher._loop._promotions.tiers:  # as planned before the prefetcher learned of the cancel
        prefetcher._loop._start(tier)
    run(prefetcher, store, clock, 3)
    assert [where(store, key) for key in keys[1:]] == before
    assert prefetcher.stats()["expected"] == 0


def test_plan_is_kept_for_a_quarter_of_a_second(store: TierStore, clock: Clock) -> None:
    prefetcher = prefetcher_of(store, clock, max_in_flight=NBYTES)
    need(store, "r", stored(store, "a", 8, Tier.HOST))
    plans = []
    for _ in range(8):  # each turn promotes one page
        prefetcher.turn(0.0)
        assert store.drain(60.0)
        plans.append(prefetcher.stats()["plans"])
        clock.now += 0.045
    assert plans == [1] * 6 + [2] * 2


def test_pages_that_are_faster_to_compute_are_not_promoted(store: TierStore, clock: Clock) -> None:
    prefetcher = prefetcher_of(store, clock, Compute(1e-12))
    keys = stored(store, "a", 4)
    with store.acquire(stored(store, "to learn the rates", 1)) as lease:
        lease.wait(60.0)
    need(store, "r", keys, 0.0)
    run(prefetcher, store, clock, 3)
    assert store.match(keys).tiers == (Tier.NVME,) * 4


def test_missed_deadline_is_counted_once(bench: Bench, clock: Clock) -> None:
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


def test_a_read_that_fails_is_not_retried_forever(bench: Bench, clock: Clock) -> None:
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock)
    keys = stored(store, "a", 3)
    bench.records.fail_next(UP, 1)
    need(store, "r", keys)
    run(prefetcher, store, clock)
    assert store.match(keys).tiers == (Tier.HBM,)
    assert prefetcher.stats()["read_bytes"] == 3 * NBYTES


def test_pages_are_the_same_with_and_without_the_prefetcher(tmp_path: Path, clock: Clock) -> None:
    """Serve the same requests with and without hints. ``read`` checks each page and returns the number of pages."""
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


def test_prefetcher_loads_pages_into_host_memory_if_an_engine_owns_hbm(tmp_path: Path, clock: Clock) -> None:
    config = load_config(
        {
            "host": {"capacity": 8 * NBYTES, "pin": "never"},
            "nvme": {"path": tmp_path, "capacity": "64MiB", "flush": "10ms"},
        }
    )
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
