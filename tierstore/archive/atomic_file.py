"""Atomic creation of a large file: it appears complete or not at all.

``Draft`` writes a file ``NAME.part`` next to the destination NAME. A commit renames it to NAME; otherwise it is
removed. While a process writes ``NAME.part``, it holds a lock on that file. If the process is killed,
``NAME.part`` stays behind unlocked, and the next writer of NAME overwrites it. There is therefore never more
than one such file.

``Output`` is the stream to which the file is written. It uses direct I/O, because an archive has gigabytes of data
that will not be read soon. In the page cache, it would displace data that other programs use. Large direct writes
are also faster.
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
    """A binary stream that collects data and writes it to the file in blocks of 8 MiB.

    ``flush`` writes data that does not fill a block. ``close`` does not flush. Thread-safe.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of ``fd``, the descriptor of an empty file that is open for writing."""
        self._fd = fd
        self._lock = Lock()
        self._staged = aligned(_STAGED_NBYTES)
        self._filled = 0
        self._offset = 0
        """Position in the file at which the staged data starts, a multiple of BLOCK."""
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
        """Add all of ``piece``, and write full blocks to the file. Return the length of ``piece`` in bytes.

        Raises:
            ValueError: The stream is closed.
            OSError: A block cannot be written. The file must not be used afterwards.
        """
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
        """Write all staged data and set the file's length. The data is durable only after an fsync."""
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
        """Close the file. Staged data that was not flushed is lost. Waits for a call in progress in another thread."""
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
                # Either the file system does not support direct writes after all, or the last write ended within
                # a block, so that the next one is not aligned. Continue without direct I/O.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                with suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)


SUFFIX = ".part"


class Draft:
    """A temporary file that ``commit`` renames to ``path``. Without a commit, it is removed.

    Use a draft as a context manager and write to ``draft.file``. An existing file at ``path`` stays unchanged
    until the commit. Entering and leaving the context never await, so a cancellation cannot interrupt them.

    Raises:
        ArchiveError: Another process is writing to this path, or ``path`` is not a regular file.
        OSError: The temporary file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + SUFFIX)
        self._committed = False
        _require_free(path)
        self.file = Output(_locked(self._part))

    def commit(self) -> None:
        """Rename the temporary file to its final name, and sync the directory.

        The caller must flush and sync the file first.
        """
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
        with suppress(
            OSError
        ):  # a network file system may report an error here, but the data is synced already
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
        raise ArchiveError(f"{path} is a {found}; choose a path that is new or a regular file")


def _locked(part: Path) -> int:
    """Open or create the file, lock it, truncate it, and return its descriptor.

    Raises:
        ArchiveError: Another process holds the lock.
    """
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
                f"{part} is being written by another process; wait for that process to finish"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another process renamed or removed the file between open and flock: try again


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
