"""Copy routes between device memory and pinned host slots, and the choice of the fastest one.

``DmaRoute`` copies each piece by DMA, with the GPU's copy engines. ``KernelRoute`` uses the copy kernel.
``slabs`` contains the route through staging buffers, and ``quant`` the routes for encoded pages. ``rates_of``
measures the link of a GPU once per process, in a fraction of a second. ``FastestRoute`` picks, for each
batch, the route that is expected to finish first. ``own_pool_route`` and ``engine_route`` build the route for
a pool. Routes queue work and never wait for it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf, log
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from tierstore.gpu import addresses
from tierstore.gpu.addresses import Segments
from tierstore.gpu.copy_kernel import DOWN, NEAR, UP, Pieces
from tierstore.gpu.layer_groups import MOST_GROUPS, LayerGroups
from tierstore.gpu.slabs import ByLayers, ByPieces, Ring, SlabCopies, SlabRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.layer_groups import Part
    from tierstore.gpu.pool import CudaPool
    from tierstore.gpu.slabs import PieceMover, RowCoder
    from tierstore.page import PageLayout


class Route(Protocol):
    """Queues page copies between slots in device memory and addresses in pinned host memory.

    ``load``, ``load_group`` and ``save`` return int32 flags, one per page, which are valid once the copies are
    complete. A nonzero flag means that the codec could not encode or decode the page; the content of its
    destination is then undefined. The result is None if this cannot happen.
    """

    name: str
    """Name of the route in ``stats()``."""
    pieces: int
    """Number of driver copies per page."""
    layers: LayerGroups | None
    """The layer groups that ``load_group`` can load. None if the route can only load whole pages."""
    group_pieces: int
    """Maximum number of driver copies per page in ``load_group``."""
    loads_end_on: torch.cuda.Stream | None
    """The stream on which loads complete. None if they complete on the stream passed to ``load``."""
    streams: Sequence[torch.cuda.Stream]
    """Streams that the route uses in addition to the stream passed to each method."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue host-to-device copies of whole pages.

        Args:
            slots: Slots in device memory, int64 ``[pages]``.
            host: Addresses of the pages in host memory, int64 ``[pages]``.
            stream: The stream on which the copies start. They complete on ``loads_end_on``.
        """
        ...

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue host-to-device copies of the layer group with index ``group`` on ``stream``."""
        ...

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue device-to-host copies of whole pages on ``stream``."""
        ...


class WholePages:
    """Base class for routes that can only load whole pages, on the stream passed to ``load``."""

    pieces = 1
    layers: LayerGroups | None = None
    group_pieces = 1
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Raise NotImplementedError. Never called, because ``layers`` is None."""
        raise NotImplementedError


class DmaRoute:
    """Copies pages by DMA, with one driver copy per piece."""

    name = "straight"
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def __init__(
        self,
        segments: Segments,
        driver: Driver,
        layers: LayerGroups | None = None,
        groups: Sequence[Segments] = (),
    ) -> None:
        """Set the pieces to copy.

        Args:
            segments: The pieces of a page.
            driver: The driver of the device.
            layers: The layer groups that pages are divided into.
            groups: The pieces of each layer group. With fewer than two groups, the route can only load whole
                pages.
        """
        self.layers = layers if len(groups) > 1 else None
        self.pieces = len(segments)
        self.group_pieces = max((len(group) for group in groups), default=self.pieces)
        self._segments = segments
        self._groups = groups
        self._driver = driver

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue host-to-device copies of whole pages on ``stream``."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Queue host-to-device copies of the layer group with index ``group`` on ``stream``."""
        there, here, nbytes = _pieces(self._groups[group], slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue device-to-host copies of whole pages on ``stream``."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(here, there, nbytes, stream)


def _pieces(
    segments: Segments, slots: NDArray[np.int64], host: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    there = segments.addresses(slots).ravel()
    here = (host[:, None] + segments.offset).ravel()
    return there, here, np.tile(segments.nbytes, len(slots))


class KernelRoute(WholePages):
    """Copies pages with the copy kernel, directly between slots and mapped host memory."""

    name = "kernel"
    pieces = 0

    def __init__(self, segments: Segments, device: torch.device) -> None:
        """Compile the kernel for the pieces of a page. ``suits`` must accept the pieces.

        Raises:
            ImportError: cupy is not installed.
        """
        self._up, self._down = (Pieces(segments, device, grid) for grid in (UP, DOWN))

    @staticmethod
    def suits(segments: Segments | None) -> bool:
        """Return whether the kernel is efficient for pages that consist of these pieces."""
        return Pieces.suits(segments)

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue host-to-device copies of whole pages on ``stream``."""
        self._up.scatter(slots, host, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue device-to-host copies of whole pages on ``stream``."""
        self._down.gather(slots, host, stream)


Way = Literal["dma", "kernel"]
Direction = Literal["up", "down"]
"""``up`` means host to device, ``down`` means device to host."""

SIZES = (4 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Piece sizes to measure, in bytes."""

FEW = 8
"""Number of pieces in the smaller of the two batches that are measured for each piece size.

The larger batch has ``MANY_NBYTES`` bytes, but at most ``MOST`` pieces.
"""

MANY_NBYTES = 16 << 20
MOST = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """Measured cost for pieces of ``nbytes`` bytes.

    A batch of n pieces takes ``fixed_s + n * piece_s`` seconds.
    """

    nbytes: int
    fixed_s: float
    piece_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured costs of copies.

    ``points`` maps each pair of method and direction to the costs measured for it, one ``Point`` per piece size,
    in ascending order of size. A method without points cannot be used.
    """

    points: Mapping[tuple[Way, Direction], Sequence[Point]]

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """Return the expected time in seconds for one batch of ``pieces`` pieces of ``nbytes`` bytes each.

        The time is infinite if ``way`` was not measured. Between two measured piece sizes, costs are
        interpolated on the logarithm of the size. Above the largest one, the cost of a piece is proportional
        to its size. Below the smallest one, a piece costs as much as one of the smallest size.
        """
        points = self.points.get((way, direction))
        if not points:
            return inf
        at = bisect_left([point.nbytes for point in points], nbytes)
        if at == 0:
            return points[0].fixed_s + pieces * points[0].piece_s
        if at == len(points):
            return points[-1].fixed_s + pieces * points[-1].piece_s * nbytes / points[-1].nbytes
        low, high = points[at - 1], points[at]
        share = log(nbytes / low.nbytes) / log(high.nbytes / low.nbytes)
        fixed = low.fixed_s + share * (high.fixed_s - low.fixed_s)
        piece: float = low.piece_s * (high.piece_s / low.piece_s) ** share
        return fixed + pieces * piece

    def plain(self) -> dict[str, dict[int, float]]:
        """Return the throughput of large batches in GB/s (10^9 bytes/s), by copy method and piece size.

        The outer keys are method and direction, for example "dma up". The inner keys are piece sizes in
        bytes.
        """
        return {
            f"{way} {direction}": {p.nbytes: round(p.nbytes / p.piece_s / 1e9, 2) for p in points}
            for (way, direction), points in self.points.items()
        }


def measured(ways: Sequence[Way], measure: Callable[[Way, Direction, int, int], float]) -> Rates:
    """Measure all piece sizes in both directions, and return the rates.

    ``measure`` copies one batch and returns the time in seconds. It takes the method, the direction, the piece
    size in bytes and the number of pieces.
    """
    directions: tuple[Direction, ...] = ("up", "down")
    return Rates(
        {
            (way, direction): [_point(way, direction, nbytes, measure) for nbytes in SIZES]
            for way in ways
            for direction in directions
        }
    )


def _point(
    way: Way, direction: Direction, nbytes: int, measure: Callable[[Way, Direction, int, int], float]
) -> Point:
    many = max(2 * FEW, min(MOST, MANY_NBYTES // nbytes))
    short, long = measure(way, direction, nbytes, FEW), measure(way, direction, nbytes, many)
    piece = max(
        (long - short) / (many - FEW), long / many / 10
    )  # more pieces take longer; a measurement that contradicts this is inaccurate
    return Point(nbytes, max(0.0, long - many * piece), piece)


KERNEL_HANDICAP = 1.1
"""Factor by which the kernel must be faster than DMA to be chosen.

The kernel takes multiprocessors and memory bandwidth away from compute.
"""

MOST_PIECES = 128
"""Maximum number of driver copies per batch, unless every route needs more.

Each copy costs the caller about one microsecond.
"""

_A_TRANSFER = 32
"""Number of pages in a typical transfer."""


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate route, and the values that determine its cost.

    The route copies each page as ``pieces`` pieces of ``piece_nbytes`` bytes, with the method ``way``.
    """

    route: Route
    way: Way
    pieces: int
    piece_nbytes: int
    extra_s: float = 0.0
    """Additional time per batch, in seconds."""

    def seconds(self, rates: Rates, direction: Direction, pages: int) -> float:
        """Return the expected time in seconds for a batch of ``pages`` pages.

        For the kernel, the time of the copies is multiplied by ``KERNEL_HANDICAP``.
        """
        handicap = KERNEL_HANDICAP if self.way == "kernel" else 1.0
        crossing = rates.seconds(self.way, direction, self.piece_nbytes, pages * self.pieces)
        return handicap * crossing + self.extra_s


class FastestRoute:
    """Combines several routes and sends each batch over the one that is expected to finish first.

    Loads by layer group always use the fastest route that supports them.
    """

    def __init__(
        self, options: Sequence[Option], rates: Rates, side: torch.cuda.Stream | None = None
    ) -> None:
        """Set the routes to choose from.

        Args:
            options: The routes and their costs.
            rates: The measured costs of copies.
            side: The stream on which all loads complete, whatever route they take. It is the ``loads_end_on``
                of one of the routes. None if every route completes its loads on the stream passed to ``load``.
        """
        self.batches: dict[str, int] = {option.route.name: 0 for option in options}
        """Number of batches so far, by route name."""
        self._options = options
        self._rates = rates
        layered = [option for option in options if option.route.layers is not None]
        by_time = sorted(layered, key=lambda option: option.seconds(rates, "up", _A_TRANSFER))
        self._layered = by_time[0].route if by_time else None
        self.layers: LayerGroups | None = None if self._layered is None else self._layered.layers
        self.pieces = min(option.route.pieces for option in options)
        self.group_pieces = 1 if self._layered is None else self._layered.group_pieces
        self.loads_end_on = side
        self.name = " or ".join(option.route.name for option in options)
        self.streams: Sequence[torch.cuda.Stream] = [s for o in options for s in o.route.streams]
        self._joint = None if side is None else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue host-to-device copies of whole pages on ``stream``. Return the flags of the pages; see ``Route``."""
        route = self._pick("up", len(slots))
        flags = route.load(slots, host, stream)
        self._join(route, stream)
        return flags

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue host-to-device copies of the layer group with index ``group`` on ``stream``."""
        assert self._layered is not None
        flags = self._layered.load_group(group, slots, host, stream)
        self._join(self._layered, stream)
        return flags

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue device-to-host copies of whole pages on ``stream``."""
        return self._pick("down", len(slots)).save(slots, host, stream)

    def _pick(self, direction: Direction, pages: int) -> Route:
        quick = [o for o in self._options if pages * o.route.pieces <= MOST_PIECES]
        best = min(quick or self._options, key=lambda o: o.seconds(self._rates, direction, pages))
        self.batches[best.route.name] += 1
        return best.route

    def _join(self, route: Route, stream: torch.cuda.Stream) -> None:
        if self._joint is not None and self.loads_end_on is not None and route.loads_end_on is None:
            self._joint.record(stream)
            self.loads_end_on.wait_event(self._joint)


_log = logging.getLogger("tierstore.gpu.calibration")

_RUNS = 3
_found: dict[int, Rates] = {}
_lock = Lock()


def rates_of(driver: Driver, device: torch.device) -> Rates:
    """Return the transfer rates of the device's link. Thread-safe.

    The first call for a device measures them, which blocks for about 0.1 s. Other work on the link or the GPU
    during that time lowers the measured rates. Later calls in the process return the same rates. Without cupy,
    only DMA is measured.
    """
    with _lock:
        if device.index not in _found:
            start = perf_counter()
            _found[device.index] = _Bed(driver, device).rates()
            _log.info("measured the link of %s in %.3f s", device, perf_counter() - start)
        return _found[device.index]


class _Bed:
    """Measures the link with copies between a device buffer and a pinned host buffer."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        nbytes = max(MANY_NBYTES, max(SIZES) * FEW)
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._driver = driver
        self._device = device
        self._stream = driver.stream(device.index)
        self._movers: dict[tuple[int, Direction], Pieces] = {}

    def rates(self) -> Rates:
        """Measure and return all rates."""
        try:
            self._mover(SIZES[0], "up")
        except ImportError:
            return measured(["dma"], self.seconds)
        return measured(["dma", "kernel"], self.seconds)

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """Copy a batch several times, and return the shortest wall time in seconds, including submission."""
        slots = np.random.default_rng(0).permutation(min(MOST, len(self._host) // nbytes)).astype(np.int64)
        slots = slots[:pieces]
        host = self._host.data_ptr() + slots[::-1] * nbytes
        runs = []
        for _ in range(_RUNS + 1):
            start = perf_counter()
            try:
                if way == "kernel":
                    mover = self._mover(nbytes, direction)
                    (mover.scatter if direction == "up" else mover.gather)(slots, host, self._stream)
                else:
                    self._dma(direction, slots * nbytes + self._there.data_ptr(), host, nbytes)
            finally:
                self._stream.synchronize()  # or the buffers could be freed with copies in flight
            runs.append(perf_counter() - start)
        return min(runs[1:])

    def _dma(
        self, direction: Direction, there: NDArray[np.int64], host: NDArray[np.int64], nbytes: int
    ) -> None:
        lengths = np.full(len(there), nbytes, dtype=np.int64)
        if direction == "up":
            self._driver.copy(there, np.ascontiguousarray(host), lengths, self._stream)
        else:
            self._driver.copy(np.ascontiguousarray(host), there, lengths, self._stream)

    def _mover(self, nbytes: int, direction: Direction) -> Pieces:
        if (nbytes, direction) not in self._movers:
            columns = (self._there.data_ptr(), nbytes, 0, nbytes)
            block = Segments(*(np.array([column], dtype=np.int64) for column in columns))
            grid = UP if direction == "up" else DOWN
            self._movers[nbytes, direction] = Pieces(block, self._device, grid)
        return self._movers[nbytes, direction]


_MOST_LISTED = 1 << 16
"""Maximum number of pieces per page for routes that keep a list of all pieces."""

_MOST_PIECES = 128
"""Maximum number of pieces per page for the route that copies every piece by DMA."""

_SPREAD_S = 50e-6
"""Time to scatter the last slab of a batch, in seconds. This work cannot overlap with copies of the batch."""

_LAUNCH_S = 10e-6
"""Time to launch a torch kernel, in seconds. Each layer needs one or two launches."""

SLAB_NBYTES = 32 << 20
"""Size of a slab for unencoded pages, in bytes."""

_PART_ALIGNMENT = 512


def own_pool_route(
    pool: CudaPool,
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """Return the route for the store's own slots.

    Pages are copied by DMA. If pages have at most ``SIZES[-1]`` bytes and cupy is installed, each batch is
    copied by DMA or by the copy kernel, whichever is expected to be faster. ``most_groups`` limits the number
    of layer groups per load.
    """
    layers = LayerGroups.of(layout, most_groups)
    straight = DmaRoute(pool.segments, driver, layers, pool.groups(layers))
    if layout.blob_nbytes > SIZES[-1] or not KernelRoute.suits(pool.segments):
        return straight
    options = [Option(straight, "dma", 1, layout.blob_nbytes)]
    with suppress(ImportError):  # cupy is part of the extra "gpu"; DMA works without it
        options.append(Option(KernelRoute(pool.segments, device), "kernel", 1, layout.blob_nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight


def engine_route(
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """Return the route for an engine's tensors.

    Each batch takes the route that is expected to be fastest: piece by piece, by DMA or with the copy kernel,
    or as whole pages through slabs. Large pages that are contiguous in the tensors are always copied by DMA.

    Args:
        layers: One sequence per KV group, with a tensor ``[slots, planes, tokens, heads, dim]`` per layer.
        layout: The layout of a page.
        driver: The driver of the device.
        device: The GPU.
        most_groups: Maximum number of layer groups per load.
    """
    groups = LayerGroups.of(layout, most_groups)
    found = addresses.tensor_segments(layers, layout, _MOST_LISTED)
    options = [] if found is None else _piece_by_piece(layers, found, layout, driver, device, groups)
    if found is not None and len(found) == 1 and layout.blob_nbytes > SIZES[-1]:
        return options[0].route
    slab = through_slabs(layers, layout, driver, device, groups)
    last = (
        _SPREAD_S
        if isinstance(slab.saves.coder, ByPieces)
        else 2 * _LAUNCH_S * sum(len(group) for group in layers)
    )
    options.append(Option(slab, "dma", 1, layout.blob_nbytes, last))
    return FastestRoute(options, rates_of(driver, device), slab.loads_end_on)


def misses_kernel(route: Route, layout: PageLayout) -> bool:
    """Return whether cupy is missing although this route could use the copy kernel."""
    small = isinstance(route, FastestRoute) or layout.blob_nbytes <= SIZES[-1]
    return small and find_spec("cupy") is None


def through_slabs(
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    by_layers: LayerGroups | None = None,
    *,
    slab_nbytes: int = SLAB_NBYTES,
) -> SlabRoute:
    """Return a route that copies unencoded pages between an engine's tensors and host memory through slabs.

    The copy kernel moves pages between slabs and tensors. Torch's kernels do this instead if cupy is missing or
    the copy kernel is not suited to the pieces.

    Args:
        layers: One sequence per KV group, with a tensor ``[slots, planes, tokens, heads, dim]`` per layer.
        layout: The layout of a page.
        driver: The driver of the device.
        device: The GPU.
        by_layers: Layer groups for loads. Ignored unless the copy kernel is suited to every part of them.
        slab_nbytes: Slab size in bytes. It is rounded down to whole pages, but to no less than one page.
    """
    nbytes = max(1, slab_nbytes // layout.slot_nbytes) * layout.slot_nbytes
    up, down = (Ring.open(nbytes, driver, device) for _ in "ud")
    coder = _by_pieces(layers, layout, device) or ByLayers(layers, layout)
    whole = [(0, 0, layout.blob_nbytes)]
    loads, saves = (dma_copies(ring, coder, layout.slot_nbytes, whole, driver) for ring in (up, down))
    groups = (
        []
        if by_layers is None or len(by_layers) == 1
        else _part_by_part(up, layers, layout, by_layers, driver, device)
    )
    return SlabRoute("slab", loads, saves, by_layers if groups else None, groups)


def dma_copies(
    ring: Ring, coder: RowCoder, stride: int, pieces: Sequence[tuple[int, int, int]], driver: Driver
) -> SlabCopies:
    """Return a ``SlabCopies`` that transfers the rows of the slabs in ``ring`` by DMA.

    Rows are ``stride`` bytes apart. ``pieces`` describes the pieces of a row; see ``addresses.row_segments``.
    """
    rows = [addresses.row_segments(at, stride, pieces) for at in ring.addresses]
    return SlabCopies(ring, coder, stride, [DmaRoute(segments, driver) for segments in rows])


def _piece_by_piece(
    layers: Sequence[Sequence[torch.Tensor]],
    found: Segments,
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    by_layers: LayerGroups,
) -> list[Option]:
    number, nbytes = len(found), layout.blob_nbytes // len(found)
    options = []
    if number <= _MOST_PIECES:
        groups = addresses.tensor_group_segments(layers, layout, by_layers, _MOST_PIECES)
        options.append(Option(DmaRoute(found, driver, by_layers, groups), "dma", number, nbytes))
    equal = addresses.in_equal_pieces(found)
    if equal is not None:
        with suppress(ImportError):
            kernel = KernelRoute(found, device)
            options.append(Option(kernel, "kernel", len(equal), int(equal.nbytes[0])))
    return options


def _by_pieces(
    layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout, device: torch.device
) -> ByPieces | None:
    found = addresses.tensor_segments(layers, layout, _MOST_LISTED)
    if found is not None and Pieces.suits(found):
        with suppress(ImportError):
            inward, outward = (Pieces(found, device, NEAR) for _ in "io")
            return ByPieces(inward, outward, layout.slot_nbytes)
    return None


def _part_by_part(
    ring: Ring,
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    by_layers: LayerGroups,
    driver: Driver,
    device: torch.device,
) -> list[list[SlabCopies]]:
    """Return the loads of each layer group. The list is empty if cupy is missing or the kernel does not suit a part."""
    groups = []
    for parts in by_layers.parts:
        group = []
        for part in parts:
            found = addresses.tensor_segments(layers, layout, _MOST_LISTED, (part,))
            if found is None or not Pieces.suits(found):
                return []
            try:
                mover = Pieces(found, device, NEAR)
            except ImportError:
                return []
            group.append(part_copies(ring, mover, part, driver))
        groups.append(group)
    return groups


def part_copies(ring: Ring, mover: PieceMover, part: Part, driver: Driver) -> SlabCopies:
    """Return a ``SlabCopies`` that loads the layers in ``part``, which are not encoded, through ``ring``.

    ``mover`` moves the pieces of these layers from the slabs into the slots.
    """
    stride = -(-part.nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
    coder = ByPieces(mover, None, stride, offset=part.offset)
    return dma_copies(ring, coder, stride, [(0, part.offset, part.nbytes)], driver)
