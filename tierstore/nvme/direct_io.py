"""Direct I/O (O_DIRECT) past the page cache: its alignment rules, and a test whether a disk supports it.

Also how a file gets its disk space before it is written.
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
"""Offsets, lengths and addresses of direct transfers are multiples of this."""


def padded(nbytes: int) -> int:
    """Round ``nbytes`` up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return a zeroed, flat, block-aligned buffer of whole blocks. Memory is committed only when touched."""
    return buffer(max(BLOCK, padded(nbytes)))


def is_aligned(buffer: NDArray[np.uint8]) -> bool:
    """Return whether a direct transfer can use ``buffer`` as it is."""
    return buffer.nbytes % BLOCK == 0 and _address(buffer) % BLOCK == 0


def _address(buffer: NDArray[np.uint8]) -> int:
    # Called twice per page read. numpy's own method is six times slower, and needed only for read-only buffers.
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer.data))
    except (TypeError, ValueError):
        return int(buffer.__array_interface__["data"][0])


def set_direct(fd: int) -> None:
    """Switch ``fd`` to direct transfers. Raises OSError if the file system does not support them."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


_CANNOT_PREALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Of posix_fallocate. EINVAL: glibc then writes single bytes, which a direct descriptor refuses."""

_ZEROS_NBYTES = 8 << 20


def reserve(fd: int, nbytes: int) -> None:
    """Have the disk set aside the first ``nbytes`` of a file, which has at least that length afterwards.

    On a filesystem that cannot preallocate (ext4 without extents, some network and FUSE filesystems), what lies behind
    the file's end is written as zeros, so that a full disk refuses now and not when the bytes are needed.

    Args:
        fd: Open for writing. Direct descriptors need a length and ``nbytes`` of whole blocks.
        nbytes: At least 1.

    Raises:
        OSError: The disk has no room or fails. The file may be longer than before.
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
            raise OSError(errno.EIO, "nothing was written")
        start += done


def works(directory: Path) -> bool:
    """Return whether direct I/O works in ``directory``: write two blocks and read them back in a temporary file.

    If the disk is full, one block of the data file is read directly instead. Any refusal or differing byte gives False.

    Raises:
        OSError: No file can be created there.
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
    """Return whether a direct read of the file's first block gives the same bytes as a normal read."""
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
    """Return whether two blocks written directly to the empty file ``fd``, in two pieces each, read back unchanged.

    Raises:
        OSError: The file system refuses direct transfers.
    """
    written, found = aligned(2 * BLOCK), aligned(2 * BLOCK)
    written[:] = np.frombuffer(os.urandom(2 * BLOCK), dtype=np.uint8)
    set_direct(fd)
    os.pwritev(fd, [written[:BLOCK].data, written[BLOCK:].data], 0)
    got = os.preadv(fd, [found[:BLOCK].data, found[BLOCK:].data], 0)
    return got == 2 * BLOCK and bool(np.array_equal(written, found))


def probe_file(directory: Path) -> int:
    """Create and open a new, unnamed, empty file in ``directory``."""
    path = directory / PROBE_FILE
    fd = fresh_file(path)
    path.unlink()
    return fd
