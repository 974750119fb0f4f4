"""Test that large transfers of small pages read adjacent records together, and report each page by itself."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme.rig import PAGE, PATIENCE_S, Rig, change, find, key, page
from tests.support.sick_disk import Hanging, hold_clock, time_is_up
from tierstore.nvme.direct_io import aligned
from tierstore.types import Failure

PAGES = 64
Replace = Callable[..., None]


class Counting:
    """A replacement for ``preadv`` that records how many buffers each call fills. Long calls may fail."""

    def __init__(self, fails_from: int = 1 << 20) -> None:
        self.sizes: list[int] = []
        self._fails_from = fails_from

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.sizes.append(len(buffers))
        if len(buffers) >= self._fails_from:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, buffers, offset)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home", payload="extents")
    hold_clock(rig.tier)
    assert rig.write(range(PAGES)).ok
    yield rig
    rig.close()


def submit_read(rig: Rig, numbers: Sequence[int]) -> tuple[int, list[NDArray[np.uint8]]]:
    """Queue a read into memory for direct I/O, as of staging buffers. Only such memory is filled by the run."""
    transfer = rig.transfer([key(number) for number in numbers])
    out = [*aligned(len(numbers) * PAGE).reshape(len(numbers), PAGE)]
    rig.tier.submit_read(transfer, out)
    return transfer.id, out


def read(rig: Rig, numbers: Sequence[int]) -> dict[int, Failure]:
    """Read pages in one transfer, check the bytes of those that arrived, and return the failures of the others."""
    transfer, out = submit_read(rig, numbers)
    ack = rig.ack(transfer)
    failures = {numbers[place]: failure for place, failure in ack.failures}
    for number, found in zip(numbers, out, strict=True):
        assert number in failures or (found == page(number)).all()
    assert ack.num_ready == len(numbers) - len(failures)
    return failures


def test_adjacent_records_are_read_with_one_call(rig: Rig, calls: Replace) -> None:
    disk = Counting()
    calls(preadv=disk)
    assert read(rig, range(PAGES)) == {}
    assert sum(disk.sizes) == 2 * PAGES
    assert len(disk.sizes) < PAGES // 2


def test_few_pages_are_read_page_by_page(rig: Rig, calls: Replace) -> None:
    disk = Counting()
    calls(preadv=disk)
    assert read(rig, range(20)) == {}
    assert disk.sizes == [2] * 20


def test_pages_in_any_order_and_missing_ones_are_told_apart(rig: Rig) -> None:
    numbers = [*range(PAGES, 0, -1), *range(100, 110), 0]
    assert read(rig, numbers[1:]) == dict.fromkeys(range(100, 110), Failure.NOT_FOUND)


def test_a_damaged_page_fails_alone(rig: Rig, calls: Replace) -> None:
    path, at = find(rig.home, page(30).tobytes())
    change(path, at + 5, bytes([int(page(30)[5]) ^ 1]))
    disk = Counting()
    calls(preadv=disk)
    assert read(rig, range(PAGES)) == {30: Failure.INTEGRITY}
    assert max(disk.sizes) > 2


def test_pages_of_a_run_that_fails_are_read_one_by_one(rig: Rig, calls: Replace) -> None:
    disk = Counting(fails_from=4)
    calls(preadv=disk)
    assert read(rig, range(PAGES)) == {}
    assert disk.sizes.count(2) == PAGES


def test_a_run_that_hangs_is_late_and_arrives_later(rig: Rig, calls: Replace) -> None:
    disk = Hanging(1)
    calls(preadv=disk)
    transfer, out = submit_read(rig, range(PAGES))
    disk.wait(1)
    time_is_up(rig.tier, reads=1)
    first = rig.ack(transfer)
    assert 1 < len(first.late) < PAGES // 2
    assert first.num_ready == PAGES - len(first.late)
    disk.go_on.set()
    second = rig.ack(transfer)
    assert second.num_ready == len(first.late)
    for number, found in enumerate(out):
        assert (found == page(number)).all()
    assert rig.tier.sync(PATIENCE_S)


def test_each_read_of_a_run_has_the_whole_timeout(rig: Rig, calls: Replace) -> None:
    numbers = [*range(0, PAGES, 2), *range(1, PAGES, 2)]  # no two records are adjacent
    readers = rig.tier._readers
    starts: list[float] = []

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with readers._changed:
            starts.extend(read.since for read in readers._reading)
        return os.preadv(fd, buffers, offset)

    calls(preadv=slow)
    assert read(rig, numbers) == {}
    assert len(set(starts)) >= PAGES  # each read began anew


def test_a_limit_for_batches_divides_a_write_into_transactions(tmp_path: Path) -> None:
    with closing(Rig(tmp_path / "home", payload="extents", batch_nbytes=3 * PAGE)) as rig:
        assert rig.write(range(9)).ok
        assert rig.tier.counters()["batches"] == 3


def test_small_transfers_that_are_queued_together_are_read_in_runs(tmp_path: Path, calls: Replace) -> None:
    with closing(Rig(tmp_path / "home", payload="extents", readers=1)) as rig:
        hold_clock(rig.tier)
        assert rig.write(range(PAGES)).ok
        disk = Hanging(1)
        calls(preadv=disk)
        queued = [(range(1), *submit_read(rig, range(1)))]
        disk.wait(1)  # the only thread is busy until all transfers are queued
        queued += [(part, *submit_read(rig, part)) for part in (range(1, 21), range(21, 41))]
        counted = Counting()
        calls(preadv=counted)
        disk.go_on.set()
        for numbers, transfer, out in queued:
            assert rig.ack(transfer).ok
            assert all((found == page(number)).all() for number, found in zip(numbers, out, strict=True))
        assert counted.sizes[0] == 2 * 20


class Watched(deque[Any]):
    """A queue that knows whether somebody went through all its items."""

    was_walked = False

    def __iter__(self) -> Iterator[Any]:
        self.was_walked = True
        return super().__iter__()


def test_the_time_to_begin_a_read_does_not_depend_on_the_length_of_the_queue(
    rig: Rig, calls: Replace
) -> None:
    readers, queue = rig.tier._readers, Watched()
    readers._jobs = queue
    disk = Hanging(readers._count)
    calls(preadv=disk)
    queued = [submit_read(rig, [number])[0] for number in range(PAGES)]
    disk.wait(readers._count)
    assert readers._num_queued == sum(len(job.pages) - job.next for job in [*queue])
    queue.was_walked = False
    disk.go_on.set()
    for transfer in queued:
        assert rig.ack(transfer).ok
    assert not queue.was_walked
    assert readers._num_queued == 0


def test_reads_that_are_refused_leave_nothing_in_the_queue(rig: Rig, calls: Replace) -> None:
    readers = rig.tier._readers
    disk = Hanging(readers._count)
    calls(preadv=disk)
    queued = [submit_read(rig, [number])[0] for number in range(PAGES)]
    disk.wait(readers._count)
    time_is_up(rig.tier, reads=readers._count)
    for transfer in queued[readers._count :]:
        assert [failure for _, failure in rig.ack(transfer).failures] == [Failure.UNAVAILABLE]
    assert readers._num_queued == 0
    disk.go_on.set()
