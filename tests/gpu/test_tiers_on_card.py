"""Run the tier contract on a GPU, for the store's own slots and for an engine's slots, over each copy route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import torch

from tests.tier_contract import Page, TierContract, TierUnderTest
from tierstore.gpu.addresses import tensor_segments
from tierstore.gpu.copy_queue import Pace
from tierstore.gpu.copy_routes import DmaRoute, KernelRoute, Route, through_slabs
from tierstore.gpu.cpu_copy_engine import CopyEngine, CpuCopyEngine
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.gpu.driver import CudaPinner, Driver
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.pool import CudaPool, GroupedPages
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Ack, PageKey, Tier, Transfer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
PATIENCE_S = 60.0


class OnCard(TierUnderTest):
    """Slots on a GPU. A copy engine copies pages through a host arena. ``look`` reads the tensors directly."""

    def __init__(
        self, spec: PageSpec, num_slots: int, engine: CopyEngine, arena: HostArena, tensor: torch.Tensor
    ) -> None:
        self.num_slots = num_slots
        self._engine, self._arena, self._tensor = engine, arena, tensor
        self._nbytes = spec.page_nbytes
        self._number = 0

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        places = tuple(reversed(range(len(slots))))
        for place, page in zip(places, pages, strict=True):
            np.copyto(self._arena.view(place), page)
        self._move(Tier.HOST, places, Tier.HBM, tuple(slots))

    def read(self, slots: Sequence[int]) -> list[Page]:
        places = tuple(reversed(range(len(slots))))
        for place in places:
            self._arena.view(place).fill(0xEE)
        self._move(Tier.HBM, tuple(slots), Tier.HOST, places)
        return [self._arena.view(place).copy() for place in places]

    def look(self, slot: int) -> Page:
        return np.array(self._tensor[slot].cpu().contiguous().view(torch.uint8).flatten().numpy())

    def close(self) -> None:
        assert self._engine.close(PATIENCE_S)
        self._arena.close()

    def _move(self, src: Tier, src_slots: tuple[int, ...], dst: Tier, dst_slots: tuple[int, ...]) -> None:
        if not src_slots:
            return
        self._number += 1
        keys = (PageKey(bytes(36)),) * len(src_slots)
        parents = (None,) * len(src_slots)
        self._engine.submit(Transfer(self._number, keys, src, src_slots, dst, dst_slots, 0, parents))
        deadline = monotonic() + PATIENCE_S
        acks: list[Ack] = []
        while not acks:
            assert monotonic() < deadline
            acks = self._engine.poll()
        (ack,) = acks
        assert (ack.transfer_id, ack.ok, ack.num_ready) == (self._number, True, len(src_slots))


def card_engine(
    pool: CudaPool | EnginePool,
    arena: HostArena,
    layout: PageLayout,
    make: Callable[[Driver], Route],
    pace: Pace | None = None,
) -> CopyEngine:
    driver = Driver(0)
    threads = CpuCopyEngine(pool, arena, layout.page_nbytes, lambda: None)
    streams = (driver.stream(0), driver.stream(0))
    return CudaCopyEngine(make(driver), arena, streams, threads, pace=pace)


def pinned(layout: PageLayout, num_slots: int) -> HostArena:
    arena = HostArena(layout, num_slots, CudaPinner(0))
    assert arena.wait_pinned(num_slots, PATIENCE_S)
    return arena


def engine_pool(spec: PageSpec, num_slots: int) -> tuple[EnginePool, torch.Tensor]:
    """Return a pool with one tensor per layer, heads before tokens, and a view of all layers in page order."""
    layers, planes, tokens, heads, dim = spec.shape
    whole = torch.zeros(layers, num_slots, heads, tokens, planes, dim, dtype=torch.uint8, device=DEVICE)
    pool = EnginePool(PageLayout.of(spec), [EnginePages(list(whole), "BHNKD")])
    return pool, whole.permute(1, 0, 4, 3, 2, 5)


class TestOwnSlotsByBatches(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, arena = CudaPool(layout, num_slots, DEVICE), pinned(layout, num_slots)
        assert not isinstance(pool.pages, GroupedPages)
        engine = card_engine(pool, arena, layout, lambda driver: DmaRoute(pool.segments, driver))
        return OnCard(spec, num_slots, engine, arena, pool.pages)


class TestOwnSlotsOneByOne(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, arena = CudaPool(layout, num_slots, DEVICE), pinned(layout, num_slots)
        assert not isinstance(pool.pages, GroupedPages)

        def route(driver: Driver) -> Route:
            driver._batch = None
            return DmaRoute(pool.segments, driver)

        return OnCard(spec, num_slots, card_engine(pool, arena, layout, route), arena, pool.pages)


class TestOwnSlotsByTheKernel(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, arena = CudaPool(layout, num_slots, DEVICE), pinned(layout, num_slots)
        assert not isinstance(pool.pages, GroupedPages)

        def route(driver: Driver) -> Route:
            if KernelRoute.suits(pool.segments):
                return KernelRoute(pool.segments, DEVICE)
            return DmaRoute(pool.segments, driver)

        return OnCard(spec, num_slots, card_engine(pool, arena, layout, route), arena, pool.pages)


class TestOwnSlotsWithUnpinnedMemory(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, arena = CudaPool(layout, num_slots, DEVICE), HostArena(layout, num_slots)
        assert not isinstance(pool.pages, GroupedPages)
        engine = card_engine(pool, arena, layout, lambda driver: DmaRoute(pool.segments, driver))
        return OnCard(spec, num_slots, engine, arena, pool.pages)


class TestEngineSlotsPieceByPiece(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, view = engine_pool(spec, num_slots)
        segments = tensor_segments(pool.layers, layout, 1 << 20)
        assert segments is not None
        arena = pinned(layout, num_slots)
        engine = card_engine(pool, arena, layout, lambda driver: DmaRoute(segments, driver))
        return OnCard(spec, num_slots, engine, arena, view)


class TestEngineSlotsThroughASlab(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, view = engine_pool(spec, num_slots)
        arena = pinned(layout, num_slots)

        def route(driver: Driver) -> Route:
            nbytes = 2 * layout.slot_nbytes  # a transfer needs several slabs
            return through_slabs(pool.layers, layout, driver, DEVICE, slab_nbytes=nbytes)

        return OnCard(spec, num_slots, card_engine(pool, arena, layout, route), arena, view)


class TestEngineSlotsThroughASlabByLayers(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        layout = PageLayout.of(spec)
        pool, view = engine_pool(spec, num_slots)
        arena = pinned(layout, num_slots)
        layers = LayerGroups.of(layout, 16, 1)
        found = [tensor_segments(pool.layers, layout, 1 << 20, parts[:1]) for parts in layers.parts]
        by_layers = len(layers) > 1 and all(map(KernelRoute.suits, found))  # False if layers have a few bytes

        def route(driver: Driver) -> Route:
            slab = through_slabs(pool.layers, layout, driver, DEVICE, layers)
            assert slab.layers is (layers if by_layers else None)
            return slab

        engine = card_engine(pool, arena, layout, route, Pace(whole=0))
        return OnCard(spec, num_slots, engine, arena, view)
