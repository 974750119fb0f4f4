"""The raw disk, as a ceiling for benchmarks: files with direct I/O, aligned memory, and the maximum read rate."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tierstore.nvme.direct_io import reserve
from tierstore.page import ALIGNMENT, buffer
from tierstore.threads import SharedFile
from tierstore.types import exact_size

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


def aligned(rows: int, nbytes: int) -> Bytes:
    """Return memory for direct I/O, uint8 ``[rows, nbytes]``, in huge pages if possible.

    Every page has been touched, so page faults do not disturb measurements. ``nbytes`` must be a multiple of
    4 KiB.
    """
    memory = buffer(rows * nbytes)
    memory[:: mmap.PAGESIZE] = 1
    return memory.reshape(rows, nbytes)


def small_pages(rows: int, nbytes: int) -> Bytes:
    """Return memory, uint8 ``[rows, nbytes]``, that consists of 4 KiB pages, as in most programs.

    All these pages have been touched, so page faults do not disturb measurements.
    """
    memory = np.frombuffer(mmap.mmap(-1, rows * nbytes), dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory.reshape(rows, nbytes)


def forget(path: Path) -> None:
    """Write a file's dirty pages to disk, and ask the kernel to drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def open_direct(path: Path) -> tuple[int, bool]:
    """Create a file and open it for direct I/O, or for ordinary I/O if the file system does not support direct I/O.

    Return the file descriptor and whether it uses direct I/O.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags & ~os.O_EXCL, 0o600), False
    with mmap.mmap(-1, ALIGNMENT) as block:
        try:
            os.pwrite(fd, block, 0)
        except OSError:
            os.close(fd)
            return os.open(path, flags & ~os.O_EXCL, 0o600), False
    return fd, True


def whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(f"only {exact_size(done)} of {exact_size(wanted)} were read or written")


_BLOCK = 8 << 20


class RawDisk:
    """A file of random bytes, to measure how fast a disk can be read.

    ``nbytes`` is the size of the file in bytes. ``direct`` is true if reads use direct I/O.
    """

    def __init__(self, path: Path, nbytes: int, piece_nbytes: int, readers: int) -> None:
        """Create the file, and return once its bytes are durable.

        Args:
            path: The path of the file. It must not exist.
            nbytes: Size of the file in bytes, rounded down to whole pieces.
            piece_nbytes: Number of bytes per read, rounded up to a multiple of 4 KiB.
            readers: Number of threads that read.
        """
        self._piece = -(-piece_nbytes // 4096) * 4096
        self._pieces = max(1, nbytes // self._piece)
        self.nbytes = self._pieces * self._piece
        self._readers = readers
        self._path = path
        self._fd, self.direct = open_direct(path)
        self._room = aligned(readers, self._piece)
        reserve(self._fd, self.nbytes)
        block = aligned(1, _BLOCK)[0]
        block[:] = bytearray(os.urandom(1 << 20) * (_BLOCK >> 20))
        for start in range(0, self.nbytes, _BLOCK):
            length = min(_BLOCK, self.nbytes - start)
            whole(os.pwrite(self._fd, block[:length].data, start), length)
        os.fdatasync(self._fd)

    def gbps(self) -> float:
        """Read the whole file once, in random order so that read-ahead does not help. Return the rate in GB/s."""
        order = list(range(self._pieces))
        Random(0).shuffle(order)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

        file = SharedFile(os.dup(self._fd))

        def some(reader: int) -> None:
            room = self._room[reader].data
            for piece in order[reader :: self._readers]:
                whole(os.preadv(file.fd, [room], piece * self._piece), self._piece)

        begun = perf_counter()
        with ThreadPoolExecutor(self._readers) as pool:
            list(pool.map(some, range(self._readers)))
        return self.nbytes / (perf_counter() - begun) / 1e9

    def close(self) -> None:
        """Close the file and delete it."""
        os.close(self._fd)
        self._path.unlink()
