"""A file that appears complete or not at all, written sequentially past the page cache.

``Draft`` writes to ``NAME.part`` beside the destination, and renames it when the caller commits, or else removes it.
``NAME.part`` is locked while a process writes it. A killed process leaves it behind without the lock, and the next
writer of NAME takes it over, so at most one such file exists.

``Output`` writes gigabytes that will not be read soon. Through the page cache they would evict data that other programs
use, and a disk accepts large direct writes faster.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from tierstore.errors import ArchiveError
from tierstore.nvme.direct_io import BLOCK, aligned, padded, set_direct

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STAGED_NBYTES = 8 << 20


class Output(io.BufferedIOBase):
    """A binary stream that stages data and writes it in blocks of 8 MiB; ``flush`` writes the rest. Thread-safe."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, an empty file opened for writing."""
        self._fd = fd
        self._lock = Lock()
        self._staged = aligned(_STAGED_NBYTES)
        self._filled = 0
        self._offset = 0
        """Offset in the file of the first staged byte; a multiple of BLOCK."""
        self._direct = True
        try:
            set_direct(fd)
        except OSError:
            self._direct = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, piece: ReadableBuffer) -> int:
        """Stage all of ``piece``. After an OSError the file is unusable."""
        data = np.frombuffer(memoryview(piece), dtype=np.uint8)
        with self._lock:
            if self._fd < 0:
                raise ValueError("write to a closed file")
            taken = 0
            while taken < data.nbytes:
                count = min(data.nbytes - taken, self._staged.nbytes - self._filled)
                np.copyto(self._staged[self._filled : self._filled + count], data[taken : taken + count])
                self._filled += count
                taken += count
                if self._filled == self._staged.nbytes:
                    self._put(self._filled)
                    self._offset, self._filled = self._offset + self._filled, 0
        return data.nbytes

    def flush(self) -> None:
        """Write everything staged and set the file's length. Does not sync."""
        with self._lock:
            if self._fd < 0:
                return
            self._staged[self._filled : padded(self._filled)] = 0
            self._put(padded(self._filled))
            os.ftruncate(self._fd, self._offset + self._filled)
            rest = self._filled % BLOCK
            begin = self._filled - rest
            self._staged[:rest] = self._staged[begin : self._filled]
            self._offset, self._filled = self._offset + begin, rest

    def close(self) -> None:
        """Close the file without writing staged data, after a call in progress has ended."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
        super().close()

    def _put(self, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                done += os.pwrite(self._fd, self._staged[done:nbytes].data, self._offset + done)
            except OSError as error:
                # The filesystem does not support direct writes after all, or wrote part of a block.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                with suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)


SUFFIX = ".part"


class Draft:
    """A file that ``commit`` moves to ``path``; without a commit nothing is left.

    Use it as a context manager and write to ``draft.file``. An existing file at ``path`` stays in place until the
    commit. Opening and leaving only change names and never await, so no cancellation can come in between.

    Raises:
        ArchiveError: Another process is writing this file, or ``path`` is a directory, link, device or pipe.
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + SUFFIX)
        self._committed = False
        _require_free(path)
        self.file = Output(_locked(self._part))

    def commit(self) -> None:
        """Rename the written and synced file to its final name, and sync the directory."""
        self._part.replace(self.path)
        self._committed = True
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            self._part.unlink(missing_ok=True)
        with suppress(OSError):  # a network file system may report errors only here; the file is synced
            self.file.close()  # waits for a write in another thread


def _require_free(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        found = (
            "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "device, pipe or socket"
        )
        raise ArchiveError(f"{path} is a {found}; name a new or an existing regular file")


def _locked(part: Path) -> int:
    """Return a descriptor of the file, emptied and locked."""
    while True:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(fd, part):
                os.ftruncate(fd, 0)
                return fd
        except BlockingIOError:
            os.close(fd)
            raise ArchiveError(
                f"{part} is being written by another process; wait until it has ended"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # renamed or removed between open and flock


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
