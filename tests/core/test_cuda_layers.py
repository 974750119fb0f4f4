"""Tests of loads by layer group in the DMA copy engine: when each group is launched, and on which thread."""

from __future__ import annotations

from math import inf
from threading import Semaphore
from time import monotonic

import pytest

from tests.core.manual_link import (
    PATIENCE_S,
    SPEC,
    Rig,
)
from tierstore.gpu import copy_queue, cuda_copy_engine
from tierstore.gpu.copy_queue import Pace
from tierstore.gpu.layer_groups import Cut
from tierstore.types import Ack, Failure, Tier

PAGE = SPEC.page_nbytes
CUT = Pace(whole=0, at_once=9)
"""A pace at which every load is divided into layer groups."""

THREAD = Pace(whole=0, pieces=0)
"""A pace at which the lane's thread makes every launch, because each exceeds the limit ``pieces``."""


def layer(rig: Rig, slot: int, index: int) -> int:
    """Return the byte that fills this layer of an HBM slot."""
    found = rig.pool.view(slot).reshape(SPEC.num_layers, -1)[index]
    assert found.min() == found.max()
    return int(found[0])


@pytest.mark.parametrize("pace", [CUT, THREAD])
def test_a_layer_can_be_read_while_later_ones_are_in_flight(pace: Pace) -> None:
    rig = Rig(layers=4, pace=pace)
    rig.move(1, Tier.HBM, (0, 3), (5, 1))
    rig.wait_launched(4)
    assert [group for group, _ in rig.route.groups] == [0, 1, 2, 3]
    first, last = rig.engine.arriving((0, 5), 0), rig.engine.arriving((0, 5), 3)
    assert first.submitted
    assert last.submitted
    assert first.event is not None
    assert last.event is not None
    assert not first.event.query()
    while not first.event.query():
        rig.up.work.popleft()()
    assert [layer(rig, slot, 0) for slot in (0, 5)] == [23, 21]
    assert [layer(rig, slot, 3) for slot in (0, 5)] == [10, 15], "the last layer has not been copied yet"
    assert not last.event.query()
    assert rig.engine.poll() == [], "a transfer is acknowledged only as a whole"
    assert rig.engine.arriving((0, 5), 0).event is None
    rig.up.run()
    assert last.event.query()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert [layer(rig, slot, 3) for slot in (0, 5)] == [23, 21]
    assert not rig.engine.arriving((0, 5), 0).submitted, "the engine has forgotten the acknowledged slots"
    assert rig.engine.close(PATIENCE_S)


def test_first_group_of_later_pages_precedes_next_group_of_earlier_pages() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, ahead=1, behind=0))
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HBM, (1, 1))
    assert rig.route.groups == [(0, 1)], "the link already has as much work as ``ahead`` allows"
    assert not rig.engine.arriving((0, 1), 0).submitted
    rig.up.run()
    assert rig.engine.poll() == []
    assert rig.engine.arriving((0, 1), 0).submitted, (
        "the first group of both transfers comes before the second group of either"
    )
    assert not rig.engine.arriving((0,), 1).submitted
    acks: list[Ack] = []
    for _ in range(4):
        rig.up.run()
        acks += rig.engine.poll()
    assert rig.route.groups == [(0, 1), (0, 1), (1, 2), (2, 2), (3, 2)]
    assert [ack.transfer_id for ack in acks] == [1, 2]
    assert [layer(rig, slot, 3) for slot in (0, 1)] == [20, 21]
    assert rig.engine.close(PATIENCE_S)


def test_unequal_groups_are_launched_together_up_to_the_same_number_of_bytes() -> None:
    rig = Rig(layers=Cut((3, 1), 1), pace=Pace(whole=0, at_once=9, together=PAGE, behind=0))
    for number in range(5):
        rig.move(number, Tier.HBM, (number, number))
        assert rig.engine._lanes[Tier.HBM].nbytes == (number + 1) * PAGE * 3 // 4
    assert rig.engine.poll() == []
    assert rig.route.groups == [(0, 1)] * 5 + [(1, 4), (1, 1)]
    assert rig.engine._lanes[Tier.HBM].nbytes == 5 * PAGE
    rig.up.run()
    assert len(rig.engine.poll()) == 5
    assert [layer(rig, slot, 3) for slot in range(5)] == [20, 21, 22, 23, 24]
    assert rig.engine.close(PATIENCE_S)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every transfer count as recently added, however long ago it was added."""
    monkeypatch.setattr(copy_queue, "_JUST_NOW_S", inf)


def test_more_is_launched_ahead_when_no_page_arrived_recently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "_JUST_NOW_S", 0.0)
    rig = Rig(layers=4, pace=Pace(whole=0, at_once=9, ahead=2 * PAGE, behind=0))
    rig.move(1, Tier.HBM, (0, 0))
    assert rig.engine.poll() == []
    assert [group for group, _ in rig.route.groups] == [0, 1, 2, 3]
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_less_is_launched_ahead_while_new_pages_would_go_first() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, at_once=9, ahead=2 * PAGE, behind=0))
    rig.move(1, Tier.HBM, (0, 0))
    assert rig.engine.poll() == []
    assert rig.route.groups == [(0, 1), (1, 1)], "half a page is in flight"
    rig.up.run()
    assert rig.engine.poll() == []
    assert [group for group, _ in rig.route.groups] == [0, 1, 2, 3], (
        "once half of the groups are launched, no later transfer goes first"
    )
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_poll_launches_a_few_groups_and_submit_one() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, at_once=2, behind=0))
    rig.move(1, Tier.HBM, (0, 0))
    assert len(rig.route.groups) == 1
    assert rig.engine.poll() == []
    assert len(rig.route.groups) == 3
    assert rig.engine.poll() == []
    assert len(rig.route.groups) == 4
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_pieces_launched_per_call_are_bounded() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, at_once=9, pieces=5, behind=0))
    rig.move(1, Tier.HBM, (0, 0), (1, 1))
    assert rig.route.groups == [(0, 2)]
    assert rig.engine.poll() == []
    assert rig.route.groups == [(0, 2), (1, 2), (2, 2)], "one more group would exceed the limit"
    assert rig.engine.poll() == []
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_thread_launches_when_calls_do_not_keep_the_link_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copy_engine, "_ALONE_S", inf)
    rig = Rig(layers=4, pace=Pace(whole=0, behind=4 * PAGE))
    rig.move(1, Tier.HBM, (0, 0))
    assert len(rig.route.groups) == 1, "pages were added just now, so more are expected"
    monkeypatch.setattr(copy_queue, "_JUST_NOW_S", 0.0)
    rig.wait_launched(4)
    rig.up.run()
    assert [ack.ok for ack in rig.wait()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_the_thread_launches_waiting_work_before_the_link_is_idle() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, at_once=1, behind=4 * PAGE))
    rig.move(1, Tier.HBM, (0, 0))
    rig.wait_launched(4)
    assert rig.engine.arriving((0,), 3).submitted
    rig.up.run()
    assert [ack.ok for ack in rig.wait()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_a_caller_that_waits_for_a_layer_is_woken_when_the_thread_launches() -> None:
    woken = Semaphore(0)
    rig = Rig(layers=4, pace=THREAD, wake=woken.release)
    rig.move(1, Tier.HBM, (0, 0))
    for _ in range(4):
        assert woken.acquire(timeout=PATIENCE_S)
    rig.up.run()
    assert [ack.ok for ack in rig.wait()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_each_transfer_is_given_its_share_of_the_time() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, ahead=1, behind=0))
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HBM, (1, 1), (2, 2), (3, 3))
    acks: list[Ack] = []
    while len(acks) < 2:
        rig.up.run()
        acks += rig.engine.poll()
    # A launch takes 2 ms here. Each transfer's first group is launched alone. Each launch of the other three
    # groups serves both transfers.
    assert [ack.seconds for ack in acks] == pytest.approx([0.002 + 3 * 0.0005, 0.002 + 3 * 0.0015])
    assert rig.engine.close(PATIENCE_S)


def test_small_transfers_on_an_idle_link_are_launched_whole() -> None:
    rig = Rig(layers=4, pace=Pace(whole=2 * PAGE))
    rig.move(1, Tier.HBM, (0, 3), (1, 4))
    assert len(rig.up.work) == 4, "two pages and two events"
    arriving = rig.engine.arriving((0, 1), 0)
    assert arriving.submitted
    assert arriving.event is rig.engine.arriving((0, 1), 3).event
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert rig.route.groups == []


def test_transfers_of_many_pieces_are_left_to_the_thread() -> None:
    rig = Rig(pace=Pace(pieces=3))
    rig.move(1, Tier.HOST, (0, 0), (1, 1), (2, 2))
    assert len(rig.down.work) == 5
    rig.down.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    rig.move(2, Tier.HOST, *((slot, slot) for slot in range(4)))
    deadline = monotonic() + PATIENCE_S
    while len(rig.down.work) < 6 or rig.engine._lanes[Tier.HOST].launching:
        assert monotonic() < deadline
    assert list(rig.engine._threads) == [Tier.HOST]
    rig.down.run()
    assert [ack.ok for ack in rig.wait()] == [True]
    assert rig.engine.close(PATIENCE_S)


def test_event_that_was_handed_out_is_not_reused() -> None:
    rig = Rig()
    rig.move(1, Tier.HBM, (0, 3))
    event = rig.engine.arriving((0,), 0).event
    assert event is not None
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    for number in range(2, 6):
        rig.move(number, Tier.HBM, (1, 3))
        assert event.query()
        rig.up.run()
        rig.engine.poll()


def test_refused_group_fails_its_transfer_after_its_last_write() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, ahead=1, behind=0))
    rig.move(1, Tier.HBM, (0, 3), (1, 4))
    rig.wait_launched(1)
    rig.route.refuse = True
    rig.up.run()
    assert rig.engine.poll() == [], "the copy of a page of the second group is still queued"
    rig.route.refuse = False
    assert not rig.engine.arriving((0, 1), 1).submitted
    assert rig.engine.poll() == []
    rig.up.run()
    failures = ((0, Failure.IO_ERROR), (1, Failure.IO_ERROR))
    assert rig.wait() == [Ack(1, False, 0, 0, 0.0, failures)]
    assert [group for group, _ in rig.route.groups] == [0, 1], "the other groups were not launched"
    assert rig.engine.close(PATIENCE_S)


def test_close_drops_pending_groups_and_waits_for_those_in_flight() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, ahead=1, behind=0))
    rig.move(1, Tier.HBM, (0, 3))
    rig.wait_launched(1)
    rig.move(2, Tier.HBM, (1, 4))
    assert not rig.engine.close(0.0), "the first group has not finished"
    assert {ack.transfer_id for ack in rig.engine.poll()} == {2}
    rig.up.run()
    assert rig.engine.close(PATIENCE_S)
    assert rig.engine.poll() == [Ack(1, False, 0, 0, 0.0, ((0, Failure.CLOSED),))]
    assert len(rig.route.groups) == 1


def test_close_ends_transfers_with_landed_and_pending_groups() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, ahead=1, behind=0))
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HBM, (1, 1))
    rig.up.run()
    assert rig.engine.poll() == []
    assert rig.route.groups == [(0, 1), (0, 1)], "no copy of the first transfer is in flight now"
    assert not rig.engine.close(0.0)
    rig.up.run()
    assert rig.engine.close(PATIENCE_S)
    closed = ((0, Failure.CLOSED),)
    assert {ack.transfer_id: ack.failures for ack in rig.engine.poll()} == {1: closed, 2: closed}


def test_a_launch_waits_for_more_of_its_group_while_the_link_has_enough_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # one group of four pages fills a launch
    pace = Pace(whole=0, together=PAGE, enough=2 * PAGE, behind=0, at_once=1)
    rig = Rig(layers=4, pace=pace)
    lane = rig.engine._lanes[Tier.HBM]
    lane.nbytes += 2 * PAGE  # as if two pages were in flight
    rig.move(4, Tier.HBM, (4, 4))
    assert rig.route.groups == []
    monkeypatch.setattr(copy_queue, "_JUST_NOW_S", 0.0)
    rig.engine.poll()
    assert rig.route.groups == [(0, 1)], "no pages were added lately, so the launch must not wait"
    lane.nbytes -= 2 * PAGE
    while len(rig.route.groups) < 4:
        rig.engine.poll()
    rig.up.run()
    rig.engine.poll()
    assert rig.engine.close(PATIENCE_S)


def test_submit_processes_completed_flights_and_launches_the_next_copies() -> None:
    rig = Rig(pace=Pace(ahead=PAGE, behind=0))
    rig.move(1, Tier.HOST, (0, 0))
    rig.move(2, Tier.HOST, (1, 1))
    assert len(rig.down.work) == 3, "one page and two events"
    rig.down.run()
    rig.move(3, Tier.HOST, (2, 2))
    rig.down.run()
    assert rig.arena.view(1).min() == 11
    acks = rig.engine.poll()
    rig.down.run()
    acks += rig.engine.poll()
    assert [ack.transfer_id for ack in acks] == [1, 2, 3]
    assert rig.engine.close(PATIENCE_S)


def test_a_full_launch_does_not_wait() -> None:
    rig = Rig(layers=4, pace=Pace(whole=0, together=PAGE, behind=0, at_once=1))
    rig.engine._lanes[Tier.HBM].nbytes += 2 * PAGE
    rig.move(1, Tier.HBM, (0, 0), (1, 1), (2, 2), (3, 3))
    assert rig.route.groups == [(0, 4)]
    rig.engine._lanes[Tier.HBM].nbytes -= 2 * PAGE
    while len(rig.route.groups) < 4:
        rig.engine.poll()
    rig.up.run()
    rig.engine.poll()
    assert rig.engine.close(PATIENCE_S)
