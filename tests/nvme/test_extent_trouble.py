"""Tests of extent files on disks that refuse writes, hang or lose bytes: misses, but no wrong bytes and no signal."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import pytest

from tests.nvme.rig import (
    CAPACITY,
    FINGERPRINT,
    PAGE,
    PATIENCE_S,
    Rig,
    change,
    data_file,
    extent_files,
    find,
    key,
    page,
    wait_until_writable,
)
from tests.nvme.watch import Calls
from tierstore.errors import ConfigError, IntegrityError
from tierstore.nvme import catalogue_entry, direct_io
from tierstore.nvme.direct_io import aligned
from tierstore.nvme.inspection import inspect, purge, verify
from tierstore.types import Failure

SLOT = 4096 + PAGE


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home", payload="extents")
    yield rig
    rig.close()


def test_disk_without_space_for_a_file_makes_the_tier_read_only_until_space_is_freed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.write(range(5)).ok
    files = extent_files(rig.home)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_io, "os", Calls(posix_fallocate=full))
    with caplog.at_level(logging.WARNING):
        ack = rig.write(range(100, 200))
    assert {failure for _, failure in ack.failures} == {Failure.NO_SPACE}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert rig.present(range(5)) == set(range(5))
    assert extent_files(rig.home) == files
    monkeypatch.setattr(direct_io, "os", os)
    wait_until_writable(rig)
    assert rig.write(range(100, 200)).ok
    assert rig.present([*range(5), *range(100, 200)]) == {*range(5), *range(100, 200)}


def test_pages_that_cannot_be_synced_are_not_stored(rig: Rig, calls: Callable[..., None]) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    calls(fdatasync=broken)
    ack = rig.write(range(5))
    assert {failure for _, failure in ack.failures} == {Failure.IO_ERROR}
    calls()
    wait_until_writable(rig)
    assert rig.present(range(5)) == set()
    assert rig.write(range(5)).ok


def test_a_partial_write_continues_where_it_stopped(rig: Rig, calls: Callable[..., None]) -> None:
    def half(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, list(buffers)[: max(1, len(buffers) // 2)], offset)

    calls(pwritev=half)
    assert rig.write(range(12)).ok
    assert rig.present(range(12)) == set(range(12))


def test_a_hung_write_stops_no_read_and_no_close(tmp_path: Path, calls: Callable[..., None]) -> None:
    rig = Rig(tmp_path / "home", payload="extents")
    assert rig.write([0]).ok
    begun, go_on = threading.Event(), threading.Event()

    def hung(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return os.pwritev(fd, buffers, offset)

    calls(pwritev=hung)
    write = rig.submit_write([1])
    assert begun.wait(PATIENCE_S)
    assert rig.tier.sync(0.05) is False
    assert rig.present([0, 1]) == {0}
    late = rig.submit_write([2])
    assert rig.tier.close(0.05) is False
    with pytest.raises(ConfigError, match="in use by process"):
        Rig(tmp_path / "home")
    go_on.set()
    rig.close()
    assert rig.ack(write).ok
    assert rig.ack(late).failures == ((0, Failure.CLOSED),)


def test_hung_read_blocks_one_reader_and_no_writer(rig: Rig, calls: Callable[..., None]) -> None:
    assert rig.write(range(4)).ok
    begun, go_on = threading.Event(), threading.Event()

    def hung(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return os.preadv(fd, buffers, offset)

    calls(preadv=hung)
    stuck, _ = rig.submit_read([0])
    assert begun.wait(PATIENCE_S)
    assert rig.present([1, 2, 3]) == {1, 2, 3}
    assert rig.write([9]).ok
    go_on.set()
    assert rig.ack(stuck).ok


@pytest.mark.parametrize("trouble", ["cut", "missing"])
def test_an_extent_file_cut_or_missing_at_open_sets_the_directory_aside(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    rig = Rig(home, payload="extents")
    assert rig.write(range(60)).ok
    rig.close()
    if trouble == "cut":
        os.truncate(extent_files(home)[1], SLOT + 4096)
    else:
        extent_files(home)[1].unlink()
    fault = inspect(home).shards[0].fault
    assert fault is not None
    assert "extent file 2" in fault
    with caplog.at_level(logging.WARNING):
        rig = Rig(home, payload="extents")
    assert "extent file 2" in caplog.text
    assert list(rig.tier.records()) == []
    assert rig.write(range(60)).ok
    assert rig.present(range(60)) == set(range(60))
    rig.close()
    assert purge(home, "damaged").removed == (f"{FINGERPRINT}-0.damaged-1",)


def test_an_extent_file_cut_under_the_open_tier_is_misses_and_no_signal(rig: Rig) -> None:
    assert rig.write(range(30)).ok
    for path in extent_files(rig.home):
        os.truncate(path, 5 * SLOT + 4096)
    ack, _ = rig.read(range(30))
    lost = {index for index, failure in ack.failures if failure is Failure.INTEGRITY}
    assert len(lost) == len(ack.failures)
    assert rig.present(range(30)) == set(range(30)) - lost
    assert len(lost) >= 30 - 10
    rig.erase(sorted(lost))


def test_a_read_cut_short_is_a_miss(rig: Rig, calls: Callable[..., None]) -> None:
    """Read into a buffer that already holds the page, so that only the length of the read shows the fault."""
    assert rig.write([0]).ok
    scratch = aligned(4096)
    out = page(0)
    calls(preadv=lambda fd, buffers, offset: os.preadv(fd, buffers, offset) - 1)
    with pytest.raises(IntegrityError, match="could be read"):
        rig.tier._catalogue.reader.fetch(key(0), out, scratch)


@pytest.mark.parametrize("position", [0, 7, 15])
def test_the_bytes_before_a_head_are_compared_too(rig: Rig, position: int) -> None:
    assert rig.write(range(3)).ok
    path, where = find(rig.home, page(1).tobytes())
    start = where - 4096 + position
    change(path, start, bytes([path.read_bytes()[start] ^ 1]))
    ack, _ = rig.read(range(3))
    assert ack.failures == ((1, Failure.INTEGRITY),)


def test_extent_files_deleted_under_the_open_tier_are_read_to_the_end(rig: Rig) -> None:
    assert rig.write(range(30)).ok
    for path in extent_files(rig.home):
        path.unlink()
    assert rig.present(range(30)) == set(range(30))


def changed_entries(
    home: Path, change: Callable[[dict[int, catalogue_entry.Entry]], dict[int, catalogue_entry.Entry]]
) -> None:
    """Change entries of pages 0 to 9 in the catalogue of a closed tier. The new entries have valid checksums."""
    with lmdb.open(str(data_file(home).parent), map_size=CAPACITY, max_dbs=catalogue_entry.MAX_DBS) as env:
        catalogue = env.open_db(catalogue_entry.CATALOGUE_DB)
        with env.begin(write=True) as txn:
            found = {n: txn.get(key(n), db=catalogue) for n in range(10)}
            old = {n: catalogue_entry.unpack(key(n), raw) for n, raw in found.items() if raw is not None}
            for number, new in change(old).items():
                txn.put(key(number), catalogue_entry.pack(key(number), new), db=catalogue)


@pytest.mark.parametrize(
    "change",
    [
        lambda old: {0: old[1]},
        lambda old: {0: old[0]._replace(block=old[1].block - 1)},
        lambda old: {0: old[0]._replace(extent=77)},
        lambda old: {0: old[0]._replace(block=1 << 30)},
        lambda old: {0: old[0]._replace(stored_nbytes=1 << 50)},
        lambda old: {0: old[0]._replace(extent=0, block=0)},
    ],
    ids=["two in one slot", "across two slots", "no such file", "behind its end", "too long", "in LMDB"],
)
def test_an_entry_without_its_own_slot_sets_the_directory_aside(
    tmp_path: Path, change: Callable[[dict[int, catalogue_entry.Entry]], dict[int, catalogue_entry.Entry]]
) -> None:
    home = tmp_path / "home"
    rig = Rig(home, payload="extents")
    assert rig.write(range(10)).ok
    rig.close()
    changed_entries(home, change)
    rig = Rig(home, payload="extents")
    assert list(rig.tier.records()) == []
    assert rig.write(range(10)).ok
    assert rig.present(range(10)) == set(range(10))
    rig.close()
    assert inspect(home).shards[1].damaged


def test_an_entry_of_another_generation_or_another_slot_is_an_integrity_failure(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home, payload="extents")
    assert rig.write(range(10)).ok
    rig.close()
    changed_entries(
        home,
        lambda old: {
            0: old[0]._replace(generation=old[0].generation + 1),
            1: old[2],
            2: old[1],
        },
    )
    (verdict,) = verify(home)
    assert [bad[0] for bad in verdict.bad] == sorted([key(0), key(1), key(2)])
    rig = Rig(home, payload="extents")
    assert rig.present(range(10)) == set(range(3, 10))
    assert rig.tier.stats()["read_integrity"] == 3
    rig.close()
