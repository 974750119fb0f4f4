"""A short disk benchmark that bypasses the page cache and chooses the number of reader threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from tierstore.nvme.direct_io import BLOCK, aligned, padded, probe_file, reserve, set_direct
from tierstore.threads import SharedFile

NBYTES = 32 << 20
"""Size in bytes of the file that the benchmark writes and then reads at random offsets."""

THREADS = (1, 2, 4, 8)

_CHUNK = 4 << 20
_LEAST_READ, _MOST_READ = 64 << 10, 2 << 20
_SECONDS = 0.03
_ENOUGH = 0.95


class Rates(NamedTuple):
    """Measured rates in bytes/s.

    Attributes:
        write: Rate of writes, including fdatasync.
        reads: Rate of random reads, including the checksum, by number of threads.
    """

    write: float
    reads: Mapping[int, float]

    @property
    def readers(self) -> int:
        """The smallest number of threads that reaches 95 % of the best read rate."""
        return min(count for count, rate in self.reads.items() if rate >= _ENOUGH * max(self.reads.values()))


def ask(directory: Path, page_nbytes: int) -> Rates:
    """Benchmark the disk that holds ``directory``: write 32 MiB to a file, then read at random offsets for 0.12 s.

    Args:
        directory: A directory on the disk.
        page_nbytes: Size of a page in bytes. Each read has this size, limited to the range from 64 KiB to 2 MiB.

    Raises:
        OSError: The file cannot be created, written or read, or the file system does not support O_DIRECT.
    """
    fd = probe_file(directory)
    try:
        return rates(fd, page_nbytes)
    finally:
        os.close(fd)


def rates(fd: int, page_nbytes: int, nbytes: int = NBYTES) -> Rates:
    """Write ``nbytes`` bytes to the empty file ``fd``, read them back, and return the rates. See ``ask``."""
    set_direct(fd)
    write = _write_rate(fd, nbytes)
    step = padded(min(_MOST_READ, max(_LEAST_READ, page_nbytes), nbytes))
    return Rates(write, {count: _read_rate(fd, nbytes, step, count) for count in THREADS})


def _write_rate(fd: int, nbytes: int) -> float:
    chunk = aligned(_CHUNK)
    chunk[:] = np.frombuffer(os.urandom(1 << 16) * (_CHUNK >> 16), dtype=np.uint8)
    reserve(fd, padded(nbytes))
    start = perf_counter()
    for offset in range(0, nbytes, _CHUNK):
        os.pwritev(fd, [chunk[: min(_CHUNK, nbytes - offset)].data], offset)
    os.fdatasync(fd)
    return nbytes / (perf_counter() - start)


def _read_rate(fd: int, nbytes: int, step: int, count: int) -> float:
    """Return the read rate of ``count`` threads in bytes/s."""
    offsets = np.random.default_rng(count).integers(0, (nbytes - step) // BLOCK + 1, 1 << 12) * BLOCK
    buffers = [aligned(step) for _ in range(count)]
    file = SharedFile(os.dup(fd))
    start = perf_counter()

    def read(number: int, buffer: NDArray[np.uint8]) -> int:
        done = 0
        for turn in range(number, len(offsets), count):
            done += os.preadv(file.fd, [buffer.data], int(offsets[turn]))
            xxh3_128_digest(buffer.data)
            if perf_counter() - start > _SECONDS:
                break
        return done

    with ThreadPoolExecutor(count) as pool:
        done = sum(pool.map(read, range(count), buffers))
        return done / (perf_counter() - start)
