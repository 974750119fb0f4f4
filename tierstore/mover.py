"""The mover: carries out transfers with the tiers' bytes and reports what became of them. No residency, no policy."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Protocol

from tierstore.gpu.layer_events import NOT_YET, Arriving
from tierstore.types import Ack, Erase, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from threading import Event

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.gpu.cpu_engine import CopyEngine


_GRACE_S = 0.5
"""Within this an idle thread ends for certain."""


class SlotBytes(Protocol):
    """A tier whose slots are memory."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The slot's page in place, flat uint8."""
        ...


class SyncMark(Protocol):
    """A mark in the queue of a record tier. ``done``: everything submitted before is settled. ``synced``: the writes
    that succeeded are durable then. ``ok``: the erases too.
    """

    done: Event
    synced: bool
    ok: bool


class RecordTier(Protocol):
    """A tier that keeps pages by key, behind queues."""

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Stores pages; never blocks; the views belong to the transfer until its ack."""
        ...

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Fetches and verifies pages; never blocks; the views belong to the transfer until its ack."""
        ...

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Removes records, in order with the writes around it."""
        ...

    def poll(self) -> list[Ack]:
        """Transfers that ended since the last call."""
        ...

    def sync(self, timeout_s: float) -> bool:
        """Whether everything submitted before is durable, or acked as failed, in time."""
        ...

    def begin_sync(self) -> SyncMark:
        """A mark behind everything submitted so far; never blocks."""
        ...

    def give_up_waiting(self) -> None:
        """Somebody stops waiting for a mark: the tier's state says so until it moves again."""
        ...

    @property
    def pending_erases(self) -> int:
        """Erased pages that a restart now could bring back."""
        ...

    @property
    def progress(self) -> object:
        """Differs from an earlier value if the tier has written something in between."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Ends the tier; whether its threads ended in time."""
        ...


class Mover:
    """Executes ``Transfer`` and ``Erase`` in the order given. ``memory``: the tiers whose slots are plain memory."""

    def __init__(
        self, memory: dict[Tier, SlotBytes], copies: CopyEngine | None, records: RecordTier | None
    ) -> None:
        self._memory = memory
        self._copies = copies
        self._records = records

    def attach(self, copies: CopyEngine) -> None:
        """The copy engine for HBM slots that an engine registered after open."""
        self._copies = copies

    def submit(self, command: Transfer | Erase) -> None:
        """Starts one command; never blocks."""
        if isinstance(command, Erase):
            assert self._records is not None
            self._records.submit_erase(command.keys)
        elif command.dst == Tier.NVME:
            assert self._records is not None
            memory = self._memory[command.src]
            self._records.submit_write(command, [memory.view(slot) for slot in command.src_slots])
        elif command.src == Tier.NVME:
            assert self._records is not None
            memory = self._memory[command.dst]
            self._records.submit_read(command, [memory.view(slot) for slot in command.dst_slots])
        else:
            assert self._copies is not None
            self._copies.submit(command)

    @property
    def polled(self) -> bool:
        """Whether something is on its way whose end wakes nobody."""
        return self._copies is not None and self._copies.polled

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """How far copies of this layer into these HBM slots are; other ways into HBM tell nothing until they end."""
        return NOT_YET if self._copies is None else self._copies.arriving(slots, layer)

    def poll(self) -> list[Ack]:
        """Transfers that ended since the last call."""
        acks = [] if self._copies is None else self._copies.poll()
        return acks if self._records is None else acks + self._records.poll()

    def begin_sync(self) -> SyncMark | None:
        """A mark behind all records submitted so far; None: there is no tier that keeps any."""
        return None if self._records is None else self._records.begin_sync()

    def give_up_waiting(self) -> None:
        """Somebody stops waiting for records to be written."""
        if self._records is not None:
            self._records.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        """Erased records that a restart now could bring back."""
        return 0 if self._records is None else self._records.pending_erases

    @property
    def progress(self) -> object:
        """Differs from an earlier value if a record was written or erased in between."""
        return None if self._records is None else self._records.progress

    def close(self, timeout_s: float) -> bool:
        """Ends copy engine and tiers; whether all threads ended in time. A stuck thread is left behind.

        Each gets a moment even when the time is up: one stuck thread must not keep the directory locked.
        """
        deadline = monotonic() + timeout_s
        ended = self._copies is None or self._copies.close(max(_GRACE_S, timeout_s))
        if self._records is not None:
            ended &= self._records.close(max(_GRACE_S, deadline - monotonic()))
        return ended
