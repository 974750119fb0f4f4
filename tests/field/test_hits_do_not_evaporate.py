"""Tests of evictions between lookup and load: a lease covers only pages that can be used, and keeps them usable."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Semaphore, Thread

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.lanes import examples
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    fill,
    read,
    require_nothing_held,
    require_right,
    tiers,
    write,
)
from tests.support.stalls import IN, UP
from tierstore.errors import CapacityError
from tierstore.types import LeaseState, PageKey, Tier


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=6, host=8, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("victim", [0, 2, 4])
def test_acquire_covers_the_remaining_match_and_pins_it(bench: Bench, tier: Tier, victim: int) -> None:
    # F044: the first, a middle or the last page is evicted between lookup and acquire
    store, keys = bench.store, chain(5)
    write(store, keys)
    if tier > Tier.HBM:
        store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).num_pages == 5
    store.evict([keys[victim]])
    lease = store.acquire(keys)
    assert (lease.num_pages, lease.missing, lease.missing_because) == (victim, keys[victim:], "evicted")
    slots = lease.slots
    for i in range(4):  # pages that the lease covers are no longer evicted
        try:
            # With victim 0, the lease covers no page: the write succeeds once the pages in HBM are saved.
            write(store, chain(6 - victim, f"other{i}"), timeout_s=0.05 if victim else PATIENCE_S)
        except CapacityError:
            assert victim
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert lease.slots == slots
    require_right(store, lease)
    lease.release()


def _evicted(bench: Bench, key: PageKey) -> None:
    bench.store.evict([key])


def _evicted_below_alone(bench: Bench, key: PageKey) -> None:
    bench.store.evict([key], Tier.NVME)
    bench.store.evict([key], Tier.HOST)


def _broken(bench: Bench, key: PageKey) -> None:
    bench.records.inner.submit_erase([key])
    assert bench.records.inner.sync(PATIENCE_S)


@pytest.mark.parametrize("happens", [_evicted, _evicted_below_alone, _broken])
@pytest.mark.parametrize("victim", [0, 2, 4])
def test_a_page_evicted_between_acquire_and_its_load_shortens_the_lease_or_is_loaded(
    bench: Bench, happens: Callable[[Bench, PageKey], None], victim: int
) -> None:
    # F044: the page is evicted after acquire and before it is loaded
    store, keys = bench.store, chain(5)
    write(store, keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    bench.records.hold(UP)
    lease = store.acquire(keys)
    assert lease.num_pages == 5
    happens(bench, keys[victim])
    bench.open_gates()
    state = lease.wait(PATIENCE_S)
    assert lease.num_pages == victim
    assert state is (LeaseState.READY if victim else LeaseState.FAILED)
    assert lease.missing == keys[victim:]
    require_right(store, lease)
    write(store, lease.missing, lease)
    lease.release()
    assert read(store, keys) == 5


def test_a_hit_that_no_request_loads_pins_nothing_and_breaks_nothing(bench: Bench) -> None:
    # F044: matched pages are evicted by the allocation for the rest of the same prompt
    store, keys = bench.store, chain(6)
    write(store, keys[:4])
    assert store.drain(PATIENCE_S)
    store.flush()
    assert store.match(keys).num_pages == 4
    slots = store.allocate(5, timeout_s=0.0)  # more slots than are free beside the hit
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 1
        assert lease.missing_because == "no_room"
        require_right(store, lease)
    store.free(slots)
    assert read(store, keys) == 4


@pytest.mark.parametrize("into_hbm_stalls", [False, True])
def test_lookups_and_loads_that_race_with_eviction_return_no_missing_page(
    tmp_path: Path, into_hbm_stalls: bool
) -> None:
    # F044: one thread acquires pages as a scheduler does, while others evict and displace pages
    bench = open_bench(tiers(6, 4, tmp_path), SPEC, pump=True, spill=True)
    store = bench.store
    prompts = [chain(4, str(i)) for i in range(3)]
    done: list[bool] = []
    permits = Semaphore(0)
    errors: list[BaseException] = []

    def paced() -> bool:
        """Wait for a permit. The scheduler issues six permits per turn. Return whether to continue."""
        permits.acquire()
        return not done

    def evict() -> None:
        chance = random.Random(1)
        while not done:
            store.evict(
                [chance.choice(chance.choice(prompts)[1:])], chance.choice([None, Tier.HBM, Tier.HOST])
            )
            if into_hbm_stalls and chance.random() < 0.1:
                bench.copies.hold(IN)
                bench.copies.let_go(IN)
                bench.copies.holding.clear()
                bench.copies.let_go(IN)

    def push_out() -> None:
        turn = 0
        while paced():
            turn += 1
            try:
                slots = store.allocate(1, timeout_s=0.01)
            except CapacityError:
                continue
            fill(store, chain(1, f"other{turn}"), slots)
            store.put(chain(1, f"other{turn}"), slots)

    def carried(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  carried to the test's own thread
            errors.append(error)

    threads = [Thread(target=carried, args=(work,)) for work in (evict, push_out)]
    for thread in threads:
        thread.start()
    covered = 0
    try:
        for turn in range(examples(24, 60)):
            keys = prompts[turn % 3]
            permits.release(6)
            store.match(keys)
            with store.acquire(keys) as lease:
                assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
                assert [*keys[: lease.num_pages], *lease.missing] == keys
                require_right(store, lease)
                covered += lease.num_pages
                try:
                    write(store, lease.missing, lease, timeout_s=0.2)
                except CapacityError:
                    continue
    finally:
        done.append(True)
        permits.release(2)
        for thread in threads:
            thread.join()
    assert not errors, errors[0]
    assert covered
    bench.open_gates()
    require_nothing_held(store)
    bench.close()
