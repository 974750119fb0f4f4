"""Shared parts of the copy benchmarks: pages in HBM and host memory, a copy engine, and contiguous copies."""

from __future__ import annotations

from time import perf_counter, sleep
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import ConfigError
from tierstore.gpu.copy_routes import DmaRoute, KernelRoute, through_slabs
from tierstore.gpu.cpu_copy_engine import CpuCopyEngine
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.gpu.device import pinner, require_device
from tierstore.gpu.driver import Driver
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.pool import CpuPool, CudaPool, GroupedPages
from tierstore.host.arena import HostArena
from tierstore.host.pinned_memory import CHUNK_NBYTES
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey, Tier, Transfer, exact_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.copy_routes import Route
    from tierstore.gpu.cpu_copy_engine import CopyEngine

Direction = Literal["h2d", "d2h", "both"]
Path = Literal["straight", "kernel", "slab"]
"""How pages are copied between HBM and host memory.

``straight`` copies the store's own pages by DMA, and ``kernel`` copies them with the copy kernel. ``slab`` copies
an engine's layer-major pages, through a slab in HBM.
"""

ALIGNMENT = 4096
_MOST_PAGES = 4096
_TRANSFER_NBYTES = 64 << 20
"""Intended size of a transfer in bytes. A transfer has at least BATCH_PAGES and at most _MOST_PAGES pages."""
_ENGINE_LAYERS = 32
_PIN_PATIENCE_S = 600.0
_POLL_S = 50e-6


def device_of(name: str) -> torch.device:
    """Return the torch device with this name. Raises ConfigError if it does not exist."""
    require_device(name)
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def require_piece(nbytes: int) -> None:
    """Raise ConfigError unless ``nbytes``, the size of a piece, is a multiple of 4 KiB."""
    if nbytes % ALIGNMENT:
        raise ConfigError(
            f"the size of a piece must be a multiple of {exact_size(ALIGNMENT)}, got {exact_size(nbytes)}"
        )


def locked_arena(name: str, layout: PageLayout, num_slots: int, codec: str = "none") -> HostArena:
    """Return an arena in host memory. If the device is a GPU, wait until the arena is page-locked.

    Raises:
        ConfigError: The device does not exist, or the memory cannot be page-locked within 600 s.
    """
    on_card = device_of(name).type == "cuda"
    arena = HostArena(layout, num_slots, pinner(name) if on_card else None, codec=codec)
    if on_card and not arena.wait_pinned(num_slots, _PIN_PATIENCE_S):
        raise ConfigError(
            f"could not page-lock {exact_size(arena.nbytes)} of host memory: "
            f"{arena.refused or f'not done within {_PIN_PATIENCE_S:g} s'}; use fewer or smaller pages"
        )
    return arena


def settle(device: torch.device) -> None:
    """Wait until the device has finished all queued work. Does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ceiling:
    """Contiguous copies of ``nbytes`` bytes between page-locked memory and the device.

    Their rate is the ceiling with which copies of scattered pages are compared.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        """Allocate host and device memory. Raises ConfigError if the device does not exist."""
        self.device = device_of(name)
        on_card = self.device.type == "cuda"
        self.nbytes = nbytes
        self._host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_card) for _ in range(2)]
        self._there = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        for host in self._host:
            host.fill_(1)
        self._streams: list[torch.cuda.Stream] = []
        if on_card:
            self._streams += [torch.cuda.Stream(self.device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def gbps(self, direction: Direction) -> float:
        """Copy once, in one direction or in both directions at once. Wait, and return the total rate in GB/s."""
        settle(self.device)
        start = perf_counter()
        self.queue(direction)
        settle(self.device)
        moved = self.nbytes * (2 if direction == "both" else 1)
        return moved / (perf_counter() - start) / 1e9

    def queue(self, direction: Direction) -> None:
        """Queue one copy in each requested direction without waiting. On the CPU, copy before returning."""
        if direction != "d2h":
            self._copy(0, self._there[0], self._host[0])
        if direction != "h2d":
            self._copy(1, self._host[1], self._there[1])

    def _copy(self, lane: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not self._streams:
            dst.copy_(src)
            return
        with torch.cuda.stream(self._streams[lane]):
            dst.copy_(src, non_blocking=True)


class Ends:
    """A copy engine that copies pages between slots of ``device`` and slots of an arena in host memory.

    ``page_nbytes`` is the size of a page on the device.
    """

    def __init__(self, device: torch.device, arena: HostArena, copies: CopyEngine, page_nbytes: int) -> None:
        self.device, self.arena, self.copies, self.page_nbytes = device, arena, copies, page_nbytes
        self._number = 0

    def transfers(
        self, dst: Tier, host: Sequence[int] | NDArray[np.int64], there: Sequence[int] | NDArray[np.int64]
    ) -> list[Transfer]:
        """Return transfers to ``dst`` that copy between ``host[i]`` and ``there[i]`` for every i.

        ``host`` are slots of the arena, and ``there`` slots of the device.
        """
        found = []
        step = min(_MOST_PAGES, max(BATCH_PAGES, _TRANSFER_NBYTES // self.page_nbytes))
        for start in range(0, len(host), step):
            part = slice(start, start + step)
            here, away = (tuple(int(x) for x in side[part]) for side in (host, there))
            keys, parents = (PageKey(b""),) * len(here), (None,) * len(here)
            self._number += 1
            slots = (
                (Tier.HOST, here, Tier.HBM, away) if dst == Tier.HBM else (Tier.HBM, away, Tier.HOST, here)
            )
            found.append(Transfer(self._number, keys, *slots, 0, parents))
        return found

    def run(self, transfers: Sequence[Transfer]) -> tuple[float, float]:
        """Submit all transfers and wait for them.

        Return the time in seconds until all have finished, and the time until all were submitted.

        Raises:
            RuntimeError: A transfer fails.
        """
        settle(self.device)
        start = perf_counter()
        for transfer in transfers:
            self.copies.submit(transfer)
        submitted = perf_counter() - start
        left = len(transfers)
        while left:
            for ack in self.copies.poll():
                if not ack.ok:
                    raise RuntimeError("the copy engine could not copy a page")
                left -= 1
            sleep(_POLL_S)  # without a pause, this thread would hold the GIL that the launching thread needs
        return perf_counter() - start, submitted

    def close(self) -> None:
        """Close the copy engine, waiting up to 600 s for copies in flight.

        If all of them have ended, close the arena.
        """
        if self.copies.close(_PIN_PATIENCE_S):
            self.arena.close()


class Rig(Ends):
    """Memory for ``num_pages`` pages on a device and in host memory, and a copy engine between the two.

    ``storage`` is the device's memory as flat uint8, and ``pages`` is the same memory by slot, ``[num_pages, ...]``.
    ``host_rows`` is the host memory by slot, uint8 ``[num_pages, page_nbytes]``. ``pieces`` is the number of
    contiguous pieces of a page in device memory. ``path`` describes how pages are copied.
    """

    def __init__(self, name: str, piece_nbytes: int, batch_nbytes: int, path: Path) -> None:
        """Create as many pages as fit into ``batch_nbytes``, but at least two.

        Raises:
            ConfigError: The device does not exist, memory cannot be page-locked, or ``piece_nbytes`` is not a
                multiple of 4 KiB.
        """
        require_piece(piece_nbytes)
        device = device_of(name)
        spec = _spec(piece_nbytes, path)
        layout = PageLayout.of(spec)
        self.page_nbytes = layout.page_nbytes
        self.pieces = layout.page_nbytes // piece_nbytes
        self.num_pages = max(2, batch_nbytes // self.page_nbytes)
        arena = locked_arena(name, layout, self.num_pages)
        self.host_rows = torch.from_numpy(arena.memory).view(self.num_pages, self.page_nbytes)
        pool = self._open(spec, layout, path, device)
        copies, self.path = self._engine(pool, arena, layout, path, device)
        super().__init__(device, arena, copies, self.page_nbytes)

    def parts(self) -> list[slice]:
        """Return the ranges of host pages that were page-locked together. A torch copy must not span two ranges."""
        step = max(1, CHUNK_NBYTES // self.page_nbytes)
        return [slice(start, start + step) for start in range(0, self.num_pages, step)]

    def _open(
        self, spec: PageSpec, layout: PageLayout, path: Path, device: torch.device
    ) -> CpuPool | CudaPool | EnginePool:
        if path == "slab":
            layers, planes, *page = spec.shape
            shape = (layers, planes, self.num_pages, *page)
            whole = torch.empty(shape, dtype=torch.uint8, device=device)
            self.storage, self.pages = whole.flatten(), whole.permute(2, 0, 1, 3, 4, 5)
            return EnginePool(layout, [EnginePages(list(whole), "KBNHD")])
        on_card = device.type == "cuda"
        pool = CudaPool(layout, self.num_pages, device) if on_card else CpuPool(layout, self.num_pages)
        assert not isinstance(pool.pages, GroupedPages)
        self.storage, self.pages = pool.pages.flatten(), pool.pages
        return pool

    def _engine(
        self,
        pool: CpuPool | CudaPool | EnginePool,
        arena: HostArena,
        layout: PageLayout,
        path: Path,
        device: torch.device,
    ) -> tuple[CopyEngine, str]:
        threads = CpuCopyEngine(pool, arena, self.page_nbytes, lambda: None)
        if device.type == "cpu":
            return threads, "threads"
        driver = Driver(device.index)
        route: Route
        if isinstance(pool, EnginePool):
            route, name = through_slabs(pool.layers, layout, driver, device), f"slab, {driver.call}"
        else:
            assert isinstance(pool, CudaPool)
            route, name = DmaRoute(pool.segments, driver), f"straight, {driver.call}"
            if path == "kernel":
                route, name = KernelRoute(pool.segments, device), "kernel"
        streams = (driver.stream(device.index), driver.stream(device.index))
        return CudaCopyEngine(route, arena, streams, threads), name


def _spec(piece_nbytes: int, path: Path) -> PageSpec:
    """Return the specification of the pages.

    With the path "slab", a page looks like a page of an engine: it has one piece for K and one for V in each of 32
    layers. With any other path, a page is a single piece.
    """
    if path == "slab":
        return PageSpec(
            num_layers=_ENGINE_LAYERS,
            page_size=piece_nbytes // 2048,
            num_kv_heads=8,
            head_dim=256,
            dtype="uint8",
            model="tierstore-bench",
        )
    return PageSpec(
        kind="mla",
        num_layers=1,
        page_size=1,
        num_kv_heads=1,
        head_dim=piece_nbytes,
        dtype="uint8",
        model="tierstore-bench",
    )
