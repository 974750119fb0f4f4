"""Test ``Chunks``, the tier below an engine's host memory, on the real NVMe tier."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme.rig import CAPACITY, FINGERPRINT, PAGE, PATIENCE_S, blank, change, find, key, on_disk, page
from tierstore.adapters.chunks import Chunks, Done
from tierstore.errors import ConfigError, TierStoreError
from tierstore.nvme.tier import NvmeTier

ROWS = 64


@dataclass
class Engine:
    """An engine with host memory for ``ROWS`` chunks. It runs one job at a time."""

    chunks: Chunks
    memory: NDArray[np.uint8]
    jobs: int = 0

    def store(self, numbers: range) -> Done:
        rows = range(len(numbers))
        for row, number in zip(rows, numbers, strict=True):
            self.memory[row] = page(number)
        self.jobs += 1
        self.chunks.store(self.jobs, [key(number) for number in numbers], rows)
        return self.end()

    def load(self, numbers: range) -> Done:
        self.jobs += 1
        self.memory[:] = blank()
        self.chunks.load(self.jobs, [key(number) for number in numbers], range(len(numbers)))
        return self.end()

    def end(self) -> Done:
        self.chunks.drain()
        (done,) = self.chunks.finished()
        assert done.job == self.jobs
        return done

    def held(self, numbers: range) -> list[int]:
        return [number for number in numbers if self.chunks.holds(key(number))]


@contextmanager
def engine(home: Path, *, payload: str = "lmdb") -> Iterator[Engine]:
    woken = Event()
    tier = NvmeTier.open(
        home,
        capacity=CAPACITY,
        fingerprint=FINGERPRINT,
        shard=0,
        page_nbytes=PAGE,
        wake=woken.set,
        payload=payload,
        timeout_s=PATIENCE_S,
    )
    memory = np.zeros((ROWS, PAGE), dtype=np.uint8)
    chunks = Chunks(tier, memory, woken)
    try:
        yield Engine(chunks, memory)
    finally:
        chunks.close(PATIENCE_S)


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_chunks_are_restored_byte_for_byte_also_after_a_restart(tmp_path: Path, payload: str) -> None:
    numbers = range(20)
    for life in range(2):
        with engine(tmp_path, payload=payload) as at:
            if life == 0:
                assert at.store(numbers).complete
            assert at.held(range(30)) == list(numbers)
            done = at.load(numbers)
            assert done.complete
            assert done.nbytes == 20 * PAGE
            for row, number in enumerate(numbers):
                np.testing.assert_array_equal(at.memory[row], page(number))


def test_disk_usage_is_bounded_and_evicts_least_recently_used_chunks(tmp_path: Path) -> None:
    with engine(tmp_path) as at:
        at.store(range(20))
        for start in range(20, 1000, 50):
            at.chunks.used([key(number) for number in range(20)])
            assert at.store(range(start, start + 50)).complete
            assert at.held(range(20)) == list(range(20))
            assert on_disk(tmp_path) <= CAPACITY
        assert at.chunks.stats()["evicted"] != 0
        for start in range(1000, 2000, 50):
            at.store(range(start, start + 50))
        assert at.held(range(20)) == []


def test_later_chunks_of_one_use_are_evicted_first(tmp_path: Path) -> None:
    with engine(tmp_path) as at:
        numbers, more = range(40), 100
        at.store(numbers)
        while len(held := at.held(numbers)) == len(numbers):
            at.store(range(more, more + 10))
            more += 10
        assert len(held) > 0
        assert held == list(range(len(held)))


def test_stored_chunks_are_not_written_again(tmp_path: Path) -> None:
    with engine(tmp_path) as at:
        at.store(range(10))
        written = at.chunks.stats()["bytes_written"]
        assert at.store(range(10)).arrived == tuple(key(number) for number in range(10))
        assert at.chunks.stats()["bytes_written"] == written


def test_only_the_damaged_chunk_is_lost_and_it_can_be_stored_again(tmp_path: Path) -> None:
    with engine(tmp_path) as at:
        at.store(range(5))
        path, position = find(tmp_path, page(2).tobytes())
        change(path, position + 100, bytes([page(2)[100] ^ 1]))
        done = at.load(range(5))
        assert not done.complete
        assert done.arrived == tuple(key(number) for number in (0, 1, 3, 4))
        assert at.held(range(5)) == [0, 1, 3, 4]
        assert at.store(range(5)).complete
        assert at.load(range(5)).complete


def test_keys_of_other_lengths_are_kept_apart(tmp_path: Path) -> None:
    with engine(tmp_path) as at:
        at.memory[:2] = [page(0), page(1)]
        at.chunks.store(1, [b"short", b"x" * 100], [0, 1])
        at.chunks.drain()
        assert [done.complete for done in at.chunks.finished()] == [True]
        at.chunks.load(2, [b"x" * 100, b"short"], [2, 3])
        at.chunks.drain()
        assert [done.complete for done in at.chunks.finished()] == [True]
        np.testing.assert_array_equal(at.memory[2], page(1))
        np.testing.assert_array_equal(at.memory[3], page(0))
        assert not at.chunks.holds(b"other")


def test_second_engine_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    with engine(tmp_path) as at:
        at.store(range(3))
        with pytest.raises(ConfigError, match="in use"), engine(tmp_path):
            pass
        assert at.load(range(3)).complete


def test_engine_memory_is_released_at_close(tmp_path: Path) -> None:
    memory = bytearray(ROWS * PAGE)
    view = memoryview(memory)
    woken = Event()
    tier = NvmeTier.open(
        tmp_path,
        capacity=CAPACITY,
        fingerprint=FINGERPRINT,
        shard=0,
        page_nbytes=PAGE,
        wake=woken.set,
    )
    chunks = Chunks(tier, np.frombuffer(view, dtype=np.uint8).reshape(ROWS, PAGE), woken)
    chunks.store(1, [key(number) for number in range(10)], range(10))
    chunks.close(PATIENCE_S)
    assert [done.complete for done in chunks.finished()] == [True]
    view.release()
    memory.clear()


class _Hanging:
    """A tier whose disk does not answer."""

    state = "ok"

    def records(self) -> Iterator[tuple[bytes, None, int]]:
        return iter([(bytes(key(0)), None, 1)])

    def close(self, timeout_s: float) -> bool:
        return False


def test_close_raises_if_the_disk_may_still_use_the_memory() -> None:
    chunks = Chunks(_Hanging(), np.zeros((1, PAGE), dtype=np.uint8), Event())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout_s must be a number of seconds, .*got nan"):
        chunks.close(float("nan"))
    with pytest.raises(TierStoreError, match="still in use"):
        chunks.close(1.0)


def test_hung_disk_is_retried_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tier = _Hanging()
    chunks = Chunks(tier, np.zeros((1, PAGE), dtype=np.uint8), Event())  # type: ignore[arg-type]
    tier.state = "absent"
    assert [chunks.holds(key(0)) for _ in range(3)] == [True, False, False]
    now = 100.4
    assert not chunks.holds(key(0))
    now = 100.6
    assert [chunks.holds(key(0)) for _ in range(2)] == [True, False]
    tier.state = "ok"
    assert chunks.holds(key(0))
