"""Which payload a directory gets, keeps or loses, and what its disk is asked."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from tests.nvme.rig import (
    CAPACITY,
    FINGERPRINT,
    Rig,
    data_file,
    extent_files,
    on_disk,
)
from tierstore.nvme import direct, opening
from tierstore.nvme.inspection import inspect, purge, verify


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_stats_say_whether_the_disk_is_read_directly(tmp_path: Path, payload: str) -> None:
    (tmp_path / "probe").mkdir()
    rig = Rig(tmp_path / "home", payload=payload)
    assert rig.tier.stats()["o_direct"] is direct.works(tmp_path / "probe")
    assert list((tmp_path / "probe").iterdir()) == []
    rig.close()


@pytest.mark.parametrize(("was", "asked"), [("lmdb", "extents"), ("extents", "lmdb")])
def test_the_other_payload_starts_anew_with_one_warning_and_auto_keeps_what_is_there(
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
    assert f"nvme.payload is {asked} and the old one is in {was}" in caplog.text
    assert list(rig.tier.records()) == []
    assert rig.write(range(10)).ok
    assert bool(extent_files(home)) == (asked == "extents")
    rig.close()
    assert [shard.payload for shard in inspect(home).shards] == [asked]
    assert on_disk(home) <= CAPACITY


@pytest.mark.parametrize(("rate", "payload"), [(1e8, "lmdb"), (1e10, "extents"), (None, "lmdb")])
def test_auto_asks_the_disk_of_a_new_directory_that_is_worth_it(
    tmp_path: Path, rate: float | None, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def write_rate(directory: Path, nbytes: int) -> float:
        asked.append(nbytes)
        if rate is None:
            raise OSError(errno.EINVAL, "no such thing")
        return rate

    monkeypatch.setattr(direct, "write_rate", write_rate)
    for _ in range(2):
        rig = Rig(tmp_path / "home", capacity=opening._WORTH_PROBING, payload="auto")
        assert rig.tier.stats()["payload"] == payload
        assert rig.write([0]).ok
        rig.close()
    assert asked == [32 << 20]
    Rig(tmp_path / "small", payload="auto").close()
    assert asked == [32 << 20]


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    if not direct.works(tmp_path):
        pytest.skip("no O_DIRECT here")
    assert direct.write_rate(tmp_path, 1 << 20) > 0
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
