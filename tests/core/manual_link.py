"""A CUDA copy engine on fake streams, whose queued copies between memory addresses run when the test runs them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.gpu.copy_queue import Pace
from tierstore.gpu.copy_routes import WholePages
from tierstore.gpu.cpu_copy_engine import CpuCopyEngine
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.gpu.events import TimedEvent
from tierstore.gpu.layer_groups import Cut, LayerGroups
from tierstore.gpu.pool import CpuPool
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Ack, PageKey, Tier, Transfer

SPEC = PageSpec(num_layers=4, page_size=1, num_kv_heads=1, head_dim=128, dtype="uint8", model="engine")
LAYOUT = PageLayout.of(SPEC)
SLOTS = 6
PATIENCE_S = 60.0


class ManualStream:
    """A fake stream whose work waits until the test runs it."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def run(self) -> None:
        while self.work:
            self.work.popleft()()


class ManualEvent:
    failed = False

    def __init__(self) -> None:
        self.recorded = 0
        self.happened = 0

    def record(self, stream: Any) -> None:
        self.recorded += 1
        number = self.recorded
        stream.work.append(lambda: setattr(self, "happened", number))

    def query(self) -> bool:
        if ManualEvent.failed:
            raise RuntimeError("the device has failed")
        return self.happened == self.recorded

    def synchronize(self) -> None:
        raise AssertionError("the engine must not wait for the device")

    def elapsed_time(self, end: TimedEvent) -> float:
        assert self.query()
        assert end.query()
        return 2.0


class ByAddress(WholePages):
    """Copies pages of a pool in ordinary memory when the stream runs. If ``refuse`` is set, raises after one page."""

    name = "by address"

    def __init__(self, pool: CpuPool) -> None:
        self._pool = pool
        self.refuse = False
        self.groups: list[tuple[int, int]] = []
        """The layer group and the number of pages of each launch of a layer group."""
        self.wrong: set[int] = set()
        """HBM slots whose pages are reported as malformed when the stream runs."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any
    ) -> NDArray[np.int32] | None:
        self._queue([(self._at(slot), int(at)) for slot, at in zip(slots, host, strict=True)], stream)
        return self._found(slots, stream)

    def load_group(self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        assert self.layers is not None
        self.groups.append((group, len(slots)))
        for part in self.layers.parts[group]:
            pairs = [
                (self._at(slot) + part.offset, int(at) + part.offset)
                for slot, at in zip(slots, host, strict=True)
            ]
            self._queue(pairs, stream, part.nbytes)

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any
    ) -> NDArray[np.int32] | None:
        self._queue([(int(at), self._at(slot)) for slot, at in zip(slots, host, strict=True)], stream)
        return self._found(slots, stream)

    def _found(self, slots: NDArray[np.int64], stream: Any) -> NDArray[np.int32] | None:
        if not self.wrong:
            return None
        found = np.zeros(len(slots), dtype=np.int32)
        stream.work.append(lambda: np.copyto(found, np.isin(slots, list(self.wrong))))
        return found

    def _queue(self, pairs: list[tuple[int, int]], stream: Any, nbytes: int = SPEC.page_nbytes) -> None:
        for dst, src in pairs:
            stream.work.append(lambda dst=dst, src=src: ctypes.memmove(dst, src, nbytes))
            if self.refuse:
                raise RuntimeError("the queue is full")

    def _at(self, slot: np.int64) -> int:
        return self._pool.view(int(slot)).ctypes.data


class Arena(HostArena):
    """A host arena with ``locked`` page-locked slots. ``more`` tells whether further slots are still being locked."""

    locked = SLOTS
    more = False

    @property
    def pinned_slots(self) -> int:
        return self.locked

    @property
    def pinning(self) -> bool:
        return self.more


class Rig:
    def __init__(
        self,
        layers: int | Cut | None = None,
        pace: Pace | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.pool, self.arena = CpuPool(LAYOUT, SLOTS), Arena(LAYOUT, SLOTS)
        for slot in range(SLOTS):
            self.pool.view(slot).fill(10 + slot)
            self.arena.view(slot).fill(20 + slot)
        self.route = ByAddress(self.pool)
        if isinstance(layers, Cut):
            self.route.layers = LayerGroups.by_shares(LAYOUT, [layers])
        elif layers is not None:
            self.route.layers = LayerGroups.of(LAYOUT, layers, 1)
        self.up, self.down = ManualStream(), ManualStream()
        streams = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", (self.up, self.down))
        threads = CpuCopyEngine(self.pool, self.arena, SPEC.page_nbytes, lambda: None)
        self.engine = CudaCopyEngine(
            self.route, self.arena, streams, threads, new_event=ManualEvent, pace=pace, wake=wake
        )

    def move(self, number: int, dst: Tier, *pairs: tuple[int, int]) -> None:
        """Submit a transfer with this number. Each of ``pairs`` is an HBM slot and a HOST slot."""
        there, here = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
        src, src_slots, dst_slots = (Tier.HOST, here, there) if dst == Tier.HBM else (Tier.HBM, there, here)
        keys, parents = (PageKey(bytes(36)),) * len(pairs), (None,) * len(pairs)
        self.engine.submit(Transfer(number, keys, src, src_slots, dst, dst_slots, 0, parents))

    def wait(self) -> list[Ack]:
        while not (acks := self.engine.poll()):
            pass
        return acks

    def wait_launched(self, launches: int) -> None:
        """Wait until the lane's thread has launched at least ``launches`` layer groups and is idle.

        A launch for several transfers together counts once.
        """
        deadline = monotonic() + PATIENCE_S
        while len(self.route.groups) < launches or self.engine._lanes[Tier.HBM].launching:
            assert monotonic() < deadline, f"only these layer groups were launched: {self.route.groups}"
