"""Test the writer's queue, and the writer when LMDB's map is full, which the budget should prevent."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nvme.rig import CAPACITY, PAGE, PATIENCE_S, blank, key, page
from tierstore.nvme import writer
from tierstore.nvme.catalogue import Catalogue
from tierstore.nvme.completion_queue import Outbox
from tierstore.nvme.direct_io import BLOCK
from tierstore.nvme.disk_space import Sizing, size
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.writer import EraseWork, SyncWork, WorkQueue, Writer
from tierstore.types import Ack, Failure, Tier, Transfer

HOLD = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=int(sys.argv[2]), max_dbs=4)
with env.begin(write=True):
    print("held", flush=True)
    sys.stdin.read()
"""


class WriterRig:
    """A writer whose budget is larger than LMDB's map."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        honest = size(CAPACITY, PAGE)
        self.sizing: Sizing = replace(honest, budget_nbytes=100 * CAPACITY)
        self.catalogue = Catalogue(
            directory, self.sizing, fingerprint="ab12", page_nbytes=PAGE, readers=2, coding=Coding()
        )
        self.woken = threading.Event()
        self.outbox = Outbox(self.woken.set)
        self.writer = Writer(self.catalogue, self.outbox, self.sizing)
        self.acks: dict[int, Ack] = {}

    def submit(self, transfer_id: int, numbers: range) -> None:
        keys = tuple(key(n) for n in numbers)
        transfer = Transfer(
            id=transfer_id,
            keys=keys,
            src=Tier.HOST,
            src_slots=(),
            dst=Tier.NVME,
            dst_slots=(),
            nbytes=0,
            parents=(None,) * len(keys),
        )
        self.writer.submit_write(transfer, [page(n) for n in numbers])

    def ack(self, transfer_id: int) -> Ack:
        deadline = time.monotonic() + PATIENCE_S
        while transfer_id not in self.acks:
            assert time.monotonic() < deadline
            self.woken.wait(0.1)
            self.woken.clear()
            self.acks.update((ack.transfer_id, ack) for ack in self.outbox.take())
        return self.acks.pop(transfer_id)

    def is_there(self, number: int) -> bool:
        out, scratch = blank(), blank(BLOCK)
        try:
            reader = self.catalogue.reader
            reader.check(
                key(number), reader.fetch(key(number), out, scratch), out, scratch, Coding().decoders()
            )
        except KeyError:
            return False
        assert (out == page(number)).all()
        return True

    def close(self) -> None:
        self.writer.close()
        assert self.writer.join(PATIENCE_S)
        self.catalogue.close()

    @contextmanager
    def writer_held_up(self) -> Iterator[None]:
        """Hold LMDB's write lock in another process, so that the writer waits and submitted operations queue up."""
        command = [sys.executable, "-c", HOLD, str(self.directory), str(self.sizing.map_size)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            self.writer.submit_erase([key(10**6)])
            assert self.writer.sync(0.2) is False
            yield
            holder.communicate()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[WriterRig]:
    rig = WriterRig(tmp_path / "ab12-0")
    yield rig
    rig.close()


def fill(rig: WriterRig) -> int:
    """Write batches until one does not fit. Returns the number of pages written."""
    step = rig.sizing.batch_pages
    for count in range(0, 10_000, step):
        rig.submit(1, range(count, count + step))
        ack = rig.ack(1)
        if not ack.ok:
            assert {failure for _, failure in ack.failures} == {Failure.NO_SPACE}
            assert ack.num_ready == 0
            return count
    raise AssertionError("LMDB's map did not fill up")


def test_batch_that_finds_the_map_full_fails_whole(rig: WriterRig) -> None:
    count = fill(rig)
    assert all(rig.is_there(n) for n in range(count))
    assert not any(rig.is_there(n) for n in range(count, count + rig.sizing.batch_pages))
    assert not rig.writer.refusal.active


def test_space_freed_by_an_erase_is_used_by_the_next_write(rig: WriterRig) -> None:
    count = fill(rig)
    for turn in range(10):
        first = turn * rig.sizing.batch_pages
        rig.writer.submit_erase([key(n) for n in range(first, first + rig.sizing.batch_pages)])
        rig.submit(2, range(1000 + first, 1000 + first + rig.sizing.batch_pages))
        assert rig.ack(2).ok
    assert rig.catalogue.num_records == count


def test_a_batch_that_finds_the_map_full_waits_for_the_erases_queued_behind_it(rig: WriterRig) -> None:
    count = fill(rig)
    step = rig.sizing.batch_pages
    with rig.writer_held_up():
        rig.submit(2, range(2000, 2000 + step))
        rig.submit(3, range(3000, 3001))
        rig.writer.submit_erase([key(n) for n in range(2 * step)])
    assert rig.ack(2).ok
    assert rig.ack(3).ok
    assert rig.writer.sync(PATIENCE_S)
    assert not any(rig.is_there(n) for n in range(2 * step))
    assert all(rig.is_there(n) for n in [*range(2 * step, count), *range(2000, 2000 + step), 3000])


def test_queued_writes_are_committed_together(rig: WriterRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LONG_S", math.inf)  # otherwise a slow batch makes the next ones smaller
    with rig.writer_held_up():
        for number in range(rig.sizing.batch_pages):
            rig.submit(number, range(number, number + 1))
    assert all(rig.ack(number).ok for number in range(rig.sizing.batch_pages))
    assert rig.outbox.counts()["batches"] == 1


def test_a_queued_erase_of_a_record_counts_once_however_often_it_is_queued() -> None:
    queue = WorkQueue(4)
    queue.add(EraseWork(dict.fromkeys([key(1), key(2)])))
    queue.add(SyncWork())
    queue.add(EraseWork(dict.fromkeys([key(2), key(3)])))
    assert queue.num_erases == 3


def test_a_sync_mark_ends_a_batch_and_erases_do_not_pass_it() -> None:
    queue = WorkQueue(4)
    mark = SyncWork()
    for item in (EraseWork({key(1): None}), mark, EraseWork({key(2): None})):
        queue.add(item)
    first, second = queue.take(), queue.take()
    assert (first.erases, first.sync) == ([key(1)], mark)
    assert (second.erases, second.sync) == ([key(2)], None)
    assert not queue
