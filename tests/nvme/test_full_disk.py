"""Test a disk that refuses writes: they fail with one warning, reads continue, and the tier recovers by itself."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nvme.rig import (
    PATIENCE_S,
    Rig,
    data_file,
    data_file_is_read_only,
    key,
    on_disk,
    wait_until_writable,
)
from tierstore.types import Ack, Failure

pytestmark = pytest.mark.usefixtures("payload")


@contextmanager
def files_end_at(nbytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes to ``nbytes``, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home")
    assert rig.write(range(20)).ok
    yield rig
    rig.close()


def all_failed(ack: Ack, failure: Failure) -> bool:
    return ack.num_ready == 0 and {found for _, found in ack.failures} == {failure}


def test_full_disk_fails_writes_keeps_reading_and_recovers(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), files_end_at(data_file(rig.home).stat().st_size):
        for first in (100, 200, 300):
            assert all_failed(rig.write(range(first, first + 50)), Failure.NO_SPACE)
            assert rig.tier.stats()["read_only"] is True
        assert rig.present(range(20)) == set(range(20))
        assert rig.tier.sync(PATIENCE_S)  # every write has been acked, as failed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    wait_until_writable(rig)
    assert rig.write(range(100, 150)).ok
    assert rig.present(range(400)) == {*range(20), *range(100, 150)}
    assert rig.tier.stats()["records"] == 70
    assert rig.tier.stats()["write_no_space"] != 0


def test_erase_refused_by_the_disk_is_done_later(rig: Rig) -> None:
    with data_file_is_read_only(rig.home):
        assert all_failed(rig.write([50]), Failure.IO_ERROR)
        rig.erase([3])
        assert rig.tier.sync(PATIENCE_S)  # a tombstone names page 3
        assert rig.tier.stats()["pending_erases"] == 0
        assert rig.present(range(20)) >= set(range(20)) - {3}
    wait_until_writable(rig)
    assert rig.tier.sync(PATIENCE_S)
    assert rig.present([3, 50]) == set()
    assert rig.write([3, 50], version=1).ok
    assert rig.present([3, 50], version=1) == {3, 50}


def test_write_error_is_an_io_error_and_later_writes_succeed(rig: Rig) -> None:
    with data_file_is_read_only(rig.home):
        assert all_failed(rig.write(range(100, 110)), Failure.IO_ERROR)
        assert rig.tier.stats()["read_only"] is True
    wait_until_writable(rig)
    assert rig.write(range(100, 110)).ok
    assert rig.present(range(100, 110)) == set(range(100, 110))


def test_a_tier_that_cannot_write_still_closes(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    rig.write([0])
    with data_file_is_read_only(rig.home):
        write = rig.submit_write(range(1, 100))
        rig.erase([0])
        rig.close()
        assert all_failed(rig.ack(write), Failure.IO_ERROR)
    rig = Rig(tmp_path / "home")
    assert rig.present(range(100)) <= {0}
    rig.close()


def test_an_overwrite_that_failed_leaves_no_record(rig: Rig) -> None:
    with files_end_at(data_file(rig.home).stat().st_size):
        assert all_failed(rig.write(range(200), version=1), Failure.NO_SPACE)
    wait_until_writable(rig)
    assert rig.present(range(200), version=1) == set()
    assert rig.tier.stats()["records"] == 0


def test_a_lower_capacity_on_a_full_disk_opens_and_takes_effect_at_an_open_with_free_space(
    tmp_path: Path,
) -> None:
    """Lower the capacity while the disk is full, and then open the directory with free space.

    Before extent files are truncated, LMDB must erase the records at their ends, which needs disk space.
    """
    home = tmp_path / "home"
    rig = Rig(home, payload="extents", capacity=8 << 20)
    assert rig.write(range(200)).ok
    rig.close()
    before = on_disk(home)
    with files_end_at(16 << 10):
        rig = Rig(home, payload="extents", capacity=1 << 20)
        found = {record[0] for record in rig.tier.records()}
        kept = {number for number in range(200) if key(number) in found}
        assert 0 < len(kept) < 200
        assert rig.present(sorted(kept)) == kept
        rig.close()
    rig = Rig(home, payload="extents", capacity=1 << 20)
    assert on_disk(home) <= 1 << 20 < before
    rig.close()
