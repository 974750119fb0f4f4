"""The copy engine on a virtual clock, with durations for its calls and a link of fixed bandwidth.

One caller adds pages to a lease and submits their copies. Then it waits for the first and the last layer, while
the store's pump polls.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierstore.codecs.host_format import HostFormat
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.gpu import copy_queue
from tierstore.gpu.copy_routes import WholePages
from tierstore.gpu.events import HERE, Arriving
from tierstore.gpu.layer_groups import MOST_GROUPS, LayerGroups
from tierstore.gpu.quant.encoded_routes import CUTS, parts_of
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey, Tier, Transfer

RATE = 54.9e9
_POLL_S = 0.001
_TURN_S = 0.0005


@dataclass(frozen=True)
class Processor:
    """Durations in seconds of adding a page to a lease, of a launch, of each piece in a launch, and of a poll."""

    page: float
    launch: float
    piece: float
    poll: float


FAST = Processor(5.2e-6, 80e-6, 1.2e-6, 60e-6)
"""Durations as measured on an idle machine."""

SLOW = Processor(15e-6, 160e-6, 1.7e-6, 200e-6)
"""Durations as on a busy machine."""


class Clock:
    now = 0.0


class Stream:
    free = 0.0


class Event:
    clock = Clock()

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Any) -> None:
        self.at = max(self.clock.now, stream.free)

    def query(self) -> bool:
        return self.clock.now >= self.at

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Link(WholePages):
    """A route whose copies run one after the other, at ``RATE``."""

    name = "virtual"
    layers: LayerGroups

    def __init__(self, clock: Clock, held: HostFormat, processor: Processor, most_groups: int) -> None:
        self.layers, self.group_pieces = LayerGroups.of(held.layout, most_groups), 1
        if held.encoded:
            self.layers = LayerGroups.by_shares(held.layout, CUTS)
            self.group_pieces = max(len(part.pieces) for part in parts_of(held, self.layers))
        self.idle = 0.0
        """Seconds without a copy, since the first copy started."""
        self.launches: list[float] = []
        self._clock, self._processor = clock, processor
        self._whole, self._sizes = held.payload_nbytes, self.layers.divide(held.payload_nbytes)

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        self._carry(len(slots), 1, self._whole, stream)

    def load_group(self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        self._carry(len(slots), self.group_pieces, self._sizes[group], stream)

    def _carry(self, pages: int, pieces: int, nbytes: int, stream: Any) -> None:
        now = self._clock.now
        if self.launches:
            self.idle += max(0.0, now - stream.free)
        self.launches.append(now)
        stream.free = max(now, stream.free) + pages * nbytes / RATE
        self._clock.now += self._processor.launch + pages * pieces * self._processor.piece


class Host:
    """A stand-in for the host arena, all of which is page-locked."""

    pinned_slots = 1 << 30
    pinning = False

    def __init__(self, held: HostFormat) -> None:
        self.held = held

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return slots


class Unpinned:
    """A stand-in for the copy engine for unpinned memory, which gets no copies."""

    polled = False

    def poll(self) -> list[Any]:
        return []

    def arriving(self, slots: Any, layer: int) -> Arriving:
        return HERE


@dataclass(frozen=True)
class Restored:
    """Result of a simulated restore.

    Attributes:
        taken: Seconds from the call to acquire until all pages were submitted.
        first: Seconds until the first layer arrived.
        whole: Seconds until the last layer arrived.
        link: Seconds that the link needs for all bytes.
        idle: Seconds without a copy, since the first copy started.
        launches: Number of launches.
        early: Number of launches until the first layer was completely launched.
    """

    taken: float
    first: float
    whole: float
    link: float
    idle: float
    launches: int
    early: int


def restore(
    module: ModuleType,
    nbytes: int,
    processor: Processor,
    page_size: int = 64,
    codec: str = "none",
    away: float = 0.0,
    most_groups: int = MOST_GROUPS,
) -> Restored:
    """Simulate a restore of an 8B model's pages.

    Args:
        module: ``cuda_copy_engine``, or a copy of it.
        nbytes: Size of the pages in bytes, before encoding.
        processor: The durations of calls.
        page_size: Number of tokens per page.
        codec: The codec of the host tier.
        away: Once all pages are submitted, the caller computes for this many seconds and polls, twice. Meanwhile
            no other thread runs.
        most_groups: Maximum number of layer groups into which pages are divided.
    """
    spec = PageSpec(
        num_layers=32, page_size=page_size, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="v"
    )
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(Event, "clock", clock)
        for where in (module, copy_queue):
            patch.setattr(where, "monotonic", lambda: clock.now)
        patch.setattr(module.CudaCopyEngine, "_wake_thread", lambda self, dst: None)
        held = HostFormat.of(codec, PageLayout.of(spec))
        return _Run(module, clock, held, processor, most_groups).restore(nbytes // spec.page_nbytes, away)


class _Run:
    def __init__(
        self, module: ModuleType, clock: Clock, held: HostFormat, processor: Processor, most_groups: int
    ) -> None:
        self._clock, self._processor, self._nbytes = clock, processor, held.payload_nbytes
        self._link = Link(clock, held, processor, most_groups)
        streams = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", (Stream(), Stream()))
        self._engine = module.CudaCopyEngine(self._link, Host(held), streams, Unpinned(), new_event=Event)

    def restore(self, pages: int, away: float) -> Restored:
        slots = tuple(range(pages))
        due = _POLL_S
        for start in range(0, pages, BATCH_PAGES):
            some = slots[start : start + BATCH_PAGES]
            self._clock.now += len(some) * self._processor.page
            keys, parents = (PageKey(bytes(36)),) * len(some), (None,) * len(some)
            self._engine.submit(Transfer(start, keys, Tier.HOST, some, Tier.HBM, some, 0, parents))
            if self._clock.now >= due:
                self._poll()
                due = self._clock.now + _POLL_S
        taken = self._clock.now
        for _ in range(2 if away else 0):
            self._clock.now += away
            self._poll()
        first, submitted = self._wait(slots, 0)
        early = sum(at < submitted for at in self._link.launches)
        whole, _ = self._wait(slots, 31)
        link = pages * self._nbytes / RATE
        return Restored(taken, first, whole, link, self._link.idle, len(self._link.launches), early)

    def _wait(self, slots: tuple[int, ...], layer: int) -> tuple[float, float]:
        """Return the times at which the layer arrived and at which all of its copies had been launched."""
        turn = 0
        while not (arriving := self._engine.arriving(slots, layer)).submitted:
            self._clock.now += _TURN_S
            self._help()
            turn += 1
            if turn % 2 == 0:
                self._poll()
        event = cast("Event | None", arriving.event)
        return (self._clock.now if event is None else event.at), self._clock.now

    def _poll(self) -> None:
        self._clock.now += self._processor.poll
        self._engine.poll()

    def _help(self) -> None:
        """Launch what the lane's thread would launch now."""
        lane = self._engine._lanes[Tier.HBM]
        while True:
            self._engine._ended += lane.land()
            if not lane.waiting or not self._engine._is_mine(lane):
                return
            flight = lane.take(self._engine._pace.together, self._engine._pace.pieces)
            lane.launch(flight)
            lane.launched(flight)
