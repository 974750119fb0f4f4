"""Tests of transfers: batches, order, rates, stalls, and erases, which must precede writes that reuse their space."""

from __future__ import annotations

import pytest

from tierstore.directory.residency import Residency, TierTable
from tierstore.directory.transfers import BATCH_PAGES, Move, Transfers
from tierstore.policy import make_policy
from tierstore.types import Ack, Erase, PageKey, Tier, Transfer

PAGE = 1000
DOWN = (Tier.HOST, Tier.NVME)


@pytest.fixture
def residency() -> Residency:
    return Residency({Tier.NVME: TierTable(make_policy("lru"), budget_nbytes=100)})


@pytest.fixture
def traffic(residency: Residency) -> Transfers:
    return Transfers(residency, PAGE)


def key(number: int) -> PageKey:
    return PageKey(b"%d" % number)


def add(traffic: Transfers, *numbers: int) -> None:
    for n in numbers:
        traffic.add(*DOWN, Move(key(n), n, 100 + n, 7, key(n - 1) if n else None))


def emitted(traffic: Transfers, now: float) -> list[Transfer]:
    traffic.emit(now)
    return [command for command in traffic.take() if isinstance(command, Transfer)]


def test_a_batch_carries_its_moves_in_order(traffic: Transfers) -> None:
    add(traffic, 0, 1, 2)
    (transfer,) = emitted(traffic, 0.0)
    assert transfer.keys == (key(0), key(1), key(2))
    assert (transfer.src, transfer.src_slots) == (Tier.HOST, (0, 1, 2))
    assert (transfer.dst, transfer.dst_slots) == (Tier.NVME, (100, 101, 102))
    assert transfer.parents == (None, key(0), key(1))
    assert transfer.nbytes == 21
    assert not traffic.idle()


def test_many_moves_become_several_transfers_with_distinct_ids(traffic: Transfers) -> None:
    numbers = range(2 * BATCH_PAGES + 1)
    add(traffic, *numbers)
    transfers = emitted(traffic, 0.0)
    assert [len(t.keys) for t in transfers] == [BATCH_PAGES, BATCH_PAGES, 1]
    assert [k for t in transfers for k in t.keys] == [key(n) for n in numbers]
    assert len({t.id for t in transfers}) == 3
    assert emitted(traffic, 0.0) == []


def test_erase_is_sent_before_the_write_that_uses_its_space(residency: Residency, traffic: Transfers) -> None:
    for n in range(10):
        [(slot, _)] = residency.reserve((key(n),), Tier.NVME, 10)
        residency.commit((key(n),), Tier.NVME, (slot,), sizes=(10,))
    [(slot, _)] = residency.reserve((key(11),), Tier.NVME, 10)
    traffic.add(*DOWN, Move(key(11), 0, slot, 10, None))
    traffic.emit(0.0)
    erase, write = traffic.take()
    assert erase == Erase(Tier.NVME, (key(0),))
    assert isinstance(write, Transfer)
    assert write.keys == (key(11),)


def test_pages_count_as_in_transfer_from_decision_to_ack(traffic: Transfers) -> None:
    add(traffic, 0, 1)
    assert traffic.carrying(*DOWN) == 2
    assert not traffic.quiet(Tier.HOST, 0.0, 1.0)
    (transfer,) = emitted(traffic, 0.0)
    assert traffic.carrying(*DOWN) == 2
    assert traffic.settle(Ack(transfer.id, True, 2, 2 * PAGE, 1.0), 1.0) == transfer
    assert traffic.carrying(*DOWN) == 0
    assert traffic.idle()
    assert traffic.quiet(Tier.NVME, 1.0, 1.0)
    with pytest.raises(KeyError):
        traffic.settle(Ack(transfer.id, True, 2, 2 * PAGE, 1.0), 1.0)


def test_the_rate_of_an_edge_is_learned_and_failures_teach_nothing(traffic: Transfers) -> None:
    assert traffic.seconds_for(DOWN, 5) == 0.0
    for n, seconds in ((0, 0.5), (1, 0.25)):
        add(traffic, n)
        (transfer,) = emitted(traffic, 0.0)
        traffic.settle(Ack(transfer.id, True, 1, PAGE, seconds), 0.0)
    assert traffic.rates[DOWN] == pytest.approx(0.8 * 2 * PAGE + 0.2 * 4 * PAGE)
    add(traffic, 2)
    assert traffic.seconds_for(DOWN, 1) == pytest.approx(2 * PAGE / traffic.rates[DOWN])
    rate = traffic.rates[DOWN]
    (transfer,) = emitted(traffic, 0.0)
    traffic.settle(Ack(transfer.id, False, 0, 0, 9.0), 0.0)
    assert traffic.rates[DOWN] == rate


def test_edge_stalls_only_without_progress_of_its_pages(traffic: Transfers) -> None:
    assert not traffic.stalled(DOWN, 100.0, 2.0)
    add(traffic, 0)
    (first,) = emitted(traffic, 100.0)
    add(traffic, 1)
    emitted(traffic, 101.5)
    assert not traffic.stalled(DOWN, 102.0, 2.0)
    assert traffic.stalled(DOWN, 102.5, 2.0)
    traffic.settle(Ack(first.id, True, 1, PAGE, 1.0), 102.5)
    assert not traffic.stalled(DOWN, 104.0, 2.0)
    assert traffic.stalled(DOWN, 105.0, 2.0)
