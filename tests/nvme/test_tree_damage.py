"""Test the check of LMDB's file: it accepts every file that a tier leaves, and finds what would crash LMDB."""

from __future__ import annotations

import os
import random
import shutil
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.campaign.regions import BLOCK, large_values
from tests.nvme import rig as rig_room
from tests.nvme.rig import (
    FINGERPRINT,
    LAYOUT,
    PATIENCE_S,
    Rig,
    catalogue_of,
    data_file,
    key,
    page,
    wait_until_writable,
)
from tests.nvme.tree_damage import DAMAGES, Hurt, name_twice
from tests.nvme.watch import Calls
from tests.support import lanes
from tierstore.errors import ConfigError
from tierstore.nvme import catalogue, catalogue_entry, directory_opener, lmdb_walker, record_format
from tierstore.nvme.catalogue import Catalogue
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.lmdb_pages import InlineRecords
from tierstore.nvme.lmdb_walker import walk

both = pytest.mark.usefixtures("payload")

NBYTES = 32 << 10


def directory(home: Path) -> str:
    return str(data_file(home).parent)


def fault(home: Path) -> str | None:
    """Return what the check finds wrong in a closed tier's directory, or None. An error from LMDB fails the test."""
    marker = (data_file(home).parent / "tierstore-shard.json").read_text()
    try:
        found = walk(directory(home), "extents" if '"extents"' in marker else "lmdb")
    except lmdb.Error as error:
        pytest.fail(f"the check called LMDB, which failed: {error}")
    return found if isinstance(found, str) else None


@pytest.fixture(scope="module")
def homes() -> dict[str, Path]:
    """Return an empty dict, in which ``home`` keeps the directory that it creates for each payload."""
    return {}


@pytest.fixture
def home(tmp_path: Path, homes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a closed tier. Its trees have branch pages, its free list several transactions."""
    kind = rig_room.default_payload
    if kind not in homes:
        homes[kind] = with_history(tmp_path_factory.mktemp(kind) / "home")
    return shutil.copytree(homes[kind], tmp_path / "home")


def with_history(home: Path) -> Path:
    rig = Rig(home)
    for version in range(12):
        assert rig.write(range(version * 10, version * 10 + 40), version).ok
        rig.erase(range(version * 10, version * 10 + 40, 4))
    assert rig.tier.sync(PATIENCE_S)
    catalogue_of(rig.tier).turn()  # writes to the tree meta, so that no tree is empty
    rig.close()
    return home


@both
def test_home_with_a_history_passes_the_walk(home: Path) -> None:
    assert fault(home) is None


@both
def test_value_shortened_in_place_passes_the_walk(home: Path) -> None:
    with lmdb.open(directory(home), map_size=4 << 20, max_dbs=catalogue_entry.MAX_DBS) as env:
        meta = env.open_db(catalogue_entry.META_DB)
        with env.begin(write=True) as txn:
            txn.put(b"other", bytes(5 * BLOCK), db=meta)
            txn.put(b"other", bytes(2 * BLOCK), db=meta)
            taken = txn.stat(meta)["overflow_pages"]
        assert taken >= 6
    assert fault(home) is None


@both
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_would_crash_lmdb_is_found(home: Path, damage: str) -> None:
    hurt = Hurt(home)
    change, told = DAMAGES[damage]
    change(hurt)
    hurt.save()
    found = fault(home)
    assert found is not None
    assert told in found


@both
def test_damage_of_the_free_list_sets_the_directory_aside_and_ends_no_process(home: Path) -> None:
    hurt = Hurt(home)
    name_twice(hurt, hurt.page("catalogue") // BLOCK)
    hurt.save()
    rig = Rig(home)
    assert data_file(home).parent.with_name(f"{FINGERPRINT}-0.damaged-1").is_dir()
    assert rig.write(range(40)).ok
    assert rig.present(range(40)) == set(range(40))
    rig.close()


@pytest.mark.parametrize("region", ["catalogue", "pages"])
def test_every_meaningful_bit_of_a_leaf_is_checked(home: Path, region: str) -> None:
    chance = random.Random(6)
    hurt = Hurt(home)
    leaf = hurt.page(region)
    lower, upper = struct.unpack_from("<HH", hurt.raw, leaf + 12)
    places = [
        at for at in (*range(lower), *range(upper, BLOCK)) if at not in (8, 9)
    ]  # padding that nothing reads
    for at in chance.sample(places, lanes.examples(120, 400)):
        bit = 1 << chance.randrange(8)
        hurt.raw[leaf + at] ^= bit
        hurt.save()
        assert fault(home) is not None, (at, bit)
        hurt.raw[leaf + at] ^= bit


def test_a_free_list_that_names_a_page_of_a_value_is_found(home: Path) -> None:
    hurt = Hurt(home)
    [first] = struct.unpack_from("<Q", hurt.raw, hurt.node(hurt.page("pages")) + 8 + 36)
    name_twice(hurt, first + 1)
    hurt.save()
    assert "claimed twice" in str(fault(home))


@both
def test_damage_of_the_small_tree_sets_the_directory_aside(home: Path) -> None:
    hurt = Hurt(home)
    hurt.number("<H", hurt.page("meta") + 10, lambda n: 1)
    hurt.save()
    for count in (1, 1):
        rig = Rig(home)
        assert len(list(home.glob("*.damaged-*"))) == count
        rig.close()


def test_an_lmdb_error_after_the_walk_passed_sets_the_directory_aside(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [lmdb.BadTxnError("as a damaged tree has it")]

    def once_broken(*args: Any, **kwargs: Any) -> Catalogue:
        if errors:
            raise errors.pop()
        return Catalogue(*args, **kwargs)

    monkeypatch.setattr(directory_opener, "Catalogue", once_broken)
    Rig(home).close()
    assert len(list(home.glob("*.damaged-*"))) == 1


@both
def test_an_open_that_fails_leaves_no_descriptor(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> bool:
        raise lmdb.BadTxnError("as a damaged tree has it")

    monkeypatch.setattr(catalogue, "Tombstones", broken)
    with pytest.raises(ConfigError):
        Rig(home)
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.realpath(link).startswith(str(home.resolve()))]


@both
@pytest.mark.parametrize(
    "there", [(), (catalogue_entry.CATALOGUE_DB,), (catalogue_entry.CATALOGUE_DB, catalogue_entry.PAGES_DB)]
)
def test_trees_whose_creation_was_killed_are_created_again(tmp_path: Path, there: tuple[bytes, ...]) -> None:
    home = tmp_path / "home"
    Rig(home).close()
    data_file(home).unlink()
    with lmdb.open(directory(home), map_size=4 << 20, max_dbs=catalogue_entry.MAX_DBS) as env:
        for name in there:
            env.open_db(name)
    rig = Rig(home)
    assert rig.write([0]).ok
    rig.close()
    assert not list(home.glob("*.damaged-*"))


def test_a_new_directory_has_all_its_trees_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commits(env: Environment, *args: Any, **kwargs: Any) -> InlineRecords:
        inner = env.enter()
        made.append((inner.info()["last_txnid"], inner.stat()["entries"]))
        env.leave()
        return InlineRecords(env, *args, **kwargs)

    made: list[tuple[int, int]] = []
    monkeypatch.setattr(catalogue, "InlineRecords", commits)
    Rig(tmp_path / "home", payload="lmdb").close()
    assert made == [(1, 3)]


def test_a_walk_reads_one_block_of_each_value(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[int] = set()

    def pread(fd: int, count: int, offset: int) -> bytes:
        read.update(range(offset // BLOCK, -(-(offset + count) // BLOCK)))
        return os.pread(fd, count, offset)

    first = set(large_values(data_file(home).read_bytes(), "pages").values())
    monkeypatch.setattr(lmdb_walker, "os", Calls(pread=pread))
    assert fault(home) is None
    assert len(first) > 50
    assert first <= read
    assert read.isdisjoint({number + 1 for number in first})  # the second block, where the payload begins


def test_walker_and_record_format_agree_on_the_head_length() -> None:
    assert lmdb_walker._HEAD_NBYTES == record_format.HEAD_NBYTES


def content(number: int, version: int, form: str) -> NDArray[np.uint8]:
    """Return a page of noise. If ``form`` is exp, two pages in three are instead pages that the codec can encode."""
    if form == "none" or (number + version) % 3 == 0:
        return page(number, version, NBYTES)
    drawn = np.random.default_rng([number, version]).standard_normal(NBYTES // 2, dtype=np.float32)
    return (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


@both
@pytest.mark.parametrize("form", ["none", pytest.param("exp", marks=pytest.mark.deep)])
def test_every_directory_that_a_tier_leaves_passes_the_walk(tmp_path: Path, form: str) -> None:
    """Cover full maps, pages written twice per transaction, old readers, erases of every page, and reopens."""
    chance = random.Random(8)
    layout = LAYOUT if form == "exp" else None
    rig = Rig(tmp_path / "home", capacity=6 << 20, page_nbytes=NBYTES, codec=form, layout=layout)
    walks, refused, steps = 0, 0, lanes.examples(50, 150)
    with ExitStack() as reader:
        for step in range(steps):
            some = [chance.randrange(200) for _ in range(chance.choice((1, 3, 20, 200)))]
            for version in range(chance.choice((0, 1, 2, 2))):
                transfer = rig.transfer([key(n) for n in some])
                rig.tier.submit_write(transfer, [content(n, version, form) for n in some])
                refused += len(rig.ack(transfer.id).failures)
            if step % 4 == 3:
                rig.erase(range(200) if step % 16 == 15 else some)
            if step % 10 == 5:
                reader.enter_context(rig.tier._catalogue._env.begin())
            elif step % 10 == 8:
                reader.close()
                wait_until_writable(rig)
            if step % 50 == 39:
                rig.close()
                rig = Rig(tmp_path / "home", capacity=6 << 20, page_nbytes=NBYTES, codec=form, layout=layout)
            rig.tier.sync(PATIENCE_S)
            if not rig.tier.stats()["read_only"]:  # a read-only tier may try to write at any moment
                assert fault(rig.home) is None
                walks += 1
    rig.close()
    assert walks >= steps * 2 // 3
    assert refused
    assert not list(rig.home.glob("*.damaged-*"))
