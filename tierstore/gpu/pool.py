"""The page-major slots of the HBM tier, in one allocation of a card or in ordinary memory (``device: cpu``).

``CudaPool`` and ``CpuPool`` hold the slots. For an engine's own tensors as slots, see ``engine_pages``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierstore.gpu import addresses
from tierstore.page import ALIGNMENT, DTYPE_NBYTES, PageSpec, buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tierstore.gpu.addresses import Segments
    from tierstore.gpu.layer_groups import LayerGroups, Part
    from tierstore.page import PageLayout


class HbmBytes(Protocol):
    """Page slots whose bytes threads can copy out and in."""

    num_slots: int

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy the slot's page into ``out``, flat uint8 ``[blob_nbytes]``."""
        ...

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copy ``page``, flat uint8 ``[blob_nbytes]``, into the slot."""
        ...

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copy the layers ``part`` of ``page`` into the slot."""
        ...


class OwnPool(HbmBytes, Protocol):
    """Slots in memory that the store itself allocated."""

    nbytes: int

    @property
    def pages(self) -> torch.Tensor | GroupedPages:
        """Return the slots in place, ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``."""
        ...


class GroupedPages:
    """The slots of a store with several KV groups: ``pages[slot]`` is a tuple of one tensor for each group."""

    def __init__(self, groups: tuple[torch.Tensor, ...]) -> None:
        self.groups = groups
        """One tensor for each group, ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``."""

    def __getitem__(self, slot: int) -> tuple[torch.Tensor, ...]:
        return tuple(group[slot] for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self[slot] for slot in range(len(self)))


class CpuPool:
    """Page-major slots in ordinary memory, aligned to memory pages.

    Their shape is ``[num_slots, num_layers, planes, page_size, heads, dim]``.
    """

    def __init__(self, layout: PageLayout, num_slots: int) -> None:
        """Allocate ``num_slots`` slots. The system provides their memory when it is first touched."""
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_nbytes
        self._stride = layout.slot_nbytes
        self._length = layout.blob_nbytes
        self._bytes = buffer(self.nbytes)
        # Never inference tensors, because those cannot be written to outside of inference mode.
        with torch.inference_mode(False):
            flat = torch.from_numpy(self._bytes)
            groups = tuple(
                slots_view(flat, spec, offset, num_slots, layout.slot_nbytes)
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            )
        self.pages: torch.Tensor | GroupedPages = groups[0] if len(groups) == 1 else GroupedPages(groups)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return the slot's bytes in place: flat uint8 ``[blob_nbytes]``, writable.

        IndexError if there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"HBM slot must be 0 to {self.num_slots - 1}, got {slot}")
        start = slot * self._stride
        return self._bytes[start : start + self._length]

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy the slot's page into ``out``."""
        np.copyto(out, self.view(slot))

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copy ``page`` into the slot."""
        np.copyto(self.view(slot), page)

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copy the layers ``part`` of ``page`` into the slot."""
        where = slice(part.offset, part.offset + part.nbytes)
        np.copyto(self.view(slot)[where], page[where])


def torch_dtype(spec: PageSpec) -> torch.dtype:
    """Return the torch dtype of the pages of ``spec``."""
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def slots_view(flat: torch.Tensor, spec: PageSpec, offset: int, num_slots: int, stride: int) -> torch.Tensor:
    """Return one KV group's pages in place, ``[num_slots, *spec.shape]``.

    ``flat`` is the uint8 memory of slots that are ``stride`` bytes apart. The group begins at byte ``offset``
    of a slot.
    """
    itemsize = DTYPE_NBYTES[spec.dtype]
    rows = flat.view(num_slots, stride)[:, offset : offset + spec.page_nbytes]
    typed = rows.view(torch_dtype(spec))
    assert typed.stride(0) == stride // itemsize
    return typed.view(num_slots, *spec.shape)


class CudaPool:
    """Page-major slots in one allocation of a card, aligned and shaped as those of ``CpuPool``."""

    def __init__(self, layout: PageLayout, num_slots: int, device: torch.device) -> None:
        """Allocate the slots. torch.OutOfMemoryError if the device lacks enough free memory in one piece."""
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_nbytes
        block = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -block.data_ptr() % ALIGNMENT
        self.bytes = block[start : start + self.nbytes]
        groups = tuple(
            slots_view(self.bytes, spec, offset, num_slots, layout.slot_nbytes)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        )
        self.pages: torch.Tensor | GroupedPages = groups[0] if len(groups) == 1 else GroupedPages(groups)
        self._rows = self.bytes.view(num_slots, layout.slot_nbytes)[:, : layout.blob_nbytes]
        self._layout = layout
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def segments(self) -> Segments:
        """Return the segments of a page, which is one piece."""
        return addresses.pool_segments(self.bytes.data_ptr(), self._layout)

    def groups(self, layers: LayerGroups) -> list[Segments]:
        """Return the segments of each layer group of a page."""
        return addresses.pool_group_segments(self.bytes.data_ptr(), self._layout, layers)

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy the slot's page into ``out`` in ordinary memory. Blocks until the copy has ended."""
        with torch.cuda.stream(self._out):
            torch.from_numpy(out).copy_(self._row(slot))

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copy ``page`` in ordinary memory into the slot. Blocks until the copy has ended."""
        with torch.cuda.stream(self._in):
            self._row(slot).copy_(torch.from_numpy(page))

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copy the layers ``part`` of ``page`` in ordinary memory into the slot.

        Blocks until the copy has ended.
        """
        where = slice(part.offset, part.offset + part.nbytes)
        with torch.cuda.stream(self._in):
            self._row(slot)[where].copy_(torch.from_numpy(page[where]))

    def _row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"HBM slot must be 0 to {self.num_slots - 1}, got {slot}")
        return self._rows[slot]
