"""Where the numbers of a KV group lie in device memory, for kernels that address each of them.

One description for slots of our own and for an engine's tensors. Addresses and strides only; nothing is read or copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

import torch

from tierstore.types import DTYPE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.layout import PageLayout

_VECTOR = 16


@dataclass(frozen=True, slots=True)
class Lot:
    """One KV group. Strides and ``deltas`` are counted in numbers of ``itemsize`` bytes.

    Number ``[l, p, t, h, d]`` of slot s lies ``s * slot + deltas[l] + p * strides[0] + t * strides[1] + ...`` after the
    first of ``memory``, which begins at slot 0 of layer 0 and is kept alive. ``shape``: planes, tokens, heads, dim.
    """

    memory: torch.Tensor
    itemsize: int
    shape: tuple[int, int, int, int]
    deltas: tuple[int, ...]
    slot: int
    strides: tuple[int, int, int, int]

    @property
    def numbers(self) -> int:
        """Of one plane of a layer."""
        return prod(self.shape[1:])

    @property
    def plain(self) -> bool:
        """Whether the numbers of a layer's plane lie in a row."""
        _, _, heads, dim = self.shape
        return self.strides[1:] == (heads * dim, dim, 1)

    @property
    def aligned(self) -> int:
        """The numbers, a power of two and 16 bytes' at most, that divide all of ``deltas``."""
        return gcd(_VECTOR // self.itemsize, *self.deltas)

    def words(self, dtype: torch.dtype, plane: int = 0) -> torch.Tensor:
        """The first word of a plane of slot 0 of layer 0, seen as ``dtype``: what is passed to a kernel."""
        start = self.memory.storage_offset() * self.memory.element_size()
        start += plane * self.strides[0] * self.itemsize
        found = torch.empty(0, dtype=dtype, device=self.memory.device)
        return found.set_(self.memory.untyped_storage(), start // dtype.itemsize, (1,), (1,))


def of_pool(memory: torch.Tensor, layout: PageLayout) -> tuple[Lot, ...]:
    """The groups of slots of our own, flat uint8 ``[num_slots * slot_nbytes]``."""
    lots = []
    for offset, spec in zip(layout.offsets, layout.specs, strict=True):
        layers, planes, tokens, heads, dim = spec.shape
        itemsize, plane = DTYPE_NBYTES[spec.dtype], tokens * heads * dim
        deltas = tuple(layer * planes * plane for layer in range(layers))
        strides = (plane, heads * dim, dim, 1)
        slot = layout.slot_nbytes // itemsize
        lots.append(Lot(memory[offset:], itemsize, (planes, tokens, heads, dim), deltas, slot, strides))
    return tuple(lots)


def of_bytes(memory: torch.Tensor, start: int, nbytes: int, stride: int) -> Lot:
    """``nbytes`` bytes of each slot, from its byte ``start`` on; slots are ``stride`` bytes apart."""
    return Lot(memory[start:], 1, (1, 1, 1, nbytes), (0,), stride, (nbytes, nbytes, nbytes, 1))


def of_tensors(groups: Sequence[Sequence[torch.Tensor]]) -> tuple[Lot, ...] | None:
    """An engine's layers ``[slots, planes, tokens, heads, dim]``, one sequence a KV group.

    None where the layers of a group have different strides.
    """
    lots = []
    for layers in groups:
        first, itemsize = layers[0], layers[0].element_size()
        distances = [layer.data_ptr() - first.data_ptr() for layer in layers]
        if len({layer.stride() for layer in layers}) > 1 or any(at % itemsize for at in distances):
            return None
        deltas = tuple(at // itemsize for at in distances)
        planes, tokens, heads, dim = first.shape[1:]
        slot, *strides = first.stride()
        lots.append(
            Lot(
                first,
                itemsize,
                (planes, tokens, heads, dim),
                deltas,
                slot,
                (strides[0], strides[1], strides[2], strides[3]),
            )
        )
    return tuple(lots)
