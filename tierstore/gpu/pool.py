"""Page-major slots of the HBM tier, in one GPU allocation or in ordinary memory (``device: cpu``).

``CudaPool`` and ``CpuPool`` own the slots. ``engine_pages`` uses an engine's own tensors as slots instead.
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
    """The slots of a pool in HBM, whose bytes CPU threads can read and write."""

    num_slots: int

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy the slot's page into ``out``, flat uint8 ``[blob_nbytes]``."""
        ...

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copy ``page``, flat uint8 ``[blob_nbytes]``, into the slot."""
        ...

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copy the layers in ``part`` into the slot. ``page`` is the whole page, flat uint8 ``[blob_nbytes]``."""
        ...


class OwnPool(HbmBytes, Protocol):
    """Page slots in memory that the store allocated."""

    nbytes: int

    @property
    def pages(self) -> torch.Tensor | GroupedPages:
        """Return a view of all slots. Nothing is copied.

        The view is a tensor ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``. With
        several KV groups, it is a ``GroupedPages`` with one such tensor per group.
        """
        ...


class GroupedPages:
    """The slots of a store with several KV groups. ``pages[slot]`` is a tuple with one tensor per group."""

    def __init__(self, groups: tuple[torch.Tensor, ...]) -> None:
        self.groups = groups
        """One tensor per group, ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``."""

    def __getitem__(self, slot: int) -> tuple[torch.Tensor, ...]:
        return tuple(group[slot] for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self[slot] for slot in range(len(self)))


class CpuPool:
    """Page-major slots in ordinary memory, aligned to OS memory pages.

    ``pages`` is a tensor ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``. With several
    KV groups, it is a ``GroupedPages`` with one such tensor per group.
    """

    def __init__(self, layout: PageLayout, num_slots: int) -> None:
        """Allocate ``num_slots`` slots. The operating system commits their memory on first access."""
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_nbytes
        self._stride = layout.slot_nbytes
        self._length = layout.blob_nbytes
        self._bytes = buffer(self.nbytes)
        # Leave inference mode, because tensors that are created in it cannot be written outside it.
        with torch.inference_mode(False):
            flat = torch.from_numpy(self._bytes)
            groups = tuple(
                slots_view(flat, spec, offset, num_slots, layout.slot_nbytes)
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            )
        self.pages: torch.Tensor | GroupedPages = groups[0] if len(groups) == 1 else GroupedPages(groups)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return a writable view of the slot's bytes, flat uint8 ``[blob_nbytes]``.

        Raises:
            IndexError: ``slot`` is out of range.
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
        """Copy the layers in ``part`` from ``page`` into the slot."""
        where = slice(part.offset, part.offset + part.nbytes)
        np.copyto(self.view(slot)[where], page[where])


def torch_dtype(spec: PageSpec) -> torch.dtype:
    """Return the torch dtype that corresponds to ``spec.dtype``."""
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def slots_view(flat: torch.Tensor, spec: PageSpec, offset: int, num_slots: int, stride: int) -> torch.Tensor:
    """Return a view of one KV group's pages, ``[num_slots, *spec.shape]``.

    Args:
        flat: The memory of all slots, flat uint8.
        spec: The page spec of the KV group.
        offset: Offset of the group within a slot, in bytes.
        num_slots: Number of slots.
        stride: Distance between slots, in bytes.
    """
    itemsize = DTYPE_NBYTES[spec.dtype]
    rows = flat.view(num_slots, stride)[:, offset : offset + spec.page_nbytes]
    typed = rows.view(torch_dtype(spec))
    assert typed.stride(0) == stride // itemsize
    return typed.view(num_slots, *spec.shape)


class CudaPool:
    """Page-major slots in one GPU allocation, aligned and shaped like the slots of ``CpuPool``."""

    def __init__(self, layout: PageLayout, num_slots: int, device: torch.device) -> None:
        """Allocate ``num_slots`` slots.

        Raises:
            torch.OutOfMemoryError: The device has no free block of this size.
        """
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
        """Return where pages are in device memory. A page is a single contiguous piece."""
        return addresses.pool_segments(self.bytes.data_ptr(), self._layout)

    def groups(self, layers: LayerGroups) -> list[Segments]:
        """Return, for each layer group, where its pieces are in device memory."""
        return addresses.pool_group_segments(self.bytes.data_ptr(), self._layout, layers)

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy the slot's page into ``out``, which is ordinary host memory. Blocks until the copy completes."""
        with torch.cuda.stream(self._out):
            torch.from_numpy(out).copy_(self._row(slot))

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copy ``page``, which is ordinary host memory, into the slot. Blocks until the copy completes."""
        with torch.cuda.stream(self._in):
            self._row(slot).copy_(torch.from_numpy(page))

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copy the layers in ``part`` from ``page``, which is ordinary host memory, into the slot.

        Blocks until the copy completes.
        """
        where = slice(part.offset, part.offset + part.nbytes)
        with torch.cuda.stream(self._in):
            self._row(slot)[where].copy_(torch.from_numpy(page[where]))

    def _row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"HBM slot must be 0 to {self.num_slots - 1}, got {slot}")
        return self._rows[slot]
