"""The routes between device memory and page-locked host slots, the measured speed of each, and the choice among them.

``DmaRoute`` copies each piece by DMA, ``KernelRoute`` by the copy kernel; slabs are in ``staging``, routes to encoded
host memory in ``quant``. ``rates_of`` measures a card's link once a process, in a fraction of a second.
``FastestRoute`` takes, for each batch, the route that is expected to end first. ``own_pool_route`` and
``engine_route`` build the route for a pool. Routes only queue work; they never wait.
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
    """Queues copies of pages. ``slots``: in device memory; ``host``: addresses of the pages' slots in memory.

    What is given back is an entry a page, not 0 once the copies have ended where the page did not arrive as its form is
    wrong; None: none can fail so. ``pieces``: copies that the driver is asked for, for each page. ``layers``: how
    ``load_group`` cuts pages, ``group_pieces`` pieces at most for each; None: loads go whole. ``loads_end_on``: the
    stream of a load's last work; None: the one that it is given. ``streams``: those that it uses besides.
    """

    name: str
    pieces: int
    layers: LayerGroups | None
    group_pieces: int
    loads_end_on: torch.cuda.Stream | None
    streams: Sequence[torch.cuda.Stream]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Host to device."""
        ...

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """One group of ``layers``, host to device."""
        ...

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Device to host."""
        ...


class WholePages:
    """What routes have in common that load pages whole, on the stream they are given."""

    pieces = 1
    layers: LayerGroups | None = None
    group_pieces = 1
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Never called where ``layers`` is None."""
        raise NotImplementedError


class DmaRoute:
    """One copy a piece. ``groups``: the pieces of each of ``layers``, as ``Segments`` has them of all; pages go whole
    where there is one."""

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
        self.layers = layers if len(groups) > 1 else None
        self.pieces = len(segments)
        self.group_pieces = max((len(group) for group in groups), default=self.pieces)
        self._segments = segments
        self._groups = groups
        self._driver = driver

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """One group of ``layers``, host to device."""
        there, here, nbytes = _pieces(self._groups[group], slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(here, there, nbytes, stream)


def _pieces(
    segments: Segments, slots: NDArray[np.int64], host: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    there = segments.addresses(slots).ravel()
    here = (host[:, None] + segments.offset).ravel()
    return there, here, np.tile(segments.nbytes, len(slots))


class KernelRoute(WholePages):
    """A route (see ``routes.Route``) straight between slots and mapped host memory."""

    name = "kernel"
    pieces = 0

    def __init__(self, segments: Segments, device: torch.device) -> None:
        """ImportError without cupy. ``segments``: such as ``suits``."""
        self._up, self._down = (Pieces(segments, device, grid) for grid in (UP, DOWN))

    @staticmethod
    def suits(segments: Segments | None) -> bool:
        """Whether pages of this form can go this way at a good speed."""
        return Pieces.suits(segments)

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        self._up.scatter(slots, host, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        self._down.gather(slots, host, stream)


Way = Literal["dma", "kernel"]
Direction = Literal["up", "down"]
"""To the device, to the host."""

SIZES = (4 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Bytes of the pieces that are measured."""

FEW = 8
"""Pieces of the smaller batch; the larger is of ``MANY_NBYTES``, but of no more than ``MOST`` pieces."""

MANY_NBYTES = 16 << 20
MOST = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """Pieces of ``nbytes``: a batch of n takes ``fixed_s + n * piece_s``."""

    nbytes: int
    fixed_s: float
    piece_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """``points``: by way and direction, by rising size of a piece; what is missing cannot be done."""

    points: Mapping[tuple[Way, Direction], Sequence[Point]]

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """What ``pieces`` pieces of ``nbytes`` take; infinity for a way that was not measured.

        Between two sizes that were measured the costs go evenly with the logarithm of the size, beyond them with the
        size itself, but for the costs of the smallest, which no smaller piece goes below.
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
        """10^9 bytes a second of large batches, by way and size: for stats."""
        return {
            f"{way} {direction}": {p.nbytes: round(p.nbytes / p.piece_s / 1e9, 2) for p in points}
            for (way, direction), points in self.points.items()
        }


def measured(ways: Sequence[Way], measure: Callable[[Way, Direction, int, int], float]) -> Rates:
    """``measure``: the seconds of a batch of so many pieces of so many bytes, by a way, in a direction."""
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
    piece = max((long - short) / (many - FEW), long / many / 10)  # whatever the clock says: more takes longer
    return Point(nbytes, max(0.0, long - many * piece), piece)


KERNEL_HANDICAP = 1.1
"""A kernel has to be so much faster than DMA: it takes multiprocessors and bandwidth from compute."""


MOST_PIECES = 128
"""The driver is asked for more only where there is no other way: it takes a microsecond of the caller for each."""

_A_TRANSFER = 32
"""Pages."""


@dataclass(frozen=True, slots=True)
class Option:
    """A route, and what its batches are made of: ``pieces`` of ``piece_nbytes`` a page, by ``way``."""

    route: Route
    way: Way
    pieces: int
    piece_nbytes: int
    extra_s: float = 0.0
    """For each batch, on top."""

    def seconds(self, rates: Rates, direction: Direction, pages: int) -> float:
        """What a batch is expected to take."""
        handicap = KERNEL_HANDICAP if self.way == "kernel" else 1.0
        crossing = rates.seconds(self.way, direction, self.piece_nbytes, pages * self.pieces)
        return handicap * crossing + self.extra_s


class FastestRoute:
    """Several routes as one. Loads by layers go by the one of those with layers that is expected to take least."""

    def __init__(
        self, options: Sequence[Option], rates: Rates, side: torch.cuda.Stream | None = None
    ) -> None:
        """``side``: where loads of one of the routes end; those of the others are made to end there too."""
        self.batches: dict[str, int] = {option.route.name: 0 for option in options}
        """Batches so far, by route."""
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
        """Host to device."""
        route = self._pick("up", len(slots))
        flags = route.load(slots, host, stream)
        self._join(route, stream)
        return flags

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """One group of ``layers``, host to device."""
        assert self._layered is not None
        flags = self._layered.load_group(group, slots, host, stream)
        self._join(self._layered, stream)
        return flags

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Device to host."""
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
    """The rates of the device's link, measured at the first call in the process: about 0.1 s, with other work on the
    link or the card as slow as that work makes it. Without cupy DMA is the only way."""
    with _lock:
        if device.index not in _found:
            start = perf_counter()
            _found[device.index] = _Bed(driver, device).rates()
            _log.info("the link of %s was measured in %.3f s", device, perf_counter() - start)
        return _found[device.index]


class _Bed:
    """A block at each end of the link, and what moves pieces of it."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        nbytes = max(MANY_NBYTES, max(SIZES) * FEW)
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._driver = driver
        self._device = device
        self._stream = driver.stream(device.index)
        self._movers: dict[tuple[int, Direction], Pieces] = {}

    def rates(self) -> Rates:
        """Everything measured."""
        try:
            self._mover(SIZES[0], "up")
        except ImportError:
            return measured(["dma"], self.seconds)
        return measured(["dma", "kernel"], self.seconds)

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """The shortest of a few runs, by the clock on the wall, submission included."""
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
"""Pieces of a page that are still written down one by one."""

_MOST_PIECES = 128
"""Pieces of a page that the driver may be asked to copy one by one."""

_SPREAD_S = 50e-6
"""Spreading the last slab, which nothing hides."""

_LAUNCH_S = 10e-6
"""A launch of torch's, where it takes one or two a layer."""

SLAB_NBYTES = 32 << 20
"""Bytes of a slab of pages as they are."""

_PART_ALIGNMENT = 512


def own_pool_route(
    pool: CudaPool,
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """For slots of our own: by DMA, or by the kernel where pages are so small that it may be faster."""
    layers = LayerGroups.of(layout, most_groups)
    straight = DmaRoute(pool.segments, driver, layers, pool.groups(layers))
    if layout.blob_nbytes > SIZES[-1] or not KernelRoute.suits(pool.segments):
        return straight
    options = [Option(straight, "dma", 1, layout.blob_nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"; DMA does without it
        options.append(Option(KernelRoute(pool.segments, device), "kernel", 1, layout.blob_nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight


def engine_route(
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """For an engine's tensors: piece by piece, by DMA or by the kernel, or as whole pages through slabs."""
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
    """Return whether the copy kernel would be one of the route's ways if cupy were installed."""
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
    """Return the route of pages as they are to and from an engine's layers, through slabs.

    A slab is spread by the copy kernel, or by torch's kernels where that cannot or cupy is missing. ``by_layers``: how
    loads are cut, where the copy kernel can spread each part. ``slab_nbytes``: of a slab, about; at least a page.
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

    ``pieces``: of a row, see ``addresses.row_segments``.
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
    """Nothing where one of the parts cannot go by the copy kernel."""
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
    """Return the loads of some layers of pages as they are, through the ring.

    ``mover``: of the pieces of these layers.
    """
    stride = -(-part.nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
    coder = ByPieces(mover, None, stride, offset=part.offset)
    return dma_copies(ring, coder, stride, [(0, part.offset, part.nbytes)], driver)
