"""Tests of many threads that share a store too small for all their pages: bytes are correct, nothing hangs or leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Thread

import pytest

from tests.support.pages import PATIENCE_S, SPEC, chain, fill, require_nothing_held, require_right, tiers
from tierstore.errors import CapacityError
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

THREADS = 8
SEQUENCES = [chain(3, str(i)) for i in range(12)]


def together(work: Callable[[int], None]) -> None:
    """Run ``work(i)`` in all threads at the same time. Raise the first error of any thread."""
    barrier = Barrier(THREADS)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
            errors.append(error)

    threads = [Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("hbm", "host", "nvme"), [(6, 4, True), (5, None, True), (6, 8, False)])
def test_random_calls_from_many_threads_change_no_byte(
    tmp_path: Path, hbm: int, host: int | None, nvme: bool
) -> None:
    # F027, F042
    with TierStore.open(tiers(hbm, host, tmp_path if nvme else None), SPEC) as store:

        def work(index: int) -> None:
            chance = random.Random(index)
            for _ in range(120):
                keys = chance.choice(SEQUENCES)[: chance.randint(1, 3)]
                dice = chance.random()
                if dice < 0.35:
                    put(keys, chance)
                elif dice < 0.8:
                    with store.acquire(keys, deadline_s=chance.choice([None, None, 0.001])) as lease:
                        if chance.random() < 0.8 and lease.wait(PATIENCE_S) is LeaseState.READY:
                            require_right(store, lease)
                elif dice < 0.87:
                    store.evict(keys, chance.choice([None, Tier.HBM, Tier.HOST, Tier.NVME]))
                elif dice < 0.95 and len(store._directory.residency.tables) > 1:
                    store.demote(keys, max(store._directory.residency.tables))
                elif dice < 0.97:
                    store.check()
                else:
                    store.stats()

        def put(keys: list[PageKey], chance: random.Random) -> None:
            with suppress(CapacityError):
                slots = store.allocate(len(keys), timeout_s=chance.choice([0.0, 0.05]))
                fill(store, keys, slots)
                if chance.random() < 0.1:
                    store.free(slots)
                else:
                    store.put(keys, slots)

        together(work)
        require_nothing_held(store)


def test_allocate_is_one_step_for_many_threads() -> None:
    # F036
    with TierStore.open(tiers(6, 2), SPEC) as store:

        def work(index: int) -> None:
            for _ in range(100):
                with suppress(CapacityError):
                    slots = store.allocate(2, timeout_s=0.0)
                    assert len(set(slots)) == 2
                    store.free(slots)

        together(work)
        require_nothing_held(store)


def test_waiting_callers_all_get_their_slots(tmp_path: Path) -> None:
    # F032: progress in bounded steps, no caller waits without end
    with TierStore.open(tiers(4, 2, tmp_path), SPEC) as store:

        def work(index: int) -> None:
            for i in range(10):
                keys = chain(2, f"{index}/{i}")
                slots = store.allocate(2, timeout_s=PATIENCE_S)
                fill(store, keys, slots)
                store.put(keys, slots)

        together(work)
        store.flush()
        sequences = [chain(2, f"{index}/{i}") for index in range(THREADS) for i in range(10)]
        assert all(store.match(keys).num_pages == 2 for keys in sequences)
        require_nothing_held(store)
