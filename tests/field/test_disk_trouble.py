"""Tests of a disk that loses files, is full, fails or hangs: memory keeps serving pages, and the disk recovers."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.nvme.rig import data_file, data_file_is_read_only
from tests.support import forked
from tests.support.bench import open_bench
from tests.support.forked import CHECKOUT
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    read,
    read_soon,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tests.support.waiting import wait_for
from tierstore.nvme.catalogue import Catalogue
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

DOWN, UP = (Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)


def nvme_stats(store: TierStore) -> dict[str, object]:
    found = store.stats()["nvme"]
    assert isinstance(found, dict)
    return found


@contextmanager
def full(home: Path) -> Iterator[None]:
    """Simulate a full disk: until the block ends, no file of this process may grow beyond the data file's size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    nbytes = data_file(home, SPEC.fingerprint).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def refusing(home: Path) -> Iterator[None]:
    """Make every write to the data file fail, with an error other than that of a full disk."""
    with data_file_is_read_only(home, SPEC.fingerprint):
        yield


@pytest.mark.parametrize("trouble", [full, refusing])
def test_memory_serves_while_the_disk_refuses_writes_and_the_disk_recovers(
    tmp_path: Path, trouble: Callable[[Path], AbstractContextManager[None]], caplog: pytest.LogCaptureFixture
) -> None:
    # F056: there is one warning and a metric, and HBM and HOST keep working. Then the disk accepts writes again.
    config = tiers(8, 16, tmp_path, nvme_pages=400)
    with TierStore.open(config, SPEC) as store, caplog.at_level(logging.WARNING):
        before = chain(4, "before")
        write(store, before)
        store.flush()
        with trouble(tmp_path):
            for i in range(60):
                keys = chain(4, str(i))
                write(store, keys)
                assert read(store, keys) == 4
            store.flush()
            assert nvme_stats(store)["read_only"] is True
            assert store.stats()["failing"] == ["NVME"]
            assert read_soon(store, before) == 4  # reads go on, and displace pages that cannot be saved
            store.check()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        wait_for(lambda: nvme_stats(store)["read_only"] is False)
        after = chain(4, "after")
        write(store, after)
        wait_for(lambda: all(where(store, key).get(Tier.NVME) == "ready" for key in after))
        assert store.stats()["failing"] == []
        require_nothing_held(store)
    with TierStore.open(config, SPEC) as store:
        assert read(store, before) == 4
        assert read(store, after) == 4


@pytest.mark.parametrize("payload", [pytest.param("lmdb", marks=pytest.mark.deep), "extents"])
def test_filesystem_filled_by_others_makes_the_tier_read_only_until_space_is_freed(
    tmp_path: Path, payload: str
) -> None:
    # F056: a 6 MiB filesystem, in a separate mount namespace
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        allowed = subprocess.run(
            [*namespace, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if allowed.returncode != 0:
        pytest.skip(f"no mount namespace here: {allowed.stderr.decode().strip()}")
    program = (
        "import sys; from tests.field import mounts, small_disk\n"
        "mounts.unshare(); mounts.mount('-t', 'tmpfs', '-o', 'size=6m', 'none', sys.argv[1]); small_disk.main()"
    )
    run = forked.run(program, tmp_path, payload, timeout=4 * PATIENCE_S)
    assert run.returncode == 0, run.stderr


@pytest.mark.deep
@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_filesystem_without_preallocation_keeps_pages_and_survives_being_full(
    tmp_path: Path, payload: str
) -> None:
    # On ext4 without extents, posix_fallocate fails for files opened with O_DIRECT. Only root can make a loop mount.
    if os.geteuid() != 0:
        pytest.skip("only root can mount a filesystem from a file")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    make = ["mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^extent,^has_journal,^64bit", str(image)]
    inside = 'mount -o loop "$4" "$1" && exec "$2" -m tests.field.small_disk "$1" "$3"'
    try:
        subprocess.run(make, capture_output=True, check=True)
        allowed = subprocess.run(
            ["unshare", "--mount", "mount", "-o", "loop", image, mount], capture_output=True, check=False
        )
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no such filesystem can be made here: {error}")
    if allowed.returncode != 0:
        pytest.skip(f"no loop mount here: {allowed.stderr.decode().strip()}")
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        inside,
        "sh",
        str(mount),
        sys.executable,
        payload,
        str(image),
    ]
    run = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert run.returncode == 0, run.stderr


def _delete_the_data_file(home: Path) -> None:
    data_file(home, SPEC.fingerprint).unlink()


def _delete_the_shard(home: Path) -> None:
    shutil.rmtree(data_file(home, SPEC.fingerprint).parent)


def _delete_everything(home: Path) -> None:
    shutil.rmtree(home)


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
@pytest.mark.parametrize("delete", [_delete_the_data_file, _delete_the_shard, _delete_everything])
def test_files_deleted_under_a_running_store_fail_no_call_and_the_next_open_is_clean(
    tmp_path: Path, delete: Callable[[Path], None], payload: str
) -> None:
    # F054: an operator or another process deletes the files
    home, keys = tmp_path / "disk", chain(4)
    config = tiers(8, 8, home, nvme_more={"payload": payload})
    with TierStore.open(config, SPEC) as store:
        write(store, keys)
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
        delete(home)
        read(store, keys)
        for i in range(10):
            write(store, chain(2, str(i)))
            assert read(store, chain(2, str(i))) == 2
        store.flush()
        store.check()
        require_nothing_held(store)
    with TierStore.open(config, SPEC) as store:
        assert store.match(keys).num_pages == 0
        write(store, keys)
        store.flush()
        assert read(store, keys) == 4


@pytest.mark.parametrize("positions", [(0,), (1, 3), (0, 1, 2, 3)])
def test_records_deleted_externally_are_misses_once_and_then_unknown(
    tmp_path: Path, positions: tuple[int, ...]
) -> None:
    # F054: the first miss repairs the index
    bench = open_bench(tiers(8, 8, tmp_path), SPEC)
    store, keys = bench.store, chain(4)
    write(store, keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    bench.records.inner.submit_erase([keys[i] for i in positions])
    assert bench.records.inner.sync(PATIENCE_S)
    assert read(store, keys) == positions[0]
    assert counter(store, "failed_pages", "NVME,HOST,not_found") == len(positions)
    assert all(store.match([keys[i]]).num_pages == 0 for i in positions)
    assert read(store, keys) == positions[0]
    assert counter(store, "failed_pages", "NVME,HOST,not_found") == len(positions)
    write(store, keys)
    store.flush()
    assert nvme_stats(store)["records"] == 4
    store.evict(keys, Tier.HBM)
    store.evict(keys, Tier.HOST)
    assert read(store, keys) == 4
    bench.close()


@pytest.mark.parametrize("lane", [DOWN, UP])
def test_hung_disk_delays_only_requests_that_need_it(
    tmp_path: Path, lane: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    # F056: transfers neither fail nor finish. Requests can still compute pages, and close returns.
    bench = open_bench(tiers(6, 4, tmp_path), SPEC, pump=True, spill=True)
    store, below = bench.store, chain(2, "below")
    write(store, below)
    store.demote(below, Tier.NVME)
    assert store.drain(PATIENCE_S)
    monkeypatch.setattr("tierstore.directory.eviction.STALL_S", 0.05)
    bench.records.hold(lane)
    lease = store.acquire(below)
    for i in range(12):
        keys = chain(2, str(i))
        write(store, keys)
        assert read(store, keys) == 2
    state = lease.wait(0.0 if lane == UP else PATIENCE_S)
    assert state is (LeaseState.PENDING if lane == UP else LeaseState.READY)
    lease.release()
    store.check()
    bench.open_gates()
    store.close(timeout_s=5.0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENAMETOOLONG])
def test_pages_stay_in_memory_after_any_write_error(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F056
    config = tiers(6, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        store_pages = Catalogue.store

        def failing(self: Catalogue, pages: object) -> None:
            raise OSError(code, "the disk says no")

        monkeypatch.setattr(Catalogue, "store", failing)
        keys = chain(4)
        write(store, keys)
        store.flush()
        assert counter(store, "failed_pages", f"HOST,NVME,{_reason(code)}") > 0
        assert nvme_stats(store)["records"] == 0
        assert read(store, keys) == 4
        monkeypatch.setattr(Catalogue, "store", store_pages)
        wait_for(lambda: all(where(store, key).get(Tier.NVME) == "ready" for key in keys))
    with TierStore.open(config, SPEC) as store:
        assert read(store, keys) == 4


def _reason(code: int) -> str:
    return "no_space" if code == errno.ENOSPC else "io_error"
