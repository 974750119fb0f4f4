"""Raw files past the page cache, and memory to read them into."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from tierstore.buffers import buffer
from tierstore.types import ALIGNMENT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


def aligned(rows: int, nbytes: int) -> Bytes:
    """Memory in huge pages where there are any, all of it touched; ``nbytes`` is a multiple of 4 KiB."""
    memory = buffer(rows * nbytes)
    memory[:: mmap.PAGESIZE] = 1
    return memory.reshape(rows, nbytes)


def small_pages(rows: int, nbytes: int) -> Bytes:
    """The same in pages of 4 KiB, as most programs have it."""
    memory = np.frombuffer(mmap.mmap(-1, rows * nbytes), dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory.reshape(rows, nbytes)


def forget(path: Path) -> None:
    """Write a file's pages out and drop them from the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def open_direct(path: Path) -> tuple[int, bool]:
    """A new file, past the page cache if it can be so, and whether it is."""
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
        raise OSError(f"{done} bytes moved where {wanted} were asked for")
