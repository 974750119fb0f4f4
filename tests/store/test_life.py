"""Tests of a store from open to close: keys, explain and stats, close, and calls after close or in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import pytest

from tests.support.bench import open_bench
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, SPEC, chain, fill, read, tiers, where, write
from tests.support.stalls import IN, OUT
from tierstore.errors import CapacityError, StoreClosed
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, Tier

DOWN = (Tier.HOST, Tier.NVME)


def test_keys_cover_full_pages_and_depend_on_everything_that_changes_kv() -> None:
    with TierStore.open(tiers(), SPEC) as store:
        tokens = list(range(11))
        keys = store.keys(tokens)
        assert len(keys) == 2
        assert store.keys(tokens[:8]) == keys
        assert store.keys(tokens[:3]) == []
        for other in (
            store.keys([9, *tokens[1:]]),
            store.keys(tokens, salt=b"tenant"),
            store.keys(tokens, extra=("lora",)),
        ):
            assert not set(other) & set(keys)
        image = store.keys(tokens, extra=((5, b"image"),))
        assert image[0] == keys[0]
        assert image[1] != keys[1]


CALLS: list[Callable[[TierStore], object]] = [
    lambda s: s.keys([1, 2, 3, 4]),
    lambda s: s.pages,
    lambda s: s.allocate(1, timeout_s=0.0),
    lambda s: s.allocate(99),
    lambda s: s.put([], []),
    lambda s: s.free([]),
    lambda s: s.match([]),
    lambda s: s.acquire([]),
    lambda s: s.hint(Hint("r", 1, ())),
    lambda s: s.take_hints(),
    lambda s: s.demote([], Tier.HOST),
    lambda s: s.evict([]),
    lambda s: s.flush(),
    lambda s: s.drain(0.0),
    lambda s: s.poll(),
    lambda s: s.check(),
    lambda s: s.explain([]),
    lambda s: s.stats(),
    lambda s: s.register(),
    lambda s: s.__enter__(),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_every_call_after_close_is_store_closed(call: Callable[[TierStore], object]) -> None:
    store = TierStore.open(tiers(), SPEC)
    store.close()
    with pytest.raises(StoreClosed):
        call(store)
    store.close()


def test_lease_may_outlive_its_store() -> None:
    store = TierStore.open(tiers(), SPEC)
    write(store, chain(1))
    with store.acquire(chain(1)) as lease:
        store.close()
        with pytest.raises(StoreClosed):
            lease.wait(0.0)


def test_close_saves_pages_that_are_only_in_memory(tmp_path: Path) -> None:
    keys = chain(4)
    config = tiers(4, 4, tmp_path, nvme_more={"flush": 3600})
    with TierStore.open(config, SPEC) as store:
        write(store, keys)
    with TierStore.open(config, SPEC) as store:
        assert store.match(keys).tiers == (Tier.NVME,) * 4
        assert read(store, keys) == 4


def test_close_with_leases_owned_slots_and_pages_in_flight_ends(tmp_path: Path) -> None:
    store = TierStore.open(tiers(6, 4, tmp_path), SPEC)
    write(store, chain(2))
    store.demote(chain(2), Tier.NVME)
    store.allocate(1)
    lease = store.acquire(chain(2))
    write(store, chain(2, "more"))
    store.close()
    with pytest.raises(StoreClosed):
        lease.release()


@pytest.mark.parametrize("lane", [OUT, DOWN])
def test_close_leaves_a_stuck_copy_behind_and_frees_the_directory(
    tmp_path: Path, lane: tuple[Tier, Tier], caplog: pytest.LogCaptureFixture
) -> None:
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    keys, stuck = chain(2), chain(2, "stuck")
    write(bench.store, keys)
    bench.store.flush()
    gate = bench.copies if lane == OUT else bench.records
    gate.losing.add(lane)
    write(bench.store, stuck)
    bench.store.close(timeout_s=0.3)
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        assert store.match(keys).num_pages == 2
        assert read(store, keys) == 2


def test_close_does_not_wait_forever_for_an_event_of_the_caller(tmp_path: Path) -> None:
    store = TierStore.open(tiers(4, 4, tmp_path), SPEC)
    write(store, chain(2))
    store.flush()
    store.put(chain(1, "never"), store.allocate(1), after=ManualEvent())
    store.close(timeout_s=0.3)
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        assert store.match(chain(2)).num_pages == 2
        assert store.match(chain(1, "never")).num_pages == 0


def test_close_wakes_waiting_callers(tmp_path: Path) -> None:
    bench = open_bench(tiers(2, 4, tmp_path), SPEC, pump=True)
    keys = chain(2)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.copies.hold(IN)
    lease = bench.store.acquire(keys)
    said: list[str] = []

    def wait() -> None:
        try:
            lease.wait(None)
        except StoreClosed:
            said.append("closed")

    def allocate() -> None:
        try:
            bench.store.allocate(1, timeout_s=PATIENCE_S)
        except StoreClosed:
            said.append("closed")

    threads = [Thread(target=wait), Thread(target=allocate)]
    for thread in threads:
        thread.start()
    bench.store.close(timeout_s=0.2)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert said == ["closed", "closed"]


def test_two_threads_may_close() -> None:
    store = TierStore.open(tiers(), SPEC)
    write(store, chain(2))
    threads = [Thread(target=store.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with pytest.raises(StoreClosed):
        store.poll()


def test_explain_reports_tiers_parent_and_eviction_reason_of_a_page() -> None:
    bench = open_bench(tiers(4, 4), SPEC)
    keys = chain(2)
    bench.copies.hold(OUT)
    write(bench.store, keys)
    first, second = bench.store.explain(keys)
    assert first["readable"] is True
    assert first["parent"] is None
    assert second["parent"] == keys[0].hex()
    assert second["copies"] == {
        "HBM": {"state": "ready", "pins": 1},
        "HOST": {"state": "arriving", "pins": 0},
    }
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    bench.store.evict(keys)
    assert [page["lost"] for page in bench.store.explain(keys)] == ["evicted", "evicted"]
    assert bench.store.explain(chain(1, "never"))[0]["lost"] is None
    bench.close()


def test_stats_are_plain_data_with_the_effective_configuration(tmp_path: Path) -> None:
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        write(store, chain(2))
        stats = store.stats()
        config = stats["config"]
        assert isinstance(config, dict)
        assert config["hbm"]["policy"] == "lru"
        assert config["nvme"]["flush"] == 0.01
        assert stats["fingerprint"] == SPEC.fingerprint
        assert stats["page_size"] == SPEC.page_size
        assert set(config) == {"hbm", "host", "nvme"}


def test_check_detects_inconsistent_state() -> None:
    bench = open_bench(tiers(4, 4), SPEC)
    keys = chain(1)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    bench.directory.residency.tables[Tier.HBM].copies[keys[0]].pins += 1
    with pytest.raises(AssertionError, match="HBM"):
        bench.store.check()
    bench.directory.residency.tables[Tier.HBM].copies[keys[0]].pins -= 1
    bench.close()


def test_timed_out_allocate_takes_nothing_and_the_error_lists_hbm_use() -> None:
    with TierStore.open(tiers(2, 2), SPEC) as store:
        slots = store.allocate(2)
        fill(store, chain(2), slots)
        with pytest.raises(CapacityError, match="2 owned"):
            store.allocate(1, timeout_s=0.0)
        store.put(chain(2), slots)
        with store.acquire(chain(2)) as lease:
            assert lease.wait(0.0) is LeaseState.READY
            with pytest.raises(CapacityError, match="2 pinned"):
                store.allocate(1, timeout_s=0.0)
        assert where(store, chain(1)[0])


def test_a_forked_child_is_refused_at_once_even_if_the_lock_was_held(tmp_path: Path) -> None:
    """A forked child has neither the store's threads nor the thread that holds the lock, so waiting would never end."""
    for config in (tiers(), tiers(nvme=tmp_path / "disk")):
        with TierStore.open(config, SPEC) as store:
            keys = chain(2)
            write(store, keys)
            with store.acquire(keys) as lease:
                with store._lock:
                    child = os.fork()
                    if child == 0:
                        os._exit(_what_a_child_gets(store))
                assert _exit_code_in_time(child) == 0
                assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert read(store, keys) == 2


def _exit_code_in_time(child: int) -> int | None:
    """Return the exit code of a child. If the child hangs, kill it and return None."""
    deadline = monotonic() + PATIENCE_S
    while monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _what_a_child_gets(store: TierStore) -> int:
    """Call every method in a forked child. Return 0 if all raise StoreClosed, else 1. ``close`` must not raise."""
    refused = 0
    for call in CALLS:
        try:
            call(store)
        except StoreClosed as error:
            refused += "after the fork" in str(error)
    store.close()
    return 0 if refused == len(CALLS) else 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_directory_renamed_under_a_store_breaks_no_call(tmp_path: Path, whole: bool) -> None:
    disk = tmp_path / "disk"
    with TierStore.open(tiers(nvme=disk), SPEC) as store:
        keys = chain(3)
        write(store, keys)
        store.flush()
        for path in [disk] if whole else [p for p in disk.iterdir() if p.is_dir()]:
            path.rename(tmp_path / "elsewhere")
        assert store.stats()["nvme"] is not None
        write(store, chain(3, "more"))
        store.flush()
        assert read(store, keys) == 3
