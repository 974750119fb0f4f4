"""Tests of requests that are aborted, preempted and resumed during copies: no slot or pin is leaked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations, product
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.events import ManualEvent
from tests.support.lanes import examples, some
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    fill,
    let_deadline_come,
    read,
    require_nothing_held,
    require_right,
    tier_stats,
    tiers,
    write,
)
from tests.support.stalls import IN, OUT, Gate
from tierstore.errors import CapacityError, LeaseError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

DOWN, UP = (Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)
DIRECT_UP = (Tier.NVME, Tier.HBM)
Lane = tuple[Tier, Tier]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=4, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def gate_of(bench: Bench, lane: Lane) -> Gate:
    return bench.records if Tier.NVME in lane else bench.copies


def on_disk(store: TierStore, keys: list[PageKey]) -> None:
    """Put pages and move them to disk, so that no other tier has them."""
    write(store, keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    store.evict(keys, Tier.HOST)
    assert store.match(keys).tiers == (Tier.NVME,) * len(keys)


def held(bench: Bench) -> list[tuple[str, int]]:
    """Return how many slots of HBM and of HOST are not free."""
    tables = bench.directory.residency.tables
    return [(tier.name, (table.num_slots or 0) - len(table.free)) for tier, table in tables.items()][:-1]


class Abort:
    """A request that is aborted. Its methods let copies end, release the lease, and evict the pages, in any order."""

    def __init__(self, bench: Bench, keys: list[PageKey], event: ManualEvent | None) -> None:
        self.bench, self.keys, self.event = bench, keys, event
        self.lease: Lease = bench.store.acquire(keys)

    def release(self) -> None:
        self.lease.release(after=self.event)

    def promote(self) -> None:
        self.bench.records.let_go(UP)
        self.bench.settle()

    def load(self) -> None:
        self.bench.copies.let_go(IN)
        self.bench.settle()

    def evict(self) -> None:
        self.bench.store.evict(self.keys, Tier.HBM)

    def happen(self) -> None:
        if self.event is not None:
            self.event.happen()
        self.bench.store.poll()


@pytest.mark.parametrize("late", [False, True])
def test_every_order_of_abort_and_completion_releases_everything(bench: Bench, late: bool) -> None:
    # F037: load, abort and complete, in every order, with some of the copies failing
    keys, store = chain(3), bench.store
    on_disk(store, keys)
    start = held(bench)
    every = examples(3, 1) if late else 1
    orders = list(permutations(["release", "promote", "load", "evict", "happen"]))[::every]
    for turn, (order, broken) in enumerate(product(orders, [None, IN, UP, IN])):
        bench.records.hold(UP)
        bench.copies.hold(IN)
        if broken is not None:
            gate_of(bench, broken).fail_next(broken, turn % 3)
        abort = Abort(bench, keys, ManualEvent() if late else None)
        for step in order:
            getattr(abort, step)()
        bench.open_gates()
        bench.settle()
        assert store.drain(PATIENCE_S)
        store.evict(keys, Tier.HBM)
        store.evict(keys, Tier.HOST)
        assert held(bench) == start, f"turn {turn}: {order}, {broken} fails"
        if store.match(keys).num_pages < 3:  # a page that could not be read was dropped
            store.evict(keys)
            on_disk(store, keys)
    require_nothing_held(store)


@pytest.mark.parametrize("nvme", [False, True])
def test_engine_gets_every_slot_back_in_every_order(tmp_path: Path, nvme: bool) -> None:
    # F037
    engine = page_major()
    bench = open_bench(tiers(SLOTS, 4, tmp_path if nvme else None, hbm_more={"owner": "engine"}), SPEC)
    store, keys = bench.store, chain(3)
    store.register(engine.pages)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    store.put(keys, [0, 1, 2])
    assert store.drain(PATIENCE_S)
    assert sorted(store.poll()) == [0, 1, 2]
    if nvme:
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
    lanes = [IN, UP] if nvme else [IN]
    steps: list[Lane | None] = [None, *lanes]  # None: the release
    for turn, order in enumerate(list(permutations(steps)) * 15):
        for lane in lanes:
            gate_of(bench, lane).hold(lane)
        lease = store.acquire(keys, into=[3, 4, 5], deadline_s=None if turn % 2 else 3600.0)
        back: list[int] = []
        for step in order:
            if step is None:
                lease.release()
            else:
                gate_of(bench, step).let_go(step)
                gate_of(bench, step).settle()
            back += store.poll()
        bench.open_gates()
        assert store.drain(PATIENCE_S)
        back += store.poll()
        arrived = order == (*reversed(lanes), None)
        assert sorted(back) == ([] if arrived else [3, 4, 5])
        store.put(keys, [3, 4, 5])  # put would reject slots that the engine does not own
        assert sorted(store.poll()) == [3, 4, 5]
        if nvme:
            store.evict(keys, Tier.HOST)
    store.check()
    bench.close()


@pytest.mark.parametrize("lane", [IN, UP, DIRECT_UP])
def test_copy_never_acknowledged_loses_only_its_slots(tmp_path: Path, lane: Lane) -> None:
    # F039: the peer died. The deadline ends the lease. Its slot stays unusable and is counted; the rest works.
    bench = open_bench(tiers(4, None if lane == DIRECT_UP else 4, tmp_path), SPEC)
    store, lost = bench.store, chain(1, "lost")
    write(store, lost)
    store.demote(lost, lane[0])
    assert store.drain(PATIENCE_S)
    gate_of(bench, lane).losing.add(lane)
    with store.acquire(lost, deadline_s=3600.0) as lease:
        let_deadline_come(store, lease)
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert (lease.missing, lease.missing_because) == (lost, "deadline")
    assert counter(store, "misses_pages", "deadline") == 1
    gate_of(bench, lane).losing.clear()
    store.evict(lost, Tier.HBM)
    store.evict(lost, Tier.HOST)
    dead = lane[1]
    assert tier_stats(store, dead)["quarantined"] == 1
    assert store.stats()["in_flight"] == {f"{lane[0].name}->{lane[1].name}": 1}
    usable = 4 - (dead == Tier.HBM)
    for i in range(4):
        keys = chain(usable - 1, f"other{i}")
        write(store, keys)
        assert read(store, keys) == usable - 1
    with pytest.raises(CapacityError):
        store.allocate(usable + 1, timeout_s=0.02)
    write(store, lost)
    assert read(store, lost) == 1
    store.check()
    assert store.drain(0.05) is False
    bench.open_gates()
    store.close(timeout_s=1.0)


def test_a_page_whose_load_never_ends_can_be_computed_by_the_next_request(bench: Bench) -> None:
    # F039: the page can be put again although its load hangs, and the load may still end later
    store, keys = bench.store, chain(2)
    on_disk(store, keys)
    bench.records.hold(UP)
    first = store.acquire(keys)
    assert first.wait(0.0) is LeaseState.PENDING
    first.release()
    with store.acquire(keys) as second:
        assert second.wait(0.0) is LeaseState.PENDING
        write(store, keys)
        assert second.wait(0.0) is LeaseState.READY
        require_right(store, second)
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert read(store, keys) == 2
    require_nothing_held(store)


@pytest.mark.parametrize("lane", [OUT, DOWN])
@pytest.mark.parametrize("order", list(permutations(["finish first", "resume", "finish second"])))
def test_a_preempted_request_resumes_while_its_pages_are_still_being_saved(
    tmp_path: Path, lane: Lane, order: tuple[str, ...]
) -> None:
    # F041: the same pages are put twice while the first saves are pending, which then end in every order
    bench = open_bench(tiers(8, 4, tmp_path), SPEC)
    store, keys = bench.store, chain(3)
    gate = gate_of(bench, lane)
    gate.hold(lane)
    first = store.acquire([])
    write(store, keys, first)
    store.demote(keys, Tier.NVME)
    bench.copies.settle()
    store.poll()
    first.release()
    store.evict(keys)  # preempted
    second = store.acquire([])
    for step in order:
        if step == "resume":
            write(store, keys, second)
            store.demote(keys, Tier.NVME)
            store.poll()
        else:
            gate.let_go(lane, 1)
            bench.settle()
        store.check()
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    second.release()
    store.flush()
    assert store.match(keys).num_pages == 3
    for tier in (Tier.HBM, Tier.HOST):
        store.evict(keys, tier)
        assert read(store, keys) == 3
        store.flush()
    require_nothing_held(store)
    bench.close()


def test_second_release_never_removes_another_pin(bench: Bench) -> None:
    # F042
    store, keys = bench.store, chain(4)
    write(store, keys)
    assert store.drain(PATIENCE_S)
    mine, yours = store.acquire(keys), store.acquire(keys)
    mine.release()
    for _ in range(3):
        with pytest.raises(LeaseError):
            mine.release()
        with pytest.raises(LeaseError):
            store.put(chain(1, "x"), [0], lease=mine)
    assert tier_stats(store, Tier.HBM)["pinned"] == 4
    with pytest.raises(CapacityError):
        store.allocate(1, timeout_s=0.0)
    store.evict(keys)
    require_right(store, yours)
    yours.release()
    require_nothing_held(store)


@pytest.mark.parametrize("seed", some(range(12), range(5).__contains__))
def test_pins_match_their_holders_after_every_step_of_random_aborts(bench: Bench, seed: int) -> None:
    # F042: check() compares all pin counts with their holders after each call; a negative count raises at once
    chance, store = random.Random(seed), bench.store
    sequences = [chain(3, str(i)) for i in range(4)]
    leases: list[Lease] = []
    lanes = [OUT, IN, DOWN, UP]
    for _ in range(150):
        keys, dice = chance.choice(sequences)[: chance.randint(1, 3)], chance.random()
        if dice < 0.3:
            deadline_s = chance.choice([None, None, 0.0, 0.001])
            leases.append(store.acquire(keys, deadline_s=deadline_s))
        elif dice < 0.5 and leases:
            leases.pop(chance.randrange(len(leases))).release()
        elif dice < 0.6:
            with suppress(CapacityError):
                slots = store.allocate(len(keys), timeout_s=0.0)
                fill(store, keys, slots)
                store.put(keys, slots, lease=chance.choice([None, *leases]))
        elif dice < 0.7:
            store.evict(keys, chance.choice([None, Tier.HBM, Tier.HOST, Tier.NVME]))
        elif dice < 0.8:
            store.demote(keys, chance.choice([Tier.HOST, Tier.NVME]))
        else:
            lane = chance.choice(lanes)
            gate = gate_of(bench, lane)
            kind = chance.randrange(3)
            if kind == 0:
                gate.hold(lane)
            elif kind == 1:
                gate.let_go(lane)
            else:
                gate.fail_next(lane, 0)
        bench.settle()
        store.check()
    bench.open_gates()
    for lease in leases:
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
        require_right(store, lease)
        lease.release()
    assert counter(store, "faults", "total") == 0
    require_nothing_held(store)
