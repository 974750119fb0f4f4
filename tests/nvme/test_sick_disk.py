"""Test a disk that hangs or fails: hung operations time out, no more are attempted, and the tier recovers by itself."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.nvme.rig import PATIENCE_S, Rig, catalogue_of, key, page, writer_of
from tests.support.sick_disk import Failing, Hanging, ask_again, hold_clock, time_is_up
from tests.support.waiting import wait_for
from tierstore.nvme.catalogue import Catalogue, Page
from tierstore.nvme.read_breaker import LIMIT
from tierstore.nvme.reader import Record
from tierstore.types import Failure

Replace = Callable[..., None]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Yield a tier with pages in extent files: unlike page faults in LMDB, its reads can be made to fail."""
    rig = Rig(tmp_path / "home", payload="extents")
    hold_clock(rig.tier)
    yield rig
    rig.close()


@pytest.fixture
def either(tmp_path: Path, payload: str) -> Iterator[Rig]:
    """Yield a tier with pages in LMDB or in extent files, according to ``payload``."""
    rig = Rig(tmp_path / "home")
    hold_clock(rig.tier)
    yield rig
    rig.close()


def state(rig: Rig) -> str:
    return rig.tier.state


def require_served(rig: Rig, numbers: Sequence[int]) -> None:
    """Assert that all pages can be read. The first read closes the breaker, so that all later reads are attempted."""
    assert rig.present(numbers[:1]) == set(numbers[:1])
    assert rig.present(numbers) == set(numbers)


def test_hung_page_is_acked_late_in_time_and_again_after_the_read_ends(
    rig: Rig, calls: Replace, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.write(range(4)).ok
    disk = Hanging(1)
    calls(preadv=disk)
    with caplog.at_level(logging.INFO):
        transfer, out = rig.submit_read([0, 1, 2])
        disk.wait(1)
        time_is_up(rig.tier, reads=1)
        first = rig.ack(transfer)
        assert (first.ok, first.num_ready, len(first.late), first.failures) == (False, 2, 1, ())
        (late,) = first.late
        for index in {0, 1, 2} - {late}:
            assert (out[index] == page(index)).all()
        assert state(rig) == "absent"
        assert rig.tier.stats()["hung_reads"] == 1
        disk.go_on.set()
        second = rig.ack(transfer)
        assert (second.ok, second.num_ready, second.late) == (True, 1, ())
        assert (out[late] == page(late)).all()
        require_served(rig, range(4))
        wait_for(lambda: len(caplog.records) == 2)  # the reader logs only after the ack
    assert state(rig) == "ok"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_while_every_reader_hangs_reads_fail_at_once_and_writes_continue(rig: Rig, calls: Replace) -> None:
    assert rig.write(range(8)).ok
    disk = Hanging(2)
    calls(preadv=disk)
    stuck, _ = rig.submit_read(range(5))
    behind, _ = rig.submit_read([6, 7])
    disk.wait(2)
    time_is_up(rig.tier, reads=2)
    ack = rig.ack(stuck)
    assert ack.late == (0, 1)
    assert ack.failures == tuple((index, Failure.UNAVAILABLE) for index in (2, 3, 4))
    assert rig.ack(behind).failures == ((0, Failure.UNAVAILABLE), (1, Failure.UNAVAILABLE))
    after, _ = rig.read([5])
    assert after.failures == ((0, Failure.UNAVAILABLE),)
    assert rig.write([9]).ok
    assert rig.tier.stats()["read_unavailable"] == 6
    disk.go_on.set()
    assert rig.ack(stuck).num_ready == 2
    require_served(rig, [*range(8), 9])


def test_a_tier_whose_readers_hang_closes_within_its_timeout_and_fails_queued_reads(
    tmp_path: Path, calls: Replace
) -> None:
    rig = Rig(tmp_path / "home", payload="extents")
    assert rig.write(range(8)).ok
    disk = Hanging(2)
    calls(preadv=disk)
    stuck, _ = rig.submit_read([0, 1])
    behind, _ = rig.submit_read([6, 7])
    disk.wait(2)
    assert rig.tier.close(0.05) is False
    assert rig.ack(behind).failures == ((0, Failure.CLOSED), (1, Failure.CLOSED))
    disk.go_on.set()
    rig.close()
    assert rig.ack(stuck).num_ready == 2


def test_disk_that_fails_reads_in_a_row_is_skipped_and_probed(
    rig: Rig, calls: Replace, caplog: pytest.LogCaptureFixture
) -> None:
    assert rig.write(range(30)).ok
    disk = Failing()
    calls(preadv=disk)
    with caplog.at_level(logging.INFO):
        ack, _ = rig.read(range(30))
        tried = sum(failure is Failure.IO_ERROR for _, failure in ack.failures)
        assert LIMIT <= tried <= LIMIT + 1  # the other reader may have begun a read when the breaker opened
        assert sum(failure is Failure.UNAVAILABLE for _, failure in ack.failures) == 30 - tried
        assert state(rig) == "absent"
        assert rig.tier.stats()["read_unavailable"] == 30 - tried
        for asked in (0, 1, 1, 2):  # the disk is tried again, one page at a time
            if disk.calls < tried + asked:
                ask_again(rig.tier)
            ack, _ = rig.read(range(30))
            assert disk.calls == tried + asked
            assert len(ack.failures) == 30
        calls()
        ask_again(rig.tier)
        require_served(rig, range(30))
        wait_for(lambda: len(caplog.records) == 3)  # the reader logs only after the ack
    assert state(rig) == "ok"
    told = {
        record.levelname: record.message for record in caplog.records if "misses until" not in record.message
    }
    assert "could not be read" in told["WARNING"]  # about the first failed page, from either reader
    assert "answers again" in told["INFO"]


def test_a_disk_that_fails_one_page_stays_in_use(rig: Rig, calls: Replace) -> None:
    assert rig.write(range(30)).ok
    failing = threading.Event()

    def one_in_three(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if failing.is_set():
            failing.clear()
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, buffers, offset)

    calls(preadv=one_in_three)
    for number in range(3 * LIMIT):
        failing.set()
        ack, _ = rig.read([number])
        assert ack.failures == ((0, Failure.IO_ERROR),)
        assert rig.present([20]) == {20}
    assert state(rig) == "ok"


def test_while_a_write_hangs_the_tier_is_read_only_and_queued_writes_fail(
    either: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert either.write([0]).ok
    begun, go_on = threading.Event(), threading.Event()
    store = Catalogue.store

    def hung(self: Catalogue, pages: Sequence[Page]) -> list[int | None]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return store(self, pages)

    monkeypatch.setattr(Catalogue, "store", hung)
    with caplog.at_level(logging.INFO):
        stuck = either.submit_write([1])
        assert begun.wait(PATIENCE_S)
        behind = either.submit_write([2, 3])
        time_is_up(either.tier)
        assert either.ack(behind).failures == ((0, Failure.UNAVAILABLE), (1, Failure.UNAVAILABLE))
        assert state(either) == "read_only"
        assert either.tier.stats()["read_only"] is True
        assert either.write([4]).failures == ((0, Failure.UNAVAILABLE),)
        assert either.present([0]) == {0}
        assert either.tier.sync(0.0) is False
        go_on.set()
        assert either.ack(stuck).ok
        assert either.tier.sync(PATIENCE_S)
        assert either.present(range(5)) == {0, 1}
        assert either.write([2, 3, 4]).ok
    assert either.present(range(5)) == {0, 1, 2, 3, 4}
    assert state(either) == "ok"
    assert either.tier.stats()["write_unavailable"] == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_erases_behind_a_hung_write_queue_only_their_keys(
    either: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert either.write([7]).ok
    begun, go_on = threading.Event(), threading.Event()
    store = Catalogue.store

    def hung(self: Catalogue, pages: Sequence[Page]) -> list[int | None]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return store(self, pages)

    monkeypatch.setattr(Catalogue, "store", hung)
    stuck = either.submit_write([1])
    assert begun.wait(PATIENCE_S)
    for _ in range(100):
        either.erase([7, 8])
    assert len(writer_of(either.tier)._queue._items) == 1
    go_on.set()
    assert either.ack(stuck).ok
    assert either.tier.sync(PATIENCE_S)
    assert either.present([1, 7]) == {1}


def test_a_read_that_hangs_keeps_no_space_from_the_writer(rig: Rig, calls: Replace) -> None:
    # An open read transaction would keep LMDB from reusing freed pages: the map would be full after one round.
    numbers = range(rig.tier.budget_nbytes // rig.tier.record_nbytes - 4)
    assert rig.write(numbers).ok
    disk = Hanging(1)
    calls(preadv=disk)
    transfer, _ = rig.submit_read([0])
    disk.wait(1)
    for version in range(1, 6):
        rig.erase(numbers[1:])
        assert rig.write(numbers[1:], version).ok
    assert rig.tier.stats()["write_no_space"] == 0
    disk.go_on.set()
    assert rig.ack(transfer).ok
    assert rig.present(numbers[1:], version=5) == set(numbers[1:])


def test_record_rewritten_during_a_read_keeps_its_bytes_and_is_not_counted_as_damage(
    rig: Rig, calls: Replace
) -> None:
    assert rig.write(range(20)).ok
    disk = Hanging(1)
    calls(preadv=disk)
    transfer, out = rig.submit_read([3])
    disk.wait(1)
    for version in range(1, 8):  # the old slot is not reused until the read ends
        rig.erase(range(20))
        assert rig.write(range(20), version).ok
    disk.go_on.set()
    assert rig.ack(transfer).ok
    assert (out[0] == page(3)).all()
    assert rig.tier.stats()["read_integrity"] == 0
    assert rig.present([3], version=7) == {3}


def test_a_record_that_is_rewritten_during_every_try_is_unavailable_and_stays(
    tmp_path: Path, calls: Replace
) -> None:
    rig = Rig(tmp_path / "home", payload="extents")
    assert rig.write([3]).ok
    number = 0

    def rewritten(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal number
        number += 1
        catalogue_of(rig.tier).store([Page(key(3), None, page(3, number))])
        raise OSError(errno.EIO, "Input/output error")

    calls(preadv=rewritten)
    ack, _ = rig.read([3])
    assert [failure for _, failure in ack.failures] == [Failure.UNAVAILABLE]
    calls()
    assert rig.present([3], version=number) == {3}
    rig.close()


def test_record_erased_during_a_read_is_missing_and_not_counted_as_damage(rig: Rig, calls: Replace) -> None:
    assert rig.write(range(20)).ok
    disk = Hanging(1)
    calls(preadv=disk)
    transfer, out = rig.submit_read([3])
    disk.wait(1)
    for version in range(1, 8):
        rig.erase([3])
        assert rig.write([*range(3), *range(4, 20)], version).ok
    disk.go_on.set()
    ack = rig.ack(transfer)
    if ack.ok:  # a slot is not reused while it is read
        assert (out[0] == page(3)).all()
    else:
        assert [failure for _, failure in ack.failures] == [Failure.NOT_FOUND]
    assert rig.tier.stats()["read_integrity"] == 0
    assert rig.present(range(20), version=7) == {*range(3), *range(4, 20)}


def test_lent_record_keeps_its_bytes_while_it_is_rewritten(rig: Rig, calls: Replace) -> None:
    assert rig.write(range(20)).ok
    disk = Hanging(1)
    calls(preadv=disk)
    lent: list[Record | str] = []
    thread = threading.Thread(target=lambda: lent.append(rig.tier.lender.record(key(3))))
    thread.start()
    disk.wait(1)
    for version in range(1, 8):
        rig.erase(range(20))
        assert rig.write(range(20), version).ok
    disk.go_on.set()
    thread.join(PATIENCE_S)
    (found,) = lent
    assert not isinstance(found, str), found
    assert (found.payload == page(3)).all()
