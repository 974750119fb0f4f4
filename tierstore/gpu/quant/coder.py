"""A codec's payloads made from pages in device memory, and pages from payloads, by kernels on the card.

Byte for byte what ``tierstore.codecs`` makes of the same pages and payloads. Kernels are queued on torch's current
stream; nothing waits.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from tierstore.codecs.lossy import Lossy, Plane
    from tierstore.gpu.addresses import GroupStrides
    from tierstore.page import PageLayout

BLOCK = 4096
"""Numbers, or bytes, that a program of a kernel has."""

WORDS = {"bfloat16": torch.int16, "float16": torch.float16, "float32": torch.float32}
_KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
SIGNED, FLOORED, FP8 = range(3)

Constants = dict[str, int | float]


class Call(NamedTuple):
    """What a call is about: ``pages`` pages of ``slots[first:]`` and the rows of ``payloads``, flat uint8.

    ``slots`` int64. ``flags`` int32, one a slot, which hold 0.
    """

    slots: torch.Tensor
    payloads: torch.Tensor
    flags: torch.Tensor
    first: int
    pages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel over ``(pages, *grid)``, with its tensors besides a call's, and its constants."""

    kernel: Any
    grid: tuple[int, int]
    words: torch.Tensor
    deltas: torch.Tensor
    constants: Constants

    @classmethod
    def of(
        cls, kernel: Any, grid: tuple[int, int], words: torch.Tensor, lot: GroupStrides, known: Constants
    ) -> Launch:
        """Of what is known of the pages the kernel is told what it has a name for."""
        deltas = torch.tensor(lot.deltas, dtype=torch.int64, device=words.device)
        return cls(
            kernel, grid, words, deltas, {name: known[name] for name in kernel.arg_names if name in known}
        )

    def queue(self, *tensors: torch.Tensor, first: int, pages: int) -> None:
        self.kernel[(pages, *self.grid)](
            self.words, self.deltas, *tensors, first, **self.constants, enable_fp_fusion=False
        )

    def compile(self, *tensors: torch.Tensor, first: int, pages: int) -> None:
        """Makes the machine code that ``queue`` uses, now."""
        grid = (pages, *self.grid)
        self.kernel.warmup(
            self.words, self.deltas, *tensors, first, grid=grid, **self.constants, enable_fp_fusion=False
        )


class Coder:
    """Encodes and decodes whole pages of ``lots``. Payloads lie ``stride`` bytes apart, a multiple of 16.

    ``kernels``: the module ``codec_kernels``. ``pool``: slots of our own as flat uint8, whose bytes between KV groups
    are kept too; None: the lots are an engine's tensors, which have none.
    """

    def __init__(
        self,
        codec: Lossy,
        layout: PageLayout,
        lots: tuple[GroupStrides, ...],
        pool: torch.Tensor | None,
        stride: int,
        kernels: ModuleType,
    ) -> None:
        """``codec``: one of fixed length for this layout, see ``codecs.fixed_nbytes``."""
        places = PayloadLayout.of(layout, codec)
        assert not codec.zstd
        assert 0 < places.fixed_nbytes <= stride
        self._encoding: list[Launch] = []
        self._decoding: list[Launch] = []
        for run in runs_of(places):
            lot = lots[layout.offsets.index(run.plane.offset)]
            words = lot.words(WORDS[run.plane.dtype], run.plane.index)
            known = strides_of(lot) | run.constants(stride)
            rows = run.plane.layers * run.count
            sides, bytes_ = blocks(known["SIDES"], known["SIDE_BLOCK"]), blocks(known["LAYER_CODES"], BLOCK)
            self._encoding.append(Launch.of(kernels.measure, (rows, sides), words, lot, known))
            if known["BITS"] == 4:
                self._encoding.append(Launch.of(kernels.pack, (rows, bytes_), words, lot, known))
            self._decoding.append(Launch.of(kernels.expand, (rows, bytes_), words, lot, known))
        kept = list(_kept(places, layout, lots, pool))
        self._keeping = [
            [_keep(kernels.keep, lot, at, stride, back=back) for lot, at in kept] for back in (False, True)
        ]

    def encode(self, call: Call) -> None:
        """Payloads of the pages. Flags of pages that the codec cannot state become 1, and their payloads are anything.

        Bytes past a payload are not touched.
        """
        self._each(Launch.queue, self._encoding, self._keeping[0], call)

    def decode(self, call: Call) -> None:
        """The way back. Flags become 1 where no ``encode`` can have made the payload, and the page is anything."""
        self._each(Launch.queue, self._decoding, self._keeping[1], call)

    def compile_decoding(self, call: Call) -> None:
        """``compile`` for who only decodes."""
        self._each(Launch.compile, self._decoding, self._keeping[1], call)

    def compile(self, call: Call) -> None:
        """Makes the kernels' machine code, seconds the first time on a machine. Nothing is run; ``call`` as later ones.

        Triton's errors where its compiler, or the compiler of C that it needs, is missing or fails.
        """
        self._each(Launch.compile, self._encoding + self._decoding, self._keeping[0] + self._keeping[1], call)

    def _each(
        self, act: Callable[..., None], coding: list[Launch], keeping: list[Launch], call: Call
    ) -> None:
        slots, payloads, flags, first, pages = call
        halves = payloads.view(torch.int16)
        for launch in coding:
            act(launch, slots, halves, payloads, flags, first=first, pages=pages)
        for launch in keeping:
            act(launch, slots, payloads, first=first, pages=pages)


@dataclass(frozen=True, slots=True)
class Run:
    """Planes of a KV group with one scheme: the first, how many, and where its parts are in a payload."""

    plane: Plane
    count: int
    scales: int
    codes: int

    def constants(self, stride: int) -> Constants:
        """What the kernels are told of the codec and of payloads."""
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
    scales, codes = 0, places.kept_nbytes
    for _, alike in groupby(places.planes, lambda plane: (plane.offset, plane.scheme)):
        planes = list(alike)
        yield Run(planes[0], len(planes), scales, codes)
        scales += sum(plane.scale_nbytes + plane.floor_nbytes for plane in planes)
        codes += sum(plane.code_nbytes for plane in planes)


def strides_of(lot: GroupStrides) -> Constants:
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
    """Which numbers share a scale, and how many of them a program has."""
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
    """What is kept as it is, each with its place in a payload."""
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
    return Launch.of(kernel, (rows, blocks(nbytes, BLOCK)), lot.words(torch.uint8), lot, known)


def blocks(number: float, size: float) -> int:
    return -(-int(number) // int(size))


def power(number: int) -> int:
    """The next power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
