"""Tests that, after a warm-up, neither the process nor the store's containers grow with the number of calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import active_count
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import pytest

from tests.support import forked, lanes
from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    page_tensor,
    read,
    tiers,
    where,
    write,
)
from tierstore.store import TierStore
from tierstore.types import Hint, Tier

CYCLES = """
import sys
from pathlib import Path
from tests.support.pages import SPEC, chain, tiers
from tierstore.store import TierStore

third = int(sys.argv[1])

def memory():
    # The first figure excludes file mappings, whose resident part depends on what other programs need.
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith(("Rss", "Vm"))}
    return found["RssAnon:"] + found["RssShmem:"] + found["VmSwap:"], found["VmRSS:"]

with TierStore.open(tiers(1000, None), SPEC) as store:
    for done in range(0, 3 * third, 60):
        keys = chain(60, str(done))
        store.put(keys, store.allocate(60))
        if done % 180:
            store.evict(keys)
        if done in (third, 3 * third - 60):
            print(*memory())
"""


def test_process_memory_does_not_grow_over_many_put_and_evict_cycles() -> None:
    # F097: many more puts than slots. A third of the pages is evicted to make space, the rest by evict().
    third = lanes.examples(9_000, 60_000)
    child = forked.run(CYCLES, str(third))
    assert child.returncode == 0, child.stderr
    early, whole, late, _ = map(int, child.stdout.split())
    assert late - early <= 0.02 * whole, f"{early} KiB after {third} puts, {late} KiB after {3 * third}"


def elements(root: object) -> dict[str, int]:
    """Count the objects that can be reached from ``root``, by type. Functions, types and modules are left out."""
    seen: set[int] = set()
    counts: dict[str, int] = {}
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(
            found, type | ModuleType | FunctionType | BuiltinFunctionType | MethodType
        ):
            continue
        seen.add(id(found))
        counts[type(found).__name__] = counts.get(type(found).__name__, 0) + 1
        waiting += gc.get_referents(found)
    return counts


def in_containers(bench: Bench) -> int:
    """Return how many objects the directory, the metrics and the pump's events contain."""
    bench.store.poll()
    gc.collect()
    return sum(elements((bench.directory, bench.store.metrics, bench.store._pump.events)).values())


def puts_and_evictions(bench: Bench, turn: int) -> None:
    keys = chain(4, str(turn))
    write(bench.store, keys)
    bench.store.evict(keys)


def pressure(bench: Bench, turn: int) -> None:
    write(bench.store, chain(4, str(turn)))
    assert bench.store.drain(PATIENCE_S)


def misses(bench: Bench, turn: int) -> None:
    keys = chain(4, str(turn))
    bench.store.match(keys)
    bench.store.acquire(keys, deadline_s=0.5).release()
    bench.store.explain(keys)
    bench.store.demote(keys, Tier.HOST)


def hints(bench: Bench, turn: int) -> None:
    keys = tuple(chain(4, "hinted"))
    bench.store.hint(Hint(f"r{turn}", 1, keys, "retain", ttl_s=0.0))
    bench.store.hint(Hint(f"r{turn}", 2, ()))
    bench.store.hint(Hint("always the same", turn, keys, "wont_need"))


def aborted_loads(bench: Bench, turn: int) -> None:
    keys = chain(3, "loaded")
    if turn == 0:
        write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.store.acquire(keys).release()


def orphans(bench: Bench, turn: int) -> None:
    keys = chain(4, str(turn))
    write(bench.store, keys)
    bench.store.evict(keys[:1])
    assert bench.store.drain(PATIENCE_S)


def a_disk_that_refuses(bench: Bench, turn: int) -> None:
    keys = chain(4, str(turn))
    bench.records.fail_next((Tier.HOST, Tier.NVME), *range(32))
    write(bench.store, keys)
    bench.store.demote(keys, Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    bench.store.evict(keys[: turn % 3])


WORK: list[Callable[[Bench, int], None]] = [
    puts_and_evictions,
    pressure,
    misses,
    hints,
    aborted_loads,
    orphans,
]
ON_DISK = [
    *((work, True) for work in WORK),
    (pressure, False),
    # A store without a disk has only some of the containers of one with a disk.
    *(pytest.param(work, False, marks=pytest.mark.deep) for work in WORK if work is not pressure),
    (a_disk_that_refuses, True),
]


@pytest.mark.parametrize(("work", "disk"), ON_DISK)
def test_no_container_of_the_store_grows_with_the_number_of_calls(
    work: Callable[[Bench, int], None], disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F097: the store remembers a limited number of hints and of dropped pages. The test lowers the limits.
    monkeypatch.setattr("tierstore.directory.eviction._REMEMBERED", 20)
    monkeypatch.setattr("tierstore.directory.hints.MAX_REQUESTS", 20)
    bench = open_bench(tiers(12, 12, tmp_path if disk else None, nvme_pages=20), SPEC)
    sizes: list[int] = []
    turn = 0
    for until in (100, 300):
        while turn < until:
            work(bench, turn)
            turn += 1
        assert bench.store.drain(PATIENCE_S)
        sizes.append(in_containers(bench))
    bench.store.check()
    bench.close()
    assert sizes[1] <= sizes[0] + 100, f"{sizes[0]} objects after 100 turns, {sizes[1]} after 300"


def test_copies_back_and_forth_take_no_more_memory_and_no_more_threads(tmp_path: Path) -> None:
    # F099, on the CPU: the same pages are moved down and up, and the store keeps using the same memory
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        keys = chain(4)
        write(store, keys)
        store.flush()
        threads = active_count()
        arenas = (store._parts.arena, store._parts.pool)
        for turn in range(200):
            store.demote(keys, Tier.HOST if turn % 4 else Tier.NVME)
            assert store.drain(PATIENCE_S)
            assert read(store, keys) == 4
        assert active_count() == threads
        assert (store._parts.arena, store._parts.pool) == arenas
        assert Tier.HBM in where(store, keys[0])
        assert len(page_tensor(store)) == 8


def test_an_engine_that_puts_pages_forever_leaves_nothing_behind() -> None:
    # F097, with HBM owned by an engine
    engine = page_major()
    bench = open_bench(tiers(SLOTS, 8, hbm_more={"owner": "engine"}), SPEC)
    bench.store.register(engine.pages)
    sizes: list[int] = []
    for turn in range(400):
        keys = chain(2, str(turn % 50))
        bench.store.put(keys, [0, 1])
        assert bench.store.drain(PATIENCE_S)
        assert sorted(bench.store.poll()) == [0, 1]
        with bench.store.acquire(keys, into=[2, 3]) as lease:
            lease.wait(PATIENCE_S)
        if turn in (199, 399):
            sizes.append(in_containers(bench))
    bench.close()
    assert sizes[1] <= sizes[0] + 100


def opened_and_closed(tmp_path: Path) -> Iterator[int]:
    for _ in range(12):
        with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
            write(store, chain(2))
        yield len(list(Path("/proc/self/fd").iterdir()))


def test_closed_stores_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    threads = active_count()
    descriptors = list(opened_and_closed(tmp_path))
    assert len(set(descriptors[1:])) == 1
    assert active_count() == threads
