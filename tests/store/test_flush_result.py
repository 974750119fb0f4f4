"""Tests of what ``flush`` reports: durable, failed and pending pages, and evicted pages that may still be on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.nvme.rig import data_file_is_read_only, writer_of
from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, read, tiers, where, write
from tests.support.sick_disk import disk_of
from tests.support.stalls import DOWN, OUT, UP
from tests.support.waiting import wait_for
from tierstore import store as saving
from tierstore.config import StoreConfig
from tierstore.errors import StoreClosed
from tierstore.nvme.catalogue import Catalogue, Page
from tierstore.store import TierStore
from tierstore.types import FlushResult, Tier

DONE = FlushResult()


@pytest.fixture(params=["lmdb", "extents"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    return tiers(8, 8, tmp_path / "disk", nvme_more={"payload": request.param, "timeout": "60s"})


@contextmanager
def impatient(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, make flush give up after 0.3 s without progress instead of the usual time."""
    with patch.context() as inner:
        inner.setattr(saving, "_FLUSH_STALL_S", 0.3)
        yield


class HeldCommits:
    """Holds calls of a catalogue method, by default commits of pages, until the test lets them continue.

    Once a call waits, flush gives up after 0.3 s without progress, until ``let_all_go`` is called.
    """

    def __init__(self, patch: pytest.MonkeyPatch, name: str = "store") -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.free = False
        self._patience_s, original = saving._FLUSH_STALL_S, getattr(Catalogue, name)
        patch.setattr(saving, "_FLUSH_STALL_S", self._patience_s)

        def held(catalogue: Catalogue, *args: Any) -> Any:
            if not self.free:
                saving._FLUSH_STALL_S = 0.3
                self.begun.release()
                assert self.go_on.acquire(timeout=PATIENCE_S)
            return original(catalogue, *args)

        patch.setattr(Catalogue, name, held)

    def let_all_go(self) -> None:
        self.free = True
        saving._FLUSH_STALL_S = self._patience_s
        self.go_on.release(1000)


class FlushClock:
    """The clock by which ``flush`` decides when to give up. It advances only when a test calls ``go_on``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._looked = threading.Event()
        patch.setattr(saving, "monotonic", self)

    def __call__(self) -> float:
        now = self.now
        self._looked.set()
        return now

    def go_on(self, seconds: float) -> None:
        """Advance the clock, and wait until flush has read the new time."""
        self.now += seconds
        self._looked.clear()
        assert self._looked.wait(PATIENCE_S)


def nvme(store: TierStore) -> dict[str, Any]:
    found = store.stats()["nvme"]
    assert isinstance(found, dict)
    return found


@contextmanager
def refusing(home: Path) -> Iterator[None]:
    """Within the block, make the disk refuse records and tombstones."""
    with (
        data_file_is_read_only(home, SPEC.fingerprint),
        data_file_is_read_only(home, SPEC.fingerprint, name="erased.bin"),
    ):
        yield


def test_flush_counts_written_and_already_stored_pages(config: StoreConfig) -> None:
    with TierStore.open(config, SPEC) as store:
        assert store.flush() == DONE
        write(store, chain(4))
        assert store.flush() == FlushResult(durable=4)
        write(store, chain(2, "more"))
        found = store.flush()
        assert found == FlushResult(durable=6)
        assert found.complete


def test_flush_without_a_disk_has_nothing_to_do() -> None:
    with TierStore.open(tiers(8, 8), SPEC) as store:
        write(store, chain(4))
        assert store.flush() == DONE
        store.evict(chain(4))
        assert store.flush_evictions() == 0


def test_flush_gives_up_on_a_hung_write_and_the_disk_state_reports_it(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = HeldCommits(monkeypatch)
    with TierStore.open(config, SPEC) as store:
        write(store, chain(4))
        assert commits.begun.acquire(timeout=PATIENCE_S)
        assert store.flush() == FlushResult(pending=4)
        assert nvme(store)["state"] == "read_only"
        assert 'tierstore_nvme_state{state="ok"} 0.0' in store.metrics.text()
        store.check()
        commits.let_all_go()
        wait_for(lambda: nvme(store)["state"] == "ok")
        assert store.flush() == FlushResult(durable=4)


def test_an_erase_behind_a_write_that_hangs_is_pending(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TierStore.open(config, SPEC) as store:
        write(store, chain(4, "gone"))
        store.flush()
        commits = HeldCommits(monkeypatch)
        write(store, chain(2))
        assert commits.begun.acquire(timeout=PATIENCE_S)
        store.evict(chain(4, "gone"))
        assert store.flush() == FlushResult(pending=2, pending_erases=4)
        assert store.flush_evictions() == 4
        assert nvme(store)["pending_erases"] == 4
        commits.let_all_go()
        assert store.flush_evictions() == 0
        assert store.flush() == FlushResult(durable=2)
    with TierStore.open(config, SPEC) as store:
        assert store.match(chain(4, "gone")).num_pages == 0


def test_an_erase_that_hangs_is_pending(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with TierStore.open(config, SPEC) as store:
        write(store, chain(4))
        store.flush()
        erases = HeldCommits(monkeypatch, "erase")
        store.evict(chain(4))
        assert store.flush() == FlushResult(pending_erases=4)
        assert nvme(store)["state"] == "read_only"
        erases.let_all_go()
        wait_for(lambda: nvme(store)["state"] == "ok")
        assert store.flush() == DONE


def test_pages_are_not_durable_while_the_sync_hangs(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TierStore.open(config, SPEC) as store:
        syncs = HeldCommits(monkeypatch, "sync")
        write(store, chain(4))
        found = store.flush()
        assert (found.durable + found.pending, found.failed) == (4, 0)
        assert found.pending or nvme(store)["state"] == "read_only"
        assert nvme(store)["state"] == "read_only"
        syncs.let_all_go()
        wait_for(lambda: nvme(store)["state"] == "ok")
        assert store.flush() == FlushResult(durable=4)


def test_hung_copy_out_of_hbm_is_pending_and_does_not_change_the_disk_state(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(config, SPEC, pump=True)
    bench.copies.hold(OUT)
    write(bench.store, chain(3))
    with impatient(monkeypatch):
        assert bench.store.flush() == FlushResult(pending=3)
    assert nvme(bench.store)["state"] == "ok"
    bench.copies.open()
    assert bench.store.flush() == FlushResult(durable=3)
    bench.close()


@pytest.mark.parametrize("lane", [DOWN, UP])
def test_a_page_evicted_while_its_copy_hangs_is_a_pending_erase(
    config: StoreConfig, lane: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(config, SPEC, pump=True)
    store, keys = bench.store, chain(2)
    write(store, keys)
    if lane == UP:
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
    bench.records.hold(lane)
    lease = store.acquire(keys)
    if lane == DOWN:
        store.demote(keys, Tier.NVME)
        wait_for(lambda: bench.records.waiting(DOWN) > 0)
    store.evict(keys)
    with impatient(monkeypatch):
        assert store.flush_evictions() == 2
    bench.records.open()
    assert store.flush_evictions() == 0
    lease.release()
    bench.close()
    with TierStore.open(config, SPEC) as store:
        assert store.match(keys).num_pages == 0


@pytest.mark.parametrize("pump", [True, False])
def test_flush_waits_for_a_disk_that_makes_progress_however_long_it_takes(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, pump: bool
) -> None:
    """Start each commit when flush is about to give up. All commits together take more than twice flush's limit."""
    clock, commit = FlushClock(monkeypatch), Catalogue.store

    def slow(catalogue: Catalogue, pages: Sequence[Page]) -> list[int | None]:
        clock.go_on(0.9 * saving._FLUSH_STALL_S)
        return commit(catalogue, pages)

    with TierStore.open(config, SPEC, pump=pump) as store:
        monkeypatch.setattr(Catalogue, "store", slow)
        writer_of(disk_of(store))._queue.batch_pages = 1
        for number in range(4):
            write(store, chain(2, str(number)))
            store.demote(chain(2, str(number)), Tier.NVME)
        found = store.flush()
        monkeypatch.setattr(Catalogue, "store", commit)
        assert clock.now > 2 * saving._FLUSH_STALL_S
        assert (found.failed, found.pending) == (0, 0)
        assert all(where(store, key).get(Tier.NVME) == "ready" for n in range(4) for key in chain(2, str(n)))


def test_a_disk_that_refuses_everything_leaves_pages_failed_and_erases_pending(config: StoreConfig) -> None:
    assert config.nvme is not None
    with TierStore.open(config, SPEC) as store:
        write(store, chain(4, "gone"))
        store.flush()
        with refusing(config.nvme.path):
            write(store, chain(2))
            store.evict(chain(4, "gone"))
            found = store.flush()
            assert (found.durable, found.failed) == (0, 2)
            # 6 if the writes were tried before the tier noticed that its disk fails: they may have left parts of two
            # pages.
            assert found.pending_erases in (4, 6)
            assert not found.complete
            assert read(store, chain(2)) == 2
        wait_for(lambda: nvme(store)["state"] == "ok")
        wait_for(lambda: store.flush() == FlushResult(durable=2))
    with TierStore.open(config, SPEC) as store:
        assert store.match(chain(4, "gone")).num_pages == 0
        assert store.match(chain(2)).num_pages == 2


def test_evicted_page_with_an_uncertain_write_stays_gone(
    config: StoreConfig,
) -> None:
    assert config.nvme is not None
    with TierStore.open(config, SPEC) as store:
        write(store, chain(2, "first"))
        store.flush()
        with data_file_is_read_only(config.nvme.path, SPEC.fingerprint):
            write(store, chain(2))
            assert store.flush().failed == 2
            store.evict(chain(2))
            assert store.flush().pending_erases == 0
    with TierStore.open(config, SPEC) as store:
        assert store.match(chain(2)).num_pages == 0
        assert store.match(chain(2, "first")).num_pages == 2


def test_two_threads_flush_at_once_and_close_ends_both(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = HeldCommits(monkeypatch)
    store = TierStore.open(config, SPEC)
    write(store, chain(4))
    assert commits.begun.acquire(timeout=PATIENCE_S)
    found: list[object] = []

    def flush() -> None:
        try:
            found.append(store.flush())
        except StoreClosed:
            found.append(StoreClosed)

    threads = [threading.Thread(target=flush) for _ in range(2)]
    for thread in threads:
        thread.start()
    store.close(0.1)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 2
    assert all(each in (StoreClosed, FlushResult(pending=4)) for each in found)
    commits.let_all_go()
