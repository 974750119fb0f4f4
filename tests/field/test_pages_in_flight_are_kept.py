"""Tests that slots and records stay in use until their copies end, despite evictions, cancels and timeouts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Lock, Thread
from time import monotonic

import numpy as np
import pytest
import torch

from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    fill,
    let_deadline_come,
    page_tensor,
    read,
    require_nothing_held,
    require_right,
    same,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.stalls import DOWN, IN, OUT, UP, Gate, Lane
from tierstore.errors import CapacityError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=4, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def gate_of(bench: Bench, lane: Lane) -> Gate:
    return bench.records if Tier.NVME in lane else bench.copies


def write_down(store: TierStore, keys: list[PageKey], tier: Tier) -> None:
    """Put pages and move them down, so that they are in ``tier`` and in no tier above it."""
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (tier,) * len(keys)


def test_host_keeps_its_next_victims_while_they_are_loaded(bench: Bench) -> None:
    # F022: the pages would be evicted next from a full HOST, and their load is held back
    store, keys = bench.store, chain(2)
    write_down(store, keys, Tier.HOST)
    store.flush()
    bench.copies.hold(IN)
    lease = store.acquire(keys)
    others = [chain(1, f"other{i}")[0] for i in range(10)]
    for key in others:
        write(store, [key])
        store.flush()
    assert sum(Tier.HOST in where(store, key) for key in others) == 2  # the other two slots of HOST
    assert [where(store, key)[Tier.HOST] for key in keys] == ["ready", "ready"]
    assert lease.wait(0.0) is LeaseState.PENDING
    bench.copies.open()
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert lease.num_pages == 2
    require_right(store, lease)
    lease.release()
    for key in others[-4:]:
        assert read(store, [key]) == 1
        store.flush()
    assert any(Tier.HOST not in where(store, key) for key in keys)  # now they can be evicted


@pytest.mark.parametrize("host", [4, None])
def test_disk_keeps_its_next_victims_while_they_are_read(tmp_path: Path, host: int | None) -> None:
    # F022: the same, one tier lower
    up = UP if host else (Tier.NVME, Tier.HBM)
    bench = open_bench(tiers(4, host, tmp_path, nvme_pages=6), SPEC)
    store, keys = bench.store, chain(2)
    write_down(store, keys, Tier.NVME)
    bench.records.hold(up)
    lease = store.acquire(keys)
    budget = tier_stats(store, Tier.NVME)["budget_nbytes"]
    turnover = 3 * budget // bench.directory.residency.tables[Tier.NVME].record_nbytes
    for i in range(turnover):
        write(store, chain(1, f"other{i}"))
        store.flush()
    assert tier_stats(store, Tier.NVME)["resident"] < turnover  # other records had to be evicted
    bench.records.open()
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert lease.num_pages == 2
    require_right(store, lease)
    lease.release()
    store.check()
    bench.close()


def _let_it_go_on(store: TierStore, lease: Lease) -> None:
    lease.release()


def _evict_in_hbm(store: TierStore, lease: Lease) -> None:
    store.evict(lease.keys, Tier.HBM)
    lease.release()


def _evict_in_host(store: TierStore, lease: Lease) -> None:
    store.evict(lease.keys, Tier.HOST)
    lease.release()


def _evict_everywhere(store: TierStore, lease: Lease) -> None:
    lease.release()
    store.evict(lease.keys)


def _compute_it_instead(store: TierStore, lease: Lease) -> None:
    write(store, list(lease.keys), timeout_s=0.0)
    lease.release()


def _come_too_late(store: TierStore, lease: Lease) -> None:
    let_deadline_come(store, lease)
    assert lease.wait(PATIENCE_S) is LeaseState.FAILED
    lease.release()


@pytest.mark.parametrize(
    "cancel",
    [_let_it_go_on, _evict_in_hbm, _evict_in_host, _evict_everywhere, _compute_it_instead, _come_too_late],
)
@pytest.mark.parametrize("lane", [IN, UP])
def test_a_cancelled_load_writes_nothing_but_its_own_slots(
    bench: Bench, lane: Lane, cancel: Callable[[TierStore, Lease], None]
) -> None:
    # F024: the load is held back and cancelled, other pages take all free slots, and only then the load runs
    store, keys = bench.store, chain(2)
    write_down(store, keys, lane[0])
    gate_of(bench, lane).hold(lane)
    deadline_s = 3600.0 if cancel is _come_too_late else None
    lease = store.acquire(keys, deadline_s=deadline_s)
    assert lease.num_pages == 2
    cancel(store, lease)
    store.check()
    in_host = _fill_host(bench)
    mine, owned = _take_all_free_slots(store)
    gate_of(bench, lane).let_go(lane)
    bench.settle()
    assert all(same(page_tensor(store)[slot], key) for key, slot in zip(mine, owned, strict=True))
    bench.open_gates()
    _require_right_in_host(bench, in_host)
    store.put(mine, owned)
    assert store.drain(PATIENCE_S)
    for key in [*mine, *in_host]:
        assert read(store, [key]) == 1
        store.flush()
    assert read(store, keys) in (0, 2)
    require_nothing_held(store)


def _fill_host(bench: Bench) -> list[PageKey]:
    """Copy other pages into all free slots of HOST, if HBM has a free slot to copy them from. Return their keys."""
    keys: list[PageKey] = []
    with suppress(CapacityError):
        while bench.directory.residency.tables[Tier.HOST].free:
            keys.append(chain(1, f"host{len(keys)}")[0])
            write(bench.store, keys[-1:], timeout_s=0.0)
            bench.copies.settle()
            bench.store.poll()
            bench.store.evict(keys[-1:], Tier.HBM)
    return keys


def _require_right_in_host(bench: Bench, keys: list[PageKey]) -> None:
    """Assert that the pages still in HOST have the expected content, byte for byte."""
    arena, copies = bench.parts.arena, bench.directory.residency.tables[Tier.HOST].copies
    assert arena is not None
    for key in keys:
        if key in copies and copies[key].ready:
            want = content(key).contiguous().view(torch.uint8).flatten().numpy()
            np.testing.assert_array_equal(arena.view(copies[key].slot)[: want.size], want)


def _take_all_free_slots(store: TierStore) -> tuple[list[PageKey], list[int]]:
    """Allocate all available HBM slots and fill each with a page. Return the keys and the slots."""
    owned: list[int] = []
    with suppress(CapacityError):
        while True:
            owned += store.allocate(1, timeout_s=0.0)
    keys = [chain(1, f"mine{i}")[0] for i in range(len(owned))]
    fill(store, keys, owned)
    return keys, owned


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("lane", [IN, UP])
def test_a_load_is_protected_however_long_it_takes(
    bench: Bench, lane: Lane, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F026: the clock jumps by days while the copy is held back and other pages need slots
    store, keys = bench.store, chain(number)
    write_down(store, keys, lane[0])
    if lane == IN:
        store.flush()
    gate_of(bench, lane).hold(lane)
    lease = store.acquire(keys)
    for room in ("events", "lease", "pump", "store"):
        monkeypatch.setattr(f"tierstore.{room}.monotonic", lambda: monotonic() + 1e6)
    for i in range(12):
        with suppress(CapacityError):
            write(store, chain(1, f"other{i}"), timeout_s=0.0)
        bench.copies.settle()
        store.poll()
    store.check()
    assert lease.wait(0.0) is LeaseState.PENDING
    bench.open_gates()
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert lease.num_pages == number
    require_right(store, lease)
    for i in range(12):
        with suppress(CapacityError):
            write(store, chain(1, f"later{i}"), timeout_s=0.0)
        require_right(store, lease)
    lease.release()


@pytest.mark.parametrize("lane", [OUT, DOWN])
def test_page_requested_while_written_below_is_whole_or_missing(bench: Bench, lane: Lane) -> None:
    # F028
    store, keys = bench.store, chain(3)
    above = lane[0]
    if above == Tier.HOST:
        write_down(store, keys, Tier.HOST)
    gate_of(bench, lane).hold(lane)
    if above == Tier.HBM:
        write(store, keys)
    store.demote(keys, lane[1])
    store.poll()
    assert gate_of(bench, lane).waiting(lane) == 1
    assert where(store, keys[0])[lane[1]] == "arriving"
    assert read(store, keys) == 3
    for tier in (Tier.HBM, Tier.HOST):
        if tier <= above:
            store.evict(keys, tier)
    with store.acquire(keys) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert lease.num_pages == 0
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert read(store, keys) in (0, 3)


def test_a_page_computed_again_while_its_old_record_is_written_and_erased_is_right(bench: Bench) -> None:
    # F028: a write, an erase and another write of one key are in the disk's queue
    store, keys = bench.store, chain(2)
    write(store, keys)
    assert store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    for _ in range(3):
        store.demote(keys, Tier.NVME)
        store.poll()
        store.evict(keys)
        write(store, keys)
        bench.copies.settle()
        store.poll()
    store.demote(keys, Tier.NVME)
    while bench.records.waiting(DOWN):
        bench.records.let_go(DOWN, 1)
        assert read(store, keys) == 2
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    store.flush()
    store.evict(keys, Tier.HBM)
    store.evict(keys, Tier.HOST)
    assert read(store, keys) == 2


THREADS, TURNS = 8, 700


def test_no_two_owners_ever_have_the_same_slot(tmp_path: Path) -> None:
    # F027: allocate, put, load, free and evict from many threads on a tiny pool
    live: dict[int, int] = {}
    guard, barrier = Lock(), Barrier(THREADS)
    errors: list[BaseException] = []
    sequences = [chain(2, str(i)) for i in range(10)]

    def turn(store: TierStore, me: int, chance: random.Random) -> None:
        slots = store.allocate(chance.randint(1, 2), timeout_s=0.0)
        with guard:
            assert live.keys().isdisjoint(slots), "a slot has two owners"
            live.update(dict.fromkeys(slots, me))
        keys = chance.choice(sequences)[: len(slots)]
        fill(store, keys, slots)
        with store.acquire(chance.choice(sequences)) as lease:
            if chance.random() < 0.5 and lease.wait(PATIENCE_S) is LeaseState.READY:
                require_right(store, lease)
                with guard:
                    assert live.keys().isdisjoint(lease.slots), "an owned slot is leased"
        assert all(same(page_tensor(store)[slot], key) for key, slot in zip(keys, slots, strict=True))
        with guard:
            for slot in slots:
                assert live.pop(slot) == me
        if chance.random() < 0.5:
            store.put(keys, slots)
        else:
            store.free(slots)
        if chance.random() < 0.2:
            store.evict(chance.choice(sequences), chance.choice([None, Tier.HBM, Tier.HOST]))

    def run(store: TierStore, me: int) -> None:
        chance = random.Random(me)
        barrier.wait()
        try:
            for _ in range(TURNS):
                with suppress(CapacityError):
                    turn(store, me, chance)
        except BaseException as error:  # noqa: BLE001  carried to the test's own thread
            errors.append(error)

    with TierStore.open(tiers(6, 3, tmp_path), SPEC) as store:
        threads = [Thread(target=run, args=(store, i)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        require_nothing_held(store)
