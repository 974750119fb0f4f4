"""Tests of damaged page headers of large values: opening detects them before LMDB frees the pages that they claim."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.campaign.regions import BLOCK, large_values
from tests.nvme.rig import LAYOUT, PATIENCE_S, Rig, data_file, key, page
from tierstore.nvme import catalogue_entry
from tierstore.nvme.lmdb_walker import walk

COUNT = 60


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the directory of a closed tier with COUNT pages in LMDB, whose file has a free list."""
    rig = Rig(tmp_path / "home", payload="lmdb")
    assert rig.write(range(COUNT + 20)).ok
    rig.erase(range(COUNT, COUNT + 20))
    assert rig.tier.sync(PATIENCE_S)
    rig.close()
    return rig.home


def headers(home: Path) -> dict[bytes, int]:
    """Return, by key, the offset in data.mdb of the LMDB page header before each stored page."""
    return {
        name: first * BLOCK for name, first in large_values(data_file(home).read_bytes(), "pages").items()
    }


HEADERS: dict[str, tuple[str, int, Callable[[int], int]]] = {
    "one page more, that is another's": ("<I", 12, lambda count: count + 1),
    "pages beyond the file": ("<I", 12, lambda count: count + (1 << 20)),
    "one page fewer": ("<I", 12, lambda count: count - 1),
    "no page": ("<I", 12, lambda count: 0),
    "another page": ("<Q", 0, lambda number: number + 1),
    "a page beyond any file": ("<Q", 0, lambda number: number | 1 << 62),
    "a copy of LMDB's own": ("<H", 10, lambda flags: flags | 0x10),
    "a leaf": ("<H", 10, lambda flags: 2),
}


@pytest.mark.parametrize("header", HEADERS)
def test_false_page_header_sets_the_directory_aside(
    home: Path, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    form, at, change = HEADERS[header]
    where = headers(home)[key(0)] + at
    raw = bytearray(data_file(home).read_bytes())
    struct.pack_into(form, raw, where, change(struct.unpack_from(form, raw, where)[0]))
    data_file(home).write_bytes(raw)
    assert isinstance(walk(str(data_file(home).parent), "lmdb"), str)
    with caplog.at_level(logging.WARNING):
        rig = Rig(home, payload="lmdb")
    assert len(list(home.glob("*.damaged-*"))) == 1
    assert len(caplog.records) == 1
    for version in range(4):
        assert rig.write(range(COUNT), version).ok
    assert rig.present(range(COUNT), 3) == set(range(COUNT))
    rig.close()


def test_overflow_pages_match_after_two_writes_in_a_transaction(tmp_path: Path) -> None:
    """Write a long value, then a shorter one. By default, LMDB would keep all LMDB pages of the longer value."""
    nbytes = 32 << 10
    rig = Rig(
        tmp_path / "home", payload="lmdb", capacity=16 << 20, page_nbytes=nbytes, codec="exp", layout=LAYOUT
    )
    transfer = rig.transfer([key(0), key(0)])
    rig.tier.submit_write(transfer, [page(0, 0, nbytes), np.zeros(nbytes, dtype=np.uint8)])
    ack = rig.ack(transfer.id)
    assert ack.ok
    assert ack.sizes[1] < ack.sizes[0]
    assert rig.tier.stats()["batches"] == 1
    rig.close()
    with data_file(rig.home).open("rb") as file:
        file.seek(headers(rig.home)[key(0)])
        _, _, _, pages = struct.unpack("<QHHI", file.read(16))
    assert pages * BLOCK + catalogue_entry.CATALOGUE_SHARE == ack.sizes[1]
