"""The DMA copy engine's own decisions, with streams that run when the test says so and copies made by address."""

from __future__ import annotations

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
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(ManualEvent, "failed", False)
    return Rig()


def test_an_ack_comes_when_the_last_byte_has_moved_and_not_before(rig: Rig) -> None:
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


def test_events_used_again_tell_the_later_copy(rig: Rig) -> None:
    for number in range(1, 4):
        rig.move(number, Tier.HBM, (0, number))
        assert rig.engine.poll() == []
        rig.up.run()
        assert [ack.transfer_id for ack in rig.engine.poll()] == [number]
        assert rig.pool.view(0).min() == 20 + number


def test_copies_of_slots_that_are_about_to_be_locked_wait_in_line(rig: Rig) -> None:
    rig.arena.locked, rig.arena.more = 2, True
    rig.move(1, Tier.HBM, (0, 3))
    rig.move(2, Tier.HBM, (1, 1))
    assert rig.engine.polled
    rig.up.run()
    assert rig.engine.poll() == []
    rig.arena.locked, rig.arena.more = SLOTS, False
    assert rig.engine.poll() == []
    rig.up.run()
    assert [ack.transfer_id for ack in rig.engine.poll()] == [1, 2]
    assert rig.pool.view(0).min() == 23


def test_slots_that_stay_unlocked_are_copied_by_threads(rig: Rig) -> None:
    rig.arena.locked = 2
    rig.move(1, Tier.HBM, (0, 3))
    assert [ack.ok for ack in rig.wait()] == [True]
    assert rig.pool.view(0).min() == 23
    assert not rig.up.work
    rig.move(2, Tier.HOST, (1, 0), (2, 5))
    assert [ack.ok for ack in rig.wait()] == [True]
    assert (rig.arena.view(0).min(), rig.arena.view(5).min()) == (11, 12)
    assert rig.engine.close(PATIENCE_S)


def test_a_copy_that_is_refused_fails_only_when_nothing_of_it_writes_any_more(rig: Rig) -> None:
    rig.route.refuse = True
    rig.move(1, Tier.HBM, (0, 3), (1, 4))
    rig.route.refuse = False
    assert rig.engine.poll() == [], "its first page is still to be written"
    rig.up.run()
    failures = ((0, Failure.IO_ERROR), (1, Failure.IO_ERROR))
    assert rig.engine.poll() == [Ack(1, False, 0, 0, 0.0, failures)]
    rig.move(2, Tier.HBM, (2, 2))
    rig.up.run()
    assert [ack.ok for ack in rig.engine.poll()] == [True]


@pytest.mark.parametrize(("dst", "why"), [(Tier.HOST, Failure.UNFIT), (Tier.HBM, Failure.INTEGRITY)])
def test_pages_of_a_wrong_form_fail_alone(rig: Rig, dst: Tier, why: Failure) -> None:
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


def test_pages_of_a_wrong_form_are_told_to_the_transfers_they_are_of(rig: Rig) -> None:
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


def test_a_copy_that_cannot_be_asked_for_as_a_graph_is_captured_is_still_on_its_way(
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


def test_close_fails_what_is_not_launched_and_waits_for_what_is(rig: Rig) -> None:
    rig.arena.locked, rig.arena.more = 2, True
    rig.move(1, Tier.HBM, (0, 0))
    rig.move(2, Tier.HBM, (1, 5))
    assert not rig.engine.close(0.0), "the first copy has not ended"
    rig.move(3, Tier.HBM, (2, 1))
    rig.up.run()
    assert rig.engine.close(PATIENCE_S)
    found = {ack.transfer_id: ack.failures for ack in rig.engine.poll()}
    assert found == {1: (), 2: ((0, Failure.CLOSED),), 3: ((0, Failure.CLOSED),)}
