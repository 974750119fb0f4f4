"""Test that inspect and verify report contents and damage, and that purge deletes only unused TierStore directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.nvme.rig import CAPACITY, FINGERPRINT, PAGE, Rig, change, data_file, find, key, page
from tierstore.errors import ConfigError
from tierstore.nvme.directory_layout import disk_nbytes
from tierstore.nvme.inspection import inspect, purge, verify

pytestmark = pytest.mark.usefixtures("payload")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a directory of three models with one, two and no pages. Damaged data of the third was set aside."""
    home = tmp_path / "home"
    for fingerprint, count in (("ab12", 1), ("cd34", 2), ("ef56", 3)):
        rig = Rig(home, fingerprint=fingerprint)
        rig.write(range(count))
        rig.close()
    os.truncate(data_file(home, "ef56"), 10_000)
    Rig(home, fingerprint="ef56").close()
    return home


def test_inspect_describes_each_sub_directory(home: Path) -> None:
    report = inspect(home)
    assert report.path == home
    assert [(shard.name, shard.records) for shard in report.shards] == [
        ("ab12-0", 1),
        ("cd34-0", 2),
        ("ef56-0", 0),
        ("ef56-0.damaged-1", None),
    ]
    first = report.shards[0]
    assert (first.fingerprint, first.damaged, first.in_use_by, first.fault) == ("ab12", False, None, None)
    assert (first.capacity, first.page_nbytes, first.format_version) == (CAPACITY, PAGE, 2)
    assert first.description == {"model": "test"}
    assert first.disk_nbytes == disk_nbytes(home / "ab12-0") > PAGE
    assert report.shards[3].damaged
    assert report.disk_nbytes == sum(shard.disk_nbytes for shard in report.shards)


def test_inspect_names_the_holder_of_one_in_use(home: Path) -> None:
    rig = Rig(home)
    assert [shard.in_use_by for shard in inspect(home).shards] == [os.getpid(), None, None, None]
    assert rig.write([5]).ok
    rig.close()


def test_inspect_reports_faults(home: Path) -> None:
    os.truncate(data_file(home), 10_000)
    fault = inspect(home).shards[0].fault
    assert fault is not None
    assert "9.8 KiB (10,000 bytes)" in fault


def test_inspect_changes_nothing(home: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    inspect(home)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("page_nbytes", [1, 2048, 4095, 4096, 4097, 8192])
def test_verify_finds_nothing_wrong_with_whole_pages_of_any_length(tmp_path: Path, page_nbytes: int) -> None:
    # verify once used the same buffer for head and payload of a record if the payload had exactly one block
    rig = Rig(tmp_path / "sound", page_nbytes=page_nbytes)
    rig.write(range(3))
    rig.close()
    (verdict,) = verify(tmp_path / "sound")
    assert (verdict.checked, verdict.bad) == (3, ())


def test_verify_reads_every_record_and_names_the_bad_ones(home: Path) -> None:
    path, position = find(home, page(1).tobytes(), "cd34")
    change(path, position + 99, bytes([page(1)[99] ^ 1]))
    steps: list[tuple[str, int, int]] = []
    verdicts = verify(home, lambda *step: steps.append(step))
    assert [(verdict.name, verdict.checked, len(verdict.bad)) for verdict in verdicts] == [
        ("ab12-0", 1, 0),
        ("cd34-0", 2, 1),
        ("ef56-0", 0, 0),
        ("ef56-0.damaged-1", 0, 0),
    ]
    bad_key, reason = verdicts[1].bad[0]
    assert bad_key == key(1)
    assert "checksum" in reason
    assert verdicts[3].skipped == "set aside as damaged"
    assert steps == [("ab12-0", 1, 1), ("cd34-0", 1, 2), ("cd34-0", 2, 2)]


def test_verify_skips_what_is_in_use_or_broken(home: Path) -> None:
    rig = Rig(home)
    os.truncate(data_file(home, "cd34"), 10_000)
    first, second, *_ = verify(home)
    assert first.skipped == f"in use by process {os.getpid()}"
    assert second.skipped is not None
    assert second.skipped.startswith("damaged: ")
    rig.close()


def test_a_verified_home_opens_as_before(home: Path) -> None:
    verify(home)
    rig = Rig(home)
    assert rig.present([0]) == {0}
    rig.close()


@pytest.mark.parametrize(
    ("which", "left"),
    [
        ("all", []),
        ("damaged", ["ab12-0", "cd34-0", "ef56-0"]),
        ("cd", ["ab12-0", "ef56-0", "ef56-0.damaged-1"]),
        ("ef56", ["ab12-0", "cd34-0"]),
        ("nothing", ["ab12-0", "cd34-0", "ef56-0", "ef56-0.damaged-1"]),
    ],
)
def test_purge_removes_what_is_named(home: Path, which: str, left: list[str]) -> None:
    before = {path.name: disk_nbytes(path) for path in home.iterdir() if path.is_dir()}
    report = purge(home, which)
    assert sorted(path.name for path in home.iterdir() if path.is_dir()) == left
    assert sorted(report.removed) == sorted(set(before) - set(left))
    assert report.freed_nbytes == sum(before[name] for name in report.removed)
    assert report.kept == ()
    Rig(home).close()


def test_purge_keeps_what_is_in_use(home: Path) -> None:
    rig = Rig(home)
    report = purge(home, "all")
    assert report.kept == (("ab12-0", f"in use by process {os.getpid()}"),)
    assert rig.present([0]) == {0}
    rig.close()
    assert purge(home, "all").removed == ("ab12-0",)


def test_purge_keeps_a_foreign_file_and_reports_it(home: Path) -> None:
    (home / f"{FINGERPRINT}-0" / "notes.txt").write_text("mine")
    report = purge(home, "ab12")
    assert report.kept == (("ab12-0", "holds files that are not TierStore's"),)
    assert (home / f"{FINGERPRINT}-0" / "notes.txt").read_text() == "mine"


def test_foreign_and_missing_directories_are_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "ab12-0").mkdir()
    (tmp_path / "ab12-0" / "data.mdb").write_text("mine")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"nvme\.path"):
            inspect(path)
        with pytest.raises(ConfigError, match=r"nvme\.path"):
            verify(path)
        with pytest.raises(ConfigError, match=r"nvme\.path"):
            purge(path, "all")
    assert (tmp_path / "ab12-0" / "data.mdb").read_text() == "mine"
    assert not (tmp_path / "missing").exists()


def test_purge_of_no_name_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match="which"):
        purge(home, "")
