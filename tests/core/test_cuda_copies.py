"""The DMA copy engine's own decisions, with streams that run when the test says so and copies made by address."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierstore.gpu.copy_engine import CpuCopyEngine
from tierstore.gpu.cuda_copies import CudaCopyEngine, Pace
from tierstore.gpu.lanes import Job, TimedEvent
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.pool import CpuPool
from tierstore.gpu.routes import WholePages
from tierstore.host.arena import HostArena
from tierstore.layout import PageLayout
from tierstore.types import Ack, Failure, PageKey, PageSpec, Tier, Transfer

SPEC = PageSpec(num_layers=4, page_size=1, num_kv_heads=1, head_dim=128, dtype="uint8", model="engine")
LAYOUT = PageLayout.of(SPEC)
SLOTS = 6
PATIENCE_S = 60.0


class ManualStream:
    """Work waits here until the test runs it."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def run(self) -> None:
        while self.work:
            self.work.popleft()()


class ManualEvent:
    failed = False

    def __init__(self) -> None:
        self.recorded = 0
        self.happened = 0

    def record(self, stream: Any) -> None:
        self.recorded += 1
        number = self.recorded
        stream.work.append(lambda: setattr(self, "happened", number))

    def query(self) -> bool:
        if ManualEvent.failed:
            raise RuntimeError("the device has failed")
        return self.happened == self.recorded

    def synchronize(self) -> None:
        raise AssertionError("the engine never waits for the device")

    def elapsed_time(self, end: TimedEvent) -> float:
        assert self.query()
        assert end.query()
        return 2.0


class ByAddress(WholePages):
    """Copies pages of a pool in ordinary memory when the stream runs. ``refuse``: raises after the first page."""

    name = "by address"

    def __init__(self, pool: CpuPool) -> None:
        self._pool = pool
        self.refuse = False
        self.groups: list[tuple[int, int]] = []
        """Layer group and number of pages of each launch of one."""
        self.wrong: set[int] = set()
        """HBM slots whose pages are found to have a wrong form when the stream runs."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any
    ) -> NDArray[np.int32] | None:
        self._queue([(self._at(slot), int(at)) for slot, at in zip(slots, host, strict=True)], stream)
        return self._found(slots, stream)

    def load_group(self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        assert self.layers is not None
        self.groups.append((group, len(slots)))
        for part in self.layers.parts[group]:
            pairs = [
                (self._at(slot) + part.offset, int(at) + part.offset)
                for slot, at in zip(slots, host, strict=True)
            ]
            self._queue(pairs, stream, part.nbytes)

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any
    ) -> NDArray[np.int32] | None:
        self._queue([(int(at), self._at(slot)) for slot, at in zip(slots, host, strict=True)], stream)
        return self._found(slots, stream)

    def _found(self, slots: NDArray[np.int64], stream: Any) -> NDArray[np.int32] | None:
        if not self.wrong:
            return None
        found = np.zeros(len(slots), dtype=np.int32)
        stream.work.append(lambda: np.copyto(found, np.isin(slots, list(self.wrong))))
        return found

    def _queue(self, pairs: list[tuple[int, int]], stream: Any, nbytes: int = SPEC.page_nbytes) -> None:
        for dst, src in pairs:
            stream.work.append(lambda dst=dst, src=src: ctypes.memmove(dst, src, nbytes))
            if self.refuse:
                raise RuntimeError("no more room in the queue")

    def _at(self, slot: np.int64) -> int:
        return self._pool.view(int(slot)).ctypes.data


class Arena(HostArena):
    """``locked``: slots that count as page-locked; ``more``: whether others are to come."""

    locked = SLOTS
    more = False

    @property
    def pinned_slots(self) -> int:
        return self.locked

    @property
    def pinning(self) -> bool:
        return self.more


class Rig:
    def __init__(self, layers: int | None = None, pace: Pace | None = None) -> None:
        self.pool, self.arena = CpuPool(LAYOUT, SLOTS), Arena(LAYOUT, SLOTS)
        for slot in range(SLOTS):
            self.pool.view(slot).fill(10 + slot)
            self.arena.view(slot).fill(20 + slot)
        self.route = ByAddress(self.pool)
        self.route.layers = None if layers is None else LayerGroups.of(LAYOUT, layers, 1)
        self.up, self.down = ManualStream(), ManualStream()
        streams = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", (self.up, self.down))
        threads = CpuCopyEngine(self.pool, self.arena, SPEC.page_nbytes, lambda: None)
        self.engine = CudaCopyEngine(
            self.route, self.arena, SPEC.page_nbytes, streams, threads, ManualEvent, pace
        )

    def move(self, number: int, dst: Tier, *pairs: tuple[int, int]) -> None:
        """Submits; ``pairs``: slots in HBM and in HOST."""
        there, here = tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
        src, src_slots, dst_slots = (Tier.HOST, here, there) if dst == Tier.HBM else (Tier.HBM, there, here)
        keys, parents = (PageKey(bytes(36)),) * len(pairs), (None,) * len(pairs)
        self.engine.submit(Transfer(number, keys, src, src_slots, dst, dst_slots, 0, parents))

    def wait(self) -> list[Ack]:
        while not (acks := self.engine.poll()):
            pass
        return acks

    def wait_launched(self, launches: int) -> None:
        """Until so many layer groups, of one transfer or of several together, were launched by the lane's thread."""
        deadline = monotonic() + PATIENCE_S
        while len(self.route.groups) < launches or self.engine._lanes[Tier.HBM].launching:
            assert monotonic() < deadline, f"only {self.route.groups} were launched"


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
    flight = lane.take(1 << 30)
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


# -- layer by layer -------------------------------------------------------------------------------------------

PAGE = SPEC.page_nbytes
BY_THREAD = Pace(inline=0, together=64 * PAGE, ahead=1 << 30)


def layer(rig: Rig, slot: int, index: int) -> int:
    """The byte that fills this layer of the slot."""
    found = rig.pool.view(slot).reshape(SPEC.num_layers, -1)[index]
    assert found.min() == found.max()
    return int(found[0])


def test_a_layer_is_there_while_later_ones_are_on_their_way() -> None:
    rig = Rig(layers=4, pace=BY_THREAD)
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
    assert [layer(rig, slot, 3) for slot in (0, 5)] == [10, 15], "not moved yet"
    assert not last.event.query()
    assert rig.engine.poll() == [], "the transfer is acknowledged whole"
    assert rig.engine.arriving((0, 5), 0).event is None
    rig.up.run()
    assert last.event.query()
    assert [ack.ok for ack in rig.engine.poll()] == [True]
    assert [layer(rig, slot, 3) for slot in (0, 5)] == [23, 21]
    assert not rig.engine.arriving((0, 5), 0).submitted, "it no longer knows of them"
    assert rig.engine.close(PATIENCE_S)


def test_pages_that_come_later_go_before_the_next_group_of_those_on_their_way() -> None:
    rig = Rig(layers=4, pace=Pace(inline=0, together=PAGE, ahead=PAGE // 4))
    rig.move(1, Tier.HBM, (0, 0))
    rig.wait_launched(1)
    rig.move(2, Tier.HBM, (1, 1))
    assert not rig.engine.arriving((0, 1), 0).submitted
    rig.up.run()
    rig.wait_launched(2)
    assert rig.engine.arriving((0, 1), 0).submitted, "the first group of both, before the second of any"
    assert not rig.engine.arriving((0,), 1).submitted
    acks: list[Ack] = []
    deadline = monotonic() + PATIENCE_S
    while len(acks) < 2:
        assert monotonic() < deadline
        rig.up.run()
        acks += rig.engine.poll()
    assert rig.route.groups == [(0, 1), (0, 1), (1, 2), (2, 2), (3, 2)]
    assert [ack.transfer_id for ack in acks] == [1, 2]
    assert [layer(rig, slot, 3) for slot in (0, 1)] == [20, 21]
    assert rig.engine.close(PATIENCE_S)


def test_each_transfer_is_given_its_share_of_the_time() -> None:
    rig = Rig(layers=4, pace=Pace(inline=0, together=64 * PAGE, ahead=1))
    rig.move(1, Tier.HBM, (0, 0))
    rig.wait_launched(1)
    rig.move(2, Tier.HBM, (1, 1), (2, 2), (3, 3))
    acks: list[Ack] = []
    while len(acks) < 2:
        rig.up.run()
        acks += rig.engine.poll()
    # A launch takes 2 ms here: the first alone, then three groups of four pages together and one of three.
    assert [ack.seconds for ack in acks] == pytest.approx([0.002 + 3 * 0.0005, 0.002 + 3 * 0.0015])
    assert rig.engine.close(PATIENCE_S)


def test_small_transfers_on_an_idle_link_go_whole_at_once() -> None:
    rig = Rig(layers=4, pace=Pace(inline=2 * PAGE))
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


def test_an_event_that_was_handed_out_is_not_used_again() -> None:
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


def test_a_group_that_is_refused_fails_its_transfer_when_nothing_of_it_writes_any_more() -> None:
    rig = Rig(layers=4, pace=Pace(inline=0, together=64 * PAGE, ahead=1))
    rig.move(1, Tier.HBM, (0, 3), (1, 4))
    rig.wait_launched(1)
    rig.route.refuse = True
    rig.up.run()
    rig.wait_launched(2)
    rig.route.refuse = False
    assert not rig.engine.arriving((0, 1), 1).submitted
    assert rig.engine.poll() == [], "a page of the second group is still to be written"
    rig.up.run()
    failures = ((0, Failure.IO_ERROR), (1, Failure.IO_ERROR))
    assert rig.wait() == [Ack(1, False, 0, 0, 0.0, failures)]
    assert [group for group, _ in rig.route.groups] == [0, 1], "the others were not tried"
    assert rig.engine.close(PATIENCE_S)


def test_close_gives_up_the_groups_to_come_and_waits_for_those_on_their_way() -> None:
    rig = Rig(layers=4, pace=Pace(inline=0, together=64 * PAGE, ahead=1))
    rig.move(1, Tier.HBM, (0, 3))
    rig.wait_launched(1)
    rig.move(2, Tier.HBM, (1, 4))
    assert not rig.engine.close(0.0), "the first group has not ended"
    assert {ack.transfer_id for ack in rig.engine.poll()} == {2}
    rig.up.run()
    assert rig.engine.close(PATIENCE_S)
    assert rig.engine.poll() == [Ack(1, False, 0, 0, 0.0, ((0, Failure.CLOSED),))]
    assert len(rig.route.groups) == 1
