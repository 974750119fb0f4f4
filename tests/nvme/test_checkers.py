"""Tests of reads in which separate threads check the pages: correct pages, misses and acks, and a clean close."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme.rig import CAPACITY, LAYOUT, PAGE, PATIENCE_S, Rig, change, find, page
from tests.nvme.test_encoded import NBYTES, ExpRig
from tierstore.nvme import reader
from tierstore.nvme.page_codecs import Coding, Decoders
from tierstore.nvme.reader import Checkers, RecordReader
from tierstore.nvme.record_storage import Fetched
from tierstore.types import Failure, PageKey

pytestmark = pytest.mark.usefixtures("payload")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_WORTH_CHECKING_APART", 0)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home")
    yield rig
    rig.close()


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return sets that collect the names of the threads that fetch pages and of those that check pages."""
    seen: dict[str, set[str]] = {"fetch": set(), "check": set()}
    fetch, check = RecordReader.fetch, RecordReader.check

    def fetching(
        self: RecordReader, key: PageKey, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> Fetched:
        seen["fetch"].add(threading.current_thread().name)
        return fetch(self, key, out, scratch)

    def checking(
        self: RecordReader,
        key: PageKey,
        fetched: Fetched,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        decoders: Decoders,
    ) -> None:
        seen["check"].add(threading.current_thread().name)
        check(self, key, fetched, out, scratch, decoders)

    monkeypatch.setattr(RecordReader, "fetch", fetching)
    monkeypatch.setattr(RecordReader, "check", checking)
    return seen


def test_other_threads_check_pages_and_every_page_is_right(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    assert rig.write(range(60)).ok
    for _ in range(5):
        assert rig.present(range(70)) == set(range(60))
    assert all(name.startswith("tierstore-nvme-read-") for name in seen["fetch"])
    assert any(name.startswith("tierstore-nvme-check-") for name in seen["check"])


def test_encoded_pages_are_decoded_from_their_own_scratch(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    numbers = [*range(80), *range(1000, 1020)]
    assert rig.write(numbers).ok
    for _ in range(4):
        rig.require(numbers)
    rig.close()


def test_a_damaged_page_is_a_miss_among_good_ones(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    assert rig.write(range(30)).ok
    rig.close()
    for number in range(0, 30, 3):
        path, start = find(tmp_path / "home", page(number).tobytes())
        change(path, start + PAGE // 2, bytes([page(number)[PAGE // 2] ^ 1]))
    rig = Rig(tmp_path / "home")
    ack, out = rig.read(range(30))
    assert ack.failures == tuple((n, Failure.INTEGRITY) for n in range(0, 30, 3))
    for number in set(range(30)) - set(range(0, 30, 3)):
        np.testing.assert_array_equal(out[number], page(number))
    rig.close()


def test_closing_finishes_checks_in_progress_and_reports_every_page(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home", capacity=CAPACITY)
    assert rig.write(range(60)).ok
    submitted = [rig.submit_read(range(60)) for _ in range(10)]
    assert rig.tier.close(PATIENCE_S)
    for transfer, out in submitted:
        ack = rig.ack(transfer)
        failed = dict(ack.failures)
        assert set(failed.values()) <= {Failure.CLOSED}
        assert ack.num_ready + len(failed) == 60
        for number in set(range(60)) - set(failed):
            np.testing.assert_array_equal(out[number], page(number))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("tierstore-nvme-check")]


def test_a_checker_accepts_pages_up_to_its_memory_and_exits_after_the_last() -> None:
    checkers = Checkers(2, NBYTES, Coding("exp", LAYOUT))
    begun, go_on, done = threading.Semaphore(0), threading.Event(), list[int]()

    def task(number: int) -> None:
        begun.release()
        assert go_on.wait(PATIENCE_S)
        done.append(number)

    mine = np.zeros(8, dtype=np.uint8)
    first = checkers.offer(lambda _: task(0), mine)
    second = checkers.offer(lambda _: task(1), mine)
    assert first is not None
    assert second is not None
    assert not np.shares_memory(first, second)
    assert checkers.offer(lambda _: task(2), mine) is None
    checkers.close()
    assert checkers.offer(lambda _: task(3), mine) is None
    go_on.set()
    for thread in checkers.threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert sorted(done) == [0, 1]
