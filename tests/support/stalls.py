"""The real copy engine and a real tier behind a gate: what is held back, failed or lost is the test's choice."""

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
    """Starts the pages of a transfer at these positions of what was submitted; leaves rubbish at the broken ones."""

    def __call__(self, part: Transfer, good: tuple[int, ...], broken: tuple[int, ...]) -> None: ...


class Held(NamedTuple):
    """A transfer at the gate; ``places``: positions of its pages in what was submitted."""

    transfer: Transfer
    places: tuple[int, ...]
    begin: Begin


class Gate:
    """Transfers by lane, each lane first in first out. ``hold`` stops a lane, ``let_go`` lets some of it pass.

    A transfer that starts runs in the real part behind the gate; nothing is simulated but time and failure.
    """

    def __init__(self) -> None:
        self.holding: set[Lane] = set()
        self.losing: set[Lane] = set()
        """Lanes whose transfers run and are never acknowledged, as with a dead peer: all that start or end now."""
        self.late: set[Lane] = set()
        """Lanes whose transfers run and are acknowledged only after ``deliver``."""
        self.failing: dict[Lane, list[frozenset[int]]] = {}
        """For each lane the pages that fail in its next transfers, by position."""
        self._held: dict[Lane, deque[Held]] = {}
        self._begun: dict[int, tuple[Transfer, tuple[int, ...], frozenset[int]]] = {}
        self._lost: set[int] = set()
        """Transfers that started in a losing lane: they are lost however long their thread takes."""
        self._acks: list[Ack] = []
        self._late_acks: list[Ack] = []
        self._lock = Lock()
        self.num_failed = 0
        """Pages that did not arrive because the test said so."""
        self.num_lost = 0
        """Acknowledgements that were lost."""

    def hold(self, *lanes: Lane) -> None:
        self.holding.update(lanes)

    def waiting(self, lane: Lane) -> int:
        """Transfers that stand at the gate."""
        return len(self._held.get(lane, ()))

    def let_go(self, lane: Lane, number: int | None = None) -> None:
        """Starts the first ``number`` held transfers of a lane, all of them if None."""
        held = self._held.get(lane, deque())
        for _ in range(len(held) if number is None else min(number, len(held))):
            self._start(held.popleft())

    def tell_late(self, lane: Lane, pages: Set[int]) -> bool:
        """The first held transfer of a lane is acknowledged: these of its pages are late, the others were not tried.

        The late ones stay at the gate. Whether there was such a transfer.
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
        """The first held transfer of a lane goes behind the others, as reads by several threads do."""
        self._held.get(lane, deque()).rotate(-1)

    def deliver(self) -> None:
        """The late acknowledgements come in, and none is late from now on."""
        self.late.clear()
        with self._lock:
            acks, self._late_acks = self._late_acks + self._acks, []
            self._acks = sorted(
                acks, key=lambda ack: not ack.late
            )  # what says that pages are late comes first

    def open(self) -> None:
        """Nothing is held, late, failed or lost from now on."""
        self.deliver()
        self.holding.clear()
        self.losing.clear()
        self.failing.clear()
        for lane in list(self._held):
            self.let_go(lane)

    def fail_next(self, lane: Lane, *pages: int) -> None:
        """These pages of the lane's next transfer that starts will not arrive."""
        self.failing.setdefault(lane, []).append(frozenset(pages))

    def settle(self) -> None:
        """Waits until everything that has passed the gate has ended."""
        deadline = monotonic() + 60.0
        while self.running:
            assert monotonic() < deadline, "a transfer does not end"
            self._collect()
            sleep(0.0002)

    @property
    def running(self) -> int:
        """Transfers that passed the gate and have not ended."""
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
        """A copy that breaks may have written anything."""

    def _collect(self) -> None:
        raise NotImplementedError


class GatedCopies(Gate):
    """A copy engine behind a gate; its two directions pass each other as the test likes.

    ``memory``: the tiers whose slots are memory, to leave rubbish where a copy breaks.
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
    """A tier that keeps pages by key behind a gate. A read that fails leaves rubbish in its slot, as disks do."""

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
    """The same transfer with only some of its pages."""
    return replace(
        transfer,
        keys=tuple(transfer.keys[i] for i in pages),
        src_slots=tuple(transfer.src_slots[i] for i in pages),
        dst_slots=tuple(transfer.dst_slots[i] for i in pages),
        parents=tuple(transfer.parents[i] for i in pages),
    )
