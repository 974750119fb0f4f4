"""Tests of the memory for pages: its alignment, its content, and whether forked processes inherit it."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tierstore.page import HUGE_NBYTES, buffer

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """Return the kernel's flags of the mapping that contains this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("nbytes", [1, 4096, 65535, 65536, HUGE_NBYTES, 3 * HUGE_NBYTES + 5])
def test_buffer_is_zeroed_private_memory_of_exact_length(nbytes: int) -> None:
    first, second = buffer(nbytes), buffer(nbytes)
    assert (first.nbytes, first.ndim) == (nbytes, 1)
    assert first.dtype == np.uint8
    assert first.flags.writeable
    assert not first.any()
    first[:] = 7
    assert not second.any()
    assert first.ctypes.data % mmap.PAGESIZE == 0


def test_view_keeps_the_buffer_alive() -> None:
    view = buffer(HUGE_NBYTES)[100:200]
    view[:] = 3
    assert int(view.sum()) == 300


def test_large_memory_asks_for_huge_pages_from_its_first_byte_on() -> None:
    memory = buffer(256 << 10)
    assert memory.ctypes.data % HUGE_NBYTES == 0
    if THP.exists():
        assert "hg" in flags_at(memory.ctypes.data)


def test_small_memory_takes_no_huge_page() -> None:
    assert "hg" not in flags_at(buffer(4096).ctypes.data)


@pytest.mark.parametrize("nbytes", [4096, 256 << 10])
def test_forked_child_does_not_inherit_the_buffer(nbytes: int) -> None:
    assert "dc" in flags_at(buffer(nbytes).ctypes.data)


def test_a_buffer_of_0_bytes_is_empty() -> None:
    assert buffer(0).nbytes == 0


def test_disk_can_read_into_a_buffer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 512)
    fd = os.open(path, os.O_RDONLY)
    try:
        memory = buffer(128 << 10)
        assert os.preadv(fd, [memory.data], 0) == memory.nbytes
    finally:
        os.close(fd)
    assert memory[:256].tolist() == list(range(256))
