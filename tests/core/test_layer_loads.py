"""Test a thread that loads pages layer group by layer group: the state that it reports for each layer, and its acks."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Semaphore
from time import monotonic

import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.gpu.cpu_copy_engine import LayerLoads
from tierstore.gpu.layer_groups import LayerGroups, Part
from tierstore.gpu.pool import CpuPool
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer

SPEC = PageSpec(num_layers=4, page_size=1, num_kv_heads=1, head_dim=256, dtype="uint8", model="m")
LAYOUT = PageLayout.of(SPEC)
PATIENCE_S = 60.0


class Pool(CpuPool):
    """A pool that writes each part only when the test permits it, and raises an error at the part ``broken``."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 4)
        self.let = Semaphore(0)
        self.order: list[tuple[int, int]] = []
        self.broken: tuple[int, int] | None = None

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        assert self.let.acquire(timeout=PATIENCE_S)
        self.order.append((slot, part.first))
        if self.order[-1] == self.broken:
            raise RuntimeError("this part cannot be written")
        super().write_part(slot, page, part)


class Rig:
    def __init__(self) -> None:
        self.pool, host = Pool(), CpuPool(LAYOUT, 4)
        for slot in range(4):
            self.pool.view(slot).fill(10 + slot)
            host.view(slot).fill(20 + slot)
        self.moved: SimpleQueue[Ack | None] = SimpleQueue()
        self.loads = LayerLoads(
            self.pool, host, SPEC.page_nbytes, LayerGroups.of(LAYOUT, 4, 1), self.moved.put
        )

    def load(self, number: int, *slots: int) -> None:
        keys, parents = (PageKey(bytes(36)),) * len(slots), (None,) * len(slots)
        self.loads.submit(Transfer(number, keys, Tier.HOST, slots, Tier.HBM, slots, 0, parents))

    def let(self, parts: int) -> None:
        self.pool.let.release(parts)

    def ack(self) -> Ack:
        while (ack := self.moved.get(timeout=PATIENCE_S)) is None:
            pass
        return ack


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_layer_is_ready_once_written_into_all_slots(rig: Rig) -> None:
    rig.load(1, 0, 1)
    assert not rig.loads.arriving((0, 1), 0).submitted
    rig.let(2)
    assert rig.moved.get(timeout=PATIENCE_S) is None
    assert rig.loads.arriving((0, 1), 0).submitted
    assert rig.loads.arriving((0, 1), 0).event is None
    assert not rig.loads.arriving((0, 1), 1).submitted
    assert not rig.loads.arriving((0, 3), 0).submitted, "no transfer loads slot 3"
    rows = rig.pool.view(1).reshape(4, -1)
    assert [int(row[0]) for row in rows] == [21, 11, 11, 11]
    rig.let(6)
    ack = rig.ack()
    assert (ack.ok, ack.num_ready, ack.nbytes) == (True, 2, 2 * SPEC.page_nbytes)
    assert not rig.loads.arriving((0, 1), 0).submitted, "the transfer has ended"
    assert rig.pool.view(1).min() == 21
    assert rig.loads.close(PATIENCE_S)


def test_the_first_layers_of_a_later_transfer_go_before_the_next_of_an_earlier_one(rig: Rig) -> None:
    rig.load(1, 0)
    rig.let(1)
    assert rig.moved.get(timeout=PATIENCE_S) is None
    rig.load(2, 1)
    rig.let(7)
    assert [rig.ack().transfer_id for _ in range(2)] == [1, 2]
    # Part 1 of the first transfer may already have been in flight when the second transfer was submitted.
    assert rig.pool.order.index((1, 0)) < rig.pool.order.index((0, 2))
    assert rig.pool.order[-2:] == [(0, 3), (1, 3)]
    assert rig.loads.close(PATIENCE_S)


def test_unwritable_part_fails_only_its_transfer(rig: Rig) -> None:
    rig.pool.broken = (0, 1)
    rig.load(1, 0)
    rig.load(2, 1)
    rig.let(8)
    acks = {ack.transfer_id: ack for ack in (rig.ack(), rig.ack())}
    assert acks[1].failures == ((0, Failure.IO_ERROR),)
    assert acks[2].ok
    assert (0, 2) not in rig.pool.order
    assert rig.pool.view(1).min() == 21
    assert rig.loads.close(PATIENCE_S)


def test_close_fails_loads_with_missing_parts(rig: Rig) -> None:
    rig.load(1, 0)
    rig.load(2, 1)
    assert not rig.loads.close(0.0)
    rig.let(8)
    deadline = monotonic() + PATIENCE_S
    assert rig.loads.close(PATIENCE_S)
    assert monotonic() < deadline
    assert {rig.ack().transfer_id for _ in range(2)} == {1, 2}
    assert len(rig.pool.order) < 8
