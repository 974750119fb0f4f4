"""The device that stores HBM pages: opens the pool and the copy engine, and records the last use of slots.

``open_device`` returns the device for a value of ``hbm.device``. ``CpuDevice`` needs no GPU.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tierstore.errors import ConfigError
from tierstore.gpu import copy_routes
from tierstore.gpu.copy_routes import FastestRoute
from tierstore.gpu.cpu_copy_engine import CpuCopyEngine, HostBytes
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine, PinnedHost
from tierstore.gpu.driver import CudaPinner, Driver, DriverError
from tierstore.gpu.engine_pages import EnginePool
from tierstore.gpu.events import AllOf, Event, StreamEvent
from tierstore.gpu.layer_groups import MOST_GROUPS, LayerGroups
from tierstore.gpu.pool import CpuPool, CudaPool
from tierstore.gpu.quant.encoded_routes import encoded_route
from tierstore.types import exact_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.gpu.copy_routes import Route
    from tierstore.gpu.cpu_copy_engine import CopyEngine
    from tierstore.gpu.engine_pages import EnginePages
    from tierstore.gpu.pool import OwnPool
    from tierstore.page import PageLayout

_log = logging.getLogger("tierstore.gpu.device")


SMALLEST_BY_THREADS = 64 << 10
"""Minimum average size in bytes of the parts of a layer group if CPU threads copy them.

With smaller parts, the threads would spend more time in Python code than in the copies themselves.
"""


class HbmDevice(Protocol):
    """A device that stores HBM pages."""

    def available_nbytes(self) -> int | None:
        """Return the free device memory in bytes, or None if the device uses the machine's memory."""
        ...

    def open_pool(self, layout: PageLayout, num_slots: int) -> OwnPool:
        """Allocate ``num_slots`` slots for pages of ``layout``. Raises ConfigError if they do not fit."""
        ...

    def register(self, layout: PageLayout, pages: tuple[EnginePages, ...]) -> EnginePool:
        """Return a pool whose slots are an engine's tensors.

        Raises:
            ConfigError: The tensors are on another device or do not match the layout.
        """
        ...

    def open_copies(self, between: Between) -> CopyEngine:
        """Open the copy engine that copies between HBM and host slots in both directions."""
        ...

    def last_use(self, after: Event | None) -> Event | None:
        """Return an event that completes after the caller's last use of some slots, or None if that use is over.

        The store overwrites the slots only after this event.

        Args:
            after: An event that completes after the last use, passed by the caller. None if the last use is part
                of the work launched so far on the caller's current stream.
        """
        ...

    def all_work(self) -> Event | None:
        """Return an event that completes after all work launched on the device so far, on any stream.

        The result is None if that work is complete.

        Raises:
            RuntimeError: The driver cannot record the event, or a CUDA graph is being captured, in which case
                the capture fails too.
        """
        ...

    def stats(self) -> dict[str, object]:
        """Return the device's entries for ``TierStore.stats``."""
        ...


class CpuDevice:
    """Ordinary memory in place of HBM, for machines without a GPU. See ``HbmDevice``."""

    def __init__(self) -> None:
        self._groups = 1

    def available_nbytes(self) -> int | None:
        """Return None, because the pool uses the machine's memory."""
        return None

    def open_pool(self, layout: PageLayout, num_slots: int) -> OwnPool:
        """Allocate slots in ordinary memory."""
        return CpuPool(layout, num_slots)

    def register(self, layout: PageLayout, pages: tuple[EnginePages, ...]) -> EnginePool:
        """Return a pool whose slots are an engine's tensors in ordinary memory.

        Raises:
            ConfigError: The tensors are on another device or do not match the layout.
        """
        _require_on(torch.device("cpu"), pages)
        return EnginePool(layout, pages)

    def open_copies(self, between: Between) -> CopyEngine:
        """Open a copy engine with one thread per direction."""
        layers = None if between.host.held.encoded else _by_threads(between)
        self._groups = 1 if layers is None else len(layers)
        return _threads(between, layers)

    def last_use(self, after: Event | None) -> Event | None:
        """Return ``after``, which may be None: work on the CPU is complete when this method is called."""
        return after

    def all_work(self) -> Event | None:
        """Return None, because work on the CPU is already complete when this method is called."""
        return None

    def stats(self) -> dict[str, object]:
        """Return the device, the copy method, and the number of layer groups."""
        return {"device": "cpu", "copies": "threads", "slow_copies": None, "layer_groups": self._groups}


class CudaDevice:
    """A CUDA GPU. See ``HbmDevice``."""

    def __init__(self, name: str) -> None:
        """Open the GPU ``name``, "cuda" or "cuda:N". Raises ConfigError if torch does not find it."""
        self._device = torch.device("cuda", _index_of(name))
        self._driver = _driver(self._device.index)
        self._copies = "none"
        self._slow: str | None = None
        self._batches: dict[str, int] = {}
        self._groups = 1

    def available_nbytes(self) -> int | None:
        """Return the free memory of the GPU in bytes."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def open_pool(self, layout: PageLayout, num_slots: int) -> OwnPool:
        """Allocate slots as one block of GPU memory. Raises ConfigError if they do not fit."""
        try:
            return CudaPool(layout, num_slots, self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"hbm.capacity needs {exact_size(num_slots * layout.slot_nbytes)} of contiguous memory, but "
                f"{self._device} has {exact_size(self.available_nbytes() or 0)} free; lower hbm.capacity"
            ) from error

    def register(self, layout: PageLayout, pages: tuple[EnginePages, ...]) -> EnginePool:
        """Return a pool whose slots are an engine's tensors on this GPU.

        Raises:
            ConfigError: The tensors are on another device or do not match the layout.
        """
        _require_on(self._device, pages)
        return EnginePool(layout, pages)

    def open_copies(self, between: Between) -> CopyEngine:
        """Open a CUDA copy engine if possible, else an engine that uses threads.

        The CUDA engine needs cuda-bindings, a driver that it can call, and pinned host slots. If host memory
        contains encoded pages, it also needs a GPU that can encode and decode them.
        """
        pool, host = between.pool, between.host
        threads = _threads(between, _by_threads(between))
        if self._driver is None or not (host.pinning or host.pinned_slots > 0):
            missing = "cuda-bindings is missing" if self._driver is None else "host memory is not page-locked"
            self._copies, self._slow = f"threads, as {missing}", missing
            return threads
        route = self._route(between, self._driver)
        if isinstance(route, str):
            self._copies, self._slow = f"threads, as {route}", route
            return threads
        if copy_routes.misses_kernel(route, host.held.layout):
            self._slow = "cupy is missing, so small pieces are not copied by a kernel"
        streams = (self._driver.stream(self._device.index), self._driver.stream(self._device.index))
        self._groups = 1 if route.layers is None else len(route.layers)
        for tensor in _tensors(pool):
            for stream in (*streams, *route.streams):
                tensor.record_stream(stream)  # in case the store is garbage-collected with copies in flight
        self._copies = f"{route.name}, {self._driver.call}"
        self._batches = route.batches if isinstance(route, FastestRoute) else {}
        return CudaCopyEngine(route, host, streams, threads, wake=between.wake)

    def last_use(self, after: Event | None) -> Event | None:
        """Return ``after``, wrapped if necessary in an event that streams can wait for.

        Without ``after``, return an event recorded on the caller's current stream, or None if that stream is
        idle.
        """
        if after is not None:
            return after if isinstance(after, StreamEvent) else AllOf((after,))
        stream = torch.cuda.current_stream(self._device)
        if stream.query():
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def all_work(self) -> Event | None:
        """Return an event that completes after all work launched on the GPU so far.

        If the driver cannot be called, block until the GPU is idle and return None.
        """
        if self._driver is not None:
            return self._driver.all_work()
        torch.cuda.synchronize(self._device)
        return None

    def stats(self) -> dict[str, object]:
        """Return the device's entries for ``TierStore.stats``.

        They are the device and its name, the copy route, the reason why copies are slow (None if they are not),
        the number of layer groups, and the number of batches per route.
        """
        return {
            "device": str(self._device),
            "name": torch.cuda.get_device_name(self._device),
            "copies": self._copies,
            "slow_copies": self._slow,
            "layer_groups": self._groups,
            "batches": dict(self._batches),
        }

    def _route(self, between: Between, driver: Driver) -> Route | str:
        """Return the copy route for this pool, or a string that says why the CUDA engine cannot be used."""
        pool, held, most_groups = between.pool, between.host.held, between.most_groups
        if held.encoded:
            return encoded_route(pool, held, driver, self._device, most_groups)
        if isinstance(pool, CudaPool):
            return copy_routes.own_pool_route(pool, held.layout, driver, self._device, most_groups)
        assert isinstance(pool, EnginePool)
        return copy_routes.engine_route(pool.layers, held.layout, driver, self._device, most_groups)


def open_device(name: str) -> HbmDevice:
    """Return the device for a value of ``hbm.device``. Raises ConfigError if the device is not available."""
    return CpuDevice() if name == "cpu" else CudaDevice(name)


def require_device(name: str) -> None:
    """Raise ConfigError unless ``name`` is a valid value of ``hbm.device`` and the device is available."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise ConfigError(f"the device must be cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu":
        _index_of(name)


def pinner(name: str) -> CudaPinner:
    """Return the pinner for host memory used with this device. For "cpu", it is the pinner of the first GPU."""
    return CudaPinner(0 if name == "cpu" else _index_of(name))


def _index_of(name: str) -> int:
    if torch.version.cuda is None:
        raise ConfigError(f"hbm.device is {name!r}, but this torch was built without CUDA; set it to cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(f"hbm.device is {name!r}, but torch finds no CUDA device; set it to cpu")
    index = torch.device(name).index or 0
    if index >= count:
        cards = ", ".join(f"cuda:{i}" for i in range(count))
        raise ConfigError(f"hbm.device must be one of cpu, {cards} on this machine, got {name!r}")
    return index


def _driver(index: int) -> Driver | None:
    try:
        return Driver(index)
    except ImportError:
        _log.warning("cuda-bindings is missing, so copies are slow: run pip install 'tierstore[gpu]'")
    except DriverError as error:
        _log.warning("the CUDA driver cannot be called directly, so copies are slow: %s", error)
    return None


def _require_on(device: torch.device, pages: tuple[EnginePages, ...]) -> None:
    others = {tensor.device for group in pages for tensor in group.tensors} - {device}
    if others:
        raise ConfigError(
            f"hbm.device must be the device of the engine's tensors, got {device} for tensors on "
            f"{', '.join(sorted(map(str, others)))}"
        )


def _by_threads(between: Between) -> LayerGroups:
    return LayerGroups.of(between.layout, between.most_groups, SMALLEST_BY_THREADS)


def _threads(between: Between, layers: LayerGroups | None) -> CpuCopyEngine:
    host = between.host
    return CpuCopyEngine(between.pool, host, between.layout.page_nbytes, between.wake, host.held, layers)


def _tensors(pool: OwnPool | EnginePool) -> list[torch.Tensor]:
    if isinstance(pool, CudaPool):
        return [pool.bytes]
    assert isinstance(pool, EnginePool)
    return [layer for group in pool.layers for layer in group]


class Host(HostBytes, PinnedHost, Protocol):
    """The host tier, as used by both kinds of copy engine."""


@dataclass(frozen=True, slots=True)
class Between:
    """The two endpoints of a copy engine.

    Attributes:
        pool: The slots in HBM.
        host: The slots in host memory.
        wake: Called by the threads of the copy engine when ``poll`` has a new ack, and when a layer group was
            copied or launched.
        most_groups: Maximum number of layer groups per load. Use 1 if no caller waits for individual layers:
            the driver then queues fewer copies, and pages complete one by one.
    """

    pool: OwnPool | EnginePool
    host: Host
    wake: Callable[[], None]
    most_groups: int = MOST_GROUPS

    @property
    def layout(self) -> PageLayout:
        """Return the layout of the pages."""
        return self.host.held.layout
