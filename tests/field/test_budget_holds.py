"""Test that a store never uses more than its configuration allows, even after restarts and failures."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.field.killing import victim
from tests.field.victim import pages
from tests.support import lanes
from tests.support.bench import open_bench
from tests.support.pages import (
    SPEC,
    chain,
    nvme_capacity,
    read,
    require_nothing_held,
    tier_stats,
    tiers,
    write,
)
from tests.support.stalls import IN, OUT
from tests.support.waiting import wait_for
from tierstore.nvme.record_format import record_nbytes
from tierstore.store import TierStore
from tierstore.types import Tier

DOWN, UP = (Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)


def disk_usage(home: Path) -> int:
    """Return the disk usage of a directory in bytes, as reported by ``du``."""
    total = 0
    for path in [home, *home.rglob("*")]:
        with suppress(FileNotFoundError):  # the store may delete a file meanwhile
            total += path.lstat().st_blocks * 512
    return total


class Watch:
    """Measures the disk usage of a directory in a thread, repeatedly. ``most`` is the largest value so far."""

    def __init__(self, home: Path) -> None:
        self.home, self.most, self.looks = home, 0, 0
        self._end = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def wait_for_a_look(self) -> None:
        """Wait until a measurement that started after this call has ended."""
        after = self.looks + 1  # the current measurement may have started before this call
        wait_for(lambda: self.looks > after)

    def _run(self) -> None:
        while not self._end.is_set():
            self.most = max(self.most, disk_usage(self.home))
            self.looks += 1
            self._end.wait(0.001)


@pytest.mark.parametrize("host", lanes.some([8, None], bool))
def test_the_disk_never_holds_more_than_its_capacity_while_five_times_that_is_written(
    tmp_path: Path, host: int | None
) -> None:
    # F052: another thread measures the disk usage of everything below the path
    home = tmp_path / "disk"
    with TierStore.open(tiers(8, host, home, nvme_pages=60), SPEC) as store, Watch(home) as watch:
        capacity = nvme_capacity(60)
        turns = 5 * capacity // record_nbytes(SPEC.page_nbytes) // 4
        for i in range(turns):
            write(store, chain(4, str(i)))
            if i % (turns // 10) == 0:
                watch.wait_for_a_look()
        store.flush()
        assert tier_stats(store, Tier.NVME)["resident"] > 30
        store.check()
    assert watch.looks >= 10
    assert watch.most <= capacity
    assert disk_usage(home) <= capacity


def test_usage_after_a_kill_is_exact_and_the_limit_holds(tmp_path: Path) -> None:
    # F053: filled to 80 %, killed and reopened; then pages for half the capacity are written
    home, room = tmp_path / "disk", 100
    with TierStore.open(tiers(8, 16, tmp_path / "other", nvme_pages=room), SPEC) as store:
        figures = store.stats()["nvme"]
        assert isinstance(figures, dict)
        most = int(figures["budget_nbytes"]) // int(figures["record_nbytes"])
    count = most * 8 // 10
    with victim(home, room, "first", count) as used:
        assert used > 0
    with TierStore.open(tiers(8, 16, home, nvme_pages=room), SPEC) as store, Watch(home) as watch:
        assert tier_stats(store, Tier.NVME)["used_nbytes"] == used
        assert sum(store.match([key]).num_pages for key in pages("first", count)) == count
        for key in pages("second", count * 5 // 8):
            write(store, [key])
        store.flush()
        figures = tier_stats(store, Tier.NVME)
        assert used < figures["used_nbytes"] <= figures["budget_nbytes"]
        assert sum(read(store, [key]) for key in pages("second", count * 5 // 8)) == count * 5 // 8
        assert sum(store.match([key]).num_pages for key in pages("first", count)) < count
        store.check()
    assert watch.most <= nvme_capacity(room)


def test_a_lowered_capacity_holds_from_the_first_call(tmp_path: Path) -> None:
    # F053: the old usage exceeds the new capacity
    home = tmp_path / "disk"
    with TierStore.open(tiers(8, 16, home, nvme_pages=200), SPEC) as store:
        for i in range(100):
            write(store, chain(1, str(i)))
    with TierStore.open(tiers(8, 16, home, nvme_pages=20), SPEC) as store:
        figures = tier_stats(store, Tier.NVME)
        assert figures["used_nbytes"] <= figures["budget_nbytes"]
        for i in range(100, 150):
            write(store, chain(1, str(i)))
        store.flush()
        assert read(store, chain(1, "149")) == 1
        store.check()
    assert disk_usage(home) <= nvme_capacity(20)


@pytest.mark.parametrize("seed", lanes.some(range(6), range(3).__contains__))
def test_accounts_balance_after_any_failure(tmp_path: Path, seed: int) -> None:
    # F052: copies fail at random on every edge; the store's counts must match the disk
    chance = random.Random(seed)
    bench = open_bench(tiers(4, 4, tmp_path, nvme_pages=8), SPEC)
    store = bench.store
    for turn in range(120):
        lane = chance.choice([OUT, IN, DOWN, UP])
        gate = bench.records if Tier.NVME in lane else bench.copies
        if chance.random() < 0.4:
            gate.fail_next(lane, chance.randrange(2))
        write(store, chain(2, str(turn % 40)))
        read(store, chain(2, str(chance.randrange(40))))
        if chance.random() < 0.3:
            store.evict(chain(2, str(chance.randrange(40))), chance.choice([None, Tier.NVME]))
        store.check()
    bench.copies.failing.clear()
    bench.records.failing.clear()
    store.flush()
    store.flush()
    nvme, figures = store.stats()["nvme"], tier_stats(store, Tier.NVME)
    assert isinstance(nvme, dict)
    assert nvme["records"] == figures["resident"]
    assert figures["used_nbytes"] == figures["resident"] * nvme["record_nbytes"] <= nvme["budget_nbytes"]
    require_nothing_held(store)
    bench.close()
