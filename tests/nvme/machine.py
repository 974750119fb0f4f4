"""The tier against a dict: writes, erases, refusing disks, reopens, and records changed on disk, in any order.

Run as a program it is one derandomised search without shrinking, which exits non-zero at the first difference: so it
is run against copies of the package with a bug planted.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.nvme.rig import (
    FINGERPRINT,
    PATIENCE_S,
    Rig,
    data_file,
    data_file_is_read_only,
    key,
    page,
    wait_until_writable,
)
from tierstore import codec
from tierstore.types import Failure, PageKey

PAGE = 4096
CAPACITY = 1 << 20  # three pages a batch
NUMBERS = 14

numbers = st.integers(0, NUMBERS - 1)
some = st.lists(numbers, min_size=1, max_size=8, unique=True)
versions = st.integers(0, 2)


def parent_of(number: int) -> PageKey | None:
    return key(number - 1) if number % 3 else None


class TierMachine(RuleBasedStateMachine):
    """``model``: version of every page that is there; ``damaged``: those whose bytes on disk were changed."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.model: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.refusals = 0

    @initialize()
    def open(self) -> None:
        self.rig = Rig(self.home, capacity=CAPACITY, page_nbytes=PAGE)

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.home)

    def submit(self, these: list[int], version: int) -> int:
        transfer = self.rig.transfer([key(n) for n in these], [parent_of(n) for n in these])
        self.rig.tier.submit_write(transfer, [page(n, version, PAGE) for n in these])
        return transfer.id

    def written(self, these: list[int], version: int) -> None:
        self.model.update(dict.fromkeys(these, version))
        self.damaged.difference_update(these)

    def erased(self, these: list[int]) -> None:
        for number in these:
            self.model.pop(number, None)
            self.damaged.discard(number)

    @rule(these=some, version=versions)
    def write(self, these: list[int], version: int) -> None:
        ack = self.rig.ack(self.submit(these, version))
        assert (ack.ok, ack.num_ready, ack.failures) == (True, len(these), ())
        self.written(these, version)
        self.check(these)

    @rule(these=some)
    def erase(self, these: list[int]) -> None:
        self.rig.erase(these)
        assert self.rig.tier.sync(PATIENCE_S)
        self.erased(these)
        self.check(these)

    @rule(first=some, gone=some, second=some, late=some, version=versions)
    def write_and_erase_in_one_go(
        self, first: list[int], gone: list[int], second: list[int], late: list[int], version: int
    ) -> None:
        writes = [self.submit(first, version)]
        self.rig.erase(gone)
        writes.append(self.submit(second, version + 1))
        self.rig.erase(late)
        assert all(self.rig.ack(write).ok for write in writes)
        assert self.rig.tier.sync(PATIENCE_S)
        self.written(first, version)
        self.erased(gone)
        self.written(second, version + 1)
        self.erased(late)
        self.check(list(range(NUMBERS)))

    @precondition(lambda self: self.refusals < 1)
    @rule(these=some, gone=some, version=versions)
    def write_and_erase_on_a_refusing_disk(self, these: list[int], gone: list[int], version: int) -> None:
        self.refusals += 1
        with data_file_is_read_only(self.home):
            ack = self.rig.ack(self.submit(these, version))
            assert ack.failures == tuple((index, Failure.IO_ERROR) for index in range(len(these)))
            self.rig.erase(gone)
            assert not self.rig.tier.sync(PATIENCE_S)
        wait_until_writable(self.rig)
        assert self.rig.tier.sync(PATIENCE_S)
        self.erased(these)
        self.erased(gone)
        self.check(list(range(NUMBERS)))

    @rule(these=some)
    def read(self, these: list[int]) -> None:
        self.check(these)

    @rule()
    def reopen(self) -> None:
        self.rig.close()
        self.open()
        records = {record[0]: record[1:] for record in self.rig.tier.records()}
        assert records == {key(n): (parent_of(n), self.rig.tier.record_nbytes) for n in self.model}
        self.check(list(range(NUMBERS)))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), position=st.integers(-codec.HEAD_NBYTES, PAGE - 1), bit=st.integers(0, 7))
    def flip_a_bit(self, data: st.DataObject, position: int, bit: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        record = self.record(number, FINGERPRINT)
        record[codec.HEAD_NBYTES + position] ^= 1 << bit
        self.replace(number, record)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), other=numbers, version=versions)
    def put_another_record_in_its_place(self, data: st.DataObject, other: int, version: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        if other != number:
            self.replace(number, self.record(other, FINGERPRINT, version))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), version=versions)
    def put_another_models_record_in_its_place(self, data: st.DataObject, version: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.replace(number, self.record(number, "cd34", version))

    def record(
        self, number: int, fingerprint: str, version: int | None = None
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        record = np.empty(codec.record_nbytes(PAGE), dtype=np.uint8)
        codec.encode(
            page(number, self.model.get(number, 0) if version is None else version, PAGE),
            record,
            fingerprint=codec.fingerprint_digest(fingerprint),
            key=key(number),
            parent=parent_of(number),
        )
        return record

    def replace(self, number: int, record: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Overwrite the record of ``number`` in data.mdb, wherever a copy of it is."""
        if number in self.damaged:
            return
        intact = self.record(number, FINGERPRINT).tobytes()
        raw = data_file(self.home).read_bytes()
        assert intact in raw
        with data_file(self.home).open("r+b") as file:
            position = raw.find(intact)
            while position >= 0:
                file.seek(position)
                file.write(record.tobytes())
                position = raw.find(intact, position + 1)
        self.damaged.add(number)
        self.check([number])

    def check(self, these: list[int]) -> None:
        transfer = self.rig.transfer([key(n) for n in these])
        out = [np.zeros(PAGE, dtype=np.uint8) for _ in these]
        self.rig.tier.submit_read(transfer, out)
        failures = dict(self.rig.ack(transfer.id).failures)
        for index, number in enumerate(these):
            if number not in self.model:
                assert failures.get(index) is Failure.NOT_FOUND, (number, failures.get(index))
            elif number in self.damaged:
                assert failures.get(index) is Failure.INTEGRITY, (number, failures.get(index))
            else:
                assert index not in failures, (number, failures[index])
                assert np.array_equal(out[index], page(number, self.model[number], PAGE)), number


def search(examples: int, steps: int, *, shrink: bool) -> None:
    """Run the machine; raises what it finds."""
    phases = tuple(Phase) if shrink else (Phase.generate,)
    run_state_machine_as_test(
        TierMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


if __name__ == "__main__":
    search(int(sys.argv[1]), int(sys.argv[2]), shrink=False)
