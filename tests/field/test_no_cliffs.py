"""Tests that costs, counted in executed lines, do not grow with the size of the store, and that no work is wasted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    nvme_capacity,
    read,
    tier_stats,
    tiers,
    write,
)
from tierstore.errors import CapacityError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Hint, Tier

FEW, MANY = 128, 2048


def lines_run(act: Callable[[], object]) -> int:
    """Return how many lines of the product ``act`` executes on this thread. Each iteration of a loop counts."""
    lines = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if "/tierstore/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        act()
    finally:
        sys.settrace(before)
    assert lines > 0
    return lines


def full_bench(pages: int, shape: str, tmp_path: Path, *, pinned: bool) -> tuple[Bench, list[Lease]]:
    """Return a store whose tiers are full, and a list with one lease.

    Args:
        pages: Number of slots per tier, and of pages.
        shape: The lowest tier: "hbm", "host" or "nvme".
        tmp_path: Where the NVMe tier stores its files.
        pinned: Whether the lease pins all pages. Otherwise it pins none.
    """
    nvme = tmp_path / str(pages) if shape == "nvme" else None
    bench = open_bench(tiers(pages, None if shape == "hbm" else pages, nvme, nvme_pages=pages), SPEC)
    lease = bench.store.acquire(())
    for i in range(0, pages, FEW):
        keys = chain(FEW, str(i))
        bench.store.put(keys, bench.store.allocate(FEW), lease=lease if pinned else None)
    assert bench.store.drain(PATIENCE_S)
    return bench, [lease]


def allocate_in_vain(store: TierStore) -> None:
    slots: list[int] = []
    try:
        slots = store.allocate(1, timeout_s=0.0)
    except CapacityError:
        return
    store.free(slots)


CALLS: dict[str, Callable[[TierStore], object]] = {
    "allocate": allocate_in_vain,
    "acquire what is there": lambda store: store.acquire(chain(3, "0")).release(),
    "acquire what is not": lambda store: store.acquire(chain(3, "none")).release(),
    "match": lambda store: store.match(chain(3, "0")),
    "evict what is not there": lambda store: store.evict(chain(3, "none")),
    "hint": lambda store: store.hint(Hint("r", 1, tuple(chain(3, "0")), "wont_need")),
    "explain": lambda store: store.explain(chain(3, "0")),
    "poll": lambda store: store.poll(),
    "stats": lambda store: store.stats(),
}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("shape", ["hbm", "host", "nvme"])
def test_no_call_walks_the_pages_of_a_full_store(shape: str, pinned: bool, tmp_path: Path) -> None:
    # F086: in particular the search for a page to evict, if all are pinned
    costs: list[dict[str, int]] = []
    for pages in (FEW, MANY):
        bench, leases = full_bench(pages, shape, tmp_path, pinned=pinned)
        costs.append({name: lines_run(partial(call, bench.store)) for name, call in CALLS.items()})
        for lease in leases:
            lease.release()
        bench.close()
    few, many = costs
    assert {name: many[name] for name in CALLS if many[name] > 1.5 * few[name] + 100} == {}


@pytest.mark.parametrize("deadline_s", [None, 3600.0])
def test_no_call_walks_the_open_leases(deadline_s: float | None) -> None:
    # F086
    costs: list[dict[str, int]] = []
    for number in (10, 1000):
        bench = open_bench(tiers(8, None), SPEC)
        write(bench.store, chain(3, "0"))
        leases = [bench.store.acquire(chain(2, "0"), deadline_s=deadline_s) for _ in range(number)]
        costs.append({name: lines_run(partial(call, bench.store)) for name, call in CALLS.items()})
        for lease in leases:
            lease.release()
        bench.close()
    few, many = costs
    assert {name: many[name] for name in CALLS if many[name] > 1.5 * few[name] + 100} == {}


def test_cost_per_put_page_does_not_depend_on_how_full_the_store_is(tmp_path: Path) -> None:
    # F086
    def cost_of_a_turnover(pages: int) -> int:
        bench, leases = full_bench(pages, "hbm", tmp_path, pinned=False)
        leases[0].release()
        keys = chain(64, "new")
        cost = lines_run(lambda: bench.store.put(keys, bench.store.allocate(64)))
        bench.close()
        return cost

    assert cost_of_a_turnover(MANY) < 1.5 * cost_of_a_turnover(FEW) + 100


# -- F088: pages that are put faster than the lower tiers can store them -----------------------------------------


def test_an_engine_faster_than_the_lower_tiers_keeps_some_pages_and_counts_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # F088: each turn fills all slots of the engine, and HOST has fewer slots
    engine = page_major()
    bench = open_bench(tiers(SLOTS, 4, hbm_more={"owner": "engine"}), SPEC)
    bench.store.register(engine.pages)
    for turn in range(10):
        keys = chain(SLOTS, str(turn))
        for slot, key in enumerate(keys):
            engine.fill(slot, key)
        bench.store.put(keys, range(SLOTS))
        assert bench.store.drain(PATIENCE_S)
        assert sorted(bench.store.poll()) == list(range(SLOTS))
        assert bench.store.match(keys).num_pages > 0
    kept = tier_stats(bench.store, Tier.HOST)["resident"]
    dropped = [counter(bench.store, "dropped_copies", why) for why in ("HOST,capacity", "HBM,no_room")]
    assert kept > 0
    assert kept + sum(dropped) == 10 * SLOTS
    assert bool(dropped[1]) == ("pages are put faster than the lower tiers can store them" in caplog.text)
    bench.close()


def test_pages_dropped_before_they_could_be_saved_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F088: the disk hangs, so that every put drops pages that were not saved
    monkeypatch.setattr("tierstore.directory.eviction.STALL_S", 0.0)
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    bench.records.hold((Tier.HOST, Tier.NVME))
    for turn in range(12):
        write(bench.store, chain(2, str(turn)))
    assert bench.store.match(chain(2, "11")).num_pages == 2
    assert counter(bench.store, "dropped_copies", "HBM,capacity") > 0
    told = [
        r for r in caplog.records if "pages are put faster than the lower tiers can store them" in r.message
    ]
    assert len(told) == 1
    bench.close()


def test_eviction_of_saved_pages_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # F088
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        for turn in range(20):
            write(store, chain(2, str(turn)))
        store.flush()
        assert sum(store.match(chain(2, str(turn))).num_pages for turn in range(20)) == 40
    assert not caplog.records


# -- F090: fragmentation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
def test_space_of_scattered_victims_fits_the_same_number_of_pages(tmp_path: Path, tier: Tier) -> None:
    # F090: every other page is evicted. A page is one slot or one record, so no space is partly used.
    bench = open_bench(tiers(64, 64, tmp_path / "disk", nvme_pages=64), SPEC)
    store = bench.store
    old = [chain(1, f"old{i}")[0] for i in range(48)]
    write(store, old)
    store.flush()
    before = tier_stats(store, tier)
    assert store.evict(old[::2]) == 24
    store.flush()
    new = [chain(1, f"new{i}")[0] for i in range(24)]
    write(store, new)
    store.flush()
    after = tier_stats(store, tier)
    assert {k: after[k] for k in ("resident", "free")} == {k: before[k] for k in ("resident", "free")}
    nvme = store.stats()["nvme"]
    assert isinstance(nvme, dict)
    assert (nvme["write_no_space"], nvme["records"]) == (0, 48)
    assert nvme["disk_nbytes"] <= nvme_capacity(64)
    assert sum(read(store, [key]) for key in [*old[1::2], *new]) == 48
    bench.close()


# -- F091: bytes written to the disk ----------------------------------------------------------------------------


def test_bytes_written_to_the_disk_are_a_metric_and_a_page_is_written_once(tmp_path: Path) -> None:
    # F091: a page is not written twice, however often it is used
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        keys = chain(4)
        write(store, keys)
        store.flush()
        for _ in range(3):
            store.evict(keys, Tier.HBM)
            store.evict(keys, Tier.HOST)
            assert read(store, keys) == 4
            write(store, keys)
            store.demote(keys, Tier.NVME)
            store.flush()
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert nvme["bytes_written"] == 4 * SPEC.page_nbytes
        assert counter(store, "transfer_bytes", "HOST,NVME") == 4 * SPEC.page_nbytes
        assert 'tierstore_transfer_bytes_total{dst="NVME",src="HOST"}' in store.metrics.text()


def test_with_second_hit_pages_seen_once_are_not_written_to_disk(tmp_path: Path) -> None:
    # F091: three quarters of the pages are used only once, as in a chat trace
    written = {}
    for admission in ("all", "second_hit"):
        config = tiers(8, 8, tmp_path / admission, nvme_more={"admission": admission})
        with TierStore.open(config, SPEC) as store:
            for i in range(40):
                keys = chain(2, str(i))
                write(store, keys)
                if i % 4 == 0:
                    assert read(store, keys) == 2
            assert store.drain(PATIENCE_S)
            written[admission] = counter(store, "transfer_bytes", "HOST,NVME")
    assert 0 < written["second_hit"] <= written["all"] / 2


# -- F093: pages that were read from the disk -------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 4])
def test_pages_loaded_from_the_disk_are_served_by_host_from_then_on(tmp_path: Path, rounds: int) -> None:
    # F093: the disk is read once, however often HBM is emptied
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        keys = chain(3)
        write(store, keys)
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
        for _ in range(1 + rounds):
            assert read(store, keys) == 3
            store.evict(keys, Tier.HBM)
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert nvme["bytes_read"] == 3 * SPEC.page_nbytes
        hits = [counter(store, "hits_pages", tier.name) for tier in (Tier.HBM, Tier.HOST, Tier.NVME)]
        assert hits == [0, 3 * rounds, 3]
