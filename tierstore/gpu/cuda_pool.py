"""Page-major HBM slots in one CUDA allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.gpu import geometry
from tierstore.gpu.pool import GroupedPages, slots_view
from tierstore.types import ALIGNMENT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.gpu.geometry import LayerGroups, Part, Segments
    from tierstore.layout import PageLayout


class CudaPool:
    """Page aligned slots on a card: ``[num_slots, num_layers, planes, page_size, heads, dim]``, as ``CpuPool``."""

    def __init__(self, layout: PageLayout, num_slots: int, device: torch.device) -> None:
        """torch.OutOfMemoryError where the device has no room."""
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
        """Where a page's bytes are: one piece."""
        return geometry.pool_segments(self.bytes.data_ptr(), self._layout)

    def groups(self, layers: LayerGroups) -> list[Segments]:
        """The same by layer groups."""
        return geometry.pool_group_segments(self.bytes.data_ptr(), self._layout, layers)

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copies the slot's page into ``out``, ordinary memory; blocks until it is there."""
        with torch.cuda.stream(self._out):
            torch.from_numpy(out).copy_(self._row(slot))

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copies ``page``, ordinary memory, into the slot; blocks until it is there."""
        with torch.cuda.stream(self._in):
            self._row(slot).copy_(torch.from_numpy(page))

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copies these layers of ``page``, ordinary memory, into the slot; blocks until they are there."""
        where = slice(part.offset, part.offset + part.nbytes)
        with torch.cuda.stream(self._in):
            self._row(slot)[where].copy_(torch.from_numpy(page[where]))

    def _row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"HBM slot {slot}; allowed: 0 to {self.num_slots - 1}")
        return self._rows[slot]
