"""Tests that no call hangs if pages do not fit: each ends with pages, a miss with its reason, or CapacityError."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Barrier, Thread
from time import monotonic

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    fill,
    read,
    read_soon,
    require_nothing_held,
    require_right,
    tier_stats,
    tiers,
    where,
    write,
)
from tests.support.stalls import IN, OUT
from tests.support.waiting import wait_for
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import CapacityError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Ack, LeaseState, PageKey, Tier

DOWN, UP = (Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)


def on_disk(store: TierStore, *sequences: list[PageKey]) -> None:
    """Put pages and move them to disk, so that no other tier has them."""
    for keys in sequences:
        write(store, keys)
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
        assert store.match(keys).tiers == (Tier.NVME,) * len(keys)


@pytest.mark.parametrize("pump", [False, True])
@pytest.mark.parametrize("host", [1, 2])
def test_several_large_leases_stream_through_a_host_of_a_page_or_two(
    tmp_path: Path, host: int, pump: bool
) -> None:
    # F030: HOST is used only for staging
    with TierStore.open(tiers(30, host, tmp_path), SPEC, pump=pump) as store:
        sequences = [chain(10, str(i)) for i in range(3)]
        on_disk(store, *sequences)
        leases = [store.acquire(keys) for keys in sequences]
        for lease in reversed(leases):
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 10
            require_right(store, lease)
            lease.release()
        require_nothing_held(store)


def test_load_gets_staging_slots_although_the_disk_refuses_hosts_pages(tmp_path: Path) -> None:
    # F030: HOST is full of pages that cannot be saved, and one of them is dropped to make space
    bench = open_bench(tiers(6, 2, tmp_path), SPEC)
    store, wanted = bench.store, chain(4, "wanted")
    on_disk(store, wanted)
    unsaved = [chain(1, f"unsaved{i}")[0] for i in range(2)]
    for key in unsaved:
        write(store, [key])
        store.demote([key], Tier.HOST)
        for _ in range(50):
            bench.records.fail_next(DOWN, 0, 1)
        assert store.drain(PATIENCE_S)
    with store.acquire(wanted) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 4
        require_right(store, lease)
    store.check()
    bench.close()


def test_a_load_whose_staging_slot_never_becomes_free_ends_at_its_deadline_and_does_not_spin(
    tmp_path: Path,
) -> None:
    # F030: HOST is full of arriving pages, whose copies are held back
    bench = open_bench(tiers(6, 2, tmp_path), SPEC)
    store, wanted = bench.store, chain(3, "wanted")
    on_disk(store, wanted)
    bench.copies.hold(OUT)
    write(store, chain(2, "under way"))
    store.demote(chain(2, "under way"), Tier.HOST)
    store.poll()
    assert tier_stats(store, Tier.HOST)["arriving"] == 2
    turns = _count_turns(bench)
    with store.acquire(wanted) as lease:
        assert lease.wait(0.3) is LeaseState.PENDING
    assert len(turns) < 50  # one turn per ms would be 300
    with store.acquire(wanted, deadline_s=0.05) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert lease.missing_because == "deadline"
        write(store, lease.missing, timeout_s=0.0)  # the failed loads have given their slots back
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert read(store, wanted) == 3
    require_nothing_held(store)
    bench.close()


def test_load_with_stalled_staging_ends_without_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F030: the load fails once the copies into HOST have made no progress for STALL_S
    bench = open_bench(tiers(6, 2, tmp_path), SPEC)
    store, wanted = bench.store, chain(3, "wanted")
    on_disk(store, wanted)
    monkeypatch.setattr("tierstore.directory.eviction.STALL_S", 0.05)
    bench.copies.hold(OUT)
    write(store, chain(2, "under way"))
    store.demote(chain(2, "under way"), Tier.HOST)
    store.poll()
    with store.acquire(wanted) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert lease.missing_because == "failed"
    store.check()
    monkeypatch.undo()
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert read(store, wanted) == 3
    bench.close()


def test_loads_without_a_waiting_lease_give_their_slots_to_other_pages(tmp_path: Path) -> None:
    # F032: a finished request keeps no slots into which no copy has started
    pages = BATCH_PAGES + 8
    bench = open_bench(tiers(pages, pages + 2, tmp_path), SPEC)
    store, gone, near = bench.store, chain(pages, "gone"), chain(2, "near")
    on_disk(store, gone)
    write(store, near)
    store.demote(near, Tier.HOST)
    assert store.drain(PATIENCE_S)
    bench.records.hold(UP)
    store.acquire(gone).release()
    assert tier_stats(store, Tier.HBM)["arriving"] == pages
    for _ in range(2):
        with store.acquire(near) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            require_right(store, lease)
    assert lease.num_pages == 2
    with store.acquire(gone) as held:
        assert held.num_pages == pages
        with pytest.raises(CapacityError):
            store.allocate(1, timeout_s=0.0)  # slots of a lease are not taken
        assert held.num_pages == pages
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert read_soon(store, gone) == pages
    require_nothing_held(store)
    bench.close()


def test_loads_without_a_waiting_lease_evict_no_page_from_host(tmp_path: Path) -> None:
    # F032: otherwise a finished request would displace available pages for reads from a disk that hangs
    bench = open_bench(tiers(6, 4, tmp_path), SPEC)
    store, gone, near = bench.store, chain(4, "gone"), chain(2, "near")
    on_disk(store, gone, near)
    assert read(store, near) == 2
    store.demote(near, Tier.HOST)
    assert store.drain(PATIENCE_S)
    bench.records.hold(UP)
    bench.copies.hold(IN)
    with store.acquire(near) as lease:
        store.acquire(gone).release()
        bench.copies.holding.clear()
        bench.copies.let_go(IN)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert tier_stats(store, Tier.HBM)["arriving"] == 2  # the pages that the disk is already reading
    assert tier_stats(store, Tier.HOST)["resident"] == 2
    store.demote(near, Tier.HOST)
    assert read(store, near) == 2
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert read_soon(store, gone) == 4
    require_nothing_held(store)
    bench.close()


@pytest.mark.parametrize("lane", [OUT, DOWN])
def test_engine_slots_are_reported_although_the_lower_tiers_stall(
    tmp_path: Path, lane: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    # F032: all slots except those that a copy still reads. The other pages are dropped and counted.
    monkeypatch.setattr("tierstore.directory.eviction.STALL_S", 0.05)
    engine = page_major()
    bench = open_bench(tiers(SLOTS, 2, tmp_path, hbm_more={"owner": "engine"}), SPEC)
    store = bench.store
    store.register(engine.pages)
    gate = bench.copies if lane == OUT else bench.records
    gate.hold(lane)
    store.put(chain(6), list(range(6)))
    back: list[int] = []
    stuck = 2 if lane == OUT else 0
    wait_for(lambda: len(_extended(back, store.poll())) == 6 - stuck)
    assert counter(store, "dropped_copies", "HBM,no_room") == 4
    store.check()
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert sorted(_extended(back, store.poll())) == list(range(6))
    bench.close()


def _extended(slots: list[int], more: list[int]) -> list[int]:
    slots += more
    return slots


def _count_turns(bench: Bench) -> list[None]:
    """Return a list that gets an entry each time the directory makes decisions."""
    turns: list[None] = []
    advance = bench.directory.advance

    def counting(acks: Sequence[Ack], now: float) -> bool:
        turns.append(None)
        return advance(acks, now)

    bench.directory.advance = counting  # type: ignore[method-assign]
    return turns


class Request:
    """A request of a scheduler: its prompt, its lease, and the pages that it still has to write."""

    def __init__(self, name: str, prompt: list[PageKey], more: int) -> None:
        self.name = name
        self.prompt = prompt
        self.left = deque(chain(more, name))
        self.lease: Lease | None = None


def _step(store: TierStore, request: Request) -> bool:
    """Admit a request, or let it write one page. If it cannot continue, release its lease.

    A request whose pages are in flight keeps its lease. Otherwise two requests could cancel each other's loads
    forever.

    Returns:
        Whether the request has ended.
    """
    if request.lease is None:
        request.lease = store.acquire(request.prompt)
    if request.lease.wait(0.0) is LeaseState.PENDING:
        return False
    if request.lease.num_pages < len(request.prompt):
        request.lease.release()
        request.lease = None
        return False
    try:
        slots = store.allocate(1, timeout_s=0.0)
    except CapacityError:
        request.lease.release()
        request.lease = None
        return False
    keys = [request.left.popleft()]
    fill(store, keys, slots)
    store.put(keys, slots, lease=request.lease)
    if request.left:
        return False
    require_right(store, request.lease)
    request.lease.release()
    return True


def test_requests_that_together_exceed_hbm_all_end(tmp_path: Path) -> None:
    # F032: HBM has 270 slots. L needs 255 pages, S and H need the same 100 pages from HOST, and W needs 10.
    store = TierStore.open(tiers(270, 300, tmp_path, nvme_pages=1000), SPEC, pump=False)
    shared = chain(100, "shared")
    write(store, shared)
    store.demote(shared, Tier.HOST)
    assert store.drain(PATIENCE_S)
    large = Request("L", chain(245, "large"), 10)
    write(store, large.prompt)
    assert store.drain(PATIENCE_S)
    waiting = deque([large, Request("S", shared, 4), Request("H", shared, 4), Request("W", [], 10)])
    ended: list[str] = []
    deadline = monotonic() + PATIENCE_S
    while waiting:
        assert monotonic() < deadline, f"only these requests have ended: {ended}"
        request = waiting.popleft()
        if _step(store, request):
            ended.append(request.name)
        else:
            waiting.append(request)
        store.poll()
    assert sorted(ended) == ["H", "L", "S", "W"]
    require_nothing_held(store)
    store.close()


def test_a_partial_lease_does_not_keep_other_requests_from_free_slots() -> None:
    # F032: the first lease covers all free slots. Once it is released, they are available to the next request.
    with TierStore.open(tiers(6, 12), SPEC, pump=False) as store:
        large, small = chain(6, "large"), chain(2, "small")
        write(store, large)
        store.demote(large, Tier.HOST)
        assert store.drain(PATIENCE_S)
        owned = store.allocate(4)
        with store.acquire(large) as head:
            assert (head.num_pages, head.missing_because) == (2, "no_room")
            with pytest.raises(CapacityError):
                store.allocate(2, timeout_s=0.02)
        assert store.drain(PATIENCE_S)
        write(store, small, timeout_s=0.0)
        store.free(owned)
        assert read_soon(store, large) == 6
        assert read_soon(store, small) == 2


@pytest.mark.parametrize("refusing", [False, True])
def test_mirrors_of_pages_that_cannot_leave_hbm_are_dropped_for_pages_from_disk(
    tmp_path: Path, refusing: bool
) -> None:
    # F034: HOST is half as large as HBM and full of copies of leased pages. The disk may refuse writes.
    bench = open_bench(tiers(8, 4, tmp_path), SPEC)
    store, below = bench.store, [chain(2, f"below{i}") for i in range(4)]
    on_disk(store, *below)
    busy = chain(6, "busy")
    write(store, busy)
    running = store.acquire(busy)
    assert running.wait(0.0) is LeaseState.READY
    store.poll()
    bench.settle()
    assert sum(Tier.HOST in where(store, key) for key in busy) >= 3
    for _ in range(200 if refusing else 0):
        bench.records.fail_next(DOWN, *range(8))
    for keys in below:
        assert read_soon(store, keys) == 2
        require_right(store, running)
    running.release()
    store.check()
    bench.close()


def test_steady_inserts_reach_the_disk_and_return_through_a_host_half_the_size_of_hbm(tmp_path: Path) -> None:
    # F034
    with TierStore.open(tiers(8, 4, tmp_path, nvme_pages=400), SPEC) as store:
        sequences = [chain(4, str(i)) for i in range(30)]
        for i, keys in enumerate(sequences):
            write(store, keys)
            if i >= 10 and i % 3 == 0:
                assert read_soon(store, sequences[i - 10]) == 4
        store.flush()
        for keys in sequences:
            assert all(Tier.NVME in where(store, key) for key in keys)
        require_nothing_held(store)


@pytest.mark.parametrize(("threads", "number"), [(16, 1), (16, 3), (16, 5)])
def test_allocate_is_atomic_and_gives_all_slots_or_none(tmp_path: Path, threads: int, number: int) -> None:
    # F036: 16 threads empty one pool. No thread gets fewer slots than requested, or an error other than CapacityError.
    barrier = Barrier(threads)
    errors: list[BaseException] = []
    got: list[int] = []

    def work(store: TierStore, me: int) -> None:
        barrier.wait()
        try:
            for turn in range(60):
                try:
                    slots = store.allocate(number, timeout_s=0.0)
                except CapacityError:
                    continue
                got.append(len(set(slots)))
                if turn % 3:
                    store.free(slots)
                else:
                    keys = chain(number, f"{me}/{turn}")
                    fill(store, keys, slots)
                    store.put(keys, slots)
        except BaseException as error:  # noqa: BLE001  carried to the test's own thread
            errors.append(error)

    with TierStore.open(tiers(7, 4, tmp_path), SPEC) as store:
        crowd = [Thread(target=work, args=(store, me)) for me in range(threads)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert not errors, errors[0]
        assert set(got) == {number}
        require_nothing_held(store)


def _hbm_alone(path: Path) -> Bench:
    return open_bench(tiers(4, None), SPEC)


def _full_host(path: Path) -> Bench:
    return open_bench(tiers(4, 1), SPEC)


def _disk_that_stands_still(path: Path) -> Bench:
    bench = open_bench(tiers(4, 2, path), SPEC)
    bench.records.hold(DOWN)
    return bench


def _copies_that_stand_still(path: Path) -> Bench:
    bench = open_bench(tiers(4, 2, path), SPEC)
    bench.copies.hold(OUT)
    return bench


@pytest.mark.parametrize("build", [_hbm_alone, _full_host, _disk_that_stands_still, _copies_that_stand_still])
def test_slots_become_free_although_any_lower_tier_stalls(
    tmp_path: Path, build: Callable[[Path], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    # F032: pages that cannot be saved in time are dropped and counted, so that no call waits forever
    monkeypatch.setattr("tierstore.directory.eviction.STALL_S", 0.05)
    bench = build(tmp_path)
    store = bench.store
    for i in range(8):
        keys = chain(2, str(i))
        slots = store.allocate(2, timeout_s=PATIENCE_S)
        fill(store, keys, slots)
        store.put(keys, slots)
        assert read(store, keys) == 2
    store.check()
    bench.open_gates()
    require_nothing_held(store)
    bench.close()


def test_slots_are_available_although_host_is_full_of_pages_that_cannot_be_saved_or_dropped(
    tmp_path: Path,
) -> None:
    # F032, F034: HOST has pages whose children are on a disk that refuses writes. The store must not keep copying
    # pages into the last slot of HOST and dropping them from there.
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    store, pairs = bench.store, [chain(2, f"parent{i}") for i in range(3)]
    on_disk(store, *pairs)
    for _ in range(1000):
        bench.records.fail_next(DOWN, *range(4))
    write(store, chain(1, "refused"))
    store.demote(chain(1, "refused"), Tier.NVME)
    assert store.drain(PATIENCE_S)
    store.evict(chain(1, "refused"))
    for keys in pairs:
        store.evict(keys, Tier.HOST)
        assert read(store, keys[:1]) == 1
        store.evict(keys[:1], Tier.HBM)
        store.evict(keys[:1], Tier.NVME)
    parents = [keys[0] for keys in pairs]
    assert [list(where(store, key)) for key in parents] == [[Tier.HOST]] * 3
    assert store.stats()["failing"] == ["NVME"]
    for i in range(4):
        write(store, chain(1, f"single{i}"))
    for i in range(6):
        write(store, chain(2, f"pair{i}"))
        assert read(store, chain(2, f"pair{i}")) == 2
    store.check()
    bench.close()
