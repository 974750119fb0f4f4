"""What a disk reads at most, in pieces of one size by some threads at once, past the page cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING

from tierstore.bench.raw_io import aligned, open_direct, whole

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 8 << 20


class RawDisk:
    """One preallocated file of ``nbytes``. ``direct``: whether the page cache is passed by."""

    def __init__(self, path: Path, nbytes: int, piece_nbytes: int, readers: int) -> None:
        """Writes it, durably. ``piece_nbytes``: rounded up to 4 KiB."""
        self._piece = -(-piece_nbytes // 4096) * 4096
        self._pieces = max(1, nbytes // self._piece)
        self.nbytes = self._pieces * self._piece
        self._readers = readers
        self._path = path
        self._fd, self.direct = open_direct(path)
        self._room = aligned(readers, self._piece)
        os.posix_fallocate(self._fd, 0, self.nbytes)
        block = aligned(1, _BLOCK)[0]
        block[:] = bytearray(os.urandom(1 << 20) * (_BLOCK >> 20))
        for start in range(0, self.nbytes, _BLOCK):
            length = min(_BLOCK, self.nbytes - start)
            whole(os.pwrite(self._fd, block[:length].data, start), length)
        os.fdatasync(self._fd)

    def gbps(self) -> float:
        """One run over all of it, in an order that no read-ahead guesses."""
        order = list(range(self._pieces))
        Random(0).shuffle(order)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def some(reader: int) -> None:
            room = self._room[reader].data
            for piece in order[reader :: self._readers]:
                whole(os.preadv(self._fd, [room], piece * self._piece), self._piece)

        begun = perf_counter()
        with ThreadPoolExecutor(self._readers) as pool:
            list(pool.map(some, range(self._readers)))
        return self.nbytes / (perf_counter() - begun) / 1e9

    def close(self) -> None:
        """Removes it."""
        os.close(self._fd)
        self._path.unlink()
