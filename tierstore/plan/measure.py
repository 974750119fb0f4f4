"""Measure this machine: a page from HOST to HBM, a page from disk, a matrix multiplication.

Each function returns a rate and how it was measured, or no rate and why. Takes about a second each and at most some
hundred megabytes of memory or disk; the temporary file has no name and is gone when it is closed.
"""

from __future__ import annotations

import fcntl
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

from tierstore.config import format_size
from tierstore.page import ALIGNMENT, buffer

_SCRATCH_NBYTES = 256 << 20
_LARGEST_SIDE = 4096
_MOST_TOKENS = 2048
_ENOUGH_S = 1.0
_RUNS = 10
"""Many short runs: the best of them was not disturbed by other programs."""

_PASSES = 3
_READERS = 2
"""As many threads as a store reads records with."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_s`` is in bytes/s or operations/s, None if it was not measured. ``how`` says how, or why not."""

    per_s: float | None
    how: str

    def seconds(self, amount: float) -> float | None:
        """Return the time for that many bytes or operations."""
        return None if self.per_s is None else amount / self.per_s


def copy_rate(page_nbytes: int, device: str) -> Rate:
    """Return the bytes/s from host memory into the fastest tier, page by page."""
    count, piece = _pieces(page_nbytes, _SCRATCH_NBYTES // 2)
    how = f"{count} pages of {format_size(piece)} copied"
    if device == "cpu":
        how = f"{how} in memory, one thread, best of {_RUNS}"
        return Rate(_copy_in_memory(count, piece), f"measured: {how}")
    how = f"{how} from pinned memory to {device}, best of {_RUNS}"
    return _on(device, lambda: Rate(_copy_to_device(count, piece, device), f"measured: {how}"))


def read_rate(page_nbytes: int, place: Path) -> Rate:
    """Return the bytes/s from a temporary file in ``place``, read page by page with checksums, like the store."""
    count, piece = _pieces(page_nbytes, _SCRATCH_NBYTES)
    disk = os.statvfs(place)
    if disk.f_bavail * disk.f_frsize < 2 * count * piece:
        return Rate(
            None, f"not measured: {place} has no space for a temporary file of {format_size(count * piece)}"
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
    """Return the operations/s of a ``[tokens, hidden] @ [hidden, inner]`` product in ``dtype``."""
    sides = min(hidden, _LARGEST_SIDE), min(inner, _LARGEST_SIDE)
    return _on(device, lambda: _multiply(*sides, dtype, device))


def _on(device: str, act: Callable[[], Rate]) -> Rate:
    """Return the rate, or why the device gives none."""
    index = torch.device(device).index or 0
    if device != "cpu" and not (torch.cuda.is_available() and index < torch.cuda.device_count()):
        found = torch.cuda.device_count()
        return Rate(None, f"not measured: hbm.device is {device}, and torch finds {found} CUDA devices")
    try:
        return act()
    except RuntimeError as error:  # the GPU's memory is full, or it does not support this dtype
        return Rate(None, f"not measured: {str(error).splitlines()[0]}")


def _multiply(hidden: int, inner: int, dtype: str, device: str) -> Rate:
    """Return the best rate over products of growing size, within the time limit."""
    kind: torch.dtype = getattr(torch, dtype)
    weight = torch.rand(hidden, inner, device=device).to(kind)
    found: list[tuple[float, int]] = []
    tokens, begin = 64, perf_counter()
    while tokens <= _MOST_TOKENS and (not found or perf_counter() - begin < _ENOUGH_S):
        rows = torch.rand(tokens, hidden, device=device).to(kind)
        seconds = _best(partial(torch.matmul, rows, weight), device)
        found.append((2.0 * tokens * hidden * inner / seconds, tokens))
        tokens *= 2
    rate, tokens = max(found)
    return Rate(rate, f"measured: {tokens} x {hidden} x {inner} in {dtype} on {device}, best of {_RUNS}")


def _pieces(page_nbytes: int, most: int) -> tuple[int, int]:
    """Return the number and size of pieces: whole pages, aligned, unless one page is larger than ``most``."""
    piece = min(-(-page_nbytes // ALIGNMENT) * ALIGNMENT, most)
    return max(1, min(most // piece, 1024)), piece


def _best(act: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest run, after a warm-up."""
    times = []
    for _ in range(1 + _RUNS):
        begin = perf_counter()
        act()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - begin)
    return min(times[1:])


def _memory(nbytes: int) -> NDArray[np.uint8]:
    """Return page-aligned memory, with every page touched."""
    block = buffer(nbytes)
    block[:: mmap.PAGESIZE] = 1
    return block


def _copy_in_memory(count: int, piece: int) -> float:
    src, dst = (_memory(count * piece).reshape(count, piece) for _ in range(2))

    def copy() -> None:
        for index in range(count):
            np.copyto(dst[index], src[index])

    return count * piece / _best(copy, "cpu")


def _copy_to_device(count: int, piece: int, device: str) -> float:
    src = torch.ones((count, piece), dtype=torch.uint8, pin_memory=True)
    dst = torch.empty((count, piece), dtype=torch.uint8, device=device)

    def copy() -> None:
        for index in range(count):
            dst[index].copy_(src[index], non_blocking=True)

    return count * piece / _best(copy, device)


def _fill(handle: int, count: int, piece: int) -> None:
    """Write bytes that no disk can compress, and wait until they are on the disk."""
    page = memoryview(os.urandom(piece))
    for _ in range(count):
        done = 0
        while done < piece:
            done += os.write(handle, page[done:])
    os.fsync(handle)


def _direct(handle: int) -> bool:
    """Turn the page cache off for the file. Returns whether the file system supports that."""
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
    """Return the seconds to read every page once, with the threads taking turns."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = [_memory(piece) for _ in range(_READERS)]

    def read(number: int) -> None:
        for index in range(number, count, _READERS):
            if os.preadv(handle, [pages[number].data], index * piece) != piece:
                raise OSError(0, "a short read")
            xxh3_128_digest(pages[number].data)

    begin = perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read, range(_READERS)))
    return perf_counter() - begin
