"""Test that damage on disk costs a page or makes the tier start empty, without wrong bytes or a fatal signal."""

from __future__ import annotations

import logging
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.nvme import rig as rig_module
from tests.nvme.rig import CAPACITY, FINGERPRINT, PAGE, Rig, change, data_file, find, key, page
from tests.support import forked, lanes
from tierstore.nvme import catalogue_entry, examination, record_format
from tierstore.nvme.examination import walk_apart
from tierstore.nvme.lmdb_walker import read_meta, walk
from tierstore.types import Failure

COUNT = 60


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the directory of a closed tier with COUNT pages, in LMDB unless the test uses ``payload``."""
    rig = Rig(tmp_path / "home")
    assert rig.write(range(COUNT)).ok
    rig.close()
    return rig.home


both = pytest.mark.usefixtures("payload")


@contextmanager
def by_hand(home: Path) -> Iterator[tuple[lmdb.Transaction[bytes], lmdb._Database, lmdb._Database]]:
    """Yield a write transaction in the LMDB file of a closed tier, and the file's trees ``catalogue`` and ``pages``."""
    with lmdb.open(str(data_file(home).parent), map_size=CAPACITY, max_dbs=catalogue_entry.MAX_DBS) as env:
        catalogue, pages = env.open_db(catalogue_entry.CATALOGUE_DB), env.open_db(catalogue_entry.PAGES_DB)
        with env.begin(write=True) as txn:
            yield txn, catalogue, pages


@contextmanager
def in_use(rig: Rig) -> Iterator[tuple[lmdb.Transaction[bytes], lmdb._Database, lmdb._Database]]:
    """Yield a write transaction that an open tier does not know of, and the trees ``catalogue`` and ``pages``."""
    env = rig.tier._catalogue._env
    with env.begin(write=True) as txn:
        yield txn, env.catalogue, env.pages


@both
def test_flipped_bit_loses_one_page_and_is_counted(home: Path) -> None:
    path, where = find(home, page(7).tobytes())
    change(path, where + 5000, bytes([page(7)[5000] ^ 1]))
    rig = Rig(home)
    ack, out = rig.read(range(COUNT))
    assert ack.failures == ((7, Failure.INTEGRITY),)
    for number in set(range(COUNT)) - {7}:
        np.testing.assert_array_equal(out[number], page(number))
    assert rig.tier.stats()["read_integrity"] == 1
    rig.erase([7])
    assert rig.write([7]).ok
    assert rig.present([7]) == {7}
    rig.close()


@both
@pytest.mark.parametrize("offset", [0, 8, 40, 80, 140, 200, 4000, 4079])
def test_changed_record_head_loses_one_page(home: Path, offset: int) -> None:
    path, where = find(home, page(7).tobytes())
    where += offset - record_format.HEAD_NBYTES
    change(path, where, bytes([path.read_bytes()[where] ^ 0x10]))
    rig = Rig(home)
    assert rig.present(range(COUNT)) == set(range(COUNT)) - {7}
    rig.close()


@both
def test_changed_entry_sets_the_directory_aside_with_one_warning(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with by_hand(home) as (txn, catalogue, _):
        raw = txn.get(key(7), db=catalogue)
        assert raw is not None
        txn.put(key(7), raw[:50] + bytes([raw[50] ^ 1]) + raw[51:], db=catalogue)
    with caplog.at_level(logging.WARNING):
        rig = Rig(home)
    assert len(caplog.records) == 1
    assert "checksum" in caplog.text
    assert list(rig.tier.records()) == []
    assert rig.write([7]).ok
    others = rig.tier.stats()["others"]
    assert isinstance(others, list)
    assert [(other["name"], other["damaged"]) for other in others] == [(f"{FINGERPRINT}-0.damaged-1", True)]
    rig.close()
    Rig(home).close()


@both
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.5, 0.99])
def test_a_cut_file_is_set_aside_without_a_signal(home: Path, share: float) -> None:
    data = data_file(home)
    os.truncate(data, int(data.stat().st_size * share))
    rig = Rig(home)
    assert list(rig.tier.records()) == []
    assert rig.write(range(COUNT)).ok
    assert rig.present(range(COUNT)) == set(range(COUNT))
    rig.close()


@both
def test_a_file_of_noise_is_set_aside(home: Path) -> None:
    data_file(home).write_bytes(random.Random(3).randbytes(100_000))
    rig = Rig(home)
    assert list(rig.tier.records()) == []
    rig.close()


@both
@pytest.mark.usefixtures("own_start")
def test_two_damaged_directories_are_kept_apart(home: Path) -> None:
    for _ in range(2):
        os.truncate(data_file(home), 10_000)
        Rig(home).close()
    names = sorted(path.name for path in home.iterdir() if path.is_dir())
    assert names == [FINGERPRINT + "-0" + suffix for suffix in ("", ".damaged-1", ".damaged-2")]


@pytest.fixture
def own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the process that checks a directory in the way the product does: with ``subprocess``. Most tests fork."""
    monkeypatch.setattr(examination, "subprocess", subprocess)


SUICIDE = "import os, signal; print('walking', flush=True); os.kill(os.getpid(), signal.SIGBUS)"


@both
@pytest.mark.usefixtures("own_start")
def test_walk_that_ends_in_a_signal_kills_only_a_child(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(examination, "_PROGRAM", SUICIDE)
        rig = Rig(home)
    assert list(rig.tier.records()) == []
    [aside] = home.glob("*.damaged-1")
    rig.close()
    assert walk(str(aside), rig_module.default_payload) == COUNT


@both
@pytest.mark.usefixtures("own_start")
def test_a_truncated_tree_is_reported_without_a_signal(home: Path) -> None:
    data = data_file(home)
    os.truncate(data, 3 * 4096)
    fault = walk_apart(data.parent, timeout_s=60.0).fault
    assert fault is not None
    assert fault.startswith("data.mdb is truncated: its length is 12 KiB")


@both
def test_a_file_that_ends_before_free_pages_is_sound(home: Path) -> None:
    with by_hand(home) as (txn, _, pages):  # LMDB does not write what one transaction allocates and frees
        txn.put(bytes(36), bytes(50_000), db=pages)
        assert txn.delete(bytes(36), db=pages)
    data = data_file(home)
    with data.open("rb") as file:
        meta = read_meta(file.fileno())
    assert meta is not None
    assert data.stat().st_size < meta.end
    rig = Rig(home)
    assert rig.present(range(COUNT)) == set(range(COUNT))
    assert rig.write(range(COUNT, 2 * COUNT)).ok
    rig.close()
    rig = Rig(home)
    assert rig.present(range(2 * COUNT)) == set(range(2 * COUNT))
    rig.close()


@both
def test_tree_with_false_nodes_sets_the_directory_aside(home: Path) -> None:
    data = data_file(home)
    with by_hand(home) as (txn, catalogue, _):
        stored = txn.get(key(0), db=catalogue)
    assert stored is not None
    raw = bytearray(data.read_bytes())
    node = raw.find(key(0) + stored)
    while node >= 0:  # change stale copies of the leaf too; only one copy is in the tree
        struct.pack_into("<H", raw, node - 6, 0x0FFF)  # upper half of the length: 268 MB, past the file's end
        node = raw.find(key(0) + stored, node + 1)
    data.write_bytes(raw)
    rig = Rig(home)
    assert list(rig.tier.records()) == []
    rig.close()


@both
def test_records_deleted_externally_are_not_found(home: Path) -> None:
    rig = Rig(home)
    command = (
        "import lmdb, sys\n"
        "env = lmdb.open(sys.argv[1], map_size=int(sys.argv[2]), max_dbs=4)\n"
        "with env.begin(write=True) as txn:\n"
        "    for name in sys.argv[3:]:\n"
        "        assert txn.delete(bytes.fromhex(name), db=env.open_db(b'catalogue', txn))\n"
        "        txn.delete(bytes.fromhex(name), db=env.open_db(b'pages', txn))\n"
    )
    arguments = [str(data_file(home).parent), str(CAPACITY), key(3).hex(), key(5).hex()]
    subprocess.run([sys.executable, "-c", command, *arguments], check=True, timeout=240)
    ack, _ = rig.read([3, 4, 5])
    assert ack.failures == ((0, Failure.NOT_FOUND), (2, Failure.NOT_FOUND))
    rig.close()


def test_a_page_deleted_under_its_entry_never_gives_other_bytes(home: Path) -> None:
    rig = Rig(home)
    with in_use(rig) as (txn, _, pages):
        for number in range(0, COUNT, 2):
            txn.delete(key(number), db=pages)
    rig.write(range(COUNT, COUNT + 40))
    rig.write(range(COUNT + 40, COUNT + 80))
    there = rig.present(range(COUNT + 80))
    assert there >= set(range(1, COUNT, 2)) | set(range(COUNT, COUNT + 80))
    rig.close()


def test_an_entry_that_points_to_another_page_is_an_integrity_failure(home: Path) -> None:
    # F016
    rig = Rig(home)
    with in_use(rig) as (txn, catalogue, _):
        raw = txn.get(key(1), db=catalogue)
        assert raw is not None
        txn.put(key(0), catalogue_entry.pack(key(0), catalogue_entry.unpack(key(1), raw)), db=catalogue)
    ack, _ = rig.read([0, 1])
    assert ack.failures == ((0, Failure.INTEGRITY),)
    rig.close()


@pytest.mark.parametrize("page_number", [1, 3, 10**6, 2**51, 2**63])
def test_page_number_in_an_entry_is_ignored(home: Path, page_number: int) -> None:
    """Check that readers ignore ``page_number``. Versions before decision 026 read the record at this LMDB page."""
    rig = Rig(home)
    with in_use(rig) as (txn, catalogue, _):
        raw = txn.get(key(0), db=catalogue)
        assert raw is not None
        wrong = catalogue_entry.unpack(key(0), raw)._replace(page_number=page_number)
        txn.put(key(0), catalogue_entry.pack(key(0), wrong), db=catalogue)
    assert rig.present([0]) == {0}
    rig.close()


def test_missing_or_foreign_value_loses_its_page(home: Path) -> None:
    with by_hand(home) as (txn, _, pages):
        txn.delete(key(1), db=pages)
        txn.put(key(2), b"short", db=pages)
        value = txn.get(key(3), db=pages)
        assert value is not None
        txn.put(key(4), value, db=pages)
    rig = Rig(home)
    ack, _ = rig.read(range(5))
    assert ack.failures == ((1, Failure.NOT_FOUND), (2, Failure.INTEGRITY), (4, Failure.INTEGRITY))
    assert rig.present(range(5, COUNT)) == set(range(5, COUNT))
    rig.close()


def test_a_record_of_another_model_is_an_integrity_failure(home: Path) -> None:
    # F010, F016
    with by_hand(home) as (txn, catalogue, pages):
        record = np.empty(record_format.record_nbytes(PAGE), dtype=np.uint8)
        record_format.encode(
            page(0), record, fingerprint=record_format.fingerprint_digest("cd34"), key=key(0), parent=None
        )
        txn.put(key(0), record.tobytes(), db=pages)
        txn.put(
            key(0), catalogue_entry.pack(key(0), catalogue_entry.Entry(None, PAGE, PAGE, 0)), db=catalogue
        )
    rig = Rig(home)
    ack, _ = rig.read([0])
    assert ack.failures == ((0, Failure.INTEGRITY),)
    rig.close()


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("bomb-went-off",)


def test_a_planted_pickle_executes_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F105
    bomb = pickle.dumps(Bomb())
    with by_hand(home) as (txn, catalogue, pages):
        txn.put(key(0), bomb.ljust(record_format.record_nbytes(PAGE), b"."), db=pages)
        txn.put(
            key(0), catalogue_entry.pack(key(0), catalogue_entry.Entry(None, PAGE, PAGE, 0)), db=catalogue
        )
    (data_file(home).parent / "tierstore-shard.json").write_bytes(bomb)
    monkeypatch.chdir(tmp_path)
    Rig(home).close()
    assert not (tmp_path / "bomb-went-off").exists()
    pickle.loads(bomb)
    assert (tmp_path / "bomb-went-off").exists()  # unpickling it does create the directory


FLIPS = """
import random, sys
from pathlib import Path
from tests.nvme.rig import Rig, data_file, extent_files
home = Path(sys.argv[1])
chance = random.Random(int(sys.argv[2]))
clean = {path: path.read_bytes() for path in (data_file(home), *extent_files(home))}
for turn in range(int(sys.argv[3])):
    for path in extent_files(home):
        path.unlink()
    changed = chance.choice(list(clean))
    for path, old in clean.items():
        raw = bytearray(old)
        for _ in range(chance.choice((1, 4)) if path == changed else 0):
            where = chance.choice((chance.randrange(len(raw)), chance.randrange(min(len(raw), 20 * 4096))))
            raw[where] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)
    rig = Rig(home)
    rig.present(range(60))
    rig.erase(range(0, 60, 3))
    rig.write(range(100, 120))
    rig.present(range(120))
    rig.close()
"""


@both
def test_random_flips_anywhere_on_disk_give_no_wrong_byte_and_no_signal(home: Path) -> None:
    child = forked.run(FLIPS, home, "7", str(lanes.examples(4, 50)))
    assert child.returncode == 0, child.stderr[-3000:]
