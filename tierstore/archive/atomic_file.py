"""A file that appears whole or not at all, written once from its beginning to its end past the page cache.

``Draft`` writes under a name of its own beside the file's place, and moves it there whole or removes it.
``NAME.part`` is locked while somebody writes it. A process that is killed leaves it behind without the lock; the next
writer of NAME takes it over, so at most one is ever there.

``Output`` writes gigabytes that nobody reads soon: in the page cache they would push out what somebody does read, and
a disk takes them faster in large direct writes than in the page cache's own.
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
    """What is written is staged and goes out 8 MiB at a time; the rest with ``flush``. Any thread."""

    def __init__(self, fd: int) -> None:
        """Takes over an empty file."""
        self._fd = fd
        self._lock = Lock()
        self._staged = aligned(_STAGED_NBYTES)
        self._filled = 0
        self._offset = 0
        """Of the first staged byte in the file; a multiple of BLOCK."""
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
        """Take all of it. OSError as it comes: then the file is of no use any more."""
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
        """Everything that was written is in the file, which is as long as that. Not yet synced."""
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
        """Let go of the file, without what is only staged; waits for a call that is running."""
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
                # A filesystem that takes no direct write after all, or has taken a part of a block.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                with suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)


SUFFIX = ".part"


class Draft:
    """``with Draft(path) as draft``: what was written to ``draft.file`` is at ``path`` after ``commit``, else nowhere.

    What was at ``path`` before stays there until then. Opening and ending do no I/O but on names, and never await, so
    that no cancellation comes between. ArchiveError if another writes there, or if anything but a file is there: its
    name would be taken from a device or a pipe; OSError as it comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + SUFFIX)
        self._committed = False
        _require_free(path)
        self.file = Output(_locked(self._part))

    def commit(self) -> None:
        """Everything is written and synced: give it its name, durably."""
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
        with suppress(OSError):  # what a network says only at the end; the file is synced, or nobody wants it
            self.file.close()  # waits for a write that a thread is still at


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
    """The file, empty and locked by us."""
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
        os.close(fd)  # it has got its name, or was removed, between open and flock


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
