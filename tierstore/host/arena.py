"""The HOST tier's bytes: one anonymous mapping, cut into page slots. No residency, no policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.codecs.host_format import HostFormat
from tierstore.host.pinned_memory import Pinning
from tierstore.page import buffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.host.pinned_memory import Pinner
    from tierstore.page import PageLayout


class HostArena:
    """``num_slots`` slots of host memory, page aligned, allocated once and never moved.

    ``codec``: what pages are encoded with in them, ``held`` the form that this gives. ValueError where it is none.
    Without a ``pinner`` the memory is touched as it is first used. It returns to the system when the arena and all
    views are gone.
    """

    def __init__(
        self, layout: PageLayout, num_slots: int, pinner: Pinner | None = None, *, codec: str = "none"
    ) -> None:
        self.held = held = HostFormat.of(codec, layout)
        self.num_slots = num_slots
        self.nbytes = num_slots * held.slot_nbytes
        self._stride = held.slot_nbytes
        self._length = held.view_nbytes
        self._bytes = buffer(self.nbytes)
        self._address = self._bytes.ctypes.data
        self._pinning = None if pinner is None else Pinning(self._bytes, held.slot_nbytes, num_slots, pinner)
        self.pin_nbytes = 0 if pinner is None else self.nbytes
        """Bytes that are to be page-locked; 0 without a pinner and after ``close``."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The slot's bytes in place: flat uint8 ``[held.view_nbytes]``, writable. Valid while the arena lives."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"host slot {slot}; allowed: 0 to {self.num_slots - 1}")
        start = slot * self._stride
        return self._bytes[start : start + self._length]

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All slots in place, flat uint8, alignment between them included."""
        return self._bytes

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the pages of these slots start in memory, for DMA."""
        return self._address + slots * self._stride

    # -- page-locking -------------------------------------------------------------------------------------------

    @property
    def pinned_slots(self) -> int:
        """Slots ``[0, pinned_slots)`` are page-locked now. Grows while pinning goes on in the background."""
        return 0 if self._pinning is None else self._pinning.pinned_slots

    def pinned_nbytes(self) -> int:
        """Bytes that are page-locked now."""
        return self.pinned_slots * self._stride

    def unpinned_nbytes(self) -> int:
        """Bytes that are to be page-locked and are not, or not yet."""
        return max(0, self.pin_nbytes - self.pinned_nbytes())

    @property
    def pinning(self) -> bool:
        """Whether more slots are about to be page-locked."""
        return self._pinning is not None and self._pinning.going_on

    @property
    def refused(self) -> str | None:
        """Why some slots stay unpinned; None: none was refused."""
        return None if self._pinning is None else self._pinning.refused

    def wait_pinned(self, slots: int, timeout_s: float) -> bool:
        """Whether the first ``slots`` slots, all if there are fewer, are page-locked in time."""
        return self._pinning is not None and self._pinning.wait(min(slots, self.num_slots), timeout_s)

    def close(self) -> None:
        """Ends pinning and unlocks the pages; no copy may be running. The bytes stay readable. Idempotent."""
        self.pin_nbytes = 0
        if self._pinning is not None:
            self._pinning.close()

    def stats(self) -> dict[str, object]:
        """For ``TierStore.stats``."""
        return {
            "pin_nbytes": self.pin_nbytes,
            "pinned_nbytes": self.pinned_nbytes(),
            "unpinned_nbytes": self.unpinned_nbytes(),
            "pinning": self.pinning,
            "refused": self.refused,
            "codec": self.held.codec,
            "slot_nbytes": self.held.slot_nbytes,
        }
