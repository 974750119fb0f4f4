"""State machines that compare the NVMe tier with a dict.

They write, erase, reopen, simulate kills and disks that refuse writes, and change records on disk, in random order.
There are machines for pages in LMDB and in extent files; with extent files, the system calls are checked as well.

Run as a program, this module does one derandomised search without shrinking, and exits non-zero at the first
difference. Tests run it this way on copies of the package with a planted bug.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
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
from numpy.typing import NDArray

from tests.nvme.forgery import Record, overwrite, parent_of, sealed
from tests.nvme.rig import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    Rig,
    catalogue_of,
    data_file_is_read_only,
    key,
    page,
    wait_until_writable,
)
from tests.nvme.watch import Watch, watching
from tests.support import lanes
from tierstore.codecs import encoder
from tierstore.codecs.host_format import HostFormat
from tierstore.nvme import record_format
from tierstore.nvme.catalogue_entry import slot_blocks, unpack
from tierstore.nvme.extent_allocator import Place
from tierstore.nvme.extents import ExtentRecords
from tierstore.page import PageLayout
from tierstore.types import Failure

NUMBERS = 14

numbers = st.integers(0, NUMBERS - 1)
some = st.lists(numbers, min_size=1, max_size=8, unique=True)
versions = st.integers(0, 2)


class TierMachine(RuleBasedStateMachine):
    """Compares a tier with ``model``, which maps every page to its version.

    ``damaged`` contains the pages whose records were changed on disk.
    """

    payload = "lmdb"
    page_nbytes, capacity = 4096, 1 << 20  # a batch has three pages
    layout: PageLayout | None = None
    on_disk, held = "none", "none"

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.home = self.root / "home"
        self.watch = Watch(self.home, self.named)
        self.patched = ExitStack()
        self.patched.enter_context(watching(self.watch))
        self.model: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.refusals = 0

    @initialize()
    def open(self) -> None:
        self.rig = Rig(
            self.home,
            capacity=self.capacity,
            page_nbytes=self.page_nbytes,
            payload=self.payload,
            codec=self.on_disk,
            layout=self.layout,
            held=self.held,
        )

    def page(self, number: int, version: int) -> NDArray[np.uint8]:
        return page(number, version, self.page_nbytes)

    def stored(self, number: int, version: int) -> NDArray[np.uint8]:
        """Return the payload of the page's record."""
        return self.page(number, version)

    def blank(self) -> NDArray[np.uint8]:
        return np.zeros(self.page_nbytes, dtype=np.uint8)

    def teardown(self) -> None:
        self.rig.close()
        self.patched.close()
        shutil.rmtree(self.root)

    def named(self) -> set[Place]:
        """Return the slots that the committed catalogue names."""
        catalogue = self.rig.tier._catalogue
        with catalogue._env.begin() as txn:
            entries = [unpack(k, raw) for k, raw in txn.cursor(db=catalogue._env.catalogue)]
        return {
            Place(entry.extent, entry.block, slot_blocks(entry.nbytes)) for entry in entries if entry.extent
        }

    def submit(self, these: list[int], version: int) -> int:
        transfer = self.rig.transfer([key(n) for n in these], [parent_of(n) for n in these])
        self.rig.tier.submit_write(transfer, [self.page(n, version) for n in these])
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
        assert not self.watch.dirty, "a page was acknowledged before it was durable"
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
    @rule(these=some, gone=some, version=versions, there_before=st.booleans(), killed=st.booleans())
    def write_and_erase_on_a_refusing_disk(
        self, these: list[int], gone: list[int], version: int, there_before: bool, killed: bool
    ) -> None:
        """Check that a tombstone makes a synced erase durable, even if the process is killed after the sync."""
        if there_before:
            self.write(these, version + 1)
        self.refusals += 1
        with data_file_is_read_only(self.home):
            ack = self.rig.ack(self.submit(these, version))
            assert ack.failures == tuple((index, Failure.IO_ERROR) for index in range(len(these)))
            self.rig.erase(gone)
            assert self.rig.tier.sync(PATIENCE_S)
            self.erased(these)
            self.erased(gone)
            if killed:
                self.watch.snapshot_in(0, self.root / "left")
                self.watch._event()
        if killed:
            self.go_on_with_what_is_left()
            self.check_records()
        wait_until_writable(self.rig)
        assert self.rig.tier.sync(PATIENCE_S)
        self.check(list(range(NUMBERS)))

    @rule(these=some)
    def read(self, these: list[int]) -> None:
        self.check(these)

    @rule()
    def reopen(self) -> None:
        self.rig.close()
        self.open()
        self.check_records()

    @rule()
    def killed(self) -> None:
        """Simulate a kill: continue with a copy of what is on disk now."""
        self.watch.snapshot_in(0, self.root / "left")
        self.watch._event()
        self.go_on_with_what_is_left()
        self.check_records()

    @precondition(lambda self: self.payload == "extents")
    @rule(these=some, gone=some, version=versions, events=st.integers(0, 5))
    def killed_while_writing(self, these: list[int], gone: list[int], version: int, events: int) -> None:
        self.watch.snapshot_in(events, self.root / "left")
        self.rig.erase(gone)
        assert self.rig.ack(self.submit(these, version)).ok
        assert self.rig.tier.sync(PATIENCE_S)
        if self.watch.no_snapshot():
            self.erased(gone)
            self.written(these, version)
            return
        self.go_on_with_what_is_left()
        left = {record[0] for record in self.rig.tier.records()}
        for number in range(NUMBERS):
            if key(number) in left:
                assert number in self.model or number in these
                self.find_version(number, {self.model.get(number, version), version})
            else:
                assert number not in self.model or number in gone
                self.erased([number])
        self.check(list(range(NUMBERS)))

    def find_version(self, number: int, possible: set[int]) -> None:
        transfer, out = self.rig.submit_read([number])
        failures = self.rig.ack(transfer).failures
        if number in self.damaged and failures:
            assert failures == ((0, Failure.INTEGRITY),)
            return
        assert not failures, (number, failures)
        (found,) = (v for v in possible if np.array_equal(out[0], self.page(number, v)))
        self.written([number], found)

    def go_on_with_what_is_left(self) -> None:
        self.rig.close()
        shutil.rmtree(self.home)
        (self.root / "left").rename(self.home)
        self.watch.dirty.clear()
        self.open()

    def check_records(self) -> None:
        records = {record[0]: record[1:] for record in self.rig.tier.records()}
        assert records == {key(n): (parent_of(n), self.cost(n, v)) for n, v in self.model.items()}
        self.check(list(range(NUMBERS)))

    def cost(self, number: int, version: int) -> int:
        return self.rig.tier._sizing.cost(self.stored(number, version).nbytes)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip_a_bit(self, data: st.DataObject, position: float, bit: int) -> None:
        def flipped(record: Record, head: record_format.Head) -> Record:
            record[int(position * record.nbytes)] ^= 1 << bit
            return record

        self.replace(data.draw(st.sampled_from(sorted(self.model))), flipped)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), other=numbers, version=versions)
    def put_another_record_in_its_place(self, data: st.DataObject, other: int, version: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        if other != number:
            self.replace(
                number,
                lambda _, head: self.sealed(other, FINGERPRINT, version, head.generation),
            )

    @precondition(lambda self: self.model)
    @rule(data=st.data(), version=versions)
    def put_another_models_record_in_its_place(self, data: st.DataObject, version: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.replace(number, lambda _, head: self.sealed(number, "cd34", version, head.generation))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), version=versions)
    def put_another_writing_of_its_key_in_its_place(self, data: st.DataObject, version: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.replace(
            number,
            lambda _, head: self.sealed(number, FINGERPRINT, version, head.generation + 1),
        )

    def sealed(self, number: int, fingerprint: str, version: int, generation: int) -> Record:
        payload = self.stored(number, version)
        return sealed(number, fingerprint, payload, generation, raw_nbytes=self.page_nbytes)

    def replace(self, number: int, changed: Callable[[Record, record_format.Head], Record]) -> None:
        """Overwrite every copy on disk of the record of ``number``."""
        if number in self.damaged:
            return
        payload = self.stored(number, self.model[number])
        assert overwrite(self.home, key(number), payload, changed)
        self.damaged.add(number)
        self.check([number])

    def check(self, these: list[int]) -> None:
        transfer = self.rig.transfer([key(n) for n in these])
        out = [self.blank() for _ in these]
        self.rig.tier.submit_read(transfer, out)
        failures = dict(self.rig.ack(transfer.id).failures)
        self.check_slots()
        for index, number in enumerate(these):
            if number not in self.model:
                assert failures.get(index) is Failure.NOT_FOUND, (number, failures.get(index))
            elif number in self.damaged:
                assert failures.get(index) is Failure.INTEGRITY, (number, failures.get(index))
            else:
                assert index not in failures, (number, failures[index])
                assert np.array_equal(out[index], self.page(number, self.model[number])), number

    def check_slots(self) -> None:
        """Assert that every slot of the extent files is either free or named by an entry."""
        records = catalogue_of(self.rig.tier)._records
        if isinstance(records, ExtentRecords):
            slots = records._slots
            used = sum(place.blocks for place in self.named())
            assert slots.total - slots.num_free == used, "a slot is neither free nor in use"


class ExtentMachine(TierMachine):
    """``TierMachine`` with pages in extent files."""

    payload = "extents"


class EncodedMachine(TierMachine):
    """A ``TierMachine`` with the codec ``exp``. Two pages in three can be encoded, to different lengths."""

    page_nbytes, capacity = 32 << 10, 3 << 20
    layout = LAYOUT
    on_disk = "exp"

    def page(self, number: int, version: int) -> NDArray[np.uint8]:
        if number % 3 == 2:
            return super().page(number, version)
        drawn = np.random.default_rng([number, version]).standard_normal(
            self.page_nbytes // 2, dtype=np.float32
        )
        drawn *= np.float32(10.0) ** (drawn * (number % 3))
        return (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)

    def stored(self, number: int, version: int) -> NDArray[np.uint8]:
        whole, out = self.page(number, version), self.blank()
        exp = encoder("exp", LAYOUT)
        length = None if exp is None else exp.encode(whole, out)
        return whole if length is None else out[:length]


class EncodedExtentMachine(EncodedMachine):
    """``EncodedMachine`` with pages in extent files."""

    payload = "extents"


class HeldMachine(TierMachine):
    """A ``TierMachine`` whose pages are encoded as int8, both in memory and on disk."""

    page_nbytes, capacity = 32 << 10, 3 << 20
    layout = LAYOUT
    held = "int8"
    form = HostFormat.of("int8", LAYOUT)

    def page(self, number: int, version: int) -> NDArray[np.uint8]:
        view = self.blank()
        view[: self.form.payload_nbytes] = page(number, version, self.form.payload_nbytes)
        return view

    def stored(self, number: int, version: int) -> NDArray[np.uint8]:
        return self.page(number, version)[: self.form.payload_nbytes]

    def blank(self) -> NDArray[np.uint8]:
        return np.zeros(self.form.view_nbytes, dtype=np.uint8)


class HeldExtentMachine(HeldMachine):
    """``HeldMachine`` with pages in extent files."""

    payload = "extents"


MACHINES = {
    "lmdb held": HeldMachine,
    "extents held": HeldExtentMachine,
    "lmdb": TierMachine,
    "extents": ExtentMachine,
    "lmdb encoded": EncodedMachine,
    "extents encoded": EncodedExtentMachine,
}


def search(payload: str, examples: int, steps: int, *, shrink: bool) -> None:
    """Run the state machine ``MACHINES[payload]``. Raises the first error that it finds."""
    phases = tuple(Phase) if shrink else (Phase.generate,)
    run_state_machine_as_test(
        MACHINES[payload],
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=lanes.SEED is None,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


if __name__ == "__main__":
    search(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), shrink=False)
