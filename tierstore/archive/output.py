"""A file that is written once, from its beginning to its end, past the page cache where the disk takes that.

Gigabytes that nobody reads soon would push out what somebody does, and a disk takes them faster in large direct writes
than in the page cache's own.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

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
