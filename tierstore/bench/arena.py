"""Benchmark of the time until page-locked host memory can be used: the store's arena compared with torch."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from tierstore.bench.measurement import Row
from tierstore.gpu.device import pinner, require_device
from tierstore.host.arena import HostArena
from tierstore.host.free_memory import available_nbytes
from tierstore.host.pinned_memory import FIRST_NBYTES
from tierstore.page import PageLayout, PageSpec

if TYPE_CHECKING:
    from tierstore.host.pinned_memory import Pinner

_PAGE = PageSpec(
    num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="tierstore-bench"
)
_PATIENCE_S = 600.0
MOST_NBYTES = 64 << 30


class NoPinner:
    """A pinner for machines without a GPU. It does not page-lock the arena's memory, so the arena only touches it."""

    def pin(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def unpin(self, address: int) -> None:
        """Do nothing."""


def _seconds_to_touch(layout: PageLayout, slots: int) -> float:
    start = perf_counter()
    arena = HostArena(layout, slots, NoPinner())
    arena.wait_pinned(slots, _PATIENCE_S)
    seconds = perf_counter() - start
    arena.close()
    return seconds


def default_nbytes() -> int:
    """Return the default size of the arena in bytes: 64 GiB, or half of the available memory if that is less."""
    available = available_nbytes()
    return MOST_NBYTES if available is None else min(MOST_NBYTES, available // 2)


def arena_rows(device: str, nbytes: int) -> list[Row]:
    """Measure how long it takes until the first GiB of an arena can be used, and until all of it can be used.

    On a GPU, also measure how long torch takes to allocate as much page-locked memory. On the CPU, memory is
    touched but not page-locked, and torch is not measured.

    A virtual machine may get its memory from the host only when it first touches it. The same amount of memory is
    therefore touched once before the measurement. A separate row reports how long this takes.

    Args:
        device: The device for which memory is page-locked, such as ``cuda:0``, or ``cpu``.
        nbytes: Size of the arena in bytes, rounded down to whole pages.

    Raises:
        ConfigError: The device does not exist.
        OSError: The memory cannot be page-locked.
    """
    require_device(device)
    locks: Pinner = NoPinner() if device == "cpu" else pinner(device)
    if device != "cpu":
        torch.zeros(1, device=device)  # creates the CUDA context before the clock starts
    layout = PageLayout.of(_PAGE)
    slots = max(1, nbytes // layout.slot_nbytes)
    before = _seconds_to_touch(layout, slots)
    start = perf_counter()
    arena = HostArena(layout, slots, locks)
    ready = arena.wait_pinned(max(1, FIRST_NBYTES // layout.slot_nbytes), _PATIENCE_S)
    first = perf_counter() - start
    ready = ready and arena.wait_pinned(slots, _PATIENCE_S)
    whole = perf_counter() - start
    if not ready:
        raise OSError(f"could not page-lock the arena's memory: {arena.refused}")
    size = slots * layout.slot_nbytes
    arena.close()
    del arena
    rows = [
        Row("first touch of as much memory, before the measurement", before, "s"),
        Row("first GiB usable", first, "s", 0.3),
        Row(f"{size / 2**30:.2f} GiB usable", whole, "s"),
    ]
    if device != "cpu":
        start = perf_counter()
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        theirs = perf_counter() - start
        rows.append(Row("torch.empty(pin_memory=True) of the same size", theirs, "s"))
        rows.append(Row("times sooner", theirs / whole, "x", at_least=3.0))
    return rows
