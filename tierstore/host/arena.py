"""The memory of the HOST tier: one mapping, divided into page slots.

The arena does not know which slots are in use, or by which pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.codecs.host_format import HostFormat
from tierstore.host.pinned_memory import Pinning
from tierstore.page import buffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.host.pinned_memory import Pinner
    from tierstore.host.shared_memory import SharedMemory
    from tierstore.page import PageLayout


class HostArena:
    """Slots in host memory, page-aligned, allocated once and never moved.

    The memory is returned to the system when the arena and all views of it are gone.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_slots: int,
        pinner: Pinner | None = None,
        *,
        codec: str = "none",
        shared: SharedMemory | None = None,
    ) -> None:
        """Allocate the slots, and start to pin them in the background.

        Args:
            layout: Layout of a page.
            num_slots: Number of slots.
            pinner: Object that pins the memory. If None, the memory is not pinned, and is committed when it is
                first touched.
            codec: Codec of the pages in the slots.
            shared: Memory for the slots that other processes map too. If None, the arena allocates its own.

        Raises:
            ValueError: The codec is unknown, or its encoded pages have no fixed size with this layout.
        """
        self.held = held = HostFormat.of(codec, layout)
        """Format of the pages in the slots."""
        self.num_slots = num_slots
        self.nbytes = num_slots * held.slot_nbytes
        self._stride = held.slot_nbytes
        self._length = held.view_nbytes
        self._bytes = buffer(self.nbytes) if shared is None else shared.bytes[: self.nbytes]
        self._address = self._bytes.ctypes.data
        self._pinning = (
            None
            if pinner is None
            else Pinning(self._bytes, held.slot_nbytes, num_slots, pinner, shared=shared is not None)
        )
        self.pin_nbytes = 0 if pinner is None else self.nbytes
        """Number of bytes to pin. 0 without a pinner and after ``close``."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return a writable view of the slot as flat uint8 ``[held.view_nbytes]``.

        The view is valid while the arena exists.

        Raises:
            IndexError: ``slot`` is negative, or not less than ``num_slots``.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"host slot must be 0 to {self.num_slots - 1}, got {slot}")
        start = slot * self._stride
        return self._bytes[start : start + self._length]

    @property
    def memory(self) -> NDArray[np.uint8]:
        """A view of all slots as flat uint8, including the alignment bytes between them."""
        return self._bytes

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of these slots for DMA, int64 ``[len(slots)]``."""
        return self._address + slots * self._stride

    # -- pinning ------------------------------------------------------------------------------------------------

    @property
    def pinned_slots(self) -> int:
        """Number of slots that are pinned now, counted from slot 0. Increases while ``pinning`` is True."""
        return 0 if self._pinning is None else self._pinning.pinned_slots

    def pinned_nbytes(self) -> int:
        """Return the number of bytes that are pinned now."""
        return self.pinned_slots * self._stride

    def unpinned_nbytes(self) -> int:
        """Return the number of bytes that should be pinned but are not pinned yet."""
        return max(0, self.pin_nbytes - self.pinned_nbytes())

    @property
    def pinning(self) -> bool:
        """Whether further slots are being pinned in the background."""
        return self._pinning is not None and self._pinning.going_on

    @property
    def refused(self) -> str | None:
        """The reason why some slots cannot be pinned, or None if pinning has not failed."""
        return None if self._pinning is None else self._pinning.refused

    def wait_pinned(self, slots: int, timeout_s: float) -> bool:
        """Wait until the first ``slots`` slots are pinned, or all slots if there are fewer.

        Args:
            slots: Number of slots.
            timeout_s: Longest time to wait, in seconds.

        Returns:
            Whether the slots are pinned. False at once if pinning has failed or there is no pinner.
        """
        return self._pinning is not None and self._pinning.wait(min(slots, self.num_slots), timeout_s)

    def close(self) -> None:
        """Stop pinning, and unpin the memory. See ``Pinning.close``.

        No copy may be in flight. The bytes remain readable. Idempotent.
        """
        self.pin_nbytes = 0
        if self._pinning is not None:
            self._pinning.close()

    def stats(self) -> dict[str, object]:
        """Return what ``TierStore.stats`` reports about the memory of the host tier."""
        return {
            "pin_nbytes": self.pin_nbytes,
            "pinned_nbytes": self.pinned_nbytes(),
            "unpinned_nbytes": self.unpinned_nbytes(),
            "pinning": self.pinning,
            "refused": self.refused,
            "codec": self.held.codec,
            "slot_nbytes": self.held.slot_nbytes,
        }
