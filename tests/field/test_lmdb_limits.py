"""Tests of LMDB's limits (docs/field-reports.md, kind K15).

They cover a map that is full while others read it, a reader table full of killed readers, a fork of the process, and
a path that is opened twice.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

import pytest

from tests.nvme.rig import Rig, data_file, writer_of
from tests.support.forked import CHECKOUT
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    read,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tests.support.sick_disk import disk_of
from tests.support.waiting import wait_for
from tierstore.config import StoreConfig
from tierstore.errors import ConfigError, StoreClosed
from tierstore.store import TierStore
from tierstore.types import Ack, Failure, Tier

LMDB = {"payload": "lmdb"}


@contextmanager
def looking_in(home: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``lmdb_reader`` on the store's environment, with ``what`` as its second argument. Kill it at the end."""
    command = [
        sys.executable,
        "-m",
        "tests.field.lmdb_reader",
        str(data_file(home, SPEC.fingerprint).parent),
        what,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def nvme(store: TierStore) -> dict[str, object]:
    found = store.stats()["nvme"]
    assert isinstance(found, dict)
    return found


def send_down(store: TierStore, names: list[str]) -> None:
    for name in names:
        write(store, chain(2, name))
        store.demote(chain(2, name), Tier.NVME)
    assert store.drain(PATIENCE_S)


def test_a_full_map_is_not_grown_while_others_read_it_in_this_process_or_another(tmp_path: Path) -> None:
    # F081: calling set_mapsize while a transaction reads the map would crash the process
    with TierStore.open(tiers(16, 16, tmp_path, nvme_pages=60, nvme_more=LMDB), SPEC) as store:
        send_down(store, ["kept"])
        size = nvme(store)["map_nbytes"]
        over, wrong = threading.Event(), list[str]()

        def reading(number: int) -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                try:
                    read(store, chain(2, f"{turn % 40}"))
                except AssertionError as error:
                    wrong.append(str(error))

        threads = [threading.Thread(target=reading, args=(number,)) for number in range(4)]
        with looking_in(tmp_path, "again") as other:
            assert heard(other) > 0
            for thread in threads:
                thread.start()
            for i in range(200):  # several times the capacity of the map
                write(store, chain(2, f"{i}"))
            store.flush()
            over.set()
            for thread in threads:
                thread.join(PATIENCE_S)
            assert other.stdin is not None
            other.stdin.close()
            assert other.wait(PATIENCE_S) == 0
        assert wrong == []
        assert nvme(store)["map_nbytes"] == size
        assert nvme(store)["read_integrity"] == 0
        require_nothing_held(store)


def test_two_hundred_readers_take_one_lmdb_slot_per_tier_thread(tmp_path: Path) -> None:
    # F082
    names = [f"{i}" for i in range(40)]
    with TierStore.open(tiers(64, 16, tmp_path, nvme_pages=200, nvme_more=LMDB), SPEC) as store:
        send_down(store, names)
        begin, served = threading.Barrier(200), list[int]()

        def reading(number: int) -> None:
            begin.wait(PATIENCE_S)
            deadline = monotonic() + PATIENCE_S
            while read(store, chain(2, names[number % 40])) < 2:
                assert monotonic() < deadline
            served.append(number)

        threads = [threading.Thread(target=reading, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(served) == list(range(200))
        assert counter(store, "failed_pages", "NVME,HOST,io_error") == 0
        require_nothing_held(store)


def test_killed_readers_lose_no_page_and_no_space_and_need_no_reopen(tmp_path: Path) -> None:
    # F082: twenty readers, and one that fills the reader table
    names = [f"{i}" for i in range(10)]
    config = tiers(8, 8, tmp_path, nvme_pages=60, nvme_more=LMDB)
    with TierStore.open(config, SPEC) as store:
        send_down(store, names)
        for what in ["2"] * 20:
            with looking_in(tmp_path, what) as other:
                assert heard(other) == 2
        with looking_in(tmp_path, "all") as other:
            assert heard(other) > 0
        for name in names:
            assert read(store, chain(2, name)) == 2
        for i in range(100):  # needs the space that killed readers could keep
            write(store, chain(2, f"new{i}"))
        store.flush()
        assert nvme(store)["state"] == "ok"
        assert nvme(store)["write_io_error"] == 0
        assert read(store, chain(2, "new99")) == 2
        require_nothing_held(store)
    with TierStore.open(config, SPEC) as store:
        assert read(store, chain(2, "new99")) == 2


def test_killed_reader_keeps_no_space_from_a_write_only_tier(tmp_path: Path) -> None:
    # F082: LMDB keeps what a reader may still see, and cannot tell a killed reader from a slow one
    rig = Rig(tmp_path, payload="lmdb", fingerprint=SPEC.fingerprint)
    numbers = range(rig.tier.budget_nbytes // rig.tier.record_nbytes)
    assert rig.write(numbers).ok
    with looking_in(tmp_path, "1") as other:
        assert heard(other) == 1
    for version in range(1, 4):
        rig.erase(numbers)
        assert rig.write(numbers, version).ok
    assert rig.present(numbers, 3) == set(numbers)
    rig.close()


def churn(rig: Rig, numbers: range, version: int) -> Ack:
    """Replace every page with a new version, which needs the space of the old one."""
    rig.erase(numbers)
    return rig.write(numbers, version)


@contextmanager
def full_under_a_reader(rig: Rig, numbers: range) -> Iterator[tuple[subprocess.Popen[str], Ack]]:
    """Let another program hold a read transaction, and replace pages until a write fails because the map is full.

    Yields:
        The other process, and the ack of the failed write.
    """
    with looking_in(rig.home, "1") as other:
        assert heard(other) == 1
        for version in range(1, 10):
            ack = churn(rig, numbers, version)
            if not ack.ok:
                yield other, ack
                return
    raise AssertionError("the map was never full")


def test_a_map_that_another_program_keeps_full_makes_the_tier_read_only_until_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, payload="lmdb", fingerprint=SPEC.fingerprint)
    writer_of(rig.tier).room_patience_s = 0.1
    numbers = range(rig.tier.budget_nbytes // rig.tier.record_nbytes)
    assert rig.write(numbers).ok
    with caplog.at_level(logging.WARNING), full_under_a_reader(rig, numbers) as (other, ack):
        assert {failure for _, failure in ack.failures} == {Failure.NO_SPACE}
        assert rig.tier.state == "read_only"
        for number in range(3):
            rig.write(range(1000 + number, 1001 + number))
            assert rig.tier.state == "read_only"
        (line,) = [record.getMessage() for record in caplog.records]
        assert "map is full" in line
        assert f"process {other.pid} " in line
    wait_for(lambda: rig.tier.state == "ok")
    assert churn(rig, numbers, 20).ok
    assert rig.present(numbers, 20) == set(numbers)
    rig.close()


def test_a_batch_that_finds_the_map_full_is_kept_until_the_other_program_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, payload="lmdb", fingerprint=SPEC.fingerprint)
    writer_of(rig.tier).room_patience_s = 0.1
    numbers = range(rig.tier.budget_nbytes // rig.tier.record_nbytes)
    assert rig.write(numbers).ok
    with full_under_a_reader(rig, numbers):
        pass
    wait_for(lambda: rig.tier.state == "ok")
    assert churn(rig, numbers, 20).ok
    with looking_in(tmp_path, "1") as other:
        assert heard(other) == 1
        writer_of(rig.tier).room_patience_s = PATIENCE_S
        writes = []
        for version in range(21, 25):  # more than fits into the map
            rig.erase(numbers)
            writes.append(rig.submit_write(numbers, version))
    assert all(rig.ack(write).ok for write in writes)
    assert rig.present(numbers, 24) == set(numbers)
    rig.close()


def test_pages_that_a_full_map_keeps_off_the_disk_stay_in_memory(tmp_path: Path) -> None:
    with TierStore.open(tiers(16, 64, tmp_path, nvme_pages=40, nvme_more=LMDB), SPEC) as store:
        writer_of(disk_of(store)).room_patience_s = 0.1
        send_down(store, [f"{i}" for i in range(16)])
        with looking_in(tmp_path, "1") as other:
            assert heard(other) == 1
            round_number = 0
            while nvme(store)["state"] == "ok":
                round_number += 1
                for i in range(16):
                    write(store, chain(2, f"{round_number} {i}"))
                store.flush()
            kept = [f"kept {i}" for i in range(8)]
            for name in kept:
                write(store, chain(2, name))
            store.flush()
            assert nvme(store)["state"] == "read_only"
            for name in kept:
                assert read(store, chain(2, name)) == 2
        wait_for(lambda: nvme(store)["state"] == "ok")
        store.flush()
        for name in kept:
            assert all(where(store, key).get(Tier.NVME) == "ready" for key in chain(2, name))
        require_nothing_held(store)


def test_with_a_full_reader_table_pages_are_misses_and_keep_their_records(
    tmp_path: Path,
) -> None:
    # F082: other programs cause this, but the store must not lose a page because of it
    with TierStore.open(tiers(8, 8, tmp_path, nvme_more=LMDB), SPEC) as store:
        send_down(store, ["below"])
        with looking_in(tmp_path, "all") as other:
            assert heard(other) > 0
            assert read(store, chain(2, "below")) == 0
            assert counter(store, "failed_pages", "NVME,HOST,unavailable") > 0
            assert store.match(chain(2, "below")).num_pages == 2
        assert read(store, chain(2, "below")) == 2
        require_nothing_held(store)


def child_of(store: TierStore, config: StoreConfig, home: Path, answer: Connection) -> None:
    """In a forked child, use the parent's store, open another on the same path, and send the errors to ``answer``."""
    said = []
    for call in (store.stats, lambda: store.acquire(chain(2)), lambda: TierStore.open(config, SPEC)):
        try:
            call()
            said.append("nothing was said")
        except (StoreClosed, ConfigError) as error:
            said.append(f"{type(error).__name__}: {error}")
    answer.send(said)
    answer.close()


def test_a_child_by_multiprocessing_is_refused_and_the_parent_continues(tmp_path: Path) -> None:
    # F084: MDB_BAD_RSLOT
    config = tiers(8, 8, tmp_path, nvme_more=LMDB)
    with TierStore.open(config, SPEC) as store:
        send_down(store, [""])
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=child_of, args=(store, config, tmp_path, there)
        )
        with warnings.catch_warnings():
            # newer Pythons warn about a fork with several threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        there.close()
        assert here.poll(PATIENCE_S)
        used, acquired, opened = here.recv()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert used.startswith("StoreClosed: the store belongs to process")
        assert acquired.startswith("StoreClosed: ")
        assert opened.startswith("ConfigError: nvme.path is")
        assert f"in use by process {os.getpid()}" in opened
        assert read(store, chain(2)) == 2
        send_down(store, ["more"])
        assert read(store, chain(2, "more")) == 2


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_second_store_on_one_path_is_refused_by_name_through_a_symlink_too(
    tmp_path: Path, payload: str
) -> None:
    # F084
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    inside = {"payload": payload}
    with TierStore.open(tiers(8, 8, tmp_path / "real", nvme_more=inside), SPEC) as store:
        send_down(store, [""])
        for path in (tmp_path / "real", tmp_path / "link", tmp_path / "link" / ".." / "real"):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                TierStore.open(tiers(8, 8, path, nvme_more=inside), SPEC)
        assert read(store, chain(2)) == 2
    with TierStore.open(tiers(8, 8, tmp_path / "link", nvme_more=inside), SPEC) as store:
        assert read(store, chain(2)) == 2
