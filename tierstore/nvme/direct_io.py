"""Direct I/O (O_DIRECT), which bypasses the page cache: alignment rules and a test of disk support.

This module also preallocates disk space for files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.nvme.directory_layout import DATA_FILE, FULL, PROBE_FILE, fresh_file
from tierstore.page import buffer

BLOCK = 4096
"""Offsets, lengths and addresses of direct I/O must be multiples of this many bytes."""


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of BLOCK."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return a flat, zeroed buffer of at least ``nbytes`` bytes that direct I/O can use.

    It is aligned to BLOCK, and its length is a multiple of BLOCK. Its memory is committed only when touched.
    """
    return buffer(max(BLOCK, padded(nbytes)))


def is_aligned(buffer: NDArray[np.uint8]) -> bool:
    """Return whether direct I/O can use ``buffer`` as it is."""
    return buffer.nbytes % BLOCK == 0 and _address(buffer) % BLOCK == 0


def _address(buffer: NDArray[np.uint8]) -> int:
    # Called twice per page read. numpy's ``__array_interface__`` is six times slower, and is needed only for
    # read-only buffers.
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer.data))
    except (TypeError, ValueError):
        return int(buffer.__array_interface__["data"][0])


def set_direct(fd: int) -> None:
    """Switch ``fd`` to direct I/O. Raises OSError if the file system does not support it."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


_CANNOT_PREALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""errno values of posix_fallocate on a file system that cannot preallocate.

EINVAL is included because glibc's fallback writes single bytes, which a descriptor for direct I/O rejects.
"""

_ZEROS_NBYTES = 8 << 20


def reserve(fd: int, nbytes: int) -> None:
    """Allocate disk space for the first ``nbytes`` bytes of a file, and extend the file to at least this length.

    On a file system that cannot preallocate (ext4 without extents, some network and FUSE file systems), zeros
    are written from the end of the file up to ``nbytes``. A full disk then causes an error now and not when
    the space is needed.

    Args:
        fd: Descriptor open for writing. With direct I/O, the file's length and ``nbytes`` must be multiples of
            BLOCK.
        nbytes: Number of bytes, at least 1.

    Raises:
        OSError: The disk is full or fails. The file may be longer than before.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_PREALLOCATE:
            raise
        _write_zeros(fd, os.fstat(fd).st_size, nbytes)


def _write_zeros(fd: int, start: int, end: int) -> None:
    zeros = aligned(min(_ZEROS_NBYTES, max(1, end - start)))
    while start < end:
        done = os.pwritev(fd, [zeros[: end - start].data], start)
        if not done:
            raise OSError(errno.EIO, "writing zeros to a file wrote 0 bytes")
        start += done


def works(directory: Path) -> bool:
    """Return whether direct I/O works in ``directory``.

    Writes two blocks to a temporary file and reads them back. If the disk is full, instead reads one block of LMDB's
    data file with direct I/O. Returns False on a mismatch, and on any error after the file was created.

    Raises:
        OSError: The temporary file cannot be created, and the disk is not full.
    """
    try:
        fd = probe_file(directory)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return reads_directly(directory / DATA_FILE)
    try:
        return round_trip(fd)
    except OSError as error:
        return error.errno in FULL and reads_directly(directory / DATA_FILE)
    finally:
        os.close(fd)


def reads_directly(path: Path) -> bool:
    """Return whether a direct read and a normal read of the file's first block return the same bytes.

    Return False if the file cannot be opened or read.
    """
    found = aligned(BLOCK)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            raw = os.pread(fd, BLOCK, 0)
            set_direct(fd)
            return os.preadv(fd, [found.data], 0) == BLOCK and found.tobytes() == raw
        finally:
            os.close(fd)
    except OSError:
        return False


def round_trip(fd: int) -> bool:
    """Write two blocks to the empty file ``fd`` with direct I/O, and return whether they read back unchanged.

    Both the write and the read use two buffers. ``fd`` remains in direct I/O mode.

    Raises:
        OSError: The file system does not support direct I/O, or the disk is full.
    """
    written, found = aligned(2 * BLOCK), aligned(2 * BLOCK)
    written[:] = np.frombuffer(os.urandom(2 * BLOCK), dtype=np.uint8)
    set_direct(fd)
    os.pwritev(fd, [written[:BLOCK].data, written[BLOCK:].data], 0)
    got = os.preadv(fd, [found[:BLOCK].data, found[BLOCK:].data], 0)
    return got == 2 * BLOCK and bool(np.array_equal(written, found))


def probe_file(directory: Path) -> int:
    """Create an empty file in ``directory``, unlink it, and return its open descriptor.

    Raises:
        OSError: The file cannot be created or unlinked.
    """
    path = directory / PROBE_FILE
    fd = fresh_file(path)
    path.unlink()
    return fd
