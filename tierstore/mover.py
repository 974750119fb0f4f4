"""Movers: they execute transfers between tiers and report the results. They make no decisions about pages.

``Mover`` is the protocol of an object that executes the directory's commands. ``LocalMover`` copies bytes in
this process; ``ranks.Ranks`` passes the commands to other processes.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.gpu.events import NOT_YET, Arriving
from tierstore.types import Ack, Erase, Failure, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.cpu_copy_engine import CopyEngine


_GRACE_S = 0.5
"""Minimum time in seconds that each part gets to close. An idle thread exits within this time."""


class SlotBytes(Protocol):
    """A tier whose slots are in memory that the CPU can access."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return a view of the page in the slot, as flat uint8."""
        ...


class Settled(Protocol):
    """The part of ``threading.Event`` that a polling caller needs."""

    def is_set(self) -> bool:
        """Return whether the event has been set."""
        ...


class SyncMark(Protocol):
    """A mark in the queue of a record tier, after everything that was submitted before it.

    Attributes:
        done: Set once everything submitted before the mark has succeeded or failed.
        synced: Whether the writes that succeeded are durable. Valid once ``done`` is set.
        ok: Whether the erases are durable, too. Valid once ``done`` is set.
    """

    @property
    def done(self) -> Settled: ...

    @property
    def synced(self) -> bool: ...

    @property
    def ok(self) -> bool: ...


class RecordTier(Protocol):
    """A tier that stores each page as a record, which is found by the page's key. Access is asynchronous."""

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Queue pages to be stored. Never blocks. Do not change ``pages`` before the transfer's ack."""
        ...

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue pages to be read into ``out`` and verified. Never blocks.

        Do not use ``out`` before the transfer's ack.
        """
        ...

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Queue the removal of records. Never blocks.

        Erases and writes of the same key take effect in the order in which they were submitted.
        """
        ...

    def poll(self) -> list[Ack]:
        """Return the acks of transfers that have finished since the last call."""
        ...

    def sync(self, timeout_s: float) -> bool:
        """Wait until everything submitted before the call is durable or has failed.

        Returns:
            False if the wait timed out.
        """
        ...

    def begin_sync(self) -> SyncMark:
        """Add a mark to the queue, after everything submitted so far, and return it. Never blocks."""
        ...

    def give_up_waiting(self) -> None:
        """Record that a caller gave up waiting for a sync mark.

        The tier's ``state`` shows this until the tier makes progress.
        """
        ...

    @property
    def pending_erases(self) -> int:
        """Number of erased pages that a restart could bring back now."""
        ...

    @property
    def progress(self) -> object:
        """A value that changes whenever the tier has written something."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Close the tier. Return whether its threads exited within ``timeout_s`` seconds."""
        ...


class Mover(Protocol):
    """Executes the commands of a directory. Not thread-safe. Only ``close`` blocks."""

    def submit(self, command: Transfer | Erase) -> None:
        """Start a command. Commands take effect in the order in which they are submitted."""
        ...

    @property
    def polled(self) -> bool:
        """Whether ``poll`` must be called regularly.

        This is the case while work is in flight that wakes no thread when it finishes.
        """
        ...

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return the progress of copies of this layer into these HBM slots."""
        ...

    def poll(self) -> list[Ack]:
        """Return the acks of transfers that have finished since the last call."""
        ...

    def begin_sync(self) -> SyncMark | None:
        """Add a mark after everything submitted to record tiers so far, and return it.

        The result is None if this mover stores no records.
        """
        ...

    def give_up_waiting(self) -> None:
        """Record that a caller gave up waiting for a sync mark.

        The ``state`` of each record tier shows this until the tier makes progress.
        """
        ...

    @property
    def pending_erases(self) -> int:
        """Number of erased records that a restart could bring back now."""
        ...

    @property
    def progress(self) -> object:
        """A value that changes whenever a record has been written or erased."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Close all tiers and stop all threads. Return whether the threads exited in time."""
        ...


class LocalMover:
    """A mover that copies pages between the tiers of this process.

    Args:
        memory: Tiers whose slots are plain memory.
        copies: Copies pages between HBM and host memory. None if one of the two does not exist, or until an
            engine has registered its tensors.
        records: Tiers that store pages as records.
    """

    def __init__(
        self,
        memory: dict[Tier, SlotBytes],
        copies: CopyEngine | None,
        records: Mapping[Tier, RecordTier],
    ) -> None:
        self._memory = memory
        self._copies = copies
        self._records = dict(records)
        self._relays: dict[int, _Relay] = {}
        """Transfers between two record tiers, by id."""

    def attach(self, copies: CopyEngine) -> None:
        """Set the copy engine, after an engine has registered its tensors."""
        self._copies = copies

    def submit(self, command: Transfer | Erase) -> None:
        """Start a command. Never blocks."""
        if isinstance(command, Erase):
            self._records[command.tier].submit_erase(command.keys)
            return
        src, dst = self._records.get(command.src), self._records.get(command.dst)
        if src is not None and dst is not None:
            self._relays[command.id] = _Relay(command, src, dst, self._page_nbytes())
        elif dst is not None:
            memory = self._memory[command.src]
            dst.submit_write(command, [memory.view(slot) for slot in command.src_slots])
        elif src is not None:
            memory = self._memory[command.dst]
            src.submit_read(command, [memory.view(slot) for slot in command.dst_slots])
        else:
            assert self._copies is not None
            self._copies.submit(command)

    @property
    def polled(self) -> bool:
        """Whether the copy engine has work in flight that wakes no thread when it finishes."""
        return self._copies is not None and self._copies.polled

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return the progress of copies of this layer into these HBM slots.

        Only a copy engine reports progress by layer. Without one, the result is always NOT_YET.
        """
        return NOT_YET if self._copies is None else self._copies.arriving(slots, layer)

    def poll(self) -> list[Ack]:
        """Return the acks of transfers that have finished since the last call."""
        acks = [] if self._copies is None else self._copies.poll()
        for tier, records in self._records.items():
            found = records.poll()
            acks += self._relayed(tier, found) if self._relays else found
        return acks

    def begin_sync(self) -> SyncMark | None:
        """Add a mark after everything submitted to record tiers so far, and return it.

        The result is None if there are no record tiers.
        """
        marks = [records.begin_sync() for records in self._records.values()]
        return marks[0] if len(marks) == 1 else _Marks(marks) if marks else None

    def give_up_waiting(self) -> None:
        """Record that a caller gave up waiting for a sync mark."""
        for records in self._records.values():
            records.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        """Number of erased records that a restart could bring back now."""
        return sum(records.pending_erases for records in self._records.values())

    @property
    def progress(self) -> object:
        """A value that changes whenever a record has been written or erased."""
        return [records.progress for records in self._records.values()]

    def close(self, timeout_s: float) -> bool:
        """Close the copy engine and all tiers. A thread that does not exit in time is abandoned.

        Each tier gets at least half a second to close. Otherwise one stuck thread could leave the other tiers
        open and the NVMe directory locked.

        Returns:
            Whether all threads exited in time.
        """
        deadline = monotonic() + timeout_s
        ended = self._copies is None or self._copies.close(max(_GRACE_S, timeout_s))
        for records in self._records.values():
            ended &= records.close(max(_GRACE_S, deadline - monotonic()))
        return ended

    def _page_nbytes(self) -> int:
        """Return the size in bytes of a page as record tiers store it: its size in the slowest memory tier."""
        return self._memory[max(self._memory)].view(0).nbytes

    def _relayed(self, tier: Tier, acks: list[Ack]) -> list[Ack]:
        """Pass the acks of relayed reads and writes to their relays.

        Returns:
            All other acks, and the acks that the relays report for their transfers.
        """
        found: list[Ack] = []
        for ack in acks:
            relay = self._relays.get(ack.transfer_id)
            if relay is None:
                found.append(ack)
                continue
            found += relay.take(tier, ack)
            if relay.ended:
                del self._relays[ack.transfer_id]
        return found


class _Marks:
    """The sync marks of several record tiers, combined into one ``SyncMark``."""

    def __init__(self, marks: Sequence[SyncMark]) -> None:
        self._marks = marks

    @property
    def done(self) -> _Marks:
        return self

    def is_set(self) -> bool:
        return all(mark.done.is_set() for mark in self._marks)

    @property
    def synced(self) -> bool:
        return all(mark.synced for mark in self._marks)

    @property
    def ok(self) -> bool:
        return all(mark.ok for mark in self._marks)


_OF_THE_WRITER = frozenset({Failure.NO_SPACE, Failure.UNFIT, Failure.CLOSED, Failure.UNAVAILABLE})
"""Write failures that a relay passes on unchanged. Any other write failure is reported as UNAVAILABLE.

Otherwise the directory would conclude that the record that was read is unusable, and drop it.
"""


class _Relay:
    """A transfer between two record tiers.

    All pages are read into memory. The pages that could be read are then written.

    If the read of some pages is late, the other pages are written first, and the ack then reports the late
    pages. From then on, the transfer consists of the late pages. They are written when they have been read.
    """

    def __init__(self, transfer: Transfer, src: RecordTier, dst: RecordTier, page_nbytes: int) -> None:
        self._transfer = transfer
        self._dst = dst
        self._pages: list[NDArray[np.uint8]] = [np.empty(page_nbytes, np.uint8) for _ in transfer.keys]
        self._read: Ack | None = None
        """The ack of the read whose pages are being written."""
        self._waiting: Ack | None = None
        """The ack of a read of late pages that finished while other pages were being written."""
        src.submit_read(transfer, self._pages)

    @property
    def ended(self) -> bool:
        """Whether no page remains to be read or written."""
        return not self._pages

    def take(self, tier: Tier, ack: Ack) -> list[Ack]:
        """Process the ack of this relay's read or write.

        Returns:
            The acks of the whole transfer, to report to the directory.
        """
        if tier == self._transfer.dst:
            return self._written(ack)
        if self._read is not None:
            self._waiting = ack
            return []
        return self._write(ack)

    def _write(self, read: Ack) -> list[Ack]:
        """Write the pages that were read."""
        came = self._came(read)
        self._read = read
        if not came:
            return self._written(Ack(read.transfer_id, True, 0, 0))
        self._dst.submit_write(self._transfer.part(came), [self._pages[i] for i in came])
        return []

    def _came(self, read: Ack) -> list[int]:
        """Return the positions of the pages that a read has delivered."""
        if not read.ok and not read.failures:
            return []
        lost = {*(i for i, _ in read.failures), *read.late}
        return [i for i in range(len(self._pages)) if i not in lost]

    def _written(self, write: Ack) -> list[Ack]:
        read = self._read
        assert read is not None
        came = self._came(read)
        failures = dict(read.failures)
        if not read.ok and not failures:
            failures = dict.fromkeys(
                (i for i in range(len(self._pages)) if i not in read.late), Failure.IO_ERROR
            )
        refused = dict(write.failures)
        if not write.ok and not refused:
            refused = dict.fromkeys(range(len(came)), Failure.UNAVAILABLE)
        for place, why in refused.items():
            failures[came[place]] = why if why in _OF_THE_WRITER else Failure.UNAVAILABLE
        self._read = None
        self._transfer = self._transfer.part(read.late)
        self._pages = [self._pages[i] for i in read.late]
        ended = replace(
            write,
            ok=not failures,
            seconds=read.seconds + write.seconds,
            failures=tuple(sorted(failures.items())),
            late=read.late,
        )
        waiting, self._waiting = self._waiting, None
        return [ended] if waiting is None else [ended, *self._write(waiting)]
