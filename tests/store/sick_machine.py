"""The store's state machine with a disk that sometimes hangs: reads are reported as late and end much later."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.store.machine import DIRECT, HOST, UP, Shape, StoreMachine, sequences
from tierstore.types import LeaseState, PageKey, Tier


class SickMachine(StoreMachine):
    """The store's state machine, with reads that are late.

    A late page counts as a miss. Its slot is not reused until the read ends. Its record is kept, as are the records of
    pages whose reads were not attempted.
    """

    shapes: ClassVar[list[Shape]] = [(HOST, 200), (1, 200), (None, 200)]

    @rule(keys=sequences, late=st.sets(st.integers(0, 2), min_size=1))
    def pages_are_asked_for_and_late(self, keys: list[PageKey], late: set[int]) -> None:
        tables = self.running.directory.residency.tables
        self.write(keys)
        self.running.store.demote(keys, Tier.NVME)
        self.calm()
        up = UP if Tier.HOST in tables else DIRECT[1]
        self.stall(up)
        stored = {key for key in keys if tables[Tier.NVME].ready(key)}
        self.acquire(keys, None)
        if not self.running.records.tell_late(up, late):
            return
        self.running.store.poll()
        assert all(tables[Tier.NVME].ready(key) for key in stored), (
            "a record whose read was not attempted was dropped"
        )
        if Tier.HOST not in tables:  # no other page is in flight to this lease
            state = self.held[-1].lease.wait(0.0)
            assert state is not LeaseState.PENDING, "a lease still waits for a late page"

    @rule(late=st.sets(st.integers(0, 2), min_size=1))
    def the_disk_is_late(self, late: set[int]) -> None:
        for lane in (UP, DIRECT[1]):
            self.running.records.tell_late(lane, late)
        self.running.store.poll()
