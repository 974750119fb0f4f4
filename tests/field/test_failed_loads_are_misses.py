"""Tests that failed loads end in a miss that names the missing pages, and that stale bytes are never readable."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme.rig import data_file
from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    counter,
    read,
    require_nothing_held,
    require_right,
    tiers,
    where,
    write,
    write_down,
)
from tests.support.stalls import IN, UP
from tierstore.gpu.layer_groups import Part
from tierstore.gpu.pool import CpuPool
from tierstore.nvme import catalogue_entry
from tierstore.nvme.page_codecs import Decoders
from tierstore.nvme.reader import RecordReader
from tierstore.nvme.record_storage import Fetched
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


@pytest.fixture
def payload() -> str:
    return "auto"


@pytest.fixture
def bench(tmp_path: Path, payload: str) -> Iterator[Bench]:
    disk = {"payload": payload}
    bench = open_bench(tiers(hbm=4, host=8, nvme=tmp_path / "disk", nvme_more=disk), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def reading_fails(monkeypatch: pytest.MonkeyPatch, bad: PageKey, error: Exception) -> None:
    """Make reads of the page ``bad`` overwrite half of the buffer with other bytes, and then raise ``error``."""
    check = RecordReader.check

    def failing(
        self: RecordReader,
        key: PageKey,
        fetched: Fetched,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        decoders: Decoders,
    ) -> None:
        check(self, key, fetched, out, scratch, decoders)
        if key == bad:
            out[: out.nbytes // 2] = 0xEE
            raise error

    monkeypatch.setattr(RecordReader, "check", failing)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, "Input/output error"), "io_error"),
        (OSError(errno.ESTALE, "Stale file handle"), "io_error"),
        (lmdb.Error("reading"), "io_error"),
        (MemoryError(), "io_error"),
        (RuntimeError("nobody thought of this one"), "io_error"),
        (KeyError("gone"), "not_found"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_page_the_disk_cannot_read_ends_the_hit_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, position: int
) -> None:
    # F017: one of several pages fails, with any error
    store, keys = bench.store, chain(4)
    write_down(store, keys, Tier.NVME)
    reading_fails(monkeypatch, keys[position], error)
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is (LeaseState.READY if position else LeaseState.FAILED)
        assert lease.num_pages == position
        assert lease.missing == keys[position:]
        assert lease.missing_because == "failed"
        require_right(store, lease)
    assert counter(store, "failed_pages", f"NVME,HOST,{reason}") == 1
    assert store.match(keys).num_pages == position
    monkeypatch.undo()
    write(store, keys[position:])
    assert read(store, keys) == 4
    require_nothing_held(store)


@pytest.mark.parametrize("payload", ["extents"])
def test_a_short_read_is_a_miss(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # F017: the disk returns fewer bytes than the record has, without an error
    store, keys = bench.store, chain(2)
    write_down(store, keys, Tier.NVME)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, buffers, offset) - 4096)
    assert read(store, keys) == 0
    monkeypatch.undo()
    assert counter(store, "failed_pages", "NVME,HOST,integrity") == 2
    assert store.match(keys).num_pages == 0


def _copies_in_fail(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let ``after`` parts of pages be copied to HBM. Each further copy raises an error after half of its bytes."""
    taken: list[int] = []
    into = CpuPool.write_part

    def failing(self: CpuPool, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        if len(taken) == after:
            self.view(slot)[part.offset : part.offset + part.nbytes // 2] = 0xEE
            raise RuntimeError("an illegal memory access was encountered")
        taken.append(slot)
        into(self, slot, page, part)

    monkeypatch.setattr(CpuPool, "write_part", failing)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_failed_copy_into_hbm_exposes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tier: Tier, after: int
) -> None:
    # F017: the device fails. The pages below are intact, and the next load succeeds.
    store, keys = bench.store, chain(4)
    write_down(store, keys, tier)
    _copies_in_fail(monkeypatch, after)
    with store.acquire(keys) as lease:
        lease.wait(PATIENCE_S)
        assert lease.num_pages <= after
        assert lease.missing == keys[lease.num_pages :]
        require_right(store, lease)
    assert counter(store, "failed_pages", "HOST,HBM,io_error") > 0
    assert all(Tier.HBM not in where(store, key) for key in keys[after:])
    monkeypatch.undo()
    assert read(store, keys) == 4
    require_nothing_held(store)


def test_failed_copy_out_of_hbm_leaves_no_page_below(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # F017: the same in the other direction. The pages stay in HBM, where they are intact.
    store, keys = bench.store, chain(3)

    def failing(self: CpuPool, slot: int, out: NDArray[np.uint8]) -> None:
        out[: out.nbytes // 2] = 0xEE
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(CpuPool, "read", failing)
    write(store, keys)
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.HBM,) * 3
    assert all(tuple(where(store, key)) == (Tier.HBM,) for key in keys)
    monkeypatch.undo()
    store.flush()
    store.evict(keys, Tier.HBM)
    assert read(store, keys) == 3


def _between_match_and_acquire(bench: Bench, keys: list[PageKey], gone: PageKey) -> Callable[[], None]:
    bench.records.inner.submit_erase([gone])
    assert bench.records.inner.sync(PATIENCE_S)
    return lambda: None


def _between_acquire_and_the_read(bench: Bench, keys: list[PageKey], gone: PageKey) -> Callable[[], None]:
    bench.records.hold(UP)

    def later() -> None:
        bench.records.inner.submit_erase([gone])
        assert bench.records.inner.sync(PATIENCE_S)
        bench.records.open()

    return later


@pytest.mark.parametrize("delete", [_between_match_and_acquire, _between_acquire_and_the_read])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_caller_learns_which_pages_to_compute_and_why(
    bench: Bench, delete: Callable[[Bench, list[PageKey], PageKey], Callable[[], None]], position: int
) -> None:
    # F019: a record is deleted between lookup and load. The caller can compute the missing pages.
    store, keys = bench.store, chain(3)
    write_down(store, keys, Tier.NVME)
    assert store.match(keys).num_pages == 3
    later = delete(bench, keys, keys[position])
    lease = store.acquire(keys)
    later()
    assert lease.wait(PATIENCE_S) is (LeaseState.READY if position else LeaseState.FAILED)
    assert lease.missing == keys[position:]
    assert lease.missing_because == "failed"
    require_right(store, lease)
    slots = write(store, lease.missing, lease)
    assert len(slots) == 3 - position
    lease.release()
    assert read(store, keys) == 3
    assert store.explain(keys)[position]["lost"] is None


def test_a_failed_page_fails_for_every_lease_that_waits_for_it(bench: Bench) -> None:
    # F017: two requests share a load, and a later request learns the result at once
    store, keys = bench.store, chain(3)
    write_down(store, keys, Tier.NVME)
    bench.records.hold(UP)
    bench.records.fail_next(UP, 1)
    first, second = store.acquire(keys), store.acquire(keys[:2])
    bench.records.let_go(UP)
    for lease in (first, second):
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.missing == list(lease.keys[1:])
        require_right(store, lease)
        lease.release()
    bench.records.open()
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert (lease.num_pages, lease.missing_because) == (1, "io_error")


def test_failed_copy_does_not_end_the_lease_of_a_page_put_meanwhile(bench: Bench) -> None:
    # F017: the page is put while its load is in flight, and then the load fails
    store, keys = bench.store, chain(2)
    write_down(store, keys, Tier.HOST)
    bench.copies.hold(IN)
    bench.copies.fail_next(IN, 0, 1)
    lease = store.acquire(keys)
    write(store, keys)
    bench.copies.let_go(IN)
    bench.settle()
    assert not bench.copies.failing[IN]
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert lease.num_pages == 2
    require_right(store, lease)
    lease.release()


def test_sessions_whose_records_were_swapped_never_get_each_others_pages(tmp_path: Path) -> None:
    # F021: each record contains its key, which is compared on every read
    config = tiers(4, 8, tmp_path)
    mine, yours = chain(3, "mine"), chain(3, "yours")
    with TierStore.open(config, SPEC) as store:
        write(store, mine)
        write(store, yours)
    path = data_file(tmp_path, SPEC.fingerprint)
    raw = path.read_bytes()
    bodies = {key: content(key).numpy().tobytes() for key in (mine[1], yours[1])}
    at = {key: raw.index(body) for key, body in bodies.items()}
    with path.open("r+b") as file:
        for key, other in ((mine[1], yours[1]), (yours[1], mine[1])):
            file.seek(at[key])
            file.write(bodies[other])
    with TierStore.open(config, SPEC) as store:
        assert read(store, mine) == 1
        assert read(store, yours) == 1
        assert counter(store, "failed_pages", "NVME,HOST,integrity") == 2


def test_sessions_whose_entries_were_swapped_never_get_each_others_pages(tmp_path: Path) -> None:
    # F021: whole records, including headers and checksums, are stored under the wrong keys
    config = tiers(4, 8, tmp_path)
    mine, yours = chain(3, "mine"), chain(3, "yours")
    with TierStore.open(config, SPEC) as store:
        write(store, mine)
        write(store, yours)
    home = data_file(tmp_path, SPEC.fingerprint).parent
    with (
        lmdb.open(
            str(home), map_size=config.nvme.capacity if config.nvme else 0, max_dbs=catalogue_entry.MAX_DBS
        ) as env,
        env.begin(write=True) as txn,
    ):
        catalogue = env.open_db(catalogue_entry.CATALOGUE_DB, txn)
        found = {key: txn.get(key, db=catalogue) for key in (mine[1], yours[1])}
        for key, other in ((mine[1], yours[1]), (yours[1], mine[1])):
            raw = found[other]
            assert raw is not None
            txn.put(key, catalogue_entry.pack(key, catalogue_entry.unpack(other, raw)), db=catalogue)
    with TierStore.open(config, SPEC) as store:
        assert read(store, mine) == 1
        assert read(store, yours) == 1
        assert counter(store, "failed_pages", "NVME,HOST,integrity") == 2
