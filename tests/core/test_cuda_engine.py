"""Tests of the DMA copy engine's decisions, on fake streams whose work runs when the test says so."""

from __future__ import annotations

import gc
from time import monotonic, sleep
from weakref import ref

import pytest

from tests.core.manual_link import (
    PATIENCE_S,
    SLOTS,
    SPEC,
    ManualEvent,
    Rig,
)
from tests.support.events import capturing
from tierstore.gpu.copy_queue import Job
from tierstore.gpu.cpu_copy_engine import CpuCopyEngine
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(ManualEvent, "failed", False)
    return Rig()


def test_ack_is_returned_only_after_the_last_byte_has_moved(rig: Rig) -> None:
    assert not rig.engine.polled
    rig.move(1, Tier.HBM, (0, 3), (5, 1))
    assert rig.engine.polled
    assert rig.engine.poll() == []
    assert rig.pool.view(0)[0] == 10
    rig.up.run()
    assert rig.engine.poll() == [Ack(1, True, 2, 2 * SPEC.page_nbytes, 0.002)]
    assert (rig.pool.view(0).min(), rig.pool.view(5).max()) == (23, 21)
    assert not rig.engine.polled


def test_the_two_directions_do_not_wait_for_each_other(rig: Rig) -> None:
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HOST, (1, 1))
    rig.move(3, Tier.HOST, (2, 2))
    rig.down.run()
    assert [ack.transfer_id for ack in rig.engine.poll()] == [2, 3]
    assert rig.arena.view(1).min() == 11
    rig.up.run()
    assert [ack.transfer_id for ack in rig.engine.poll()] == [1]


def test_reused_events_signal_the_later_copy(rig: Rig) -> None:
    for number in range(1, 4):
        rig.move(number, Tier.HBM, (0, number))
        assert rig.engine.poll() == []
        rig.up.run()
        assert [ack.transfer_id for ack in rig.engine.poll()] == [number]
        assert rig.pool.view(0).min() == 20 + number


def test_copies_of_slots_being_pinned_wait_in_order(rig: Rig) -> None:
    rig.arena.locked, rig.arena.more = 2, True
    rig.move(1, Tier.HBM, (0, 3))
    rig.move(2, Tier.HBM, (1, 1))
    assert rig.engine.polled
    rig.up.run()
    assert rig.engine.poll() == []
    rig.arena.locked, rig.arena.more = SLOTS, False
    done: list[int] = []
    deadline = monotonic() + PATIENCE_S
    while len(done) < 2:
        assert monotonic() < deadline
        done += [ack.transfer_id for ack in rig.engine.poll()]
        rig.up.run()
    assert done == [1, 2]
    assert rig.pool.view(0).min() == 23


def test_copies_start_once_their_slots_are_pinned_although_nobody_polls(rig: Rig) -> None:
    """An engine that is idle takes no steps, and polls only in a step."""
    rig.arena.locked, rig.arena.more = 0, True
    rig.move(1, Tier.HOST, (1, 0))
    assert not rig.down.work
    rig.arena.locked, rig.arena.more = SLOTS, False
    deadline = monotonic() + PATIENCE_S
    while not rig.down.work:
        assert monotonic() < deadline, "the copy was not started"
        sleep(0.001)
    while not (acks := rig.engine.poll()):
        rig.down.run()
    assert [(ack.transfer_id, ack.ok) for ack in acks] == [(1, True)]
    assert rig.arena.view(0).min() == 11
    assert rig.engine.close(PATIENCE_S)


def test_slots_that_stay_unpinned_are_copied_by_threads(rig: Rig) -> None:
    rig.arena.locked = 2
    rig.move(1, Tier.HBM, (0, 3))
    assert [ack.ok for ack in rig.wait()] == [True]
    assert rig.pool.view(0).min() == 23
    assert not rig.up.work
    rig.move(2, Tier.HOST, (1, 0), (2, 5))
    assert [ack.ok for ack in rig.wait()] == [True]
    assert (rig.arena.view(0).min(), rig.arena.view(5).min()) == (11, 12)
    assert rig.engine.close(PATIENCE_S)


def test_refused_copy_fails_only_after_its_last_write(rig: Rig) -> None:
    rig.route.refuse = True
    rig.move(1, Tier.HBM, (0, 3), (1, 4))
    rig.route.refuse = False
    assert rig.engine.poll() == [], "the copy of the first page is still queued"
    rig.up.run()
    failures = ((0, Failure.IO_ERROR), (1, Failure.IO_ERROR))
    assert rig.engine.poll() == [Ack(1, False, 0, 0, 0.0, failures)]
    rig.move(2, Tier.HBM, (2, 2))
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]


@pytest.mark.parametrize(("dst", "why"), [(Tier.HOST, Failure.UNFIT), (Tier.HBM, Failure.INTEGRITY)])
def test_only_malformed_pages_fail(rig: Rig, dst: Tier, why: Failure) -> None:
    rig.route.wrong = {1, 4}
    rig.move(1, dst, (0, 0), (1, 1), (2, 2), (4, 4))
    rig.move(2, dst, (3, 3))
    assert rig.engine.poll() == []
    (rig.down if dst == Tier.HOST else rig.up).run()
    first, second = rig.engine.poll()
    assert (first.ok, first.num_ready, first.failures) == (False, 2, ((1, why), (3, why)))
    assert first.nbytes == 2 * SPEC.page_nbytes
    assert (second.ok, second.num_ready, second.failures) == (True, 1, ())
    rig.route.wrong = set()
    rig.move(3, dst, (1, 1))
    (rig.down if dst == Tier.HOST else rig.up).run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]


def test_malformed_pages_are_reported_to_their_own_transfers(rig: Rig) -> None:
    rig.route.wrong = {0, 3, 5}
    lane = rig.engine._lanes[Tier.HOST]
    keys, parents = (PageKey(bytes(36)),) * 2, (None,) * 2
    pairs = [(0, 1), (2, 4), (3, 5)]
    jobs = [
        Job.of(Transfer(i, keys, Tier.HBM, pair, Tier.HOST, pair, 0, parents)) for i, pair in enumerate(pairs)
    ]
    for job in jobs:
        lane.add(job)
    flight = lane.take(1 << 30, 1 << 30)
    assert flight.jobs == jobs
    lane.launch(flight)
    lane.launched(flight)
    rig.down.run()
    assert lane.land() == jobs
    assert [job.refused for job in jobs] == [{0}, set(), {0, 1}]


def test_when_the_device_fails_every_copy_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HOST, (1, 1))
    monkeypatch.setattr(ManualEvent, "failed", True)
    acks = rig.engine.poll()
    assert {ack.transfer_id: ack.failures for ack in acks} == dict.fromkeys((1, 2), ((0, Failure.IO_ERROR),))
    assert rig.engine.close(PATIENCE_S)


def test_copy_that_cannot_be_queried_during_graph_capture_is_in_flight(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query(event: ManualEvent) -> bool:
        raise capturing()

    rig.move(1, Tier.HBM, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(ManualEvent, "query", query)
        assert rig.engine.poll() == []
    rig.up.run()
    (ack,) = rig.engine.poll()
    assert (ack.transfer_id, ack.ok) == (1, True)


def test_close_fails_unlaunched_copies_and_waits_for_launched_ones(rig: Rig) -> None:
    rig.arena.locked, rig.arena.more = 2, True
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HBM, (1, 5))
    assert not rig.engine.close(0.0), "the first copy has not finished"
    rig.move(3, Tier.HBM, (2, 1))
    rig.up.run()
    assert rig.engine.close(PATIENCE_S)
    found = {ack.transfer_id: ack.failures for ack in rig.engine.poll()}
    assert found == {1: (), 2: ((0, Failure.CLOSED),), 3: ((0, Failure.CLOSED),)}


def test_copies_in_flight_keep_the_memory_of_a_dropped_engine() -> None:
    """Drop an engine with copies in flight, as happens if a store's ``close`` timed out or was interrupted."""
    rig = Rig()
    rig.move(1, Tier.HBM, (0, 0))
    assert not rig.engine.close(0.0)
    assert isinstance(rig.engine._unpinned, CpuCopyEngine)
    assert rig.engine._unpinned.close(PATIENCE_S), "its threads would keep a reference to the memory"
    arena, engine, stream = ref(rig.arena), ref(rig.engine), rig.up
    del rig
    gc.collect()
    assert arena() is not None
    stream.run()
    left = engine()
    assert left is not None
    assert left.close(PATIENCE_S)
    del left
    gc.collect()
    assert arena() is None
