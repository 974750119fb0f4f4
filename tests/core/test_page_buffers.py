"""Memory for pages: where it begins, what is in it, who has it."""

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
    """What the kernel says of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("nbytes", [1, 4096, 65535, 65536, HUGE_NBYTES, 3 * HUGE_NBYTES + 5])
def test_it_is_zeroed_memory_of_its_own_of_just_that_length(nbytes: int) -> None:
    first, second = buffer(nbytes), buffer(nbytes)
    assert (first.nbytes, first.ndim) == (nbytes, 1)
    assert first.dtype == np.uint8
    assert first.flags.writeable
    assert not first.any()
    first[:] = 7
    assert not second.any()
    assert first.ctypes.data % mmap.PAGESIZE == 0


def test_a_view_keeps_it() -> None:
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
def test_a_forked_child_has_no_such_memory(nbytes: int) -> None:
    assert "dc" in flags_at(buffer(nbytes).ctypes.data)


def test_none_is_a_page_nobody_uses() -> None:
    assert buffer(0).nbytes == 0


def test_a_disk_reads_into_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 512)
    fd = os.open(path, os.O_RDONLY)
    try:
        memory = buffer(128 << 10)
        assert os.preadv(fd, [memory.data], 0) == memory.nbytes
    finally:
        os.close(fd)
    assert memory[:256].tolist() == list(range(256))
