"""Test how pages are written to extent files: into which files, in how many system calls, and from which memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nvme.rig import (
    PAGE,
    Rig,
    data_file,
    extent_files,
    key,
    page,
)
from tierstore.nvme import direct_io
from tierstore.nvme.direct_io import BLOCK, aligned, is_aligned


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home", payload="extents")
    yield rig
    rig.close()


def submit(rig: Rig, numbers: Sequence[int], pages: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> int:
    transfer = rig.transfer([key(n) for n in numbers])
    rig.tier.submit_write(transfer, pages)
    return transfer.id


def test_pages_are_in_extent_files_and_not_in_lmdb(rig: Rig) -> None:
    assert rig.write(range(10)).ok
    assert rig.tier.stats()["payload"] == "extents"
    assert page(3).tobytes() not in data_file(rig.home).read_bytes()
    assert any(page(3).tobytes() in path.read_bytes() for path in extent_files(rig.home))


def test_a_batch_of_neighbours_is_one_call_and_aligned_pages_are_not_copied(
    rig: Rig, calls: Callable[..., None]
) -> None:
    written: list[tuple[int, list[int]]] = []

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        written.append((offset, [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers]))
        return os.pwritev(fd, buffers, offset)

    calls(pwritev=pwritev)
    memory = aligned(5 * PAGE).reshape(5, PAGE)
    for number in range(5):
        memory[number] = page(number)
    assert rig.ack(submit(rig, range(5), list(memory))).ok
    ((_, addresses),) = written
    assert addresses[1::2] == [row.ctypes.data for row in memory]
    assert rig.present(range(5)) == set(range(5))


@pytest.mark.parametrize("nbytes", [PAGE, PAGE + 100])
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("works", [True, False])
def test_pages_anywhere_in_memory_are_written_and_read_back(
    tmp_path: Path, nbytes: int, shift: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check pages at aligned and unaligned addresses, with O_DIRECT or, if not ``works``, through the page cache."""
    if not works:
        monkeypatch.setattr(direct_io, "works", lambda directory: False)
    rig = Rig(tmp_path / "home", page_nbytes=nbytes, payload="extents")
    pages = [aligned(nbytes + shift)[shift : shift + nbytes] for _ in range(4)]
    for number, each in enumerate(pages):
        each[:] = page(number, 0, nbytes)
    assert rig.ack(submit(rig, range(4), pages)).ok
    outs = [aligned(nbytes + shift)[shift : shift + nbytes] for _ in range(4)]
    transfer = rig.transfer([key(n) for n in range(4)])
    rig.tier.submit_read(transfer, outs)
    assert rig.ack(transfer.id).ok
    for number, out in enumerate(outs):
        np.testing.assert_array_equal(out, page(number, 0, nbytes))
    if not works:
        assert rig.tier.stats()["o_direct"] is False
    rig.close()


@pytest.mark.parametrize("writable", [True, False])
def test_a_buffer_is_aligned_by_its_address_and_length_whether_it_may_be_written_or_not(
    writable: bool,
) -> None:
    whole = aligned(3 * BLOCK)
    for start, end in [(0, 2), (1, 2), (0, 0)]:
        part = whole[start * BLOCK : end * BLOCK]
        part.flags.writeable = writable
        assert is_aligned(part)
    for start, end in [(512, 512 + BLOCK), (0, 512), (1, 1 + BLOCK)]:
        part = whole[start:end]
        part.flags.writeable = writable
        assert not is_aligned(part)
