"""A stored prefix that is still on its way while the first layers of the model are computed.

The idea of LMCache's and LayerKV's layer-wise loads: a layer waits for its own bytes only. What is computed meanwhile
counts once ``settle`` has said that all of it came; else it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep

import torch

from tierstore.adapters.huggingface.request import PageGroups
from tierstore.errors import StoreClosed
from tierstore.lease import Lease
from tierstore.types import LeaseState

_POLL_S = 0.001


class Arrival:
    """What one sequence waits for. For the thread of its sequence."""

    def __init__(self, pages: PageGroups, lease: Lease, slots: Sequence[int], timeout_s: float) -> None:
        """``lease``: of the prefix, in ``slots``. The sequence releases it, not this object."""
        self._pages = pages
        self._lease = lease
        self._slots = list(slots)
        self._deadline = monotonic() + timeout_s
        self.half: Lease | None = None
        """Of a page that is to be copied; released in the end."""
        self._into = -1
        self._missed = False
        """A layer was computed without its bytes, or over other slots, whatever came later."""
        self._copied: set[tuple[int, int]] = set()

    @property
    def over(self) -> bool:
        """Whether all of it is there. Ends nothing: say ``settle``."""
        here = self.half is None and self._pages.reach(self._lease, 0.0) is LeaseState.READY
        return here and self._in_place()

    def comes(self) -> bool:
        """Waits until the first layer is on its way; False: some of the prefix is lost already, say ``settle``.

        Until then a page may come into another slot than it was to, where somebody else has put it.
        """
        self._missed |= not self._queued(self._lease, 0)
        return not self._missed and self._in_place()

    def copy_page(self, lease: Lease, into: int) -> None:
        """Copy the only page of ``lease`` into a slot, layer by layer as it comes. Releases the lease in the end."""
        self.half, self._into = lease, into

    def layer(self, group: int, index: int) -> None:
        """From now on the caller's current stream, on the CPU the caller, has this layer of KV group ``group``.

        Waits no longer than the time that there is; what is computed over a layer that did not come does not count,
        also where it came before the end.
        """
        here = self._queued(self._lease, index) and (self.half is None or self._queued(self.half, index))
        self._missed |= not here
        if self.half is None or not here:
            return
        if (group, index) not in self._copied and self.half.num_pages:
            self._pages.copy_layer(group, index, self.half.slots[0], self._into)
            self._copied.add((group, index))

    def settle(self) -> tuple[int, bool]:
        """Waits for the rest: how many pages of the lease there are, and whether the copied page is right.

        The time being up, then or at a layer before, none: the sequence must let go of the lease.
        """
        here = not self._missed and self._ended(self._lease)
        pages = self._lease.num_pages if here else 0
        if self._lease.slots[:pages] != self._slots[:pages]:
            self._missed, pages = True, 0
        half, self.half = self.half, None
        if half is None:
            return pages, True
        whole = not self._missed and self._ended(half) and half.num_pages == 1
        if whole and len(self._copied) < self._pages.num_layers:
            self._pages.copy(half.slots[0], self._into)
        half.release()
        return pages, whole

    def drop(self) -> None:
        """Nobody goes on from it."""
        half, self.half = self.half, None
        if half is not None:
            with suppress(StoreClosed):
                half.release()

    def _in_place(self) -> bool:
        return self._lease.slots == self._slots

    def _queued(self, lease: Lease, index: int) -> bool:
        try:
            event = lease.ready(index, self._left())
        except TimeoutError:
            return False
        if event is not None and self._pages.device.type == "cuda":
            torch.cuda.current_stream(self._pages.device).wait_event(event)  # type: ignore[arg-type]
            return True
        while event is not None and not event.query():
            if not self._left():
                return False
            sleep(_POLL_S)
        return True

    def _ended(self, lease: Lease) -> bool:
        return self._pages.reach(lease, self._left()) is not LeaseState.PENDING

    def _left(self) -> float:
        return max(0.0, self._deadline - monotonic())
