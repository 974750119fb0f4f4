"""Test which directories can be opened. All others are refused with one clear error, and foreign files are kept."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.nvme.rig import CAPACITY, FINGERPRINT, PAGE, PATIENCE_S, Rig, data_file, key
from tests.support import forked, lanes
from tierstore.errors import ConfigError
from tierstore.nvme import (
    catalogue_entry,
    direct_io,
    directory_layout,
    directory_opener,
)
from tierstore.nvme.catalogue import Catalogue
from tierstore.types import PageKey

pytestmark = pytest.mark.usefixtures("payload")


def everything(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"" for p in sorted(path.rglob("*"))}


def test_foreign_directory_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    home = tmp_path / "photos"
    (home / "ab12-0").mkdir(parents=True)
    (home / "ab12-0" / "data.mdb").write_bytes(b"not yours")
    before = everything(home)
    with pytest.raises(ConfigError, match=r"nvme\.path is .*photos.* files that TierStore did not create"):
        Rig(home)
    assert everything(home) == before


@pytest.mark.parametrize(
    "text", ['{"format": "something else"}', '{"format": "tierstore-nvme", "version": 2}']
)
def test_foreign_home_marker_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tierstore-home.json").write_text(text)
    with pytest.raises(ConfigError, match=r"nvme\.path"):
        Rig(tmp_path)
    assert everything(tmp_path) == {"tierstore-home.json": text.encode()}


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"nvme\.path is .*cannot be used \(Not a directory\)"):
            Rig(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0)
    with pytest.raises(ConfigError, match=r"nvme\.path"):
        Rig(home)


def test_a_sub_directory_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    Rig(tmp_path / "home").close()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "home" / f"{FINGERPRINT}-0").rename(elsewhere)
    (tmp_path / "home" / f"{FINGERPRINT}-0").symlink_to(elsewhere)
    before = everything(elsewhere)
    with pytest.raises(ConfigError, match="a symbolic link"):
        Rig(tmp_path / "home")
    assert everything(elsewhere) == before


def test_second_opener_in_this_process_gets_the_holders_pid(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()};"):
        Rig(tmp_path / "home")
    assert rig.write([0]).ok
    rig.close()
    Rig(tmp_path / "home").close()


def test_second_process_gets_the_holders_pid(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    program = (
        "import sys; from pathlib import Path; from tests.nvme.rig import Rig; from tierstore import ConfigError\n"
        "try: Rig(Path(sys.argv[1]))\n"
        "except ConfigError as error: sys.exit(str(error))\n"
    )
    other = forked.run(program, tmp_path / "home")
    assert f"in use by process {os.getpid()};" in other.stderr
    rig.close()


def test_a_capacity_beyond_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"nvme\.capacity must be at most .* \([0-9,]+ bytes\), which is the free disk .*, got 1024 PiB \(1,152,",
    ):
        Rig(tmp_path / "home", capacity=1 << 60)


def test_a_refused_opening_removes_what_it_has_created_and_nothing_else(tmp_path: Path) -> None:
    def refused(home: Path) -> None:
        before = everything(tmp_path)
        with pytest.raises(ConfigError, match=r"nvme\.capacity must be at most"):
            Rig(home, capacity=1 << 60, fingerprint="cd34")
        assert everything(tmp_path) == before

    refused(tmp_path / "several" / "new" / "folders")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty")
    refused(tmp_path / "empty" / "new")
    Rig(tmp_path / "home").close()  # creates the directory of another model
    refused(tmp_path / "home")
    (tmp_path / "home" / "cd34-0").mkdir()
    refused(tmp_path / "home")


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (directory_layout, "write_json"),
        (directory_layout, "write_marker"),
        (directory_opener, "clear_odd_lock"),
        (directory_opener, "examine"),
        (directory_opener, "Catalogue"),
        (direct_io, "works"),
        (direct_io, "reserve"),
    ],
)
def test_an_opening_that_fails_at_any_step_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, done: bool
) -> None:
    """Make one step of opening a directory fail: after the step has done its work if ``done``, else before."""
    working = getattr(module, name)

    def failing(*args: Any, **more: Any) -> None:
        found = working(*args, **more) if done else None
        if isinstance(found, Catalogue):
            found.close()
        raise OSError(errno.ENOSPC if name == "reserve" else errno.EIO, "planted")

    monkeypatch.setattr(module, name, failing)
    with pytest.raises(ConfigError, match=r"cannot be .*\(planted\)"):
        Rig(tmp_path / "new" / "home")
    assert everything(tmp_path) == {}


@pytest.mark.parametrize("fingerprint", ["", "../up", "a/b", "a.damaged-1", "x" * 200])
def test_fingerprint_that_is_not_a_plain_name_is_refused(tmp_path: Path, fingerprint: str) -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        Rig(tmp_path / "home", fingerprint=fingerprint)


def test_created_files_are_accessible_to_the_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Rig(tmp_path / "home").close()
    finally:
        os.umask(before)
    for path in [tmp_path / "home", *(tmp_path / "home").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_unknown_files_in_a_home_are_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    Rig(home).close()
    (home / "notes.txt").write_text("mine")
    (home / f"{FINGERPRINT}-0" / "more.txt").write_text("mine too")
    rig = Rig(home)
    rig.write([0])
    rig.close()
    assert (home / "notes.txt").read_text() == "mine"
    assert (home / f"{FINGERPRINT}-0" / "more.txt").read_text() == "mine too"


def test_interrupted_creation_of_a_sub_directory_is_completed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    Rig(home).close()
    directory = data_file(home).parent
    for path in directory.iterdir():
        path.unlink()
    data_file(home).touch()
    (directory / "tierstore-shard.json").write_text("{")
    rig = Rig(home)
    assert rig.write([0]).ok
    rig.close()


def test_a_home_whose_creation_was_killed_is_created_again(tmp_path: Path) -> None:
    """Open a directory that contains only half a temporary file, as left by a kill before the marker exists."""
    (tmp_path / "tierstore-home.json.new").write_text('{"form')
    rig = Rig(tmp_path)
    assert rig.write([0]).ok
    rig.close()


def test_another_page_size_under_the_same_name_starts_empty_and_keeps_the_old_aside(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home)
    rig.write([0])
    rig.close()
    rig = Rig(home, page_nbytes=PAGE * 2)
    assert rig.present([0]) == set()
    rig.close()
    assert data_file(home).parent.with_name(f"{FINGERPRINT}-0.damaged-1").is_dir()


def test_a_capacity_below_the_existing_size_frees_the_space(tmp_path: Path, payload: str) -> None:
    """Reopen a directory with a lower capacity, and check which pages are kept.

    LMDB's file never shrinks, so the tier then starts empty. With extent files, the pages that fit are kept.
    """
    home = tmp_path / "home"
    rig = Rig(home)
    rig.write(range(200))
    rig.close()
    rig = Rig(home, capacity=1 << 20)
    kept = [record[0] for record in rig.tier.records()]
    assert bool(kept) == (payload == "extents")
    assert {key(n) for n in rig.present(range(200))} >= set(kept)
    assert rig.tier.sync(PATIENCE_S)
    assert {key(n) for n in rig.present(range(200))} == set(kept)
    rig.tier.submit_erase(kept)
    assert rig.write(range(300, 300 + rig.tier.budget_nbytes // rig.tier.record_nbytes)).ok
    rig.close()
    assert sum(path.lstat().st_blocks * 512 for path in home.rglob("*")) <= 1 << 20


def fill_catalogue(home: Path, count: int, capacity: int) -> None:
    """Create a tier's directory whose catalogue has ``count`` entries, without the bytes of their pages.

    These bytes are not read when a tier is opened. With extents, all slots are in one sparse file.
    """
    Rig(home, capacity=capacity).close()
    in_extents = "extents" in (data_file(home).parent / "tierstore-shard.json").read_text()
    slot = 1 + PAGE // 4096
    if in_extents:
        path = data_file(home).parent / "extent-00001.bin"
        path.touch(mode=0o600)
        os.truncate(path, count * slot * 4096)
    with lmdb.open(
        str(data_file(home).parent), map_size=capacity, max_dbs=catalogue_entry.MAX_DBS, sync=False
    ) as env:
        catalogue, pages = env.open_db(catalogue_entry.CATALOGUE_DB), env.open_db(catalogue_entry.PAGES_DB)
        with env.begin(write=True) as txn:
            for number in range(count):
                name = key(number)
                parent = key(number - 1) if number else None
                there = (1, number * slot, 1) if in_extents else (0, 0, 0)
                txn.put(
                    name,
                    catalogue_entry.pack(name, catalogue_entry.Entry(parent, PAGE + 5120, PAGE, 0, *there)),
                    db=catalogue,
                )
                if not in_extents:
                    txn.put(name, b"-", db=pages)


def test_large_catalogue_is_read_back_completely(tmp_path: Path) -> None:
    count = lanes.examples(10_000, 50_000)
    fill_catalogue(tmp_path / "home", count, 1 << 30)
    started = time.monotonic()
    rig = Rig(tmp_path / "home", capacity=1 << 30)
    found = {record[0]: record[1] for record in rig.tier.records()}
    print(f"{count} records reopened in {time.monotonic() - started:.2f} s")  # noqa: T201  reported, not asserted
    assert found == {key(n): key(n - 1) if n else None for n in range(count)}
    rig.close()


def test_short_form_of_an_entry_equals_the_whole_one() -> None:
    for parent in (None, key(1)):
        raw = catalogue_entry.pack(
            key(0), catalogue_entry.Entry(parent, 13312, PAGE, 77, 3, 2**32 - 1, 2**64 - 1)
        )
        whole = catalogue_entry.unpack(key(0), raw)
        assert whole == catalogue_entry.Entry(parent, 13312, PAGE, 77, 3, 2**32 - 1, 2**64 - 1)
        assert int.from_bytes(raw[catalogue_entry.LOCATION], "little") == 3 << 32 | 2**32 - 1
        assert int.from_bytes(raw[catalogue_entry.STORED_NBYTES], "little") == PAGE
        assert catalogue_entry.summary((key(0), raw)) == (key(0), parent, 13312)
        assert not catalogue_entry.intact(PageKey(key(2)), raw)
        for position in range(len(raw)):
            assert not catalogue_entry.intact(
                key(0), raw[:position] + bytes([raw[position] ^ 4]) + raw[position + 1 :]
            )


def test_the_home_is_unlocked_after_a_failed_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Rig(tmp_path / "home", capacity=1 << 60)
    rig = Rig(tmp_path / "home", capacity=CAPACITY)
    assert rig.write([0]).ok
    rig.close()


def test_a_map_too_full_for_an_erase_starts_empty_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a full map. One has occurred with a capacity just above the length of the old file."""
    home = tmp_path / "home"
    rig = Rig(home)
    assert rig.write(range(10)).ok
    rig.close()
    set_up = Catalogue._set_up

    def full(self: Catalogue, *args: Any) -> None:
        monkeypatch.setattr(Catalogue, "_set_up", set_up)
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    monkeypatch.setattr(Catalogue, "_set_up", full)
    with caplog.at_level(logging.WARNING):
        rig = Rig(home)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "its capacity is too small for the existing catalogue" in caplog.text
    assert list(rig.tier.records()) == []
    assert rig.write(range(5)).ok
    assert rig.present(range(10)) == set(range(5))
    rig.close()
