"""Addresses and strides of pages in device memory, in the store's own slots or in an engine's tensors.

``Segments`` describes a page as contiguous pieces, for copies. ``GroupStrides`` describes a KV group by its
strides, for kernels that address individual elements. This module does not access page contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.gpu.layer_groups import LayerGroups, Part
from tierstore.page import DTYPE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.page import PageLayout


@dataclass(frozen=True, slots=True)
class Segments:
    """The contiguous pieces of a page, in the order of the page's blob.

    Piece j of slot s is at address ``base[j] + s * stride[j]``, is ``nbytes[j]`` bytes long, and belongs at
    byte ``offset[j]`` of the blob. Each attribute is an int64 array with one entry per piece.
    """

    base: NDArray[np.int64]
    stride: NDArray[np.int64]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.base)

    @property
    def smallest(self) -> int:
        """Return the size in bytes of the smallest piece."""
        return int(self.nbytes.min())

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the device addresses of all pieces of these slots, int64 ``[len(slots), pieces]``."""
        return self.base + slots[:, None] * self.stride


def pool_segments(address: int, layout: PageLayout) -> Segments:
    """Return the segments of the store's own slots: a single piece, the whole blob.

    ``address`` is the address of slot 0.
    """
    return _segments([(address, layout.slot_nbytes, 0, layout.blob_nbytes)])


def row_segments(address: int, stride: int, pieces: Sequence[tuple[int, int, int]]) -> Segments:
    """Return the segments of the rows of a slab. Row numbers take the place of slot numbers.

    The slab starts at ``address``, and its rows are ``stride`` bytes apart. Each entry of ``pieces`` has a
    piece's offset within the row, its offset within the page or payload, and its length, all in bytes.
    """
    return _segments([(address + here, stride, there, nbytes) for here, there, nbytes in pieces])


def pool_group_segments(address: int, layout: PageLayout, layers: LayerGroups) -> list[Segments]:
    """Return the segments of each layer group in the store's own slots, with one piece per part of the group.

    ``address`` is the address of slot 0.
    """
    return [
        _segments([(address + part.offset, layout.slot_nbytes, part.offset, part.nbytes) for part in parts])
        for parts in layers.parts
    ]


def placed(layers: Sequence[torch.Tensor], start: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield, for each tensor of a KV group, its offset in the page's blob and the tensor.

    The group starts at offset ``start``. Its tensors follow each other without gaps, whatever their sizes.
    """
    for layer in layers:
        yield start, layer
        start += layer[0].nbytes


def tensor_segments(
    groups: Sequence[Sequence[torch.Tensor]], layout: PageLayout, limit: int, parts: Sequence[Part] = ()
) -> Segments | None:
    """Return the segments of pages in an engine's tensors, or None if there are more than ``limit`` pieces.

    Pieces that are adjacent both in memory and in the blob are merged.

    Args:
        groups: One sequence per KV group, with a tensor ``[slots, planes, tokens, heads, dim]`` per layer, of
            any size and with any strides.
        layout: The layout of a page.
        limit: Maximum number of pieces.
        parts: The layers to return pieces for. Empty for the whole page.
    """
    pieces: list[tuple[int, int, int, int]] = []
    wanted = [(part.spec, part.offset, part.offset + part.nbytes) for part in parts] or [
        (spec, 0, layout.blob_nbytes) for spec in range(len(groups))
    ]
    for spec, first, end in wanted:
        for offset, layer in placed(groups[spec], layout.offsets[spec]):
            if not first <= offset < end:
                continue
            found = _pieces(layer, offset, limit)
            if found is None:
                return None
            for piece in found:
                _append(pieces, piece)
            if len(pieces) > limit:
                return None
    return _segments(pieces)


def tensor_group_segments(
    groups: Sequence[Sequence[torch.Tensor]], layout: PageLayout, layers: LayerGroups, limit: int
) -> list[Segments]:
    """Return the segments of each layer group; see ``tensor_segments``.

    The whole page must not have more than ``limit`` pieces.
    """
    found = [tensor_segments(groups, layout, limit, parts) for parts in layers.parts]
    return [segments for segments in found if segments is not None]


def _pieces(layer: torch.Tensor, offset: int, limit: int) -> list[tuple[int, int, int, int]] | None:
    itemsize = layer.element_size()
    shape, strides = layer.shape[1:], [stride * itemsize for stride in layer.stride()]
    run, split = itemsize, len(shape)
    while split and (shape[split - 1] == 1 or strides[split] == run):
        run *= shape[split - 1]
        split -= 1
    outer = shape[:split]
    if int(np.prod(outer, dtype=np.int64)) > limit:
        return None
    return [
        (
            layer.data_ptr() + sum(i * s for i, s in zip(index, strides[1:], strict=False)),
            strides[0],
            offset + number * run,
            run,
        )
        for number, index in enumerate(np.ndindex(*outer))
    ]


def _append(pieces: list[tuple[int, int, int, int]], piece: tuple[int, int, int, int]) -> None:
    if pieces:
        base, stride, offset, nbytes = pieces[-1]
        if (base + nbytes, stride, offset + nbytes) == piece[:3]:
            pieces[-1] = (base, stride, offset, nbytes + piece[3])
            return
    pieces.append(piece)


def _segments(pieces: list[tuple[int, int, int, int]]) -> Segments:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    return Segments(*(np.ascontiguousarray(column) for column in columns))


_SMALLEST_EQUAL = 64
_MOST_EQUAL = 1 << 16


def in_equal_pieces(segments: Segments) -> Segments | None:
    """Divide the pieces further, so that all have the same length, which the copy kernel requires.

    Return None if the new pieces would be too many, or too short to be copied efficiently.
    """
    length = int(np.gcd.reduce(segments.nbytes))
    counts = segments.nbytes // length
    if length < min(_SMALLEST_EQUAL, int(segments.nbytes.sum())) or counts.sum() > _MOST_EQUAL:
        return None
    within = np.concatenate([np.arange(count, dtype=np.int64) for count in counts.tolist()]) * length
    base, stride, offset = (
        np.repeat(column, counts) for column in (segments.base, segments.stride, segments.offset)
    )
    return Segments(base + within, stride, offset + within, np.full(len(base), length, dtype=np.int64))


def alignment(segments: Segments) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides every address, stride, offset and length."""
    columns = (segments.base, segments.stride, segments.offset, segments.nbytes)
    common = int(np.gcd.reduce([np.gcd.reduce(column) for column in columns]))
    return int(np.gcd(common, 16))


_VECTOR = 16


@dataclass(frozen=True, slots=True)
class GroupStrides:
    """The strides of the elements in a KV group, for kernels.

    Element ``[l, p, t, h, d]`` (layer, plane, token, head, dim) of slot s is at offset ``s * slot + deltas[l]
    + p * strides[0] + t * strides[1] + h * strides[2] + d * strides[3]`` from the first element. All
    distances are in elements, not in bytes.

    Attributes:
        memory: The memory of the group, starting at slot 0 of layer 0. The reference keeps it alive.
        itemsize: Size of an element in bytes.
        shape: Planes, tokens, heads, dim.
        deltas: Distance of each layer from the first layer.
        slot: Distance between slots.
        strides: Distances between planes, tokens, heads, and elements of a head.
    """

    memory: torch.Tensor
    itemsize: int
    shape: tuple[int, int, int, int]
    deltas: tuple[int, ...]
    slot: int
    strides: tuple[int, int, int, int]

    @property
    def numbers(self) -> int:
        """Return the number of elements in one plane of one layer."""
        return prod(self.shape[1:])

    @property
    def plain(self) -> bool:
        """Return whether the elements in one plane of one layer are contiguous."""
        _, _, heads, dim = self.shape
        return self.strides[1:] == (heads * dim, dim, 1)

    @property
    def aligned(self) -> int:
        """Return the largest power of two, in elements, that divides all ``deltas`` and is at most 16 bytes."""
        return gcd(_VECTOR // self.itemsize, *self.deltas)

    def words(self, dtype: torch.dtype, plane: int = 0) -> torch.Tensor:
        """Return a one-element tensor of ``dtype`` that starts at the plane's first element in slot 0 of layer 0.

        Kernels use its address as their pointer.
        """
        start = self.memory.storage_offset() * self.memory.element_size()
        start += plane * self.strides[0] * self.itemsize
        found = torch.empty(0, dtype=dtype, device=self.memory.device)
        return found.set_(self.memory.untyped_storage(), start // dtype.itemsize, (1,), (1,))


def pool_strides(memory: torch.Tensor, layout: PageLayout) -> tuple[GroupStrides, ...]:
    """Return the strides of each KV group in the store's own slots.

    ``memory`` contains all slots, as flat uint8 ``[num_slots * slot_nbytes]``.
    """
    lots = []
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        layers, planes, tokens, heads, dim = spec.shape
        itemsize, plane = DTYPE_NBYTES[spec.dtype], tokens * heads * dim
        deltas = tuple(layer * planes * plane for layer in range(layers))
        strides = (plane, heads * dim, dim, 1)
        slot = layout.slot_nbytes // itemsize
        lots.append(
            GroupStrides(memory[offset:], itemsize, (planes, tokens, heads, dim), deltas, slot, strides)
        )
    return tuple(lots)


def byte_strides(memory: torch.Tensor, start: int, nbytes: int, stride: int) -> GroupStrides:
    """Return strides with which a kernel addresses bytes ``[start, start + nbytes)`` of each slot one by one.

    Slots are ``stride`` bytes apart.
    """
    return GroupStrides(memory[start:], 1, (1, 1, 1, nbytes), (0,), stride, (nbytes, nbytes, nbytes, 1))


def tensor_strides(groups: Sequence[Sequence[torch.Tensor]]) -> tuple[GroupStrides, ...] | None:
    """Return the strides of each KV group in an engine's tensors.

    The result is None if layers of the same group have different shapes or strides, or if the distance between
    two layers is not a whole number of elements.

    Args:
        groups: One sequence per KV group, with a tensor ``[slots, planes, tokens, heads, dim]`` per layer.
    """
    lots = []
    for layers in groups:
        first, itemsize = layers[0], layers[0].element_size()
        distances = [layer.data_ptr() - first.data_ptr() for layer in layers]
        if len({(layer.shape, layer.stride()) for layer in layers}) > 1 or any(
            at % itemsize for at in distances
        ):
            return None
        deltas = tuple(at // itemsize for at in distances)
        planes, tokens, heads, dim = first.shape[1:]
        slot, *strides = first.stride()
        lots.append(
            GroupStrides(
                first,
                itemsize,
                (planes, tokens, heads, dim),
                deltas,
                slot,
                (strides[0], strides[1], strides[2], strides[3]),
            )
        )
    return tuple(lots)
