"""Tests that copies read a page only after its last write, and write a slot only after its last use."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.events import ManualEvent
from tests.support.lanes import some
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    fill,
    page_tensor,
    read,
    require_right,
    same,
    settle,
    tiers,
    where,
    write,
)
from tests.support.stalls import IN, OUT
from tierstore.errors import CapacityError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

DOWN, UP = (Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)
DIRECT_DOWN, DIRECT_UP = (Tier.HBM, Tier.NVME), (Tier.NVME, Tier.HBM)
ENGINE: dict[str, object] = {"owner": "engine"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=8, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def scribble(store: TierStore, slots: list[int]) -> None:
    """Overwrite slots, like a kernel that was launched earlier and is still running."""
    for slot in slots:
        page_tensor(store)[slot].view(torch.uint8).fill_(0x55)
    settle()


@pytest.mark.parametrize(("host", "nvme"), [(8, False), (8, True), (None, True)])
def test_page_is_copied_down_with_its_last_write_in_every_round(
    tmp_path: Path, host: int | None, nvme: bool
) -> None:
    # F001: each round reuses the slots of the previous round, which still contain its bytes
    bench = open_bench(tiers(3, host, tmp_path if nvme else None), SPEC, spill=True)
    store = bench.store
    lowest = Tier.NVME if nvme else Tier.HOST
    for turn in range(60):
        keys = chain(3, f"round{turn}")
        slots = store.allocate(3, timeout_s=PATIENCE_S)
        event = ManualEvent()
        store.put(keys, slots, after=event)
        store.demote(keys, lowest)
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.0)
        bench.settle()
        assert all(where(store, key) == {Tier.HBM: "ready"} for key in keys)
        fill(store, keys, slots)
        event.happen()
        assert store.drain(PATIENCE_S)
        assert store.match(keys).tiers == (lowest,) * 3
        assert read(store, keys) == 3
        store.evict(keys)
    store.check()
    bench.close()


def test_engine_page_is_copied_out_with_its_last_write_in_every_round(tmp_path: Path) -> None:
    # F001
    engine = page_major()
    bench = open_bench(tiers(SLOTS, 4, tmp_path, hbm_more=ENGINE), SPEC)
    bench.store.register(engine.pages)
    for turn in range(40):
        keys = chain(2, f"round{turn}")
        event = ManualEvent()
        bench.store.put(keys, [0, 1], after=event)
        bench.settle()
        assert bench.store.match(keys).num_pages == 0
        engine.fill(0, keys[0])
        engine.fill(1, keys[1])
        event.happen()
        assert bench.store.drain(PATIENCE_S)
        assert sorted(bench.store.poll()) == [0, 1]
        with bench.store.acquire(keys, into=[4, 5]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert engine.holds(4, keys[0])
            assert engine.holds(5, keys[1])
    bench.close()


def test_events_in_another_order_delay_only_their_own_pages(bench: Bench) -> None:
    # F001
    keys, store = chain(4), bench.store
    slots = store.allocate(4)
    events = [ManualEvent() for _ in keys]
    for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        with store.acquire(keys[:i]) as lease:
            store.put([key], [slot], after=events[i], lease=lease)
    store.demote(keys, Tier.HOST)
    for i in (2, 0, 3, 1):
        fill(store, [keys[i]], [slots[i]])
        events[i].happen()
        store.poll()
        bench.settle()
        written = {j for j, event in enumerate(events) if event.query()}
        below = {j for j, key in enumerate(keys) if Tier.HOST in where(store, key)}
        assert below == written
    assert store.drain(PATIENCE_S)
    assert read(store, keys) == 4


def _freed(store: TierStore, event: ManualEvent, _: ExitStack) -> list[int]:
    slots = store.allocate(4, timeout_s=PATIENCE_S)
    store.free(slots, after=event)
    return slots


def _duplicate(store: TierStore, event: ManualEvent, held: ExitStack) -> list[int]:
    keys = chain(2, "twice")
    write(store, keys)
    held.enter_context(store.acquire(keys))  # pins the two other slots
    slots = store.allocate(2, timeout_s=PATIENCE_S)
    fill(store, keys, slots)
    store.put(keys, slots, after=event)
    return slots


def _released(store: TierStore, event: ManualEvent, _: ExitStack) -> list[int]:
    keys = chain(4, "released")
    slots = write(store, keys)
    assert store.drain(PATIENCE_S)
    store.acquire(keys).release(after=event)
    return slots


def _sealed_under_a_lease(store: TierStore, event: ManualEvent, _: ExitStack) -> list[int]:
    keys = chain(4, "sealed")
    lease = store.acquire([])
    slots = write(store, keys, lease)
    assert store.drain(PATIENCE_S)
    lease.release(after=event)
    return slots


def _evicted_unwritten(store: TierStore, event: ManualEvent, _: ExitStack) -> list[int]:
    keys = chain(4, "unwritten")
    slots = store.allocate(4, timeout_s=PATIENCE_S)
    store.put(keys, slots, after=event)
    store.evict(keys)
    return slots


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize(
    "give_up", [_freed, _duplicate, _released, _sealed_under_a_lease, _evicted_unwritten]
)
def test_no_page_is_loaded_into_a_slot_before_its_last_round_has_finished(
    bench: Bench, give_up: Callable[[TierStore, ManualEvent, ExitStack], list[int]], tier: Tier
) -> None:
    # F004: a finished request's kernels still write its pages when those of another request are loaded
    store, keys = bench.store, chain(2, "wanted")
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    event = ManualEvent()
    with ExitStack() as held:
        slots = give_up(store, event, held)
        with store.acquire(keys) as lease:
            assert (lease.num_pages, lease.missing_because) == (0, "no_room")
        store.check()
        scribble(store, slots)
        event.happen()
        store.poll()
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 2
            assert set(lease.slots) <= set(slots)
            require_right(store, lease)


@pytest.mark.parametrize("seed", some(range(24), range(8).__contains__))
@pytest.mark.parametrize("host", [3, None])
def test_pages_swap_slots_while_copies_stall_in_any_order(
    tmp_path: Path, host: int | None, seed: int
) -> None:
    # F005: calls do not wait for each other, and copies finish in any order
    chance = random.Random(seed)
    bench = open_bench(tiers(3, host, tmp_path), SPEC)
    store = bench.store
    lanes = [OUT, IN, DOWN, UP] if host else [DIRECT_DOWN, DIRECT_UP]
    for lane in lanes:
        (bench.records if Tier.NVME in lane else bench.copies).hold(lane)
    names = [chain(2, str(i)) for i in range(4)]
    held: list[Lease] = []
    served = 0
    for _ in range(70):
        keys, dice = chance.choice(names), chance.random()
        if dice < 0.2:
            _write_if_there_is_room(store, keys)
        elif dice < 0.35:
            store.demote(keys, chance.choice([Tier.HOST, Tier.NVME] if host else [Tier.NVME]))
        elif dice < 0.5:
            held.append(store.acquire(keys))
        elif dice < 0.6 and held:
            held.pop(chance.randrange(len(held))).release()
        else:
            lane = chance.choice(lanes)
            (bench.records if Tier.NVME in lane else bench.copies).let_go(lane, 1)
            bench.settle()
        served += _require_right(store, held)
    bench.open_gates()
    for lease in held:
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
    served += _require_right(store, held)
    assert served > 0
    for lease in held:
        lease.release()
    store.check()
    bench.close()


def _write_if_there_is_room(store: TierStore, keys: list[PageKey]) -> None:
    try:
        slots = store.allocate(len(keys), timeout_s=0.0)
    except CapacityError:
        return
    fill(store, keys, slots)
    store.put(keys, slots)


def _require_right(store: TierStore, held: list[Lease]) -> int:
    """Check the bytes of every lease that is ready. Return the number of pages checked."""
    ready = [lease for lease in held if lease.wait(0.0) is LeaseState.READY]
    for lease in ready:
        require_right(store, lease)
    return sum(lease.num_pages for lease in ready)


@pytest.mark.parametrize("lane", [IN, DOWN])
def test_a_host_slot_that_a_copy_reads_is_not_reused_when_its_page_is_dropped(
    tmp_path: Path, lane: tuple[Tier, Tier]
) -> None:
    # F007: the page is dropped, other pages are written to HOST, and only then the copy runs
    bench = open_bench(tiers(4, 3, tmp_path), SPEC)
    store, keys = bench.store, chain(2, "moved")
    write(store, keys)
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    gate = bench.copies if lane == IN else bench.records
    gate.hold(lane)
    lease = store.acquire(keys if lane == IN else [])
    if lane == DOWN:
        store.demote(keys, Tier.NVME)
    store.poll()
    assert gate.waiting(lane) == 1
    slots = {bench.directory.residency.tables[Tier.HOST].copies[key].slot for key in keys}
    store.evict(keys, Tier.HOST)
    others = [chain(1, f"other{i}")[0] for i in range(2)]
    for key in others:
        write(store, [key])
        store.poll()
        bench.copies.settle()
    host = bench.directory.residency.tables[Tier.HOST]
    assert slots.isdisjoint(copy.slot for copy in host.copies.values())
    store.check()
    gate.open()
    assert store.drain(PATIENCE_S)
    if lane == IN:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 2
        require_right(store, lease)
    lease.release()
    assert read(store, keys) in (0, 2)
    assert not host.quarantine
    bench.close()


def test_engine_tensors_live_until_the_store_no_longer_needs_them(tmp_path: Path) -> None:
    # F007: the engine drops its last reference while a copy of its pages is held back
    raw = np.zeros((SLOTS, *SPEC.shape), dtype=np.float16)
    alive = weakref.ref(raw)
    pages = EnginePages([torch.from_numpy(raw)], "BLKNHD")
    keys = chain(2)
    for slot, key in enumerate(keys):
        pages.tensors[0][slot].copy_(content(key))
    in_memory = ENGINE | {"device": "cpu"}
    bench = open_bench(tiers(SLOTS, 4, tmp_path, hbm_more=in_memory), SPEC)
    bench.store.register(pages)
    bench.copies.hold(OUT)
    bench.store.put(keys, [0, 1])
    del raw, pages
    gc.collect()
    assert alive() is not None
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    arena, host = bench.parts.arena, bench.directory.residency.tables[Tier.HOST]
    assert arena is not None
    for key in keys:
        want = content(key).contiguous().view(torch.uint8).flatten().numpy()
        np.testing.assert_array_equal(arena.view(host.copies[key].slot)[: want.size], want)
    bench.close()


def test_pages_a_caller_still_looks_at_outlive_their_store() -> None:
    # F007: the view keeps the memory alive, but not the store
    with TierStore.open(tiers(2, 2), SPEC) as store:
        keys = chain(2)
        slots = write(store, keys)
        pages = page_tensor(store)
    del store
    gc.collect()
    for key, slot in zip(keys, slots, strict=True):
        assert same(pages[slot], key)
