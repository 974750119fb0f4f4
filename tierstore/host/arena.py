"""The memory of the HOST tier: one anonymous mapping, cut into page slots. It knows nothing of residency or policy."""

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

    The memory returns to the system when the arena and all views of it are gone.
    """

    def __init__(
        self, layout: PageLayout, num_slots: int, pinner: Pinner | None = None, *, codec: str = "none"
    ) -> None:
        """Allocate the slots, and start page-locking them in the background.

        Args:
            layout: of a page.
            num_slots: number of slots.
            pinner: page-locks the memory; None: it stays pageable, and is taken from the system as it is first touched.
            codec: how pages are encoded in the slots.

        Raises:
            ValueError: the codec is unknown, or has no fixed length for these pages.
        """
        self.held = held = HostFormat.of(codec, layout)
        """The form that pages have in the slots."""
        self.num_slots = num_slots
        self.nbytes = num_slots * held.slot_nbytes
        self._stride = held.slot_nbytes
        self._length = held.view_nbytes
        self._bytes = buffer(self.nbytes)
        self._address = self._bytes.ctypes.data
        self._pinning = None if pinner is None else Pinning(self._bytes, held.slot_nbytes, num_slots, pinner)
        self.pin_nbytes = 0 if pinner is None else self.nbytes
        """Bytes that should be page-locked in the end; 0 without a pinner and after ``close``."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return the slot's bytes in place: flat uint8 ``[held.view_nbytes]``, writable, valid while the arena lives.

        IndexError for a slot that is not there.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"host slot must be 0 to {self.num_slots - 1}, got {slot}")
        start = slot * self._stride
        return self._bytes[start : start + self._length]

    @property
    def memory(self) -> NDArray[np.uint8]:
        """Return all slots in place: flat uint8, with the alignment bytes between slots."""
        return self._bytes

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of these slots, int64 ``[len(slots)]``, for DMA."""
        return self._address + slots * self._stride

    # -- page-locking -------------------------------------------------------------------------------------------

    @property
    def pinned_slots(self) -> int:
        """Return how many slots are page-locked now, from slot 0 on. It grows while ``pinning``."""
        return 0 if self._pinning is None else self._pinning.pinned_slots

    def pinned_nbytes(self) -> int:
        """Return how many bytes are page-locked now."""
        return self.pinned_slots * self._stride

    def unpinned_nbytes(self) -> int:
        """Return how many bytes should be page-locked but are not, or not yet."""
        return max(0, self.pin_nbytes - self.pinned_nbytes())

    @property
    def pinning(self) -> bool:
        """Return whether more slots are being page-locked in the background."""
        return self._pinning is not None and self._pinning.going_on

    @property
    def refused(self) -> str | None:
        """Return why some slots stay pageable, or None if page-locking has not failed."""
        return None if self._pinning is None else self._pinning.refused

    def wait_pinned(self, slots: int, timeout_s: float) -> bool:
        """Block until the first ``slots`` slots (all, if there are fewer) are page-locked; return whether they are.

        Returns False after ``timeout_s`` seconds, and at once where page-locking has failed or there is no pinner.
        """
        return self._pinning is not None and self._pinning.wait(min(slots, self.num_slots), timeout_s)

    def close(self) -> None:
        """Stop page-locking and unlock the memory. No copy may be in flight. The bytes stay readable. Idempotent."""
        self.pin_nbytes = 0
        if self._pinning is not None:
            self._pinning.close()

    def stats(self) -> dict[str, object]:
        """Return the figures for ``TierStore.stats``."""
        return {
            "pin_nbytes": self.pin_nbytes,
            "pinned_nbytes": self.pinned_nbytes(),
            "unpinned_nbytes": self.unpinned_nbytes(),
            "pinning": self.pinning,
            "refused": self.refused,
            "codec": self.held.codec,
            "slot_nbytes": self.held.slot_nbytes,
        }
