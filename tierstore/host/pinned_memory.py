"""Page-locked (pinned) memory: a mapping is locked chunk by chunk by several threads, from its start on.

``Pinning`` locks in the background, so that an open need not wait: touching and registering takes about half a second
per GiB. A ``Pinner`` registers a range with the device; ``gpu.driver.CudaPinner`` does so by cudaHostRegister.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("tierstore.host.pinning")

CHUNK_NBYTES = 64 << 20
"""Bytes locked by one call. A page never lies in two chunks, so that no copy spans two registrations."""

FIRST_NBYTES = 1 << 30
"""Bytes that are locked before an open returns; the rest follows in the background."""

_THREADS = 8
_JOIN_S = 30.0
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python has no name for it


class Pinner(Protocol):
    """Page-locks memory for a device."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a range. OSError if the system refuses. Any thread; may take seconds."""
        ...

    def unpin(self, address: int) -> None:
        """Unlock the range that starts at ``address``. No copy may be using it."""
        ...


class Pinning:
    """Page-locks the slots of a mapping, in order, in the background.

    The first failure ends it: the slots that are locked stay locked, the others stay pageable.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        stride: int,
        num_slots: int,
        pinner: Pinner,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        """Start the threads.

        Args:
            memory: flat uint8, kept alive until it is unlocked.
            stride: bytes of a slot.
            num_slots: number of slots.
            pinner: locks a range.
            chunk_nbytes: bytes locked at once, about; at least one slot.
        """
        self.pinned_slots = 0
        """Slots ``[0, pinned_slots)`` are page-locked."""
        self.refused: str | None = None
        """Why no more is locked; None: nothing has failed."""
        self._address = memory.ctypes.data
        self._stride = stride
        self._pinner = pinner
        self._starts = _chunks(num_slots, max(1, chunk_nbytes // stride))
        self._ends = [*self._starts[1:], num_slots]
        self._next = 0
        self._done: set[int] = set()
        self._locked: list[int] = []
        self._changed = Condition()
        # Keeps the mapping until its pages are unlocked, even if ``close`` is never called.
        self._finalizer = weakref.finalize(self, _unlock, pinner, self._locked, memory)
        self._finalizer.atexit = False
        self._threads = [
            Thread(target=_run, args=(weakref.ref(self),), name=f"tierstore-pin-{i}", daemon=True)
            for i in range(min(_THREADS, os.cpu_count() or 1, len(self._starts)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def going_on(self) -> bool:
        """Return whether chunks are still to be locked."""
        return self.refused is None and self.pinned_slots < self._ends[-1]

    def wait(self, slots: int, timeout_s: float) -> bool:
        """Block until the first ``slots`` slots are locked; return whether they are.

        Returns False after ``timeout_s`` seconds, and at once if that cannot happen any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.pinned_slots >= slots or not self.going_on, timeout_s)
            return self.pinned_slots >= slots

    def close(self) -> None:
        """Stop locking, and unlock everything. Idempotent."""
        with self._changed:
            self.refused = self.refused or "the store is closed"
        deadline = monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning(
                "a thread that page-locks memory did not end within %s s: the memory stays locked", _JOIN_S
            )
            return
        self.pinned_slots = 0
        self._finalizer()

    def lock_next(self) -> bool:
        """Lock one chunk; return whether there may be another."""
        with self._changed:
            if self.refused is not None or self._next == len(self._starts):
                return False
            index, self._next = self._next, self._next + 1
        address = self._address + self._starts[index] * self._stride
        nbytes = (self._ends[index] - self._starts[index]) * self._stride
        try:
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
        """Lock no further chunk and log the reason once; what is locked stays locked."""
        with self._changed:
            first = self.refused is None
            self.refused = self.refused or why
            self._changed.notify_all()
        if first:
            _log.warning(
                "page-locking failed at host slot %d of %d: copies to and from the slots from there on are slow: %s",
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
        except Exception as error:  # noqa: BLE001 - a thread's top: copies would wait for its chunk for ever
            assert alive is not None
            alive.refuse(f"{type(error).__name__}: {error}")
            more = False
        del alive


def _chunks(num_slots: int, slots: int) -> list[int]:
    return list(range(0, num_slots, slots))


def _touch(address: int, nbytes: int) -> None:
    """Have the kernel allocate the pages, bytes unchanged.

    Several threads do so at once, which locking alone would not. On kernels without MADV_POPULATE_WRITE locking
    allocates the pages.
    """
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


def _unlock(pinner: Pinner, addresses: list[int], memory: NDArray[np.uint8]) -> None:
    while addresses:
        pinner.unpin(addresses.pop())


_libc = ctypes.CDLL(None, use_errno=True)
