"""The HOST tier's bytes: one anonymous mapping, cut into page slots. No residency, no policy, no thread."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.layout import PageLayout


class HostArena:
    """``num_slots`` page slots of host memory, page aligned, allocated once and never moved.

    The memory is touched as it is first used; it returns to the system when the arena and all views are gone.
    """

    def __init__(self, layout: PageLayout, num_slots: int) -> None:
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_nbytes
        self._stride = layout.slot_nbytes
        self._length = layout.blob_nbytes
        self._bytes = np.frombuffer(mmap.mmap(-1, self.nbytes), dtype=np.uint8)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The slot's bytes in place: flat uint8 ``[blob_nbytes]``, writable. Valid while the arena lives."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"host slot {slot}; allowed: 0 to {self.num_slots - 1}")
        start = slot * self._stride
        return self._bytes[start : start + self._length]
