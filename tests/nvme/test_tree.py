"""Test the prefetch of LMDB's file: it finds every page of a tree, and raises nothing if the file is damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from tests.nvme.rig import CAPACITY, Rig, data_file, key
from tierstore.nvme import catalogue_entry
from tierstore.nvme.lmdb_walker import prefetch, read_meta

NAMES = (catalogue_entry.CATALOGUE_DB, catalogue_entry.PAGES_DB)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the directory of a closed tier. The trees in its LMDB file have three levels."""
    home = tmp_path / "home"
    Rig(home, capacity=16 * CAPACITY).close()
    with lmdb.open(
        str(data_file(home).parent), map_size=16 * CAPACITY, max_dbs=catalogue_entry.MAX_DBS, sync=False
    ) as env:
        trees = [env.open_db(name) for name in NAMES]
        for first in range(0, 4000, 500):
            with env.begin(write=True) as txn:
                for number in range(first, first + 500):
                    for tree in trees:
                        txn.put(key(number), b"x" * catalogue_entry.ENTRY_NBYTES, db=tree)
    return home


@pytest.fixture
def fd(home: Path) -> Iterator[int]:
    fd = os.open(data_file(home), os.O_RDONLY)
    yield fd
    os.close(fd)


def test_prefetch_reads_every_page_of_the_named_trees(home: Path, fd: int) -> None:
    with lmdb.open(
        str(data_file(home).parent), readonly=True, lock=False, max_dbs=catalogue_entry.MAX_DBS
    ) as env:
        stats = []
        for name in NAMES:
            tree = env.open_db(name, create=False)
            with env.begin() as txn:
                stats.append(txn.stat(tree))
    assert all(stat["depth"] >= 3 for stat in stats)
    pages = [stat["branch_pages"] + stat["leaf_pages"] for stat in stats]
    assert prefetch(fd, NAMES) == sum(pages)
    assert prefetch(fd, NAMES[:1]) == pages[0]
    assert prefetch(fd, [b"no such tree"]) == 0


def test_newest_meta_page_gives_the_file_length(home: Path, fd: int) -> None:
    with lmdb.open(
        str(data_file(home).parent), readonly=True, lock=False, max_dbs=catalogue_entry.MAX_DBS
    ) as env:
        info = env.info()
    meta = read_meta(fd)
    assert meta is not None
    assert (meta.end, meta.transaction) == ((info["last_pgno"] + 1) * meta.block, info["last_txnid"])


@pytest.mark.parametrize("length", [0, 1, 200, 4096, 4200, 8192, 20_000])
def test_a_cut_file_raises_nothing(home: Path, length: int) -> None:
    os.truncate(data_file(home), length)
    fd = os.open(data_file(home), os.O_RDONLY)
    assert (read_meta(fd) is None) == (length < 8192)
    prefetch(fd, NAMES)
    os.close(fd)


def test_random_changes_raise_nothing(home: Path) -> None:
    chance = random.Random(4)
    clean = data_file(home).read_bytes()
    scratch = home / "scratch"
    for _ in range(150):
        raw = bytearray(clean)
        for _ in range(30):
            position = chance.choice((chance.randrange(8192), chance.randrange(len(raw))))
            raw[position] = chance.choice((0, 0xFF, chance.randrange(256)))
        scratch.write_bytes(raw)
        fd = os.open(scratch, os.O_RDONLY)
        prefetch(fd, NAMES)
        os.close(fd)
