"""Pinned (page-locked) memory: several threads pin a mapping chunk by chunk, from its start.

``Pinning`` works in the background, because touching and registering memory takes about half a second per
GiB. A ``Pinner`` registers a range with the device. ``gpu.driver.CudaPinner`` uses cudaHostRegister for this.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from threading import Condition
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from tierstore.host.shared_memory import use_huge_pages
from tierstore.threads import Worker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("tierstore.host.pinning")

CHUNK_NBYTES = 64 << 20
"""Number of bytes to pin per call, rounded down to whole slots.

No slot crosses a chunk boundary, so no copy spans two registrations.
"""

FIRST_NBYTES = 1 << 30
"""Number of bytes that are pinned before a store opens. The rest is pinned in the background."""

_THREADS = 8
_JOIN_S = 30.0
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python does not define it


class Pinner(Protocol):
    """Interface for pinning memory for a device."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range of memory. Thread-safe. May take seconds.

        Raises:
            OSError: The system refuses to pin the memory.
        """
        ...

    def unpin(self, address: int) -> None:
        """Unpin the range that starts at ``address``. No copy may be using it."""
        ...


class Pinning:
    """A background task that pins the slots of a mapping, in order.

    The first failure stops it. Slots that are pinned by then remain pinned, and the others stay pageable.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        stride: int,
        num_slots: int,
        pinner: Pinner,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        shared: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            memory: The mapping, flat uint8. It is kept alive until it is unpinned.
            stride: Size of a slot in bytes.
            num_slots: Number of slots.
            pinner: Object that pins and unpins ranges of memory.
            chunk_nbytes: Number of bytes to pin per call, rounded down to whole slots. At least one slot is
                pinned per call.
            shared: Whether the mapping is a ``SharedMemory``.
        """
        self.pinned_slots = 0
        """Number of pinned slots, starting at slot 0."""
        self.refused: str | None = None
        """The reason why no more slots are pinned, or None if nothing has failed."""
        self._address = memory.ctypes.data
        self._stride = stride
        self._pinner = pinner
        self._shared = shared
        self._starts = _chunks(num_slots, max(1, chunk_nbytes // stride))
        self._ends = [*self._starts[1:], num_slots]
        self._next = 0
        self._done: set[int] = set()
        self._locked: list[int] = []
        self._changed = Condition()
        # Keeps the mapping alive until its pages are unpinned, even if ``close`` is never called.
        self._finalizer = weakref.finalize(self, _unlock, pinner, self._locked, memory)
        self._finalizer.atexit = False
        self._threads = [
            Worker(_run, weakref.ref(self), name=f"tierstore-pin-{i}")
            for i in range(min(_THREADS, os.cpu_count() or 1, len(self._starts)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def going_on(self) -> bool:
        """Whether chunks remain to be pinned."""
        return self.refused is None and self.pinned_slots < self._ends[-1]

    def wait(self, slots: int, timeout_s: float) -> bool:
        """Wait until the first ``slots`` slots are pinned, but at most ``timeout_s`` seconds.

        Returns:
            Whether the slots are pinned. False at once if pinning has failed or was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.pinned_slots >= slots or not self.going_on, timeout_s)
            return self.pinned_slots >= slots

    def close(self) -> None:
        """Stop pinning, wait for the threads, and unpin everything. Idempotent.

        If a thread does not finish within 30 s, the memory stays pinned, and a warning is logged.
        """
        with self._changed:
            self.refused = self.refused or "the store is closed"
        deadline = monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning(
                "a thread that page-locks memory did not finish within %s s: the memory stays locked", _JOIN_S
            )
            return
        self.pinned_slots = 0
        self._finalizer()

    def lock_next(self) -> bool:
        """Pin the next chunk. Return False if none is left or pinning has stopped."""
        with self._changed:
            if self.refused is not None or self._next == len(self._starts):
                return False
            index, self._next = self._next, self._next + 1
        address = self._address + self._starts[index] * self._stride
        nbytes = (self._ends[index] - self._starts[index]) * self._stride
        try:
            if self._shared:
                use_huge_pages(address, nbytes)
            _touch(address, nbytes)
            self._pinner.pin(address, nbytes)
        except OSError as error:
            self.refuse(str(error))
            return False
        with self._changed:
            self._locked.append(address)
            self._done.add(index)
            first = next((i for i in range(len(self._starts)) if i not in self._done), len(self._starts))
            self.pinned_slots = self._ends[first - 1] if first else 0
            self._changed.notify_all()
        return True

    def refuse(self, why: str) -> None:
        """Stop pinning further chunks, and log the reason once. Pinned chunks remain pinned."""
        with self._changed:
            first = self.refused is None
            self.refused = self.refused or why
            self._changed.notify_all()
        if first:
            _log.warning(
                "page-locking failed at host slot %d of %d: copies of this slot and all later ones are slow: %s",
                self.pinned_slots,
                self._ends[-1],
                why,
            )


def _run(pinning: weakref.ref[Pinning]) -> None:
    more = True
    while more:
        alive = pinning()
        try:
            more = alive is not None and alive.lock_next()
        except Exception as error:  # noqa: BLE001  top level of the thread; otherwise copies would wait forever
            assert alive is not None
            alive.refuse(f"{type(error).__name__}: {error}")
            more = False
        del alive


def _chunks(num_slots: int, slots: int) -> list[int]:
    return list(range(0, num_slots, slots))


def _touch(address: int, nbytes: int) -> None:
    """Make the kernel allocate the pages without changing their contents.

    Several threads can do so in parallel, which pinning alone would not allow. On kernels without
    MADV_POPULATE_WRITE, pinning allocates the pages.
    """
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


def _unlock(pinner: Pinner, addresses: list[int], memory: NDArray[np.uint8]) -> None:
    while addresses:
        pinner.unpin(addresses.pop())


_libc = ctypes.CDLL(None, use_errno=True)
