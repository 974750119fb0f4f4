"""A changed page header of a value costs nothing: it is put right before LMDB frees as many pages as it says."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.nvme.rig import LAYOUT, PATIENCE_S, Rig, data_file, key, page
from tierstore.nvme import catalogue_entry
from tierstore.nvme.lmdb_pages import InlineRecords, PageHeaders
from tierstore.nvme.lmdb_walker import walk

COUNT = 60
BLOCK = 4096


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A closed home with COUNT pages in LMDB and a free list."""
    rig = Rig(tmp_path / "home", payload="lmdb")
    assert rig.write(range(COUNT + 20)).ok
    rig.erase(range(COUNT, COUNT + 20))
    assert rig.tier.sync(PATIENCE_S)
    rig.close()
    return rig.home


def numbers(home: Path) -> dict[bytes, int]:
    """Where each value begins."""
    with lmdb.open(
        str(data_file(home).parent), readonly=True, lock=False, max_dbs=catalogue_entry.MAX_DBS
    ) as env:
        catalogue = env.open_db(catalogue_entry.CATALOGUE_DB, create=False)
        with env.begin() as txn:
            return {
                name: catalogue_entry.unpack(name, raw).page_number for name, raw in txn.cursor(db=catalogue)
            }


def hurt(home: Path, some: range, form: str, at: int, change: Callable[[int], int]) -> None:
    """Change a number in the headers of the values of these pages."""
    places = numbers(home)
    raw = bytearray(data_file(home).read_bytes())
    for number in some:
        where = places[key(number)] * BLOCK + at
        struct.pack_into(form, raw, where, change(struct.unpack_from(form, raw, where)[0]))
    data_file(home).write_bytes(raw)


HEADERS: dict[str, tuple[str, int, Callable[[int], int]]] = {
    "one page more": ("<I", 12, lambda count: count + 1),
    "pages beyond the file": ("<I", 12, lambda count: count + (1 << 20)),
    "one page fewer": ("<I", 12, lambda count: count - 1),
    "no page": ("<I", 12, lambda count: 0),
    "another page": ("<Q", 0, lambda number: number + 1),
    "a page beyond any file": ("<Q", 0, lambda number: number | 1 << 62),
    "a copy of LMDB's own": ("<H", 10, lambda flags: flags | 0x10),
    "a leaf": ("<H", 10, lambda flags: 2),
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("again", [False, True], ids=["erased", "replaced"])
def test_a_header_that_says(home: Path, header: str, again: bool) -> None:
    hurt(home, range(0, COUNT, 3), *HEADERS[header])
    rig = Rig(home, payload="lmdb")
    assert rig.present(range(COUNT)) == set(range(COUNT))
    gone = set(range(0, COUNT, 2))
    if again:
        assert rig.write(sorted(gone), 1).ok
    else:
        rig.erase(sorted(gone))
    for version in range(4):  # so that what was freed is written to
        assert rig.write(range(100, 140), version).ok
        assert rig.tier.sync(PATIENCE_S)
    assert rig.present(sorted(gone), 1) == (gone if again else set())
    assert rig.present(range(1, COUNT, 2)) == set(range(1, COUNT, 2))
    assert rig.present(range(100, 140), 3) == set(range(100, 140))
    rig.close()
    assert walk(str(data_file(home).parent), "lmdb") == 70 + (30 if again else 0)
    rig = Rig(home, payload="lmdb")
    assert not list(home.glob("*.damaged-*"))
    rig.erase(range(140))
    assert rig.tier.sync(PATIENCE_S)
    assert rig.present(range(140)) == set()
    rig.close()


def test_headers_are_counted_when_they_are_mended_and_left_alone_when_they_are_right(home: Path) -> None:
    hurt(home, range(1), "<I", 12, lambda count: count + 1)
    headers = PageHeaders(data_file(home).parent, BLOCK)
    places = numbers(home)
    for _ in range(2):
        headers.mend(places[key(0)], 4080 + 8192)
        headers.mend(places[key(1)], 4080 + 8192)
        assert headers.num_mended == 1
    headers.close()


def test_a_header_that_cannot_be_mended_is_not_handed_to_lmdb(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt(home, range(1), "<I", 12, lambda count: count + 1)
    rig = Rig(home, payload="lmdb")

    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        rig.erase([0])
        assert not rig.tier.sync(PATIENCE_S)
        assert rig.tier.stats()["read_only"]
        assert rig.present(range(COUNT)) == set(range(COUNT))
        rig.close()  # before it may be tried again
    rig = Rig(home, payload="lmdb")
    assert rig.present([0]) == {0}
    rig.erase([0])
    assert rig.tier.sync(PATIENCE_S)
    assert rig.present([0]) == set()
    rig.close()


def test_a_page_written_twice_in_a_transaction_has_the_pages_that_it_needs(tmp_path: Path) -> None:
    """LMDB writes a shorter value over a longer one of the same transaction in place, and keeps all its pages."""
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
    records = rig.tier._catalogue._records
    assert isinstance(records, InlineRecords)
    assert records._headers.num_mended == 0
    rig.close()
    with data_file(rig.home).open("rb") as file:
        file.seek(numbers(rig.home)[key(0)] * BLOCK)
        _, _, _, pages = struct.unpack("<QHHI", file.read(16))
    assert pages * BLOCK + catalogue_entry.CATALOGUE_SHARE == ack.sizes[1]
