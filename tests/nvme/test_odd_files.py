"""Test that opening warns once and does not hang if a file is damaged, or is a FIFO, directory, socket or link."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.nvme import rig as rig_room
from tests.nvme.rig import (
    CAPACITY,
    FINGERPRINT,
    PAGE,
    Rig,
    data_file,
    data_file_is_read_only,
    extent_files,
)
from tests.support import forked
from tierstore.errors import ConfigError
from tierstore.nvme.inspection import inspect, purge, verify

PATIENCE_S = 120.0

pytestmark = pytest.mark.usefixtures("payload")

HOME_MARKER = "tierstore-home.json"
SHARD_MARKER = "tierstore-shard.json"


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket must be short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


ODD: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": full_directory,
    "a socket": socket_at,
    "a symbolic link": dangling,
}

NAMES = ("lock.mdb", "direct.probe", "tierstore-shard.json.new", "extent-00009.bin")


def cases(*names: str) -> list[Any]:
    """Return all combinations of payload, kind and, if given, name. `make test` runs each value, but not every pair."""
    found = []
    for (i, payload), (j, kind), (k, name) in product(
        *map(enumerate, (rig_room.PAYLOADS, ODD, names or ("",)))
    ):
        often = (2 * i + j + k) % len(ODD) == 0 if names else (i + j) % 2 == 0
        values = (payload, kind, name) if names else (payload, kind)
        found.append(pytest.param(*values, marks=() if often else pytest.mark.deep))
    return found


odd = pytest.mark.parametrize(("payload", "kind"), cases(), indirect=["payload"])


def make_odd(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    ODD[kind](path)


@pytest.fixture(scope="module")
def homes() -> dict[str, Path]:
    """Return an empty dict, in which ``home`` keeps the directory that it creates for each payload."""
    return {}


@pytest.fixture
def home(tmp_path: Path, homes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a closed tier that contains twenty pages."""
    kind = rig_room.default_payload
    if kind not in homes:
        homes[kind] = tmp_path_factory.mktemp(kind) / "home"
        rig = Rig(homes[kind])
        assert rig.write(range(20)).ok
        rig.close()
    return shutil.copytree(homes[kind], tmp_path / "home")


def pages_of(home: Path) -> set[int]:
    """Return the pages that a separate process can read, and check that it can write. A hang fails the test."""
    program = (
        "import sys; from pathlib import Path; from tests.nvme.rig import Rig\n"
        "rig = Rig(Path(sys.argv[1]), payload=sys.argv[2])\n"
        "print(sorted(rig.present(range(20)))); assert rig.write([99]).ok; rig.close()\n"
    )
    kind = "extents" if extent_files(home) else "lmdb"
    child = forked.run(program, home, kind, timeout=PATIENCE_S)
    assert child.returncode == 0, child.stderr
    return {int(number) for number in child.stdout.strip("[]\n").split(", ") if number}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def opened(home: Path, caplog: pytest.LogCaptureFixture) -> tuple[set[int], list[str]]:
    """Open the directory, and check that the tier can write. Returns the pages found and the warnings logged."""
    with caplog.at_level(logging.WARNING):
        rig = Rig(home)
    found = rig.present(range(20))
    assert rig.write([99]).ok
    assert rig.present([99]) == {99}
    rig.close()
    return found, lines(caplog)


@pytest.mark.parametrize("how", ["empty", "missing"])
def test_empty_or_missing_catalogue_is_logged_and_the_tier_starts_empty(
    home: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    data_file(home).unlink()
    if how == "empty":
        data_file(home).touch()
    found, (line,) = opened(home, caplog)
    assert found == set()
    assert "starts empty" in line
    assert ("data.mdb has 0 bytes" if how == "empty" else "data.mdb is missing") in line


@odd
def test_catalogue_that_is_not_a_file_is_set_aside(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    make_odd(data_file(home), kind)
    assert pages_of(shutil_copy(home)) == set()
    found, (line,) = opened(home, caplog)
    assert found == set()
    assert f"data.mdb is {kind}" in line
    assert f"{FINGERPRINT}-0.damaged-1" in line
    inspect(home), verify(home)
    purge(home, "damaged")


def shutil_copy(home: Path) -> Path:
    """Return a copy of the directory. Only regular files are opened to make it."""
    to = home.with_name("copy")
    for path in [home, *sorted(home.rglob("*"))]:
        there = to / path.relative_to(home)
        if path.is_dir() and not path.is_symlink():
            there.mkdir()
        elif path.is_file() and not path.is_symlink():
            shutil.copyfile(path, there)
        elif path.is_symlink():
            dangling(there)
        elif path.is_fifo():
            os.mkfifo(there)
        else:
            socket_at(there)
    return to


@pytest.mark.parametrize(("payload", "kind", "name"), cases(*NAMES), indirect=["payload"])
def test_odd_file_without_pages_is_moved_away_and_no_page_is_lost(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str, name: str
) -> None:
    make_odd(data_file(home).parent / name, kind)
    found, (line,) = opened(home, caplog)
    assert found == set(range(20))
    assert f"{name} is {kind} and was renamed to {name}.damaged-1" in line


@odd
def test_unusable_tombstones_drop_every_page_once_and_are_created_again(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    tombstones = data_file(home).with_name("erased.bin")
    make_odd(tombstones, kind)
    inspect(home), verify(home)
    caplog.clear()
    found, (line,) = opened(home, caplog)  # the keys of erased pages are lost
    assert found == set()
    assert f"erased.bin is {kind}" in line
    assert tombstones.is_file()
    assert not tombstones.is_symlink()
    rig = Rig(home)
    assert rig.write(range(20)).ok
    rig.close()
    caplog.clear()
    assert opened(home, caplog) == (set(range(20)), [])


def test_tombstones_are_never_read_or_written_through_a_link(home: Path) -> None:
    tombstones, foreign = data_file(home).with_name("erased.bin"), home.with_name("foreign")
    raw = tombstones.read_bytes()
    tombstones.rename(foreign)
    tombstones.symlink_to(foreign)
    rig = Rig(home)
    assert rig.write(range(20)).ok
    with data_file_is_read_only(home):
        rig.erase([3])
        assert rig.tier.sync(PATIENCE_S)
        rig.close()
    assert foreign.read_bytes() == raw
    assert pages_of(home) == set(range(20)) - {3}


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("extent-0000000001.bin", 1 << 20),
        ("extent-9999999999.bin", 0),
        ("extent-00000.bin", 1 << 20),
        ("extent-1.bin", 0),
        pytest.param("extent-0000000001.bin", 0, marks=pytest.mark.deep),
        pytest.param("extent-9999999999.bin", 1 << 20, marks=pytest.mark.deep),
        pytest.param("extent-00000.bin", 0, marks=pytest.mark.deep),
        pytest.param("extent-1.bin", 1 << 20, marks=pytest.mark.deep),
    ],
)
def test_file_that_resembles_an_extent_file_is_left_alone(
    home: Path, caplog: pytest.LogCaptureFixture, name: str, nbytes: int
) -> None:
    (data_file(home).parent / name).write_bytes(bytes(nbytes))
    assert opened(home, caplog) == (set(range(20)), [])
    rig = Rig(home)
    assert rig.write(range(100, 140)).ok  # more than fit into the existing extent files
    assert rig.present(range(100, 140)) == set(range(100, 140))
    rig.close()
    assert (data_file(home).parent / name).read_bytes() == bytes(nbytes)


@odd
def test_odd_lock_file_is_moved_away_and_no_page_is_lost(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    lock = home / f"{FINGERPRINT}-0.lock"
    make_odd(lock, kind)
    inspect(home), verify(home)
    found, (line,) = opened(home, caplog)
    assert found == set(range(20))
    assert f"{lock} was {kind}" in line
    assert lock.is_file()


@odd
def test_a_sub_directory_that_is_something_else_is_set_aside(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    directory = data_file(home).parent
    shutil.rmtree(directory)
    if kind == "a directory":
        directory.write_text("mine")
    else:
        make_odd(directory, kind)
    if kind == "a symbolic link":
        with pytest.raises(ConfigError, match="a symbolic link"):
            Rig(home)
        return
    found, (line,) = opened(home, caplog)
    assert found == set()
    assert "it is not a directory" in line


@pytest.mark.parametrize(("payload", "kind"), [("extents", kind) for kind in ODD], indirect=["payload"])
def test_odd_extent_file_loses_the_pages_without_a_hang(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    for path in extent_files(home):
        make_odd(path, kind)
    inspect(home), verify(home)
    found, _ = opened(home, caplog)
    assert found in (set(), set(range(20)))


@pytest.mark.parametrize("length", [0, 100, PAGE])
def test_short_extent_file_loses_the_pages_with_one_warning(
    home: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    for path in extent_files(home):
        os.truncate(path, length)
    if not extent_files(home):
        return
    found, (line,) = opened(home, caplog)
    assert found == set()
    assert "missing or truncated" in line


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        bytes(range(128, 192)),
        b'{"format": "other"}',
        *(
            pytest.param(raw, marks=pytest.mark.deep)
            for raw in (b"[]", b"\x00" * 64, b'{"format": "tierst', b"[" * 100_000)
        ),
    ],
    ids=["empty", "cut-object", "binary", "other-format", "list", "zeros", "cut-text", "deep"],
)
def test_a_damaged_home_marker_is_written_again_and_every_page_is_found(
    home: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    whole = (home / HOME_MARKER).read_bytes()
    (home / HOME_MARKER).write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert [report.records for report in inspect(home).shards] == [20]
        assert [verdict.checked for verdict in verify(home)] == [20]
    assert len(lines(caplog)) == 2
    caplog.clear()
    found, (line,) = opened(home, caplog)
    assert found == set(range(20))
    assert f"{HOME_MARKER} in {home} cannot be used" in line
    assert (home / f"{HOME_MARKER}.damaged-1").read_bytes() == raw
    assert (home / HOME_MARKER).read_bytes() == whole


@odd
def test_an_unusable_home_marker_is_written_again_and_every_page_is_found(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    make_odd(home / HOME_MARKER, kind)
    inspect(home), verify(home)
    caplog.clear()
    found, (_,) = opened(home, caplog)
    assert found == set(range(20))
    assert (home / HOME_MARKER).is_file()


def test_a_missing_home_marker_is_written_again_if_a_sub_directory_belongs_to_tierstore(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / HOME_MARKER).unlink()
    found, (line,) = opened(home, caplog)
    assert found == set(range(20))
    assert "it is missing" in line


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe"])
def test_directory_with_only_a_damaged_home_marker_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    (tmp_path / HOME_MARKER).write_bytes(raw)
    found, (_,) = opened(tmp_path, caplog)
    assert found == set()


def test_a_damaged_home_marker_next_to_foreign_files_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / HOME_MARKER).write_bytes(b"{")
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="files that TierStore did not create"):
        Rig(tmp_path)
    with pytest.raises(ConfigError, match="files that TierStore did not create"):
        purge(tmp_path, "all")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.jpg", HOME_MARKER]


def test_a_home_of_a_newer_version_is_refused_by_its_version(home: Path) -> None:
    (home / HOME_MARKER).write_text('{"format": "tierstore-nvme", "version": 7}')
    with pytest.raises(ConfigError, match="version 7 is newer"):
        Rig(home)


@pytest.mark.parametrize("raw", [b"", b"{", b"\x00\x01", b"[1]", b'{"fingerprint": 3}'])
def test_a_damaged_marker_of_a_sub_directory_sets_it_aside(
    home: Path, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    (data_file(home).parent / SHARD_MARKER).write_bytes(raw)
    found, (line,) = opened(home, caplog)
    assert found == set()
    assert f"{FINGERPRINT}-0.damaged-1" in line


@odd
def test_odd_marker_of_a_sub_directory_sets_it_aside(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    make_odd(data_file(home).parent / SHARD_MARKER, kind)
    inspect(home), verify(home)
    found, (line,) = opened(home, caplog)
    assert found == set()
    assert f"{FINGERPRINT}-0.damaged-1" in line


@odd
def test_leftovers_under_the_names_of_temporary_files_stop_no_open(
    home: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    if kind == "a directory":
        (home / f"{HOME_MARKER}.new").mkdir()
    else:
        make_odd(home / f"{HOME_MARKER}.new", kind)
    (home / HOME_MARKER).write_bytes(b"{")
    found, (_,) = opened(home, caplog)
    assert found == set(range(20))


def test_a_home_with_a_line_break_in_its_name_works(tmp_path: Path) -> None:
    home = tmp_path / "one\ntwo" / "below"
    rig = Rig(home, capacity=CAPACITY)
    assert rig.write([0]).ok
    rig.close()
    assert pages_of(home) == {0}


@odd
def test_purge_removes_odd_files_and_keeps_what_is_not_ours(home: Path, kind: str) -> None:
    make_odd(data_file(home), kind)
    report = purge(home, "all")
    if kind == "a directory":
        assert [name for name, _ in report.kept] == [f"{FINGERPRINT}-0"]
        assert (data_file(home) / "mine").read_text() == "mine"
    else:
        assert report.kept == ()
        assert not data_file(home).parent.exists()
