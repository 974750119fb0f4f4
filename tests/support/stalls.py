"""Gates in front of the real copy engine and a real tier. Tests choose which transfers are held, fail or are lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore.gpu.cpu_copy_engine import CopyEngine
from tierstore.gpu.events import Arriving
from tierstore.mover import RecordTier, SlotBytes, SyncMark
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer

Lane = tuple[Tier, Tier]

OUT: Lane = (Tier.HBM, Tier.HOST)
IN: Lane = (Tier.HOST, Tier.HBM)
DOWN: Lane = (Tier.HOST, Tier.NVME)
UP: Lane = (Tier.NVME, Tier.HOST)


class Begin(Protocol):
    """Starts a part of a transfer in the real engine or tier.

    ``good`` and ``broken`` are positions of pages in the submitted transfer. Garbage is written for broken pages.
    """

    def __call__(self, part: Transfer, good: tuple[int, ...], broken: tuple[int, ...]) -> None: ...


class Held(NamedTuple):
    """A transfer that waits at the gate. ``places`` are the positions of its pages in the submitted transfer."""

    transfer: Transfer
    places: tuple[int, ...]
    begin: Begin


class Gate:
    """FIFO queues of transfers, one per lane, that is, per pair of source and destination.

    ``hold`` stops a lane, and ``let_go`` lets some of its transfers pass. A transfer that passes is executed by the
    real engine or tier. Only delays and failures are simulated.
    """

    def __init__(self) -> None:
        self.holding: set[Lane] = set()
        self.losing: set[Lane] = set()
        """Lanes in which transfers that start or end are executed but not acknowledged."""
        self.late: set[Lane] = set()
        """Lanes whose transfers are executed but only acknowledged after ``deliver``."""
        self.failing: dict[Lane, list[frozenset[int]]] = {}
        """For each lane, the positions of the pages that fail in each of its next transfers."""
        self._held: dict[Lane, deque[Held]] = {}
        self._begun: dict[int, tuple[Transfer, tuple[int, ...], frozenset[int]]] = {}
        self._lost: set[int] = set()
        """Transfers that started in a losing lane. Their acks are lost even if the lane is no longer in ``losing``."""
        self._acks: list[Ack] = []
        self._late_acks: list[Ack] = []
        self._lock = Lock()
        self.num_failed = 0
        """Number of pages that failed because of ``fail_next``."""
        self.num_lost = 0
        """Number of acks that were lost."""

    def hold(self, *lanes: Lane) -> None:
        self.holding.update(lanes)

    def waiting(self, lane: Lane) -> int:
        """Return the number of transfers that are waiting at the gate."""
        return len(self._held.get(lane, ()))

    def let_go(self, lane: Lane, number: int | None = None) -> None:
        """Start the first ``number`` held transfers of a lane, or all of them if ``number`` is None."""
        held = self._held.get(lane, deque())
        for _ in range(len(held) if number is None else min(number, len(held))):
            self._start(held.popleft())

    def tell_late(self, lane: Lane, pages: Set[int]) -> bool:
        """Send an ack for the first held transfer of a lane: ``pages`` are late, and the others were not attempted.

        The late pages stay at the gate. Return False if there is no held transfer with one of these pages.
        """
        held = self._held.get(lane)
        late = () if not held else tuple(i for i in range(len(held[0].transfer.keys)) if i in pages)
        if not held or not late:
            return False
        transfer, places, begin = held[0]
        untried = [(i, Failure.UNAVAILABLE) for i in range(len(places)) if i not in late]
        held[0] = Held(_part(transfer, late), tuple(places[i] for i in late), begin)
        with self._lock:
            self._acks.append(Ack(transfer.id, False, 0, 0, failures=tuple(untried), late=late))
        return True

    def overtake(self, lane: Lane) -> None:
        """Move the first held transfer of a lane to the end, as may happen when several threads read."""
        self._held.get(lane, deque()).rotate(-1)

    def deliver(self) -> None:
        """Deliver all late acks. From now on, no ack is late."""
        self.late.clear()
        with self._lock:
            acks, self._late_acks = self._late_acks + self._acks, []
            self._acks = sorted(acks, key=lambda ack: not ack.late)  # acks that report late pages come first

    def open(self) -> None:
        """Let all transfers pass. From now on, no transfer is held, and no ack is late, failed or lost."""
        self.deliver()
        self.holding.clear()
        self.losing.clear()
        self.failing.clear()
        for lane in list(self._held):
            self.let_go(lane)

    def fail_next(self, lane: Lane, *pages: int) -> None:
        """Make these pages fail in the next transfer of the lane that starts. ``pages`` are positions."""
        self.failing.setdefault(lane, []).append(frozenset(pages))

    def settle(self) -> None:
        """Wait until all transfers that have passed the gate have ended."""
        deadline = monotonic() + 60.0
        while self.running:
            assert monotonic() < deadline, "a transfer that passed the gate has not ended"
            self._collect()
            sleep(0.0002)

    @property
    def running(self) -> int:
        """Return the number of transfers that have passed the gate and have not ended."""
        with self._lock:
            return len(self._begun)

    def _enter(self, transfer: Transfer, begin: Begin) -> None:
        lane = (transfer.src, transfer.dst)
        held = Held(transfer, tuple(range(len(transfer.keys))), begin)
        if lane in self.holding or self._held.get(lane):
            self._held.setdefault(lane, deque()).append(held)
        else:
            self._start(held)

    def _start(self, held: Held) -> None:
        transfer, places, begin = held
        broken = self._next_failure((transfer.src, transfer.dst), len(places))
        good = tuple(i for i in range(len(places)) if i not in broken)
        self._spoil(transfer, broken)
        with self._lock:
            self._begun[transfer.id] = (transfer, good, broken)
            if (transfer.src, transfer.dst) in self.losing:
                self._lost.add(transfer.id)
        begin(_part(transfer, good), tuple(places[i] for i in good), tuple(places[i] for i in broken))
        if not good:
            self._ended([Ack(transfer.id, True, 0, 0)])

    def _next_failure(self, lane: Lane, pages: int) -> frozenset[int]:
        planned = self.failing.get(lane)
        return planned.pop(0) & frozenset(range(pages)) if planned else frozenset()

    def _ended(self, acks: Sequence[Ack]) -> None:
        with self._lock:
            for ack in acks:
                transfer, good, broken = self._begun.pop(ack.transfer_id)
                if ack.late:
                    rest = tuple(range(len(ack.late)))
                    self._begun[ack.transfer_id] = (transfer, rest, frozenset())
                lane = (transfer.src, transfer.dst)
                if lane in self.losing or ack.transfer_id in self._lost:
                    self.num_lost += 1
                    continue
                self.num_failed += len(broken)
                failures = [(good[i], why) for i, why in ack.failures]
                failures += [(i, Failure.IO_ERROR) for i in broken]
                late = tuple(good[i] for i in ack.late)
                whole = replace(
                    ack, ok=not failures and not late, failures=tuple(sorted(failures)), late=late
                )
                (self._late_acks if lane in self.late else self._acks).append(whole)

    def _take(self) -> list[Ack]:
        self._collect()
        with self._lock:
            acks, self._acks = self._acks, []
        return acks

    def _spoil(self, transfer: Transfer, pages: frozenset[int]) -> None:
        """Write garbage to the destinations of these pages, as a failed copy may do."""

    def _collect(self) -> None:
        raise NotImplementedError


class GatedCopies(Gate):
    """A copy engine behind a gate. Each of its two directions is a lane.

    ``memory`` contains the slots of the memory tiers. Failed copies write garbage into these slots.
    """

    def __init__(self, inner: CopyEngine, memory: Mapping[Tier, SlotBytes]) -> None:
        super().__init__()
        self.inner = inner
        self._memory = memory

    @property
    def polled(self) -> bool:
        return self.inner.polled

    def _spoil(self, transfer: Transfer, pages: frozenset[int]) -> None:
        for page in pages if transfer.dst in self._memory else ():
            self._memory[transfer.dst].view(transfer.dst_slots[page]).fill(0xEE)

    def submit(self, transfer: Transfer) -> None:
        def begin(part: Transfer, good: tuple[int, ...], broken: tuple[int, ...]) -> None:
            if good:
                self.inner.submit(part)

        self._enter(transfer, begin)

    def poll(self) -> list[Ack]:
        return self._take()

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        return self.inner.arriving(slots, layer)

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)

    def _collect(self) -> None:
        self._ended(self.inner.poll())


class GatedRecords(Gate):
    """A tier of records behind a gate. A failed read leaves garbage in its slot, as on a real disk."""

    def __init__(self, inner: RecordTier) -> None:
        super().__init__()
        self.inner = inner

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        def begin(part: Transfer, good: tuple[int, ...], broken: tuple[int, ...]) -> None:
            if good:
                self.inner.submit_write(part, [pages[i] for i in good])

        self._enter(transfer, begin)

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        def begin(part: Transfer, good: tuple[int, ...], broken: tuple[int, ...]) -> None:
            for i in broken:
                out[i].fill(0xEE)
            if good:
                self.inner.submit_read(part, [out[i] for i in good])

        self._enter(transfer, begin)

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        self.inner.submit_erase(keys)

    def poll(self) -> list[Ack]:
        return self._take()

    def sync(self, timeout_s: float) -> bool:
        return self.inner.sync(timeout_s)

    def begin_sync(self) -> SyncMark:
        return self.inner.begin_sync()

    def give_up_waiting(self) -> None:
        self.inner.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        return self.inner.pending_erases

    @property
    def progress(self) -> object:
        return self.inner.progress

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)

    def _collect(self) -> None:
        self._ended(self.inner.poll())


def _part(transfer: Transfer, pages: tuple[int, ...]) -> Transfer:
    """Return the same transfer with only the pages at these positions."""
    return replace(
        transfer,
        keys=tuple(transfer.keys[i] for i in pages),
        src_slots=tuple(transfer.src_slots[i] for i in pages),
        dst_slots=tuple(transfer.dst_slots[i] for i in pages),
        parents=tuple(transfer.parents[i] for i in pages),
    )
