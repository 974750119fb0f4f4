"""Test which payload format a directory gets and keeps, when its pages are dropped, and when its disk is measured."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from tests.nvme.rig import (
    CAPACITY,
    FINGERPRINT,
    PAGE,
    Rig,
    data_file,
    extent_files,
    on_disk,
)
from tests.nvme.watch import Calls
from tests.support.sick_disk import Failing
from tierstore.nvme import direct_io, disk_probe
from tierstore.nvme.directory_opener import DEFAULT_READERS
from tierstore.nvme.disk_space import EXTENTS_FROM
from tierstore.nvme.inspection import inspect, purge, verify


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_stats_say_whether_the_disk_is_read_directly(tmp_path: Path, payload: str) -> None:
    (tmp_path / "probe").mkdir()
    rig = Rig(tmp_path / "home", payload=payload)
    assert rig.tier.stats()["o_direct"] is direct_io.works(tmp_path / "probe")
    assert list((tmp_path / "probe").iterdir()) == []
    rig.close()


@pytest.mark.parametrize(("was", "asked"), [("lmdb", "extents"), ("extents", "lmdb")])
def test_another_payload_starts_empty_with_one_warning_and_auto_keeps_existing_records(
    tmp_path: Path, was: str, asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    rig = Rig(home, payload=was)
    assert rig.write(range(10)).ok
    rig.close()
    with caplog.at_level(logging.WARNING):
        rig = Rig(home, payload="auto")
        assert rig.tier.stats()["payload"] == was
        assert rig.present(range(10)) == set(range(10))
        rig.close()
        assert not caplog.records
        rig = Rig(home, payload=asked)
    assert len(caplog.records) == 1
    assert f"nvme.payload is {asked}, but the old pages are in {was}" in caplog.text
    assert list(rig.tier.records()) == []
    assert rig.write(range(10)).ok
    assert bool(extent_files(home)) == (asked == "extents")
    rig.close()
    assert [shard.payload for shard in inspect(home).shards] == [asked]
    assert on_disk(home) <= CAPACITY


class Disk:
    """Replaces the disk probe. Returns the given rates or, if ``write`` is None, fails as if O_DIRECT were missing."""

    def __init__(self, write: float | None, reads: dict[int, float] | None = None) -> None:
        self.asked: list[int] = []
        self._write = write
        self._reads = reads or {1: 1e9, 2: 1e9}

    def __call__(self, directory: Path, page_nbytes: int) -> disk_probe.Rates:
        self.asked.append(page_nbytes)
        if self._write is None:
            raise OSError(errno.EINVAL, "no such thing")
        return disk_probe.Rates(self._write, self._reads)


@pytest.mark.parametrize("rate", [1e8, 1e10, None])
def test_auto_takes_extents_from_1_gib_up_on_any_disk(
    tmp_path: Path, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(rate)
    monkeypatch.setattr(disk_probe, "ask", disk)
    for _ in range(2):
        rig = Rig(tmp_path / "home", capacity=EXTENTS_FROM, payload="auto")
        assert rig.tier.stats()["payload"] == "extents"
        assert rig.write([0]).ok
        rig.close()
    assert disk.asked == [PAGE]
    rig = Rig(tmp_path / "small", capacity=EXTENTS_FROM - 1, payload="auto")
    assert rig.tier.stats()["payload"] == "lmdb"
    rig.close()
    assert disk.asked == [PAGE]


@pytest.mark.parametrize("payload", ["auto", "lmdb", "extents"])
def test_a_new_directory_gets_as_many_readers_as_its_disk_needs_and_keeps_them(
    tmp_path: Path, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(1e9, {1: 0.4e9, 2: 0.8e9, 4: 0.96e9, 8: 1e9})
    monkeypatch.setattr(disk_probe, "ask", disk)
    for _ in range(2):
        rig = Rig(tmp_path / "home", capacity=EXTENTS_FROM, payload=payload)
        assert rig.tier.stats()["readers"] == 4
        assert rig.write(range(9)).ok
        assert rig.present(range(9)) == set(range(9))
        rig.close()
    assert disk.asked == [PAGE]
    rig = Rig(tmp_path / "home", capacity=EXTENTS_FROM, payload=payload, readers=3)
    assert rig.tier.stats()["readers"] == 3
    rig.close()
    rig = Rig(tmp_path / "home", capacity=EXTENTS_FROM, payload=payload)
    assert rig.tier.stats()["readers"] == 4
    rig.close()
    assert disk.asked == [PAGE]


def test_a_given_number_of_readers_is_not_measured_and_an_unmeasurable_disk_gets_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(None)
    monkeypatch.setattr(disk_probe, "ask", disk)
    rig = Rig(tmp_path / "given", capacity=EXTENTS_FROM, payload="lmdb", readers=5)
    assert rig.tier.stats()["readers"] == 5
    rig.close()
    assert disk.asked == []
    for _ in range(2):  # the second open does not measure either: the disk may be full by then
        rig = Rig(tmp_path / "home", capacity=EXTENTS_FROM, payload="lmdb")
        assert rig.tier.stats()["readers"] == DEFAULT_READERS == 2
        rig.close()
    assert disk.asked == [PAGE]


@pytest.mark.parametrize(
    ("reads", "readers"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 1),
        ({1: 0.94, 2: 0.95, 4: 1.0, 8: 0.9}, 2),
        ({1: 0.2, 2: 0.4, 4: 0.7, 8: 1.0}, 8),
        ({1: 0.8, 2: 1.0, 4: 0.6, 8: 0.5}, 2),
    ],
)
def test_the_fewest_threads_that_read_nearly_as_fast_as_any_are_enough(
    reads: dict[int, float], readers: int
) -> None:
    assert disk_probe.Rates(1.0, reads).readers == readers


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    if not direct_io.works(tmp_path):
        pytest.skip("no O_DIRECT here")
    rates = disk_probe.ask(tmp_path, PAGE)
    assert rates.write > 0
    assert set(rates.reads) == {1, 2, 4, 8}
    assert min(rates.reads.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_probe_reports_reads_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct_io.works(tmp_path):
        pytest.skip("no O_DIRECT here")
    monkeypatch.setattr(disk_probe, "os", Calls(preadv=Failing()))
    with pytest.raises(OSError, match="Input/output error"):
        disk_probe.ask(tmp_path, PAGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_directory_of_an_older_format_is_set_aside_reported_and_reclaimed(
    tmp_path: Path, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    Rig(home).close()
    marker = data_file(home).parent / "tierstore-shard.json"
    marker.write_text(marker.read_text().replace('"format_version": 2', '"format_version": 1'))
    assert inspect(home).shards[0].fault == "its format is version 1, not 2"
    (verdict,) = verify(home)
    assert verdict.skipped is not None
    with caplog.at_level(logging.WARNING):
        rig = Rig(home, payload=payload)
    assert "its format is version 1, not 2" in caplog.text
    assert rig.write([0]).ok
    rig.close()
    assert purge(home, "damaged").removed == (f"{FINGERPRINT}-0.damaged-1",)
