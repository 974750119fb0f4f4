"""Tests of erases that the disk refuses: tombstones keep their keys, and the next open deletes the records."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nvme.rig import (
    PATIENCE_S,
    Rig,
    change,
    data_file,
    data_file_is_read_only,
    key,
    on_disk,
    page,
    wait_until_writable,
)
from tests.support import forked, lanes
from tierstore.nvme.inspection import open_reader, purge, verify
from tierstore.nvme.tombstones import Tombstones

NUM_BLOCKS, BLOCK = 4, 4096


def tombstone_file(home: Path) -> Path:
    return data_file(home).with_name("erased.bin")


def listed(rig: Rig) -> set[int]:
    """Return which of pages 0 to 399 a store would find when it opens the tier."""
    found = {record[0] for record in rig.tier.records()}
    return {number for number in range(400) if key(number) in found}


def refuse_erase(home: Path, numbers: range) -> None:
    """Write pages 0 to 19, erase ``numbers`` while LMDB's file refuses writes, and close the tier."""
    rig = Rig(home)
    assert rig.write(range(20)).ok
    with data_file_is_read_only(home):
        rig.erase(numbers)
        assert rig.tier.sync(PATIENCE_S)
        rig.close()


@pytest.mark.usefixtures("payload")
def test_restart_does_not_restore_pages_the_disk_refused_to_erase(tmp_path: Path) -> None:
    refuse_erase(tmp_path / "home", range(3, 7))
    rig = Rig(tmp_path / "home")
    assert listed(rig) == {*range(3), *range(7, 20)}
    assert rig.present(range(20)) == {*range(3), *range(7, 20)}
    assert rig.tier.stats()["records"] == 16
    rig.close()


@pytest.mark.usefixtures("payload")
def test_page_rewritten_after_its_tombstone_survives_restarts(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    assert rig.write(range(20)).ok
    with data_file_is_read_only(tmp_path / "home"):
        rig.erase([3])
        assert rig.tier.sync(PATIENCE_S)
    wait_until_writable(rig)
    assert rig.write([3], version=1).ok
    assert rig.tier.sync(PATIENCE_S)
    rig.close()
    for _ in range(2):
        rig = Rig(tmp_path / "home")
        assert listed(rig) == set(range(20))
        assert rig.present([3], version=1) == {3}
        rig.close()


@pytest.mark.usefixtures("payload")
def test_an_erase_that_no_tombstone_can_name_is_pending_until_the_disk_takes_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home)
    assert rig.write(range(20)).ok
    with data_file_is_read_only(home), data_file_is_read_only(home, name="erased.bin"):
        rig.erase([3, 4])
        assert rig.tier.sync(PATIENCE_S) is False
        assert rig.tier.stats()["pending_erases"] == 2
        assert rig.tier.state == "read_only"
    wait_until_writable(rig)
    assert rig.tier.sync(PATIENCE_S)
    assert rig.tier.stats()["pending_erases"] == 0
    rig.close()
    rig = Rig(home)
    assert listed(rig) == set(range(20)) - {3, 4}
    rig.close()


@pytest.mark.parametrize("damaged", range(NUM_BLOCKS))
def test_damaged_tombstone_block_restores_no_page_and_loses_no_other(tmp_path: Path, damaged: int) -> None:
    home = tmp_path / "home"
    refuse_erase(home, range(3, 7))
    change(tombstone_file(home), damaged * BLOCK + 100, b"\x55" * 64)
    rig = Rig(home)
    assert listed(rig) == {*range(3), *range(7, 20)}
    rig.close()


def test_tombstones_that_are_damaged_throughout_drop_every_page(tmp_path: Path) -> None:
    home = tmp_path / "home"
    refuse_erase(home, range(3, 7))
    tombstone_file(home).write_bytes(b"")
    rig = Rig(home)
    assert listed(rig) == set()
    assert rig.write(range(20)).ok
    rig.close()
    rig = Rig(home)
    assert listed(rig) == set(range(20))
    rig.close()


def test_damage_to_empty_tombstones_loses_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home)
    assert rig.write(range(20)).ok
    rig.close()
    for damaged in range(NUM_BLOCKS - 1):
        change(tombstone_file(home), damaged * BLOCK, bytes(BLOCK))
        rig = Rig(home)
        assert listed(rig) == set(range(20))
        rig.close()


def test_tombstone_cut_short_by_a_kill_was_not_confirmed_and_is_harmless(tmp_path: Path) -> None:
    home = tmp_path / "home"
    refuse_erase(home, range(3, 7))
    confirmed = tombstone_file(home).read_bytes()
    rig = Rig(home)  # carries the erase out
    rig.close()
    with data_file_is_read_only_at_open(home) as rig:
        rig.erase([10])
        assert rig.tier.sync(PATIENCE_S)
    newer = tombstone_file(home).read_bytes()
    for blocks in range(1, NUM_BLOCKS):
        tombstone_file(home).write_bytes(newer[: blocks * BLOCK] + confirmed[blocks * BLOCK :])
        assert not Tombstones(tombstone_file(home).parent, 1).live
    tombstone_file(home).write_bytes(newer)
    assert Tombstones(tombstone_file(home).parent, 1).live


@contextmanager
def data_file_is_read_only_at_open(home: Path) -> Iterator[Rig]:
    rig = Rig(home)
    with data_file_is_read_only(home):
        yield rig
        rig.close()


def test_any_number_of_tombstones_can_be_recorded(tmp_path: Path) -> None:
    tombstones = Tombstones(tmp_path, 0)
    erased = [key(number) for number in range(3000)]
    tombstones.record(erased)
    again = Tombstones(tmp_path, 0)
    assert all(each in again for each in erased)
    assert sum(key(number) in again for number in range(10_000, 20_000)) < 20
    again.record(key(number) for number in range(100_000, 200_000))
    assert all(each in Tombstones(tmp_path, 0) for each in erased)


def test_tombstones_count_until_their_epoch_is_retired(tmp_path: Path) -> None:
    tombstones = Tombstones(tmp_path, 0)
    tombstones.prepare()
    assert not Tombstones(tmp_path, 0).live
    for epoch in range(1, 4):
        tombstones.record([key(epoch)])
        assert tombstones.epoch == epoch
        again = Tombstones(tmp_path, epoch - 1)
        assert again.live
        assert key(epoch) in again
        assert key(epoch - 1) not in again
        assert not Tombstones(tmp_path, epoch).live
        tombstones.retire()


@pytest.mark.usefixtures("payload")
def test_refused_writes_leave_no_tombstones_of_pages_that_are_not_there(tmp_path: Path) -> None:
    """A disk may be full for days. If every refused key were recorded, the filter would soon match every page."""
    home = tmp_path / "home"
    rig = Rig(home)
    assert rig.write(range(20)).ok
    with data_file_is_read_only(home):
        assert not rig.write([3, *range(100, 120)], version=1).ok
        assert rig.tier.sync(PATIENCE_S)
        named = Tombstones(tombstone_file(home).parent, 0, writable=False)
        assert key(3) in named  # the old version of page 3 must not come back
        assert not any(key(number) in named for number in range(100, 120))
        rig.close()
    rig = Rig(home)
    assert listed(rig) == set(range(20)) - {3}
    rig.close()


def test_a_directory_without_tombstones_opens_as_it_is_and_gets_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home)
    assert rig.write(range(20)).ok
    rig.close()
    tombstone_file(home).unlink()
    rig = Rig(home)
    assert listed(rig) == set(range(20))
    assert tombstone_file(home).stat().st_size == NUM_BLOCKS * BLOCK
    rig.close()


@pytest.mark.usefixtures("payload")
def test_a_closed_directory_gives_no_page_that_a_tombstone_names(tmp_path: Path) -> None:
    home = tmp_path / "home"
    refuse_erase(home, range(3, 7))
    with open_reader(data_file(home).parent, "ab12") as reader:
        assert {found for found, _, _ in reader.summaries()} == {key(n) for n in (*range(3), *range(7, 20))}
        out, scratch = page(0), page(1)
        with pytest.raises(KeyError):
            reader.record(key(3), out, scratch)
    (verdict,) = verify(home)
    assert (verdict.checked, verdict.bad) == (16, ())


def test_purge_and_a_new_payload_remove_tombstones(tmp_path: Path) -> None:
    home = tmp_path / "home"
    refuse_erase(home, range(3, 7))
    rig = Rig(home, payload="extents")  # starts empty, because the payload was lmdb
    assert rig.write(range(20)).ok
    rig.close()
    rig = Rig(home, payload="extents")
    assert listed(rig) == set(range(20))
    rig.close()
    assert purge(home, "all").kept == ()
    assert not tombstone_file(home).exists()


@pytest.mark.usefixtures("payload")
def test_everything_on_disk_stays_within_the_capacity_with_tombstones(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home, capacity=4 << 20)
    rig.write(range(400))
    with data_file_is_read_only(home):
        rig.erase(range(100))
        assert rig.tier.sync(PATIENCE_S)
    assert on_disk(home) <= 4 << 20
    rig.close()


KILLED = """
import os, sys
from pathlib import Path
from tests.nvme.rig import Rig, data_file_is_read_only
home = Path(sys.argv[1])
rig = Rig(home, payload=sys.argv[2])
assert rig.write(range(20)).ok
with data_file_is_read_only(home):
    rig.erase(range(3, 7))
    assert rig.tier.sync(60.0)
    print("synced", flush=True)
    for number in range(7, 20):
        rig.erase([number])
    sys.stdin.read()
"""


def test_kill_at_any_moment_after_a_sync_restores_no_erased_page(tmp_path: Path, payload: str) -> None:
    for turn in range(lanes.examples(2, 6)):
        home = tmp_path / f"home{turn}"
        with forked.running(KILLED, home, payload) as child:
            assert child.stdout.readline() == "synced\n"
            for _ in range(random.Random(turn).randrange(200)):
                os.sched_yield()
        rig = Rig(home)
        assert listed(rig) >= set(range(3))
        assert not listed(rig) & set(range(3, 7))
        rig.close()


def test_tombstones_can_be_recorded_on_a_full_disk(tmp_path: Path) -> None:
    """Prevent files from growing, as on a full disk. Existing blocks can still be overwritten."""
    home = tmp_path / "home"
    rig = Rig(home)
    assert rig.write(range(20)).ok
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BLOCKS * BLOCK, hard))
    try:
        rig.erase([3])
        assert rig.tier.sync(PATIENCE_S)
        assert rig.tier.state == "read_only"
        rig.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    rig = Rig(home)
    assert listed(rig) == set(range(20)) - {3}
    rig.close()
