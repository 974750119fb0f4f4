"""The GPU coder: encodes pages in device memory into payloads, and decodes payloads into pages.

``Coder`` produces exactly the same bytes as ``tierstore.codecs``. It decodes payloads in slabs (``decode``)
or directly in pinned host memory (``fetch``), because measurements show that each is faster for some pages.
It queues kernels on torch's current stream and never waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tierstore.codecs.lossy import PayloadLayout
from tierstore.codecs.quantization import LARGEST, Steps
from tierstore.gpu import addresses
from tierstore.gpu.slabs import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from numpy.typing import NDArray

    from tierstore.codecs.lossy import Lossy, Plane
    from tierstore.gpu.addresses import GroupStrides
    from tierstore.gpu.slabs import Card, Share
    from tierstore.page import PageLayout

BLOCK = 4096
"""Number of elements (``measure``) or bytes (other kernels, except ``fetch``) that one program processes."""

WORDS = {"bfloat16": torch.int16, "float16": torch.float16, "float32": torch.float32}
_KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
SIGNED, FLOORED, FP8 = range(3)

Constants = dict[str, int | float]


class Grid(NamedTuple):
    """Launch configuration of ``fetch``.

    Attributes:
        programs: Number of programs.
        warps: Warps per program.
        nbytes: Bytes of codes that a program reads per iteration.
        tile_nbytes: Maximum size of a tile in bytes.
        stages: Pipeline stages. While a program decodes the codes of one iteration, its reads for the next
            ``stages - 2`` iterations are in flight. With 1 or 2 stages, none are.
    """

    programs: int
    warps: int
    nbytes: int
    tile_nbytes: int
    stages: int


FETCH_GRID = Grid(24, 4, 8192, 65536, 3)
"""A configuration with at least 192 KiB in flight.

The copy kernel saturates the link with 128 KiB. These programs need more, because they start each tile with
nothing in flight.
"""

_ROW_NBYTES = 128
"""Width in bytes of a row of codes if all codes of a layer share one scale.

With one scale per channel, a tile is at most eight times as wide.
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its constants, its options and the tensors that are the same for every call.

    ``programs`` contains the size of the second and of the third dimension of the grid. ``layers`` is the number
    of layers in the KV group.
    """

    kernel: Any
    words: torch.Tensor
    deltas: torch.Tensor
    options: Constants
    layers: int
    programs: tuple[int, int] = (1, 1)

    @classmethod
    def of(
        cls,
        kernel: Any,
        words: torch.Tensor,
        lot: GroupStrides,
        known: Constants,
        programs: tuple[int, int] = (1, 1),
    ) -> Launch:
        """Return a launch for the KV group with the strides ``lot``.

        The kernel is passed those constants in ``known`` for which it has parameters.
        """
        deltas = torch.tensor(lot.deltas, dtype=torch.int64, device=words.device)
        constants = {name: known[name] for name in kernel.arg_names if name in known}
        return cls(kernel, words, deltas, constants | {"enable_fp_fusion": False}, len(lot.deltas), programs)

    def queue(self, grid: tuple[int, ...], *arguments: torch.Tensor | int) -> None:
        """Launch the kernel on torch's current stream."""
        self.kernel[grid](self.words, self.deltas, *arguments, **self.options)

    def compile(self, grid: tuple[int, ...], *arguments: torch.Tensor | int) -> None:
        """Compile the kernel for ``queue`` with arguments of these types, without running it."""
        self.kernel.warmup(self.words, self.deltas, *arguments, grid=grid, **self.options)


class Coder:
    """Encodes and decodes pages in device memory.

    It is a ``slabs.RowCoder`` that can also decode without slabs. It has two methods for decoding, because each of
    them is faster for some pages (docs/decisions/015):

    - ``decode`` reads payloads that DMA has copied into the rows of a slab. It supports every layout and
      reaches 98 % of the link's speed, with two or more pieces per page and one launch per slab.
    - ``fetch`` reads payloads in mapped host memory. It reaches 91 % of the link's speed, but one launch
      decodes hundreds of pages, or one of their layer groups, so the first token comes sooner. It supports
      pages that ``can_fetch`` accepts, and is slow if ``smallest_tile`` is small.
    """

    def __init__(
        self,
        codec: Lossy,
        layout: PageLayout,
        lots: tuple[GroupStrides, ...],
        pool: torch.Tensor | None,
        stride: int,
        kernels: ModuleType,
        grid: Grid | None = None,
    ) -> None:
        """Prepare the launches. Compiles nothing yet.

        Args:
            codec: A codec with fixed-length payloads for this layout; see ``codecs.fixed_nbytes``.
            layout: The layout of the pages.
            lots: The strides of each KV group in device memory.
            pool: The store's own slots as flat uint8. Payloads then contain the bytes between KV groups too.
                None for an engine's tensors, which have no such bytes.
            stride: Distance between payloads in a slab, in bytes, a multiple of 16.
            kernels: The module ``codec_kernels``.
            grid: The launch configuration of ``fetch``. None to decode only payloads in slabs.
        """
        places = PayloadLayout.of(layout, codec)
        assert not codec.zstd
        assert 0 < places.fixed_nbytes <= stride
        self._grid = grid
        self._encoding: list[Launch] = []
        self._decoding: list[Launch] = []
        self._fetching: list[Launch] = []
        for run in runs_of(places):
            lot = lots[layout.offsets.index(run.plane.offset)]
            words = lot.words(WORDS[run.plane.dtype], run.plane.index)
            known = strides_of(lot) | run.constants(stride)
            rows = run.plane.layers * run.count
            sides, bytes_ = blocks(known["SIDES"], known["SIDE_BLOCK"]), blocks(known["LAYER_CODES"], BLOCK)
            self._encoding.append(Launch.of(kernels.measure, words, lot, known, (rows, sides)))
            if known["BITS"] == 4:
                self._encoding.append(Launch.of(kernels.pack, words, lot, known, (rows, bytes_)))
            self._decoding.append(Launch.of(kernels.expand, words, lot, known, (rows, bytes_)))
            if grid is not None:
                launch = Launch.of(kernels.fetch, words, lot, known | _tiles(known, grid))
                launch.options["num_warps"] = grid.warps
                self._fetching.append(launch)
        kept = list(_kept(places, layout, lots, pool))
        self._keeping = [
            [_keep(kernels.keep, lot, at, stride, back=back) for lot, at in kept] for back in (False, True)
        ]

    @property
    def fetches(self) -> bool:
        """Return whether ``fetch`` can be called, which requires that the coder was created with a ``grid``."""
        return self._grid is not None

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return a batch for these slots, with the slot numbers on the device and one flag per page."""
        return Batch(slots, card.uploaded(slots), card.flags(len(slots)))

    def encode(self, share: Share) -> None:
        """Encode the pages into the rows.

        If the codec cannot represent a page, the page's flag becomes 1 and its payload is undefined. Bytes
        after a payload are not changed.
        """
        self._each(Launch.queue, self._encoding, self._keeping[0], share)

    def decode(self, share: Share) -> None:
        """Decode the rows into the pages.

        If a payload cannot be the output of ``encode``, the page's flag becomes 1 and its content is
        undefined.
        """
        self._each(Launch.queue, self._decoding, self._keeping[1], share)

    def fetch(self, table: torch.Tensor, flags: torch.Tensor, layers: tuple[int, int] | None = None) -> None:
        """Decode payloads in pinned, mapped host memory into pages, or into some of their layers.

        Keep ``table`` and ``flags`` until the queued kernels complete: they read ``table`` and write
        ``flags``.

        Args:
            table: int64 ``[2 * pages]``: the slots, then the addresses of the payloads, which are multiples
                of 16.
            flags: int32 zeros ``[pages]``; see ``decode``.
            layers: The layers ``[first, end)``. None for all layers.
        """
        self._fetch(Launch.queue, table, flags, layers)

    def compile(self, share: Share) -> None:
        """Compile ``encode`` and ``decode`` without running them.

        Takes several seconds the first time on a machine. The tensors in ``share`` must have the same types
        as in later shares. Raises Triton's errors (``codec_kernels.REFUSALS``) if Triton's compiler, or the
        C compiler that it needs, is missing or fails.
        """
        self._each(
            Launch.compile, self._encoding + self._decoding, self._keeping[0] + self._keeping[1], share
        )

    def compile_decoding(self, share: Share) -> None:
        """Compile only ``decode``, without running it. See ``compile``."""
        self._each(Launch.compile, self._decoding, self._keeping[1], share)

    def compile_fetching(self, table: torch.Tensor, flags: torch.Tensor) -> None:
        """Compile ``fetch`` for tables and flags of these types, without running it. See ``compile``."""
        self._fetch(Launch.compile, table, flags, None)

    def _each(
        self, act: Callable[..., None], coding: list[Launch], keeping: list[Launch], share: Share
    ) -> None:
        batch, payloads, first, pages, _ = share
        halves = payloads.view(torch.int16)
        for launch in coding:
            act(launch, (pages, *launch.programs), batch.on_device, halves, payloads, batch.flags, first)
        for launch in keeping:
            act(launch, (pages, *launch.programs), batch.on_device, payloads, first)

    def _fetch(
        self,
        act: Callable[..., None],
        table: torch.Tensor,
        flags: torch.Tensor,
        layers: tuple[int, int] | None,
    ) -> None:
        assert self._grid is not None
        for launch in self._fetching:
            first, end = layers or (0, launch.layers)
            act(launch, (self._grid.programs,), table, flags, len(flags), first, end - first)


def can_fetch(codec: Lossy, layout: PageLayout) -> bool:
    """Return whether ``Coder.fetch`` supports these pages.

    All bytes of a page must be encoded, and each scale must apply to whole rows of codes or to one column of
    a tile.
    """
    places = PayloadLayout.of(layout, codec)
    return not any(places.gaps()) and all(map(_fits_tiles, runs_of(places)))


def smallest_tile(codec: Lossy, layout: PageLayout, grid: Grid) -> int:
    """Return the size in bytes of the smallest tile that a program of ``fetch`` reads."""
    codes = (int(run.constants(0)["LAYER_CODES"]) for run in runs_of(PayloadLayout.of(layout, codec)))
    return min(grid.tile_nbytes, min(codes, default=0))


def _fits_tiles(run: Run) -> bool:
    """Return whether tiles can be chosen so that each one reads only its own scales.

    With 4 bits, the scales of the two elements in a byte must be a fixed distance apart throughout a tile.
    """
    known = run.constants(0)
    if known["RULE"] == FP8:
        return True
    members, channels, length = int(known["MEMBERS"]), int(known["CHANNELS"]), int(known["LENGTH"])
    if not channels:
        return length % members == 0
    half = int(known["LAYER_CODES"]) // channels
    return known["BITS"] == 8 or members >= length or half % members == 0


def _tiles(known: Constants, grid: Grid) -> Constants:
    """Return the constants for dividing a layer's codes into tiles. See ``codec_kernels.fetch``."""
    channels, codes = int(known["CHANNELS"]), int(known["LAYER_CODES"])
    shared = known["RULE"] == FP8
    width = channels or (_ROW_NBYTES if shared else int(known["MEMBERS"]))
    columns = min(power(width), 8 * _ROW_NBYTES if channels else grid.nbytes)
    height = blocks(codes, width)
    most = min(int(known["MEMBERS"]), height) if channels else max(1, grid.tile_nbytes // width)
    tile = min(most, height)
    rows = min(power(tile), max(1, grid.nbytes // columns))
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS": rows,
        "TILE_ROWS": tile,
        "DOWN": blocks(height, tile),
        "ACROSS": blocks(width, columns),
        "RAGGED": bool(tile % rows or width % columns),
        "ALONG": 0 if channels else 1,
        "STAGES": grid.stages,
    }


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent planes of one KV group that are encoded with the same scheme.

    Attributes:
        plane: The first plane.
        count: The number of planes.
        scales: Offset of the run's scales in a payload, in bytes.
        codes: Offset of the run's codes in a payload, in bytes.
    """

    plane: Plane
    count: int
    scales: int
    codes: int

    def constants(self, stride: int) -> Constants:
        """Return the kernel constants of this run for payloads that are ``stride`` bytes apart."""
        plane = self.plane
        sides = prod(plane.scheme.sides(plane.shape))
        found: Constants = {
            "PLANES": self.count,
            "PAYLOAD": stride,
            "SCALES": self.scales,
            "FLOORS": self.scales + plane.scale_nbytes,
            "SIDES_NEXT": plane.scale_nbytes + plane.floor_nbytes,
            "CODES": self.codes,
            "CODES_NEXT": plane.code_nbytes,
            "LAYER_CODES": plane.scheme.code_nbytes(plane.shape),
            "NUMBERS": plane.shape.numbers,
            "SIDES": sides,
            "BLOCK": BLOCK,
        }
        return found | _groups(plane, sides) | _arithmetic(plane)


def runs_of(places: PayloadLayout) -> Iterator[Run]:
    """Yield the runs of a payload in payload order."""
    scales, codes = 0, places.kept_nbytes
    for _, alike in groupby(places.planes, lambda plane: (plane.offset, plane.scheme)):
        planes = list(alike)
        yield Run(planes[0], len(planes), scales, codes)
        scales += sum(plane.scale_nbytes + plane.floor_nbytes for plane in planes)
        codes += sum(plane.code_nbytes for plane in planes)


def strides_of(lot: GroupStrides) -> Constants:
    """Return the kernel constants for the strides of a KV group."""
    plane, token, head, number = lot.strides
    return {
        "SLOT": lot.slot,
        "PLANE": plane,
        "TOKEN": token,
        "HEAD": head,
        "NUMBER": number,
        "HEADS": lot.shape[2],
        "DIM": lot.shape[3],
        "PLAIN": lot.plain,
        "ALIGNED": lot.aligned,
    }


def _groups(plane: Plane, sides: int) -> Constants:
    """Return the constants that define which elements share a scale, and how many scales a program handles."""
    shape, scheme = plane.shape, plane.scheme
    members, length, channels = scheme.members(shape), shape.numbers, 0
    if isinstance(scheme, Steps):
        length = shape.dim if scheme.along == "token" else shape.tokens
        channels = 0 if scheme.along == "token" else shape.heads * shape.dim
    block = min(power(members), BLOCK)
    return {
        "LENGTH": length,
        "MEMBERS": members,
        "CHANNELS": channels,
        "MEMBER_BLOCK": block,
        "SIDE_BLOCK": min(power(sides), BLOCK // block),
    }


def _arithmetic(plane: Plane) -> Constants:
    scheme = plane.scheme
    rule, bits, up = FP8, 8, False
    if isinstance(scheme, Steps):
        rule, bits, up = (FLOORED if scheme.floored else SIGNED), scheme.bits, not scheme.nearest
    return {
        "DTYPE": _KINDS[plane.dtype],
        "LARGEST": LARGEST[plane.dtype],
        "LIMIT": int(np.float32(LARGEST[plane.dtype]).view(np.int32)),
        "MOST": float(scheme.most),
        "MOST_SCALE": scheme.largest_scale(plane.dtype),
        "UP": up,
        "RULE": rule,
        "BITS": bits,
    }


def _kept(
    places: PayloadLayout, layout: PageLayout, lots: tuple[GroupStrides, ...], pool: torch.Tensor | None
) -> Iterator[tuple[GroupStrides, int]]:
    """Yield, for each unencoded piece of a page, its strides and its offset in a payload."""
    at = sum(plane.scale_nbytes + plane.floor_nbytes for plane in places.planes)
    for start, end in places.gaps():
        if pool is not None:
            yield addresses.byte_strides(pool, start, end - start, layout.slot_nbytes), at
        else:
            inside = (i for i, offset in enumerate(layout.offsets) if start <= offset < end)
            yield from ((lots[i], at + layout.offsets[i] - start) for i in inside)
        at += end - start


def _keep(kernel: Any, lot: GroupStrides, at: int, stride: int, *, back: bool) -> Launch:
    nbytes = lot.numbers * lot.itemsize
    known = strides_of(lot) | {
        "PLANES": lot.shape[0],
        "ITEM": lot.itemsize,
        "PAYLOAD": stride,
        "AT": at,
        "NBYTES": nbytes,
        "BACK": back,
        "BLOCK": BLOCK,
    }
    rows = len(lot.deltas) * lot.shape[0]
    return Launch.of(kernel, lot.words(torch.uint8), lot, known, (rows, blocks(nbytes, BLOCK)))


def blocks(number: float, size: float) -> int:
    """Return how many blocks of ``size`` are needed for ``number`` items."""
    return -(-int(number) // int(size))


def power(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
