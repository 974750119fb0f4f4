"""Measurements of this machine: copies from host memory to HBM, reads from disk, and matrix multiplications.

Each function returns a rate and a note that says how the rate was measured, or why it could not be measured. A
measurement takes at most a few seconds, and at most a few hundred megabytes of memory or disk space. The
temporary file has no name, so the system deletes it even if the process is killed.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from tierstore.page import ALIGNMENT, buffer
from tierstore.threads import SharedFile
from tierstore.types import format_size

_SCRATCH_NBYTES = 256 << 20
_LARGEST_SIDE = 4096
_MOST_TOKENS = 2048
_FEWEST_TOKENS = 64
_ENOUGH_S = 1.0
_PROBE_TOKENS = 4
_PROBE_S = 0.1
"""A device is measured only if a product with ``_PROBE_TOKENS`` tokens takes at most this long, in seconds.

On one CPU without AVX-512, torch multiplied bfloat16 matrices at only 0.2 GFLOP/s. A single product of 64 tokens
with a matrix of an 8B model took 9 s there.
"""

_RUNS = 10
"""Maximum number of runs of a measurement. If there are many short runs, at least one is likely to be undisturbed."""

_PASSES = 3
_READERS = 2
"""Number of reader threads, as in a store by default."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of this machine.

    ``per_s`` is in bytes, tokens or operations per second, or None if the rate is unknown. ``how`` says how the
    rate was measured, or why it was not.
    """

    per_s: float | None
    how: str

    def seconds(self, amount: float) -> float | None:
        """Return the time in seconds for ``amount`` bytes, tokens or operations, or None if the rate is unknown."""
        return None if self.per_s is None else amount / self.per_s


def copy_rate(page_nbytes: int, device: str) -> Rate:
    """Measure how fast pages are copied one by one from host memory to ``device``, in bytes/s.

    If the device is "cpu", copies within host memory are measured.
    """
    count, piece = _pieces(page_nbytes, _SCRATCH_NBYTES // 2)
    how = f"{count} pages of {format_size(piece)} copied"
    if device == "cpu":
        how = f"{how} in memory, one thread, best of {_RUNS}"
        return Rate(_copy_in_memory(count, piece), f"measured: {how}")
    how = f"{how} from pinned memory to {device}, best of {_RUNS}"
    return _on(device, lambda: Rate(_copy_to_device(count, piece, device), f"measured: {how}"))


def read_rate(page_nbytes: int, place: Path) -> Rate:
    """Measure how fast pages are read from a temporary file in the folder ``place``, in bytes/s.

    As in the store, two threads read page by page and compute a checksum of each page.
    """
    count, piece = _pieces(page_nbytes, _SCRATCH_NBYTES)
    disk = os.statvfs(place)
    if disk.f_bavail * disk.f_frsize < 2 * count * piece:
        return Rate(
            None,
            f"not measured: {place} has too little free space for a temporary file of "
            f"{format_size(count * piece)}",
        )
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            _fill(file.fileno(), count, piece)
            cache = "past the page cache" if _direct(file.fileno()) else "dropped from the page cache first"
            rate = count * piece / min(_read_all(file.fileno(), count, piece) for _ in range(_PASSES))
    except OSError as error:
        return Rate(None, f"not measured: cannot create a temporary file in {place}: {error.strerror}")
    return Rate(
        rate,
        f"measured: {count} pages of {format_size(piece)} read, {cache}, {_READERS} threads, best of {_PASSES}",
    )


def matmul_rate(hidden: int, inner: int, dtype: str, device: str) -> Rate:
    """Measure matrix products ``[tokens, hidden] @ [hidden, inner]`` in ``dtype``, in operations/s.

    ``hidden`` and ``inner`` are limited to 4,096.
    """
    sides = min(hidden, _LARGEST_SIDE), min(inner, _LARGEST_SIDE)
    return _on(device, lambda: _multiply(*sides, dtype, device))


def found_card() -> str | None:
    """Return "cuda" if torch finds a CUDA device, else None."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else None


def _on(device: str, act: Callable[[], Rate]) -> Rate:
    """Return the result of ``act``, or an unknown Rate if the device does not exist or ``act`` fails."""
    index = torch.device(device).index or 0
    if device != "cpu" and not (torch.cuda.is_available() and index < torch.cuda.device_count()):
        found = torch.cuda.device_count()
        return Rate(None, f"not measured: device {device} does not exist; torch finds {found} CUDA devices")
    try:
        return act()
    except RuntimeError as error:  # for example, the GPU's memory is full, or it does not support the dtype
        return Rate(None, f"not measured: {str(error).splitlines()[0]}")


def _multiply(hidden: int, inner: int, dtype: str, device: str) -> Rate:
    """Measure matrix products with a growing number of tokens for about a second, and return the highest rate.

    Return an unknown Rate if even a small product takes too long.
    """
    kind: torch.dtype = getattr(torch, dtype)
    weight = torch.rand(hidden, inner, device=device).to(kind)

    def product(tokens: int) -> Callable[[], object]:
        return partial(torch.matmul, torch.rand(tokens, hidden, device=device).to(kind), weight)

    (probe,) = _times(product(_PROBE_TOKENS), device, runs=1)
    if probe > _PROBE_S:
        return Rate(
            None,
            f"not measured: {device} takes {probe:.2g} s for one product of {_PROBE_TOKENS} x {hidden} x {inner} "
            f"in {dtype}, too long for an engine; set --prefill-tokens-per-s",
        )
    found: list[tuple[float, int, int]] = []
    tokens, begin = _FEWEST_TOKENS, perf_counter()
    while tokens <= _MOST_TOKENS and (not found or perf_counter() - begin < _ENOUGH_S):
        times = _times(product(tokens), device, within_s=_ENOUGH_S)
        found.append((2.0 * tokens * hidden * inner / min(times), tokens, len(times)))
        tokens *= 2
    rate, tokens, runs = max(found)
    return Rate(rate, f"measured: {tokens} x {hidden} x {inner} in {dtype} on {device}, best of {runs}")


def _pieces(page_nbytes: int, most: int) -> tuple[int, int]:
    """Return the number of pieces to measure, and the size of a piece in bytes.

    A piece has the size of a page, rounded up to a multiple of 4 KiB, but at most ``most`` bytes. All pieces
    together also have at most ``most`` bytes.
    """
    piece = min(-(-page_nbytes // ALIGNMENT) * ALIGNMENT, most)
    return max(1, min(most // piece, 1024)), piece


def _times(
    act: Callable[[], object], device: str, *, runs: int = _RUNS, within_s: float = math.inf
) -> list[float]:
    """Call ``act`` once as a warm-up, then up to ``runs`` times. Return the time of each run in seconds.

    No further run starts once the runs have taken ``within_s`` seconds together.
    """

    def seconds() -> float:
        begin = perf_counter()
        act()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return perf_counter() - begin

    seconds()
    times: list[float] = []
    while len(times) < runs and (not times or sum(times) < within_s):
        times.append(seconds())
    return times


def _memory(nbytes: int) -> NDArray[np.uint8]:
    """Return page-aligned memory of ``nbytes`` bytes. All of it has been touched, so no page faults are measured."""
    block = buffer(nbytes)
    block[:: mmap.PAGESIZE] = 1
    return block


def _copy_in_memory(count: int, piece: int) -> float:
    src, dst = (_memory(count * piece).reshape(count, piece) for _ in range(2))

    def copy() -> None:
        for index in range(count):
            np.copyto(dst[index], src[index])

    return count * piece / min(_times(copy, "cpu"))


def _copy_to_device(count: int, piece: int, device: str) -> float:
    src = torch.ones((count, piece), dtype=torch.uint8, pin_memory=True)
    dst = torch.empty((count, piece), dtype=torch.uint8, device=device)

    def copy() -> None:
        for index in range(count):
            dst[index].copy_(src[index], non_blocking=True)

    return count * piece / min(_times(copy, device))


def _fill(handle: int, count: int, piece: int) -> None:
    """Write ``count`` pieces of random bytes, which no disk can compress, and wait until they are durable."""
    page = memoryview(os.urandom(piece))
    for _ in range(count):
        done = 0
        while done < piece:
            done += os.write(handle, page[done:])
    os.fsync(handle)


def _direct(handle: int) -> bool:
    """Switch the file to direct I/O, which bypasses the page cache. Return False if that is not supported."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGNMENT) as block:
            os.preadv(handle, [block], 0)
    except OSError:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        return False
    return True


def _read_all(handle: int, count: int, piece: int) -> float:
    """Read every piece once, divided evenly between two threads, and return the time in seconds."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = [_memory(piece) for _ in range(_READERS)]
    file = SharedFile(os.dup(handle))

    def read(number: int) -> None:
        for index in range(number, count, _READERS):
            if os.preadv(file.fd, [pages[number].data], index * piece) != piece:
                raise OSError(0, "a read returned too few bytes")
            xxh3_128_digest(pages[number].data)

    begin = perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read, range(_READERS)))
    return perf_counter() - begin
