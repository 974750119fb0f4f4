"""How fast a disk takes and gives bytes past the page cache, and how many threads it takes to have most of it."""

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

NBYTES = 32 << 20
"""What is written, and then read at random."""

THREADS = (1, 2, 4, 8)

_CHUNK = 4 << 20
_LEAST_READ, _MOST_READ = 64 << 10, 2 << 20
_SECONDS = 0.03
_ENOUGH = 0.95


class Rates(NamedTuple):
    """Bytes a second: of writes, fdatasync included, and of random reads, checksum included, by number of threads."""

    write: float
    reads: Mapping[int, float]

    @property
    def readers(self) -> int:
        """The fewest threads that read at 0.95 of the best rate."""
        return min(count for count, rate in self.reads.items() if rate >= _ENOUGH * max(self.reads.values()))


def ask(directory: Path, page_nbytes: int) -> Rates:
    """Measure the disk under ``directory`` with a file that is gone afterwards: 32 MiB written, 0.12 s of reads of
    about ``page_nbytes``. OSError for any refusal, O_DIRECT's too.
    """
    fd = probe_file(directory)
    try:
        return rates(fd, page_nbytes)
    finally:
        os.close(fd)


def rates(fd: int, page_nbytes: int, nbytes: int = NBYTES) -> Rates:
    """As ``ask``, with an empty file of the caller's, which is written to."""
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
    """Of ``count`` threads for a moment."""
    offsets = np.random.default_rng(count).integers(0, (nbytes - step) // BLOCK + 1, 1 << 12) * BLOCK
    buffers = [aligned(step) for _ in range(count)]
    start = perf_counter()

    def read(number: int, buffer: NDArray[np.uint8]) -> int:
        done = 0
        for turn in range(number, len(offsets), count):
            done += os.preadv(fd, [buffer.data], int(offsets[turn]))
            xxh3_128_digest(buffer.data)
            if perf_counter() - start > _SECONDS:
                break
        return done

    with ThreadPoolExecutor(count) as pool:
        done = sum(pool.map(read, range(count), buffers))
        return done / (perf_counter() - start)
