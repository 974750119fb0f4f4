"""Tests of page-locking the host arena: in chunks of whole pages, from the first slot on, and after a refusal."""

from __future__ import annotations

import gc
import logging
from threading import Event, Lock
from time import sleep

import numpy as np
import pytest

from tests.support.interrupts import interrupted_in
from tierstore.host import pinned_memory
from tierstore.host.arena import HostArena
from tierstore.host.pinned_memory import Pinning
from tierstore.page import PageLayout, PageSpec
from tierstore.threads import Worker

PATIENCE_S = 60.0
STRIDE = 8192
SPEC = PageSpec(num_layers=1, page_size=3, num_kv_heads=1, head_dim=1000, dtype="uint8", model="pinning")


class RecordingPinner:
    """A pinner that records which ranges are locked.

    Args:
        refuse_after: Number of calls that succeed, or None for all.
        gate: Event that all calls except the first wait for.
    """

    def __init__(self, refuse_after: int | None = None, gate: Event | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self._refuse_after = refuse_after
        self._gate = gate
        self._lock = Lock()

    def pin(self, address: int, nbytes: int) -> None:
        with self._lock:
            self.calls += 1
            number = self.calls
        if self._gate is not None and number > 1:
            assert self._gate.wait(PATIENCE_S)
        if self._refuse_after is not None and number > self._refuse_after:
            raise OSError("no more")
        with self._lock:
            self.locked[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.locked[address]


def memory(slots: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    raw = np.zeros(slots * STRIDE + 4096, dtype=np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + slots * STRIDE]


@pytest.mark.parametrize(
    ("slots", "chunk"), [(1, 1), (7, 3 * STRIDE), (7, 3 * STRIDE + 1), (64, STRIDE), (5, 1 << 30)]
)
def test_chunks_cover_every_slot_once_and_no_page_lies_in_two(slots: int, chunk: int) -> None:
    pinner, here = RecordingPinner(), memory(slots)
    pinning = Pinning(here, STRIDE, slots, pinner, chunk_nbytes=chunk)
    assert pinning.wait(slots, PATIENCE_S)
    assert not pinning.going_on
    ranges = sorted((address - here.ctypes.data, nbytes) for address, nbytes in pinner.locked.items())
    end = 0
    for start, nbytes in ranges:
        assert start == end
        assert start % STRIDE == 0
        assert nbytes % STRIDE == 0
        end = start + nbytes
    assert end == slots * STRIDE
    assert max(nbytes for _, nbytes in ranges) <= max(chunk, STRIDE)
    pinning.close()
    assert pinner.locked == {}


def test_bytes_already_there_survive_page_locking() -> None:
    here = memory(16)
    want = np.random.default_rng(0).integers(0, 256, len(here), np.uint8)
    here[:] = want
    pinning = Pinning(here, STRIDE, 16, RecordingPinner(), chunk_nbytes=STRIDE)
    assert pinning.wait(16, PATIENCE_S)
    np.testing.assert_array_equal(here, want)
    pinning.close()


def test_the_first_slots_can_be_used_while_the_rest_is_locked() -> None:
    gate = Event()
    pinner = RecordingPinner(gate=gate)
    pinning = Pinning(memory(4), STRIDE, 4, pinner, chunk_nbytes=STRIDE)
    while pinner.calls == 0:
        pinning.wait(1, 0.01)
    assert pinning.going_on
    assert pinning.pinned_slots <= 1
    gate.set()
    assert pinning.wait(4, PATIENCE_S)
    pinning.close()


def test_after_a_refusal_locked_chunks_stay_locked_and_one_warning_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinner = RecordingPinner(refuse_after=2)
    with caplog.at_level(logging.WARNING):
        pinning = Pinning(memory(32), STRIDE, 32, pinner, chunk_nbytes=STRIDE)
        assert not pinning.wait(32, PATIENCE_S)
    assert not pinning.going_on
    assert pinning.refused == "no more"
    pinning.close()
    assert pinner.locked == {}
    assert [record.getMessage().rsplit(": ", 1)[1] for record in caplog.records] == ["no more"]


def test_pinning_ends_with_the_reason_when_a_pinner_fails_unexpectedly() -> None:
    class Broken(RecordingPinner):
        def pin(self, address: int, nbytes: int) -> None:
            super().pin(address, nbytes)
            if self.calls > 2:
                self.unpin(address)
                raise RuntimeError("no CUDA device")

    pinning = Pinning(memory(32), STRIDE, 32, Broken(), chunk_nbytes=STRIDE)
    assert not pinning.wait(32, PATIENCE_S)
    assert not pinning.going_on
    assert pinning.refused == "RuntimeError: no CUDA device"
    pinning.close()


def test_arena_reports_how_much_memory_is_not_pinned() -> None:
    layout = PageLayout.of(SPEC)
    arena = HostArena(layout, 9, RecordingPinner(refuse_after=0))
    assert not arena.wait_pinned(9, PATIENCE_S)
    found = arena.stats()
    assert (found["pin_nbytes"], found["pinned_nbytes"]) == (arena.nbytes, 0)
    assert (found["unpinned_nbytes"], found["refused"]) == (arena.nbytes, "no more")
    arena.close()
    assert arena.unpinned_nbytes() == 0, "a closed arena has no memory left to pin"


def test_pinned_slots_are_locked_at_every_moment() -> None:
    here = memory(40)

    class Checking(RecordingPinner):
        def pin(self, address: int, nbytes: int) -> None:
            super().pin(address, nbytes)
            reached.append(pinning_holder[0].pinned_slots if pinning_holder else 0)

    reached: list[int] = []
    pinning_holder: list[Pinning] = []
    pinner = Checking()
    pinning_holder.append(Pinning(here, STRIDE, 40, pinner, chunk_nbytes=2 * STRIDE))
    assert pinning_holder[0].wait(40, PATIENCE_S)
    assert max(reached) < 40, "the last chunk cannot have been counted before it was locked"
    pinning_holder[0].close()


def test_an_arena_unlocks_its_memory_when_it_is_closed_and_when_it_is_dropped() -> None:
    layout = PageLayout.of(SPEC)
    pinner = RecordingPinner()
    arena = HostArena(layout, 9, pinner)
    assert arena.wait_pinned(9, PATIENCE_S)
    nbytes = 9 * layout.slot_nbytes
    pinned = {
        "pin_nbytes": nbytes,
        "pinned_nbytes": nbytes,
        "unpinned_nbytes": 0,
        "pinning": False,
        "refused": None,
    }
    assert arena.stats() == {**pinned, "codec": "none", "slot_nbytes": layout.slot_nbytes}
    arena.view(8).fill(7)
    arena.close()
    arena.close()
    assert pinner.locked == {}
    assert arena.pinned_slots == 0
    assert arena.view(8).min() == 7
    dropped = HostArena(layout, 9, pinner)
    assert dropped.wait_pinned(9, PATIENCE_S)
    view = dropped.view(3)
    view.fill(3)
    del dropped
    gc.collect()
    assert pinner.locked == {}
    assert view.min() == 3


def test_an_arena_without_a_pinner_is_ordinary_memory() -> None:
    layout = PageLayout.of(SPEC)
    arena = HostArena(layout, 4)
    pinned = {"pin_nbytes": 0, "pinned_nbytes": 0, "unpinned_nbytes": 0, "pinning": False, "refused": None}
    assert arena.stats() == {**pinned, "codec": "none", "slot_nbytes": layout.slot_nbytes}
    assert not arena.wait_pinned(1, 0.0)
    arena.close()


def test_addresses_are_those_of_the_slots() -> None:
    arena = HostArena(PageLayout.of(SPEC), 5)
    slots = np.array([4, 0, 2])
    assert arena.addresses(slots).tolist() == [arena.view(int(s)).ctypes.data for s in slots]


def test_interrupted_wait_does_not_unpin_memory_while_a_thread_is_pinning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Event()
    pinner = RecordingPinner(gate=gate)
    pinning = Pinning(memory(2), STRIDE, 2, pinner, chunk_nbytes=STRIDE)
    # until one thread has pinned its chunk and the other waits for the gate
    while pinner.calls < 2 or not pinner.locked:
        sleep(0.001)
    locked = dict(pinner.locked)
    with interrupted_in(Worker.join):
        pinning.close()
    with monkeypatch.context() as patch:
        patch.setattr(pinned_memory, "_JOIN_S", 0.0)
        pinning.close()
    assert pinner.locked == locked
    gate.set()
    pinning.close()
    assert pinner.locked == {}
