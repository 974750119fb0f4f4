"""A state machine of an engine that uses ``Chunks``. The machine decides when disk operations end or fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from tierstore.adapters import chunks as sources
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer

NBYTES = 8
ROWS = 8
KEYS = 7
BUDGET = 4
RECORD = 10


def key(number: int) -> bytes:
    return bytes([number]) * 36


def content(number: int, cleared: int) -> NDArray[np.uint8]:
    """Return the content of a chunk, which changes at every ``clear``."""
    return np.full(NBYTES, number + 1 + cleared % 30 * KEYS, dtype=np.uint8)


class Disk:
    """A stand-in for ``NvmeTier`` that completes writes and erasures in order of submission, and reads in any order."""

    tier = Tier.NVME
    record_nbytes = RECORD
    budget_nbytes = BUDGET * RECORD

    def __init__(self) -> None:
        self.state = "ok"
        self.there: dict[PageKey, NDArray[np.uint8]] = {}
        self.writes: list[tuple[Transfer, list[NDArray[np.uint8]]] | list[PageKey]] = []
        self.reads: list[tuple[Transfer, list[NDArray[np.uint8]], list[int]]] = []
        self.acks: list[Ack] = []
        self.vanished: list[PageKey] = []
        self.failed: list[tuple[PageKey, Failure]] = []

    def records(self) -> Iterator[tuple[PageKey, None, int]]:
        return ((key, None, RECORD) for key in self.there)

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        self.writes.append((transfer, list(pages)))

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        self.reads.append((transfer, list(out), list(range(len(out)))))

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        reading = {transfer.keys[place] for transfer, _, places in self.reads for place in places}
        self.vanished += [key for key in keys if key in reading]
        self.writes.append(list(keys))

    def poll(self) -> list[Ack]:
        acks, self.acks = self.acks, []
        return acks

    def close(self, timeout_s: float) -> bool:
        return True

    def stats(self) -> dict[str, object]:
        return {}

    def write_next(self, fails: bool) -> None:
        work = self.writes.pop(0)
        if isinstance(work, list):
            for gone in work:
                self.there.pop(gone, None)
            return
        transfer, pages = work
        failures = ((0, Failure.NO_SPACE),) if fails else ()
        for place, (name, page) in enumerate(zip(transfer.keys, pages, strict=True)):
            if not (fails and place == 0):
                self.there[name] = page.copy()
        ready = len(pages) - len(failures)
        self.acks.append(Ack(transfer.id, not failures, ready, ready * RECORD, failures=failures))

    def read(self, index: int, failure: Failure | None, late: int | None) -> None:
        """Complete a read. With ``failure``, its first page fails. The page at index ``late`` stays in flight."""
        transfer, out, places = self.reads.pop(index)
        failures, kept = [], []
        for position, place in enumerate(places):
            name = transfer.keys[place]
            if late == position:
                kept.append(position)
            elif failure is not None and position == 0:
                out[place][:] = 0xEE
                failures.append((position, failure))
                self.failed.append((name, failure))
            elif name not in self.there:
                self.vanished.append(name)
                failures.append((position, Failure.NOT_FOUND))
            else:
                out[place][:] = self.there[name]
        ready = len(places) - len(failures) - len(kept)
        self.acks.append(
            Ack(
                transfer.id,
                not failures and not kept,
                ready,
                ready * NBYTES,
                failures=tuple(failures),
                late=tuple(kept),
            )
        )
        if kept:
            self.reads.append((transfer, out, [places[position] for position in kept]))


class ChunkMachine(RuleBasedStateMachine):
    """An engine that gives each row of host memory to one job at a time, as vLLM's CPU tier does."""

    code: ModuleType = sources

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.memory = np.zeros((ROWS, NBYTES), dtype=np.uint8)
        self.chunks = self._open()
        self.jobs: dict[int, tuple[list[bytes], list[int], bool]] = {}
        self.free = set(range(ROWS))
        self.seen = self.memory.copy()
        self.last = 0
        self.cleared = 0

    def _open(self) -> Any:
        return self.code.Chunks(self.disk, self.memory, Event())

    def _begin(self, numbers: Sequence[int]) -> tuple[int, list[bytes], list[int]]:
        rows = sorted(self.free)[: len(numbers)]
        self.free -= set(rows)
        self.last += 1
        return self.last, [key(number) for number in numbers], rows

    numbers = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=3, unique=True)

    @rule(numbers=numbers)
    def store(self, numbers: list[int]) -> None:
        if len(self.free) < len(numbers):
            return
        job, keys, rows = self._begin(numbers)
        for number, row in zip(numbers, rows, strict=True):
            self.memory[row] = content(number, self.cleared)
        self.jobs[job] = (keys, rows, False)
        self.chunks.store(job, keys, rows)

    @rule(numbers=numbers)
    def load(self, numbers: list[int]) -> None:
        loading = {name for keys, _, is_load in self.jobs.values() if is_load for name in keys}
        held = [n for n in numbers if key(n) not in loading and self.chunks.holds(key(n))]
        if not held or len(self.free) < len(held):
            return
        job, keys, rows = self._begin(held)
        self.memory[rows] = 0
        self.jobs[job] = (keys, rows, True)
        self.chunks.load(job, keys, rows)

    @rule(numbers=numbers)
    def use(self, numbers: list[int]) -> None:
        self.chunks.used([key(number) for number in numbers])

    @precondition(lambda self: not self.disk.reads and not self.disk.acks)
    @rule()
    def clear(self) -> None:
        self.chunks.clear()
        self.cleared += 1
        assert not any(self.chunks.holds(key(number)) for number in range(KEYS))
        assert not any(self.chunks.writes(key(number)) for number in range(KEYS))

    @precondition(lambda self: self.disk.writes)
    @rule(fails=st.booleans())
    def the_disk_writes(self, fails: bool) -> None:
        self.disk.write_next(fails)

    @precondition(lambda self: self.disk.reads)
    @rule(
        data=st.data(),
        failure=st.sampled_from([None, None, Failure.INTEGRITY, Failure.UNAVAILABLE]),
        late=st.sampled_from([None, 0, 1]),
    )
    def the_disk_reads(self, data: st.DataObject, failure: Failure | None, late: int | None) -> None:
        self.disk.read(data.draw(st.integers(0, len(self.disk.reads) - 1)), failure, late)

    @rule()
    def ask_what_is_done(self) -> None:
        for done in self.chunks.finished():
            keys, rows, is_load = self.jobs.pop(done.job)
            assert done.is_load == is_load
            assert set(done.arrived) <= set(keys)
            assert done.complete == (len(done.arrived) == len(keys))
            for name, row in zip(keys, rows, strict=True):
                if is_load and name in done.arrived:
                    np.testing.assert_array_equal(self.memory[row], content(name[0], self.cleared))
            self.free |= set(rows)
        for name, failure in self.disk.failed:
            assert self.chunks.holds(name) == (failure is Failure.UNAVAILABLE)
        self.disk.failed.clear()
        self.seen = self.memory.copy()
        assert not self.jobs or self.disk.reads or self.disk.writes
        going = {name for work in self.disk.writes if isinstance(work, list) for name in work}
        assert not any(self.chunks.holds(name) for name in going)
        for number in range(KEYS):
            busy = any(key(number) in keys for keys, _, _ in self.jobs.values())
            if not busy and self.chunks.holds(key(number)) and not self.disk.writes:
                assert PageKey(key(number)) in self.disk.there
            if busy or self.disk.writes:
                continue
            if (there := self.disk.there.get(PageKey(key(number)))) is not None:
                np.testing.assert_array_equal(there, content(number, self.cleared))

    @precondition(lambda self: not self.jobs and not self.disk.writes)
    @rule()
    def restart(self) -> None:
        held = {number for number in range(KEYS) if self.chunks.holds(key(number))}
        self.chunks.close(60.0)
        self.chunks = self._open()
        assert {number for number in range(KEYS) if self.chunks.holds(key(number))} == held

    @invariant()
    def everything_under_way_ends(self) -> None:
        under_way = sum(not isinstance(work, list) for work in self.disk.writes) + len(self.disk.reads)
        assert self.jobs or not under_way

    @invariant()
    def rows_of_nobody_stay_as_they_were(self) -> None:
        rows = sorted(self.free)
        np.testing.assert_array_equal(self.memory[rows], self.seen[rows])

    @invariant()
    def the_disk_has_room(self) -> None:
        writing = sum(len(work[0].keys) for work in self.disk.writes if not isinstance(work, list))
        figures = self.chunks.stats()
        assert figures["used_nbytes"] == figures["chunks"] * RECORD
        assert figures["used_nbytes"] + writing * RECORD <= self.disk.budget_nbytes

    @invariant()
    def nothing_is_written_twice_at_once(self) -> None:
        writing: set[PageKey] = set()
        for work in self.disk.writes:
            if isinstance(work, list):
                writing -= {*work}  # the write was in flight at a ``clear``
                continue
            assert writing.isdisjoint(work[0].keys)
            writing |= {*work[0].keys}

    @invariant()
    def what_is_read_does_not_vanish(self) -> None:
        assert not self.disk.vanished
