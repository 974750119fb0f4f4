"""Benchmark of the CPU's share of a restore, without a GPU: the real store and copy engine on a simulated device.

One thread acquires a lease on pages in host memory, waits for it layer by layer, and releases it. The pages have the
shape of an 8B model's pages. The streams, events and driver of the simulated device take as long as a link with
``LINK_RATE``, but move no bytes. All code above the driver's calls is real. The measured times do not include driver
calls and Triton launches; these are counted instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from threading import get_ident
from time import perf_counter, sleep, thread_time
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch

from tierstore.bench import measurement
from tierstore.bench.core import synthetic_pages
from tierstore.bench.measurement import Row
from tierstore.build import Parts, make_directory
from tierstore.codecs import LOSSY
from tierstore.codecs.host_format import HostFormat
from tierstore.config import load_config
from tierstore.gpu import addresses
from tierstore.gpu.copy_routes import DmaRoute, dma_copies
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.gpu.device import CpuDevice
from tierstore.gpu.events import NOT_YET, Arriving
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.quant.coder import Coder
from tierstore.gpu.quant.encoded_routes import CUTS, DOWN_NBYTES, UP_NBYTES, parts_of, slab_nbytes
from tierstore.gpu.slabs import CpuCard, Ring, SlabRoute
from tierstore.metrics import Metrics
from tierstore.mover import LocalMover
from tierstore.page import PageLayout, PageSpec
from tierstore.pump import Wakeup
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tierstore.gpu.copy_routes import Route
    from tierstore.types import Ack, PageKey


class PaperStream:
    """A simulated CUDA stream.

    ``free`` is the time in seconds at which its queued work finishes, on the clock of ``time.perf_counter``.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.free = 0.0

    def wait_event(self, event: PaperEvent) -> None:
        """Delay work that is queued from now on until the event has completed."""
        self.free = max(self.free, event.at)


class PaperEvent:
    """A simulated CUDA event. It completes when its stream has finished the work queued before ``record``."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: PaperStream) -> None:
        """Record the event on a stream, after the work queued there so far."""
        self.at = max(perf_counter(), stream.free)

    def query(self) -> bool:
        """Return whether the event has completed."""
        return perf_counter() >= self.at

    def synchronize(self) -> None:
        """Block until the event has completed."""
        sleep(max(0.0, self.at - perf_counter()))

    def elapsed_time(self, end: PaperEvent) -> float:
        """Return the time in milliseconds from the completion of this event to the completion of ``end``."""
        return (end.at - self.at) * 1e3


class PaperDriver:
    """A simulated driver with a link of ``rate`` bytes/s. The rate may be changed.

    ``calls`` counts the calls to ``copy``, and ``pieces`` counts the pieces copied by these calls. A call itself
    takes no time; the copies keep their stream busy.
    """

    def __init__(self, rate: float) -> None:
        self.calls = self.pieces = 0
        self.rate = rate

    def copy(
        self, dst: NDArray[np.int64], src: NDArray[np.int64], nbytes: NDArray[np.int64], stream: PaperStream
    ) -> None:
        """Queue copies on a stream. See ``Driver.copy``. No bytes are copied."""
        self.calls += 1
        self.pieces += len(dst)
        stream.free = max(perf_counter(), stream.free) + int(nbytes.sum()) / self.rate


class PaperKernel:
    """A stand-in for a Triton kernel. It only counts its launches.

    ``arg_names`` are the argument names of the real kernel.
    """

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *tensors: object, **constants: object) -> None:
        self.launches += 1


class PaperCard(CpuCard):
    """A simulated GPU with the operations that slabs use. See ``slabs.Card``."""

    def event(self) -> PaperEvent:
        """Return a new event."""
        return PaperEvent()


class PaperHost:
    """Simulated host slots, which have addresses but no memory. All of them count as page-locked."""

    pinning = False

    def __init__(self, num_slots: int, held: HostFormat) -> None:
        self.num_slots = self.pinned_slots = num_slots
        self.held = held

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the simulated addresses at which the pages in these slots start."""
        return slots * self.held.slot_nbytes


class PaperPool:
    """Simulated HBM slots, which have slot numbers but no memory."""

    def __init__(self, num_slots: int, page_nbytes: int) -> None:
        self.num_slots = num_slots
        self.nbytes = num_slots * page_nbytes


class NoThreads:
    """Stand-in for the engine that copies to and from memory that is not page-locked.

    This engine never has work, because all simulated memory counts as page-locked.
    """

    polled = False

    def poll(self) -> list[Ack]:
        """Return an empty list, because nothing is copied."""
        return []

    def close(self, timeout_s: float) -> bool:
        """Return True, because no copies are in flight."""
        return True

    def arriving(self, slots: object, layer: int) -> Arriving:
        """Return NOT_YET, because this engine has no loads."""
        return NOT_YET


LINK_RATE = 54.6e9
"""Rate of the simulated link in bytes/s. It was measured on an H200."""

_PATIENCE_S = 60.0
_SAVE_RATE = 1e15
_WAITING = "asking for layers and waiting"

Codec = Literal["none", "int8"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Page size in tokens and number of layers. The pages' other dimensions are those of an 8B model."""

    page_size: int
    num_layers: int = 32

    @property
    def spec(self) -> PageSpec:
        """Specification of the pages, which are in bfloat16."""
        return PageSpec(
            num_layers=self.num_layers,
            page_size=self.page_size,
            num_kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
            model="paper",
        )


class Stopwatch:
    """Measures the CPU time of the thread that created it, separately for each named part of the work.

    ``seconds`` contains the CPU time of each part. If one watched method calls another, the time of the inner method
    counts only towards the part of the inner method.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        """Number of calls of each part, including calls in other threads."""
        self._inner = [0.0]
        self._thread = get_ident()

    def watch(self, owner: object, method: str, part: str) -> None:
        """Replace a method of ``owner`` with a wrapper that adds the method's calls and CPU time to ``part``."""
        act = getattr(owner, method)

        def timed(*given: Any, **named: Any) -> Any:
            self.calls[part] += 1
            if get_ident() != self._thread:
                return act(*given, **named)
            self._inner.append(0.0)
            begun = thread_time()
            try:
                return act(*given, **named)
            finally:
                taken = thread_time() - begun
                self.seconds[part] += taken - self._inner.pop()
                self._inner[-1] += taken

        setattr(owner, method, timed)

    def clear(self) -> None:
        """Reset all times and counters to 0."""
        self.seconds.clear()
        self.calls.clear()


@dataclass(frozen=True, slots=True)
class Restored:
    """Times and counters of one restore.

    ``acquired_ms``, ``first_layer_ms`` and ``whole_ms`` are the times from the call to ``acquire`` until it
    returned, until the first layer had arrived, and until all layers had arrived. ``link_ms`` is how long the link
    alone needs for the bytes. ``parts`` is the CPU time per page in microseconds, by part of the work.
    """

    acquired_ms: float
    first_layer_ms: float
    whole_ms: float
    link_ms: float
    parts: dict[str, float]
    launches: int
    driver_calls: int
    pieces: int
    kernels: int


class Rig:
    """A store on the simulated device, with ``pages`` pages in host memory that can be restored repeatedly."""

    def __init__(self, pages: int, shape: Shape, codec: Codec) -> None:
        layout = PageLayout.of(shape.spec)
        held = HostFormat.of(codec, layout)
        self.pages, self.num_layers = pages, shape.num_layers
        self.watch = Stopwatch()
        self.driver = PaperDriver(_SAVE_RATE)
        self.kernels = [PaperKernel([]) for _ in range(4)]
        self._crossing = pages * (held.payload_nbytes if held.encoded else layout.page_nbytes)
        engine = self._engine(layout, held)
        self.store, parts = _open(pages, layout, held, engine)
        self.keys: list[PageKey] = [key for key, _ in synthetic_pages(pages)]
        self.store.put(self.keys, self.store.allocate(pages))
        self.store.drain(_PATIENCE_S)
        self._watch(parts, engine)

    def restore(self) -> Restored:
        """Evict all pages from HBM and restore them once.

        Raises:
            RuntimeError: Not all pages came from host memory.
        """
        self.store.evict(self.keys, Tier.HBM)
        self.store.drain(_PATIENCE_S)
        watch, driver = self.watch, self.driver
        driver.rate = LINK_RATE
        watch.clear()
        calls, pieces, kernels = driver.calls, driver.pieces, self._launched
        cpu, begun = thread_time(), perf_counter()
        lease = self.store.acquire(self.keys)
        acquired = perf_counter() - begun
        lease.ready(0, _PATIENCE_S)
        first = perf_counter() - begun
        for layer in range(1, self.num_layers):
            event = lease.ready(layer, _PATIENCE_S)
        if event is not None:
            event.synchronize()
        whole = perf_counter() - begun
        if lease.wait(_PATIENCE_S) is not LeaseState.READY or set(lease.tiers) != {Tier.HOST}:
            raise RuntimeError("not all pages were restored from HOST")
        settled, named = thread_time(), dict(watch.seconds)
        lease.release()
        released = thread_time()
        named[_WAITING] = (settled - cpu) - sum(named.values())
        named["release"] = released - settled
        driver.rate = _SAVE_RATE
        return Restored(
            acquired_ms=acquired * 1e3,
            first_layer_ms=first * 1e3,
            whole_ms=whole * 1e3,
            link_ms=self._crossing / LINK_RATE * 1e3,
            parts={part: seconds / self.pages * 1e6 for part, seconds in named.items()},
            launches=watch.calls["launch"],
            driver_calls=driver.calls - calls,
            pieces=driver.pieces - pieces,
            kernels=self._launched - kernels,
        )

    @property
    def _launched(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)

    def _watch(self, parts: Parts, engine: CudaCopyEngine) -> None:
        directory = parts.directory
        for owner, method, part in (
            (directory, "extend_lease", "plan"),
            (directory.residency, "reserve", "reserve"),
            (directory.loads, "start", "plan"),
            (engine, "submit", "submit"),
            (engine, "poll", "poll"),
            (engine._lanes[Tier.HBM], "launch", "launch"),
            (self.driver, "copy", "driver"),
            (directory, "apply", "acks"),
        ):
            self.watch.watch(owner, method, part)

    def _engine(self, layout: PageLayout, held: HostFormat) -> CudaCopyEngine:
        streams: Any = (PaperStream(), PaperStream())
        route = self._coded(layout, held) if held.encoded else self._straight(layout)
        return CudaCopyEngine(
            route,
            PaperHost(self.pages, held),
            streams,
            cast("Any", NoThreads()),
            new_event=cast("Any", PaperEvent),
        )

    def _straight(self, layout: PageLayout) -> Route:
        layers = LayerGroups.of(layout)
        groups = addresses.pool_group_segments(0, layout, layers)
        return DmaRoute(addresses.pool_segments(0, layout), cast("Any", self.driver), layers, groups)

    def _coded(self, layout: PageLayout, held: HostFormat) -> Route:
        """Create the same route as ``encoded_routes.encoded_route`` does for the store's own slots."""
        card: Any = PaperCard()
        driver: Any = self.driver
        kernels: Any = _Kernels(self.kernels)
        lot = addresses.pool_strides(torch.empty(layout.slot_nbytes, dtype=torch.uint8), layout)
        coder = Coder(LOSSY[held.codec], layout, lot, None, held.slot_nbytes, kernels)
        stream: Any = PaperStream
        up, down = (Ring(slab_nbytes(held, nbytes), stream(), card) for nbytes in (UP_NBYTES, DOWN_NBYTES))
        layers = LayerGroups.by_shares(layout, CUTS)
        groups = []
        for part in parts_of(held, layers):
            some = Coder(LOSSY[held.codec], part.layout, lot, None, part.stride, kernels)
            groups.append([dma_copies(up, some, part.stride, part.pieces, driver)])
        whole = [(0, 0, held.slot_nbytes)]
        loads, saves = (dma_copies(ring, coder, held.slot_nbytes, whole, driver) for ring in (up, down))
        return SlabRoute("paper", loads, saves, layers if groups else None, groups)


class _Kernels:
    """Stand-in for the module ``codec_kernels``, with the kernels that a ``Coder`` uses."""

    def __init__(self, found: list[PaperKernel]) -> None:
        self.measure, self.pack, self.expand, self.keep = found


def _open(
    pages: int, layout: PageLayout, held: HostFormat, engine: CudaCopyEngine
) -> tuple[TierStore, Parts]:
    nbytes = pages * layout.page_nbytes
    config = load_config(
        {"hbm": {"capacity": nbytes, "device": "cpu"}, "host": {"capacity": nbytes, "codec": held.codec}}
    )
    pool: Any = PaperPool(pages, layout.page_nbytes)
    metrics = Metrics()
    directory = make_directory(config, layout, pool, PaperHost(pages, held), None, metrics)
    parts = Parts(
        layout,
        held,
        CpuDevice(),
        pool,
        None,
        None,
        directory,
        LocalMover({}, engine, {}),
        metrics,
    )
    return TierStore(config, parts, Wakeup(), pump=False), parts


def rows(pages: int, page_size: int, codec: Codec, runs: int = 5) -> list[Row]:
    """Restore ``runs`` times, after one restore that is not counted, and return the results.

    Times since ``acquire`` and counters are medians. CPU times of the parts are minima, because the fastest run
    is the one that other programs disturbed least. Rows whose value is 0 are left out.

    Args:
        pages: Number of pages.
        page_size: Number of tokens per page.
        codec: The value of ``host.codec``.
        runs: Number of restores.
    """
    rig = Rig(pages, Shape(page_size), codec)
    try:
        with measurement.at_rest():
            rig.restore()
            found = [rig.restore() for _ in range(runs)]
    finally:
        rig.store.close()
    name = f"restore of {pages} pages" + ("" if codec == "none" else f", {codec}")
    told = [
        Row(f"{name}: {what}", median(getattr(each, f"{field}_ms") for each in found), "ms")
        for what, field in (
            ("acquired", "acquired"),
            ("first layer", "first_layer"),
            ("whole", "whole"),
            ("the link alone", "link"),
        )
    ]
    for part in sorted(set.intersection(*({*each.parts} for each in found))):
        told.append(Row(f"{name}: {part}", min(each.parts[part] for each in found), "us a page"))
    for what in ("launches", "driver_calls", "pieces", "kernels"):
        told.append(Row(f"{name}: {what.replace('_', ' ')}", median(getattr(x, what) for x in found), ""))
    return [row for row in told if row.value > 0]
