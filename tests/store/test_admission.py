"""Tests of admission policies and write budgets: which pages are written automatically, and which on request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    read,
    read_soon,
    tiers,
    where,
    write,
)
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

ON_DISK = {Tier.HBM: "ready", Tier.HOST: "ready", Tier.NVME: "ready"}


def opened(
    path: Path, admission: str, hbm: int = 4, host: int | None = 4, nvme_pages: int = 200, **more: object
) -> Bench:
    nvme_more = {"admission": admission, **more}
    return open_bench(
        tiers(hbm, host, path, nvme_pages=nvme_pages, nvme_more=nvme_more), SPEC, spill=True, pump=True
    )


def stored(bench: Bench, keys: Sequence[PageKey]) -> list[bool]:
    """Wait until all automatic writes have ended. Return, for each page, whether it is on disk."""
    for _ in range(3):
        assert bench.store.drain(PATIENCE_S)
    while bench.directory.writeback.next_spill is not None:
        bench.store.drain(0.01)
    assert bench.store.drain(PATIENCE_S)
    nvme = bench.directory.residency.tables[Tier.NVME]
    return [nvme.ready(key) for key in keys]


def admission_stats(store: TierStore) -> dict[str, int | None]:
    found = store.stats()["admission"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("host", [4, 1, None])
def test_page_never_requested_again_is_never_written(tmp_path: Path, host: int | None) -> None:
    bench = opened(tmp_path, "second_hit", host=host)
    names = [chain(3, str(i)) for i in range(12)]
    for keys in names:
        write(bench.store, keys)
    assert stored(bench, [key for keys in names for key in keys]) == [False] * 36
    lost = sum(not where(bench.store, key) for keys in names for key in keys)
    assert lost > 20
    found = admission_stats(bench.store)
    assert (found["refused_pages"], found["refused_nbytes"]) == (lost, lost * SPEC.page_nbytes)
    assert found["written_last_24h"] == 0
    lowest = "HBM" if host is None else "HOST"
    tiers_above = ("HBM", "HOST")
    assert sum(counter(bench.store, "dropped_copies", f"{t},not_admitted") for t in tiers_above) == lost
    assert counter(bench.store, "transfer_bytes", f"{lowest},NVME") == 0
    bench.store.check()
    bench.close()


def test_a_refused_page_is_explained_while_it_waits_and_when_it_is_evicted(tmp_path: Path) -> None:
    bench = opened(tmp_path, "second_hit")
    keys = chain(3)
    write(bench.store, keys)
    before = bench.store.explain(keys)[0]
    assert (before["not_admitted"], before["memory_only"]) == (True, False)
    assert admission_stats(bench.store)["waiting_pages"] == 3
    for i in range(8):
        write(bench.store, chain(3, str(i)))
    assert bench.store.explain(keys)[0]["lost"] == "not_admitted"
    assert "tierstore_admission_waiting_pages" in bench.store.metrics.text()
    bench.close()


def test_a_page_that_is_hit_is_written_with_earlier_pages_and_not_with_later_ones(tmp_path: Path) -> None:
    bench = opened(tmp_path, "second_hit")
    keys = chain(3)
    write(bench.store, keys)
    assert read(bench.store, keys[:2]) == 2
    assert stored(bench, keys) == [True, True, False]
    bench.close()


def test_page_put_again_after_its_eviction_is_written(tmp_path: Path) -> None:
    bench = opened(tmp_path, "second_hit")
    keys = chain(3)
    write(bench.store, keys)
    for i in range(8):
        write(bench.store, chain(3, str(i)))
    assert bench.store.match(keys).num_pages == 0
    write(bench.store, keys)
    assert stored(bench, keys) == [True, True, True]
    bench.close()


def test_a_page_put_again_while_it_is_leased_counts_as_a_hit(tmp_path: Path) -> None:
    bench = opened(tmp_path, "second_hit")
    keys = chain(2)
    write(bench.store, keys)
    write(bench.store, keys[:1])
    assert stored(bench, keys) == [True, False]
    bench.close()


@pytest.mark.parametrize("admission", ["second_hit", "cost"])
def test_pages_requested_on_disk_are_written_regardless_of_admission(tmp_path: Path, admission: str) -> None:
    bench = opened(tmp_path, admission, daily_writes=1)
    keys, others, more = chain(3), chain(2, "o"), chain(3, "m")
    write(bench.store, keys)
    bench.store.demote(keys[2:], Tier.NVME)
    assert stored(bench, keys) == [True, True, True], "the pages before the demoted page must be written too"
    write(bench.store, others)
    assert stored(bench, others) == [False, False]
    bench.store.flush()
    assert stored(bench, others) == [True, True]
    write(bench.store, more)
    bench.close()
    again = opened(tmp_path, admission)
    assert [again.store.match(keys).num_pages for keys in (keys, others, more)] == [3, 2, 3]
    again.close()


@pytest.mark.parametrize("admission", ["all", "second_hit", "cost"])
def test_pages_on_disk_are_not_written_again(tmp_path: Path, admission: str) -> None:
    bench = opened(tmp_path, admission)
    keys = chain(3)
    write(bench.store, keys)
    bench.store.flush()
    for _ in range(3):
        bench.store.evict(keys, Tier.HBM)
        bench.store.evict(keys, Tier.HOST)
        assert read_soon(bench.store, keys) == 3
        write(bench.store, keys)
        assert stored(bench, keys) == [True] * 3
        bench.store.flush()
    nvme = bench.store.stats()["nvme"]
    assert isinstance(nvme, dict)
    assert nvme["bytes_written"] == 3 * SPEC.page_nbytes
    assert admission_stats(bench.store)["written_last_24h"] == nvme["bytes_stored"]
    bench.close()


def test_a_daily_budget_stops_automatic_writes_and_nothing_else(tmp_path: Path) -> None:
    probe = opened(tmp_path / "probe", "all")
    record = probe.directory.residency.tables[Tier.NVME].record_nbytes
    probe.close()
    bench = opened(tmp_path / "disk", "all", daily_writes=5 * record)
    names = [chain(3, str(i)) for i in range(4)]
    for keys in names:
        write(bench.store, keys)
        stored(bench, keys)
    flat = [key for keys in names for key in keys]
    assert sum(stored(bench, flat)) == 5
    found = admission_stats(bench.store)
    assert found["daily_writes"] == 5 * record
    written, left = found["written_last_24h"], found["left_today"]
    assert written is not None
    assert left is not None
    assert (left < record, written + left) == (True, 5 * record)
    assert 'tierstore_nvme_day_bytes{state="left"}' in bench.store.metrics.text()
    here = [key for key in flat if where(bench.store, key)]
    bench.store.flush()
    assert all(stored(bench, here))
    assert admission_stats(bench.store)["left_today"] == 0
    bench.store.check()
    bench.close()


def test_a_budget_too_small_for_the_earlier_pages_refuses_a_page(tmp_path: Path) -> None:
    probe = opened(tmp_path / "probe", "all")
    record = probe.directory.residency.tables[Tier.NVME].record_nbytes
    probe.close()
    bench = opened(tmp_path / "disk", "second_hit", daily_writes=2 * record)
    keys = chain(3)
    write(bench.store, keys)
    bench.directory.admission.hit(keys[2:], Tier.HBM)
    assert stored(bench, keys) == [False, False, False]
    bench.directory.admission.hit(keys[1:2], Tier.HBM)
    assert stored(bench, keys) == [True, True, False]
    bench.close()


def test_engine_pages_go_through_admission(tmp_path: Path) -> None:
    owner, second_hit = {"owner": "engine"}, {"admission": "second_hit"}
    config = tiers(SLOTS, 8, tmp_path, hbm_more=owner, nvme_more=second_hit)
    bench, engine = open_bench(config, SPEC, spill=True, pump=True), page_major()
    bench.store.register(engine.pages)
    keys = chain(3)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, [0, 1, 2])
    assert stored(bench, keys) == [False, False, False]
    history = bench.directory.admission._history
    assert history is not None
    assert [history.get(key).span for key in keys] == [3, 3, 3], "put must record the whole run"  # type: ignore[union-attr]
    with bench.store.acquire(keys[:2], into=[3, 4]) as lease:
        lease.wait(PATIENCE_S)
    assert stored(bench, keys) == [True, True, False]
    bench.store.check()
    bench.store.drain(PATIENCE_S)
    bench.store.poll()
    bench.store.put(keys, [0, 1, 2])
    assert stored(bench, keys) == [True, True, True]
    bench.close()


def test_cost_writes_everything_before_it_has_statistics(tmp_path: Path) -> None:
    bench = opened(tmp_path, "cost")
    keys = chain(3)
    write(bench.store, keys)
    assert stored(bench, keys) == [True, True, True]
    bench.close()


def test_on_a_full_disk_cost_refuses_kinds_that_are_never_requested(tmp_path: Path) -> None:
    bench = opened(tmp_path, "cost", nvme_pages=12)
    chat = chain(3, "chat")
    write(bench.store, chat)
    for i in range(400):
        write(bench.store, chain(2, str(i)))
        if i % 4 == 0 and read_soon(bench.store, chat) == 0:
            write(bench.store, chat)
    stored(bench, chat)
    nvme = bench.store.stats()["nvme"]
    assert isinstance(nvme, dict)
    assert nvme["bytes_written"] < 600 * SPEC.page_nbytes, (
        "at most three quarters of the pages may be written"
    )
    assert bench.store.match(chat).num_pages == 3
    bench.close()
