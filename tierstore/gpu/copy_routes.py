"""The routes between device memory and page-locked host slots, their measured speed, and the choice among them.

``DmaRoute`` copies each piece by DMA (the card's copy engines), ``KernelRoute`` by the copy kernel. ``slabs``
has the route through staging buffers, ``quant`` the routes to encoded host memory. ``rates_of`` measures a
card's link once per process, in a fraction of a second. ``FastestRoute`` chooses for each batch the route
that is expected to end first. ``own_pool_route`` and ``engine_route`` build the route for a pool. Routes only
queue work and never wait for it.
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
    """Queues copies of pages between slots in device memory and addresses of page-locked host memory.

    Each method returns int32 flags, one per page. A flag that is not 0 once the copies have ended means that
    the page was not copied because the codec cannot encode or decode it. The result is None if no page can
    fail in this way.
    """

    name: str
    """The name of the route in ``stats()``."""
    pieces: int
    """Number of copies that each page asks the driver for."""
    layers: LayerGroups | None
    """The layer groups of ``load_group``. None if pages are only loaded whole."""
    group_pieces: int
    """Most copies that a page of a ``load_group`` asks the driver for."""
    loads_end_on: torch.cuda.Stream | None
    """The stream on which loads end. None if it is the stream that the load is given."""
    streams: Sequence[torch.cuda.Stream]
    """The streams that the route uses besides the one that a copy is given."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of whole pages, host to device.

        Args:
            slots: Slots in device memory, int64 ``[pages]``.
            host: Addresses of the pages in host memory, int64 ``[pages]``.
            stream: The stream on which the copies begin. They end on ``loads_end_on``.
        """
        ...

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of one group of ``layers``, host to device, on ``stream``."""
        ...

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of whole pages, device to host, on ``stream``."""
        ...


class WholePages:
    """Base of routes that load whole pages on the stream they are given."""

    pieces = 1
    layers: LayerGroups | None = None
    group_pieces = 1
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Raise NotImplementedError. Nothing calls this, because ``layers`` is None."""
        raise NotImplementedError


class DmaRoute:
    """Copies by DMA, one for each piece of a page."""

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
            layers: The layer groups that pages are cut into.
            groups: The pieces of each of ``layers``. With fewer than two groups, pages are only loaded whole.
        """
        self.layers = layers if len(groups) > 1 else None
        self.pieces = len(segments)
        self.group_pieces = max((len(group) for group in groups), default=self.pieces)
        self._segments = segments
        self._groups = groups
        self._driver = driver

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies of whole pages, host to device, on ``stream``."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Queue copies of one group of ``layers``, host to device, on ``stream``."""
        there, here, nbytes = _pieces(self._groups[group], slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies of whole pages, device to host, on ``stream``."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(here, there, nbytes, stream)


def _pieces(
    segments: Segments, slots: NDArray[np.int64], host: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    there = segments.addresses(slots).ravel()
    here = (host[:, None] + segments.offset).ravel()
    return there, here, np.tile(segments.nbytes, len(slots))


class KernelRoute(WholePages):
    """Copies by the copy kernel, directly between slots and mapped host memory."""

    name = "kernel"
    pieces = 0

    def __init__(self, segments: Segments, device: torch.device) -> None:
        """Compile the kernel for the pieces of a page, which ``suits`` must accept.

        ImportError without cupy.
        """
        self._up, self._down = (Pieces(segments, device, grid) for grid in (UP, DOWN))

    @staticmethod
    def suits(segments: Segments | None) -> bool:
        """Return whether the kernel can copy pages of these pieces at a good speed."""
        return Pieces.suits(segments)

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies of whole pages, host to device, on ``stream``."""
        self._up.scatter(slots, host, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies of whole pages, device to host, on ``stream``."""
        self._down.gather(slots, host, stream)


Way = Literal["dma", "kernel"]
Direction = Literal["up", "down"]
"""``up`` is to the device, ``down`` to the host."""

SIZES = (4 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Sizes in bytes of the pieces to measure."""

FEW = 8
"""Number of pieces in the smaller batch. The larger one has ``MANY_NBYTES``, but at most ``MOST`` pieces."""

MANY_NBYTES = 16 << 20
MOST = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """The measured cost of pieces of ``nbytes``: a batch of n takes ``fixed_s + n * piece_s`` seconds."""

    nbytes: int
    fixed_s: float
    piece_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured costs of copies.

    ``points`` has them by way and direction, in ascending order of the size of a piece. A way that is missing
    cannot be used.
    """

    points: Mapping[tuple[Way, Direction], Sequence[Point]]

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """Return the seconds that ``pieces`` pieces of ``nbytes`` take, infinity for an unmeasured way.

        Between two measured sizes, costs are interpolated over the logarithm of the size. Above the largest
        size the cost of a piece grows with its size. Below the smallest size the cost is constant.
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
        """Return the throughput of large batches in 10^9 bytes/s, by way, direction and size of a piece."""
        return {
            f"{way} {direction}": {p.nbytes: round(p.nbytes / p.piece_s / 1e9, 2) for p in points}
            for (way, direction), points in self.points.items()
        }


def measured(ways: Sequence[Way], measure: Callable[[Way, Direction, int, int], float]) -> Rates:
    """Return the rates that ``measure`` finds.

    ``measure`` is called with way, direction, bytes of a piece and number of pieces, and returns seconds.
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
    )  # even if the clock says otherwise, more pieces take longer
    return Point(nbytes, max(0.0, long - many * piece), piece)


KERNEL_HANDICAP = 1.1
"""Factor by which the kernel must beat DMA to be chosen.

The kernel takes multiprocessors and memory bandwidth from compute.
"""

MOST_PIECES = 128
"""Most copies that a batch may ask the driver for if there is another route.

Each copy takes a microsecond of the caller's time.
"""

_A_TRANSFER = 32
"""Number of pages in a typical transfer."""


@dataclass(frozen=True, slots=True)
class Option:
    """A route to choose from, with its cost: ``pieces`` pieces of ``piece_nbytes`` per page, by ``way``."""

    route: Route
    way: Way
    pieces: int
    piece_nbytes: int
    extra_s: float = 0.0
    """Additional seconds per batch."""

    def seconds(self, rates: Rates, direction: Direction, pages: int) -> float:
        """Return the seconds that a batch is expected to take, times ``KERNEL_HANDICAP`` for the kernel."""
        handicap = KERNEL_HANDICAP if self.way == "kernel" else 1.0
        crossing = rates.seconds(self.way, direction, self.piece_nbytes, pages * self.pieces)
        return handicap * crossing + self.extra_s


class FastestRoute:
    """Combines several routes: each batch takes the route that is expected to end first.

    Loads by layer groups always take the same route, the fastest of those that support them.
    """

    def __init__(
        self, options: Sequence[Option], rates: Rates, side: torch.cuda.Stream | None = None
    ) -> None:
        """Set the routes to choose from.

        Args:
            options: The routes and their costs.
            rates: The measured costs of copies.
            side: The stream on which loads of one of the routes end. Loads of the others are made to end
                there too.
        """
        self.batches: dict[str, int] = {option.route.name: 0 for option in options}
        """Number of batches so far, by route."""
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
        """Queue copies of whole pages, host to device, on ``stream``."""
        route = self._pick("up", len(slots))
        flags = route.load(slots, host, stream)
        self._join(route, stream)
        return flags

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of one group of ``layers``, host to device, on ``stream``."""
        assert self._layered is not None
        flags = self._layered.load_group(group, slots, host, stream)
        self._join(self._layered, stream)
        return flags

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of whole pages, device to host, on ``stream``."""
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
    """Return the rates of the device's link, which the first call in a process measures.

    The measurement takes about 0.1 s. Other work on the link or the card during it lowers the measured rates.
    Without cupy only DMA is measured.
    """
    with _lock:
        if device.index not in _found:
            start = perf_counter()
            _found[device.index] = _Bed(driver, device).rates()
            _log.info("measured the link of %s in %.3f s", device, perf_counter() - start)
        return _found[device.index]


class _Bed:
    """Measures the link: has memory at both ends, and copies pieces of it by the driver and by kernels."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        nbytes = max(MANY_NBYTES, max(SIZES) * FEW)
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._driver = driver
        self._device = device
        self._stream = driver.stream(device.index)
        self._movers: dict[tuple[int, Direction], Pieces] = {}

    def rates(self) -> Rates:
        """Return all measured rates."""
        try:
            self._mover(SIZES[0], "up")
        except ImportError:
            return measured(["dma"], self.seconds)
        return measured(["dma", "kernel"], self.seconds)

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """Return the wall time of the shortest of a few runs, including submission."""
        slots = np.random.default_rng(0).permutation(min(MOST, len(self._host) // nbytes)).astype(np.int64)
        slots = slots[:pieces]
        host = self._host.data_ptr() + slots[::-1] * nbytes
        runs = []
        for _ in range(_RUNS + 1):
            start = perf_counter()
            if way == "kernel":
                mover = self._mover(nbytes, direction)
                (mover.scatter if direction == "up" else mover.gather)(slots, host, self._stream)
            else:
                self._dma(direction, slots * nbytes + self._there.data_ptr(), host, nbytes)
            self._stream.synchronize()
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
"""Most pieces of a page for which a list of pieces is made."""

_MOST_PIECES = 128
"""Most pieces of a page for which each is copied by the driver."""

_SPREAD_S = 50e-6
"""Seconds to spread the last slab, which cannot overlap with copies."""

_LAUNCH_S = 10e-6
"""Seconds of a torch kernel launch. Each layer needs one or two."""

SLAB_NBYTES = 32 << 20
"""Bytes of a slab for unencoded pages."""

_PART_ALIGNMENT = 512


def own_pool_route(
    pool: CudaPool,
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """Return the route for the store's own slots.

    Pages are copied by DMA. If they are so small that the copy kernel may be faster, the route may choose
    that. ``most_groups`` limits the number of layer groups of a load.
    """
    layers = LayerGroups.of(layout, most_groups)
    straight = DmaRoute(pool.segments, driver, layers, pool.groups(layers))
    if layout.blob_nbytes > SIZES[-1] or not KernelRoute.suits(pool.segments):
        return straight
    options = [Option(straight, "dma", 1, layout.blob_nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"; DMA does not need it
        options.append(Option(KernelRoute(pool.segments, device), "kernel", 1, layout.blob_nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight


def engine_route(
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """Return the route for an engine's tensors, which chooses the fastest of the routes that suit them.

    Pages are copied piece by piece, by DMA or by the copy kernel, or as whole pages through slabs. ``layers``
    has the layers ``[slots, planes, tokens, heads, dim]``, one sequence for each KV group. ``most_groups``
    limits the number of layer groups of a load.
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
    """Return whether cupy is missing and this route could otherwise choose the copy kernel."""
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
    """Return the route for unencoded pages to and from an engine's layers, through slabs.

    The copy kernel spreads a slab, or torch's kernels if the copy kernel does not suit the pieces or cupy is
    missing. ``by_layers`` are the layer groups that loads are cut into, if the copy kernel can spread each
    part. ``slab_nbytes`` is the approximate size of a slab, which holds at least one page.
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
    """Return copies through the ring whose rows, ``stride`` bytes apart, cross the link by DMA.

    ``pieces`` are those of a row, see ``addresses.row_segments``.
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
    if KernelRoute.suits(found):
        with suppress(ImportError):
            options.append(Option(KernelRoute(found, device), "kernel", number, nbytes))
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
    """Return the loads of each layer group, or an empty list if the copy kernel cannot copy a part."""
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
    """Return the loads of some layers of unencoded pages, through the ring.

    ``mover`` moves the pieces of these layers.
    """
    stride = -(-part.nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
    coder = ByPieces(mover, None, stride, offset=part.offset)
    return dma_copies(ring, coder, stride, [(0, part.offset, part.nbytes)], driver)
