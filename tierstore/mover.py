"""The mover: executes transfers between the tiers and reports their results. It knows no residency and no policy.

``Mover`` is the protocol that receives a directory's decisions. ``LocalMover`` moves the bytes of this process;
``ranks.Ranks`` has other processes move theirs.
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
"""Longest time until an idle thread has ended."""


class SlotBytes(Protocol):
    """A tier whose slots are memory."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return the slot's page in place, as flat uint8."""
        ...


class Settled(Protocol):
    """The part of ``threading.Event`` that a polling caller needs."""

    def is_set(self) -> bool:
        """Return whether it has happened."""
        ...


class SyncMark(Protocol):
    """A mark in the queue of a record tier.

    Attributes:
        done: Everything submitted before it is settled.
        synced: Then: the writes that succeeded are durable.
        ok: Then: the erases are durable, too.
    """

    @property
    def done(self) -> Settled: ...

    @property
    def synced(self) -> bool: ...

    @property
    def ok(self) -> bool: ...


class RecordTier(Protocol):
    """A tier that keeps pages by key, behind queues."""

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Store pages. Never blocks; the views belong to the transfer until its ack."""
        ...

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Fetch and verify pages. Never blocks; the views belong to the transfer until its ack."""
        ...

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Remove records, ordered with the writes around the call."""
        ...

    def poll(self) -> list[Ack]:
        """Return the transfers that ended since the last call."""
        ...

    def sync(self, timeout_s: float) -> bool:
        """Return whether everything submitted before became durable, or was acked as failed, in time."""
        ...

    def begin_sync(self) -> SyncMark:
        """Mark the queue behind everything submitted so far. Never blocks."""
        ...

    def give_up_waiting(self) -> None:
        """Report that a caller stopped waiting for a mark: the tier's state shows it until the tier makes progress."""
        ...

    @property
    def pending_erases(self) -> int:
        """Erased pages that a restart now could bring back."""
        ...

    @property
    def progress(self) -> object:
        """A value that changes when the tier has written something."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Close the tier. Returns whether its threads ended in time."""
        ...


class Mover(Protocol):
    """Executes a directory's decisions. Not thread-safe; only ``close`` blocks."""

    def submit(self, command: Transfer | Erase) -> None:
        """Start a command. Commands take effect in the order of submission."""
        ...

    @property
    def polled(self) -> bool:
        """Whether something in flight ends without waking anybody, so ``poll`` must be called to notice."""
        ...

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return how far copies of this layer into these HBM slots have come."""
        ...

    def poll(self) -> list[Ack]:
        """Return the transfers that ended since the last call."""
        ...

    def begin_sync(self) -> SyncMark | None:
        """Return a mark behind all records submitted so far, or None if no records are kept here."""
        ...

    def give_up_waiting(self) -> None:
        """Report that a caller stopped waiting for a mark.

        The record tiers' state shows it until they make progress.
        """
        ...

    @property
    def pending_erases(self) -> int:
        """Number of erased records that a restart now could bring back."""
        ...

    @property
    def progress(self) -> object:
        """A value that changes when a record was written or erased."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End all threads and tiers. Returns whether they ended in time."""
        ...


class LocalMover:
    """Moves the bytes of this process's tiers.

    Args:
        memory: Tiers whose slots are plain memory.
        records: Tiers that keep pages by key.
        copies: Moves pages between HBM and host memory; None until an engine registers its own HBM.
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
        """Use this copy engine, for HBM slots that an engine registered after opening."""
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
        """Whether the copy engine has something in flight that ends without waking anybody."""
        return self._copies is not None and self._copies.polled

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return how far copies of this layer into these HBM slots have come.

        Other routes into HBM report only their end.
        """
        return NOT_YET if self._copies is None else self._copies.arriving(slots, layer)

    def poll(self) -> list[Ack]:
        """Return the transfers that ended since the last call."""
        acks = [] if self._copies is None else self._copies.poll()
        for tier, records in self._records.items():
            found = records.poll()
            acks += self._relayed(tier, found) if self._relays else found
        return acks

    def begin_sync(self) -> SyncMark | None:
        """Return a mark behind all records submitted so far, or None if no tier keeps records."""
        marks = [records.begin_sync() for records in self._records.values()]
        return marks[0] if len(marks) == 1 else _Marks(marks) if marks else None

    def give_up_waiting(self) -> None:
        """Report that a caller stopped waiting for records to be written."""
        for records in self._records.values():
            records.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        """Number of erased records that a restart now could bring back."""
        return sum(records.pending_erases for records in self._records.values())

    @property
    def progress(self) -> object:
        """A value that changes when a record was written or erased."""
        return [records.progress for records in self._records.values()]

    def close(self, timeout_s: float) -> bool:
        """End the copy engine and the tiers. Returns whether all threads ended in time; a stuck thread is left behind.

        Each gets a moment even when the time is up, so that one stuck thread does not keep the directory locked.
        """
        deadline = monotonic() + timeout_s
        ended = self._copies is None or self._copies.close(max(_GRACE_S, timeout_s))
        for records in self._records.values():
            ended &= records.close(max(_GRACE_S, deadline - monotonic()))
        return ended

    def _page_nbytes(self) -> int:
        """Return the page size of record tiers: that of the slowest memory tier, from which pages are spilled."""
        return self._memory[max(self._memory)].view(0).nbytes

    def _relayed(self, tier: Tier, acks: list[Ack]) -> list[Ack]:
        """Remove the acks that are steps of relays. Returns the other acks, and those of relays that ended."""
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
    """Several record tiers' marks, as one."""

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
"""Failures of a write that the directory does not count as failures of the record that was read."""


class _Relay:
    """A transfer from one record tier to another through memory: pages are read, and those that arrive are written.

    Pages whose read is late are reported as late once the others are written. They form the transfer from then on, and
    are written when their read has ended.
    """

    def __init__(self, transfer: Transfer, src: RecordTier, dst: RecordTier, page_nbytes: int) -> None:
        self._transfer = transfer
        self._dst = dst
        self._pages: list[NDArray[np.uint8]] = [np.empty(page_nbytes, np.uint8) for _ in transfer.keys]
        self._read: Ack | None = None
        """The read whose pages are being written."""
        self._waiting: Ack | None = None
        """A read of late pages that ended while the others were being written."""
        src.submit_read(transfer, self._pages)

    @property
    def ended(self) -> bool:
        """Whether no page is left to be read or written."""
        return not self._pages

    def take(self, tier: Tier, ack: Ack) -> list[Ack]:
        """Process the end of a read or a write. Returns what the directory must know about the whole transfer."""
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
        """Return the positions of the pages that a read delivered."""
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
