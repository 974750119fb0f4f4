"""Host memory that several processes of one machine map: an anonymous file (``memfd_create``).

Unlike files in ``/dev/shm``, such a file is not limited by the size of a mount, which is 64 MiB in many containers.
It disappears with the last process that maps it, also after a crash.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.page import HUGE_NBYTES
from tierstore.types import exact_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAME = "tierstore-host"
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python does not define it
_MADV_COLLAPSE = 25  # since Linux 6.1; Python does not define it
_ATTEMPTS = 4


class Handle(NamedTuple):
    """The integers with which another process of the machine can open a ``SharedMemory``.

    Attributes:
        pid: Process that created the memory.
        file: File descriptor in that process.
        nbytes: Size of the memory in bytes.
        token: A random number, which the memory contains as well.
    """

    pid: int
    file: int
    nbytes: int
    token: int


class SharedMemory:
    """A mapping of memory that other processes can map too.

    Attributes:
        bytes: The memory as flat uint8 ``[nbytes]``, zeroed when it is created. It starts at a huge page. The memory
            is unmapped when the last view is gone. A forked child process does not inherit it.
        handle: Opens the memory in another process, until ``close`` is called in the process that created it.
    """

    def __init__(self, file: int, handle: Handle) -> None:
        """Map an open file, which this object then owns. Use ``create`` or ``open`` to create an instance."""
        self._file: int | None = file
        self.handle = handle
        whole = _map(file, _length(handle.nbytes))
        self._token = whole[-mmap.PAGESIZE :].view(np.int64)[:1]
        self.bytes: NDArray[np.uint8] = whole[: handle.nbytes]

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Return new memory. The kernel provides it when it is first touched.

        Raises:
            OSError: The system has no anonymous files, or refuses the mapping.
        """
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _length(nbytes))
            made = cls(file, Handle(os.getpid(), file, nbytes, secrets.randbits(62)))
        except OSError:
            os.close(file)
            raise
        made._token[0] = made.handle.token
        return made

    @classmethod
    def open(cls, handle: Handle) -> SharedMemory:
        """Map memory that a process of this machine has created.

        Raises:
            OSError: The process is on another machine or in another container, or this process may not access its
                files.
        """
        path = f"/proc/{handle.pid}/fd/{handle.file}"
        name = os.readlink(path)
        if not name.startswith(f"/memfd:{_NAME}"):
            raise OSError(errno.EINVAL, f"{path} is {name!r}, not shared host memory of a store")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size, expected = os.fstat(file).st_size, _length(handle.nbytes)
            if size != expected:
                raise OSError(
                    errno.EINVAL, f"{path} has a size of {exact_size(size)}, expected {exact_size(expected)}"
                )
            found = cls(file, handle)
        except OSError:
            os.close(file)
            raise
        if found._token[0] != handle.token:
            found.close()
            raise OSError(errno.EINVAL, f"{path} is the shared host memory of another store")
        return found

    def close(self) -> None:
        """Close the file, so that no further process can open the memory. ``bytes`` stays mapped. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def use_huge_pages(address: int, nbytes: int) -> None:
    """Make the kernel provide this part of a ``SharedMemory`` in huge pages, if it can.

    By default (``shmem_enabled`` is ``never``), the kernel uses huge pages for shared memory only if a process asks for
    each of them. Several processes and threads may call this at the same time. Contents do not change.
    """
    first = address // HUGE_NBYTES * HUGE_NBYTES
    for start in range(first, address + nbytes, HUGE_NBYTES):
        _advise(start, mmap.PAGESIZE, _MADV_POPULATE_WRITE)  # the kernel does not collapse an empty range
        for _ in range(_ATTEMPTS):
            code = _advise(start, HUGE_NBYTES, _MADV_COLLAPSE)
            if code not in (errno.EAGAIN, errno.EBUSY):  # another process was faster
                break
        if code == errno.EINVAL:  # an older kernel
            return


def _length(nbytes: int) -> int:
    """Return the length of the file: whole huge pages, and a page with the token."""
    return -(-max(1, nbytes) // HUGE_NBYTES) * HUGE_NBYTES + mmap.PAGESIZE


def _map(file: int, length: int) -> NDArray[np.uint8]:
    """Return a mapping of the whole file that starts at a huge page. Raises OSError."""
    around = _mmap(None, length + HUGE_NBYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-around // HUGE_NBYTES) * HUGE_NBYTES
    memory = (ctypes.c_uint8 * length).from_address(start)
    weakref.finalize(memory, _libc.munmap, around, length + HUGE_NBYTES).atexit = False
    _mmap(start, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file)
    with suppress(OSError):
        code = _advise(start, length, mmap.MADV_DONTFORK)
        if code:
            raise OSError(code, os.strerror(code))
    return np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)


def _mmap(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    found: int | None = _libc.mmap(address, length, protection, flags, file, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {exact_size(length)} of memory failed: {os.strerror(code)}")
    return found


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Return 0, or the error with which the kernel refused the advice."""
    return ctypes.get_errno() if _libc.madvise(address, nbytes, advice) else 0


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
