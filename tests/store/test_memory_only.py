"""Tests of pages that are put with ``memory_only`` and must never be written to disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import lanes
from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, Engine, page_major
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    counter,
    fill,
    read,
    read_soon,
    require_right,
    tiers,
    where,
    write,
)
from tests.support.stalls import OUT
from tierstore.directory import invariants
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, PageKey, Tier

SHAPES = [(4, 8, True), (4, 2, True), (2, 1, True), (4, None, True), (4, 8, False), (4, None, False)]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def bench(disk: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=8, nvme=disk), SPEC, spill=True)
    yield bench
    invariants.check(bench.directory, bench.store._pump.events)
    bench.close()


def write_secret(store: TierStore, keys: list[PageKey], timeout_s: float = PATIENCE_S) -> None:
    slots = store.allocate(len(keys), timeout_s)
    fill(store, keys, slots)
    store.put(keys, slots, memory_only=True)


def on_disk(disk: Path, key: PageKey) -> bool:
    """Return whether any of the 16 parts of the page's bytes is in any file under the directory."""
    payload = content(key).numpy().tobytes()
    piece = len(payload) // 16
    files = [path.read_bytes() for path in disk.rglob("*") if path.is_file()]
    assert files
    return any(payload[i : i + piece] in raw for raw in files for i in range(0, len(payload), piece))


def secret(store: TierStore, key: PageKey) -> bool:
    told = store.explain([key])[0]["memory_only"]
    assert isinstance(told, bool)
    return told


def test_pages_that_are_not_memory_only_are_found_on_disk_so_that_the_search_can_fail(
    store: TierStore, disk: Path
) -> None:
    keys = chain(2)
    write(store, keys)
    store.flush()
    assert all(on_disk(disk, key) for key in keys)
    assert not any(secret(store, key) for key in keys)


def test_neither_flush_nor_demote_nor_time_nor_close_writes_a_memory_only_page(
    bench: Bench, disk: Path
) -> None:
    store, keys, others = bench.store, chain(3, "secret"), chain(2, "other")
    write_secret(store, keys)
    write(store, others)
    store.flush()
    assert store.demote(keys, Tier.NVME) == 3
    assert store.drain(PATIENCE_S)
    assert [where(store, key) for key in keys] == [{Tier.HOST: "ready"}] * 3
    assert read(store, keys) == 3
    for _ in range(5):  # make timed spills due
        bench.directory.writeback._next_spill = 0.0
        store.poll()
        assert store.drain(PATIENCE_S)
    store.flush()
    assert all(Tier.NVME in where(store, key) for key in others)
    assert not any(Tier.NVME in where(store, key) for key in keys)
    store.check()
    store.close()
    assert all(on_disk(disk, key) for key in others)
    assert not any(on_disk(disk, key) for key in keys)
    with TierStore.open(tiers(hbm=4, host=8, nvme=disk), SPEC) as again:
        assert again.match(keys).num_pages == 0
        assert again.match(others).num_pages == 2


@pytest.mark.parametrize("pump", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_pressure_memory_only_pages_are_dropped_and_ordinary_ones_kept(
    shape: tuple[int, int | None, bool], pump: bool, disk: Path
) -> None:
    hbm, host, nvme = shape
    secrets = [chain(2, f"secret{i}") for i in range(12)]
    ordinary = [chain(2, f"ordinary{i}") for i in range(12)]
    with TierStore.open(tiers(hbm, host, disk if nvme else None), SPEC, pump=pump) as store:
        for hidden, open_ in zip(secrets, ordinary, strict=True):
            write_secret(store, hidden)
            write(store, open_)
            store.check()
        store.flush()
        served = [read_soon(store, keys) for keys in secrets]
        assert sum(served) <= hbm + (host or 0)
        if nvme:
            assert all(read_soon(store, keys) == 2 for keys in ordinary)
            dropped = sum(counter(store, "dropped_copies", f"{t},memory_only") for t in ("HBM", "HOST"))
            assert dropped >= 24 - hbm - (host or 0)
            lost = [store.explain(keys)[1]["lost"] for keys, n in zip(secrets, served, strict=True) if n == 0]
            assert set(lost) == {"memory_only"}
        assert store.drain(PATIENCE_S)
        store.check()
    if nvme:
        assert not any(on_disk(disk, key) for keys in secrets for key in keys)


@pytest.mark.parametrize("host", [None, 1, 2, 8])
def test_hbm_full_of_memory_only_pages_can_be_reused(host: int | None, disk: Path) -> None:
    with TierStore.open(tiers(4, host, disk), SPEC, pump=False) as store:
        for i in range(4):
            write_secret(store, chain(4, f"long{i}"))
            store.check()
        assert len(store.allocate(4, timeout_s=PATIENCE_S)) == 4
        store.check()


def test_without_host_memory_only_pages_are_evicted_at_once_leaf_first(disk: Path) -> None:
    with TierStore.open(tiers(4, None, disk), SPEC, pump=False) as store:
        keys = chain(4)
        write_secret(store, keys)
        assert store.demote(keys, Tier.NVME) == 4
        assert store.drain(PATIENCE_S)
        store.flush()
        assert [where(store, key) for key in keys] == [{Tier.HBM: "ready"}] * 4
        slots = store.allocate(1, timeout_s=0.0)
        assert store.match(keys).num_pages == 3
        slots += store.allocate(3, timeout_s=0.0)
        assert store.match(keys).num_pages == 0
        assert counter(store, "dropped_copies", "HBM,memory_only") == 4
        store.free(slots)


def test_a_full_host_drops_memory_only_pages_for_others_leaf_first(disk: Path) -> None:
    with TierStore.open(tiers(4, 4, disk), SPEC, pump=False) as store:
        keys = chain(4, "secret")
        write_secret(store, keys)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        write(store, chain(2, "other"))
        assert store.demote(chain(2, "other"), Tier.HOST) == 2
        assert store.drain(PATIENCE_S)
        assert store.match(keys).tiers == (Tier.HOST,) * 2
        assert counter(store, "dropped_copies", "HOST,memory_only") == 2
        with store.acquire(keys) as lease:
            assert lease.missing == keys[2:]


def test_ordinary_pages_reach_the_disk_though_host_is_full_of_memory_only_ones(
    disk: Path,
) -> None:
    bench = open_bench(tiers(4, 2, disk), SPEC, spill=True)
    store = bench.store
    write_secret(store, chain(2, "secret"))
    store.demote(chain(2, "secret"), Tier.HOST)
    assert store.drain(PATIENCE_S)
    write_secret(store, chain(2, "waiting"))
    key = chain(1, "other")[0]
    write(store, [key])
    for _ in range(10):
        bench.directory.writeback._next_spill = 0.0
        store.poll()
        assert store.drain(PATIENCE_S)
    assert Tier.NVME in where(store, key)
    store.check()
    bench.close()


def keep_the_head_in_host_and_the_tail_in_hbm(bench: Bench, keys: list[PageKey]) -> None:
    write_secret(bench.store, keys)
    bench.store.demote(keys[:1], Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    assert [where(bench.store, key) for key in keys] == [{Tier.HOST: "ready"}, {Tier.HBM: "ready"}]


def test_memory_only_pages_do_not_keep_others_from_the_disk(disk: Path) -> None:
    bench = open_bench(tiers(4, 1, disk), SPEC)
    keep_the_head_in_host_and_the_tail_in_hbm(bench, chain(2, "secret"))
    write(bench.store, chain(2, "other"))
    bench.store.flush()
    assert all(Tier.NVME in where(bench.store, key) for key in chain(2, "other"))
    bench.store.check()
    bench.close()


def test_memory_only_pages_do_not_keep_others_from_being_loaded(disk: Path) -> None:
    bench = open_bench(tiers(4, 1, disk), SPEC)
    write(bench.store, chain(2, "other"))
    bench.store.demote(chain(2, "other"), Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    keep_the_head_in_host_and_the_tail_in_hbm(bench, chain(2, "secret"))
    assert read(bench.store, chain(2, "other")) == 2
    bench.store.check()
    bench.close()


def test_memory_only_page_is_matched_leased_hinted_and_loaded_from_host(store: TierStore) -> None:
    keys = chain(3)
    write_secret(store, keys)
    assert store.match(keys).tiers == (Tier.HBM,) * 3
    store.hint(Hint("r", 1, tuple(keys), "retain"))
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.HOST,) * 3
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(store, lease)
        assert store.evict(keys, Tier.HOST) == 3
    assert all(secret(store, key) for key in keys)
    assert store.demote(keys, Tier.NVME) == 3
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.HOST,) * 3
    assert store.stats()["memory_only"] == 3


def test_memory_only_put_of_a_held_page_does_not_restrict_it(store: TierStore) -> None:
    stored, unsaved = chain(2, "stored"), chain(1, "unsaved")
    write(store, stored)
    store.flush()
    write(store, unsaved)
    write_secret(store, stored)
    assert store.drain(PATIENCE_S)
    write_secret(store, unsaved)
    assert not any(secret(store, key) for key in [*stored, *unsaved])
    store.flush()
    assert all(Tier.NVME in where(store, key) for key in [*stored, *unsaved])


@pytest.mark.parametrize("sunk", [False, True])
def test_ordinary_put_of_the_same_page_lifts_memory_only(store: TierStore, disk: Path, sunk: bool) -> None:
    keys = chain(2)
    write_secret(store, keys)
    if sunk:
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
    write(store, keys)
    assert not any(secret(store, key) for key in keys)
    store.flush()
    assert all(on_disk(disk, key) for key in keys)


def test_ordinary_page_lifts_all_ancestors_but_no_siblings_or_descendants(disk: Path) -> None:
    keys = chain(610)
    siblings = chain(1, "sibling")
    config = tiers(620, 620, disk, nvme_pages=700)
    bench = open_bench(config, SPEC)
    store = bench.store
    write_secret(store, keys)
    with store.acquire(keys[:600]) as lease:
        slots = store.allocate(1)
        fill(store, siblings, slots)
        store.put(siblings, slots, lease=lease)
        store.flush()
    assert all(Tier.NVME in where(store, key) for key in [*keys[:600], *siblings])
    assert not any(secret(store, key) for key in [*keys[:600], *siblings])
    assert all(secret(store, key) for key in keys[600:])
    store.check()
    bench.close()
    with TierStore.open(config, SPEC) as store:
        assert store.match([*keys[:600], *siblings]).num_pages == 601
        assert store.match(keys).num_pages == 600
    assert not any(on_disk(disk, key) for key in keys[600:])


def test_lifted_pages_are_written_and_drain_waits_for_the_lifting(disk: Path) -> None:
    bench = open_bench(
        tiers(620, 1300, disk, nvme_pages=700), SPEC
    )  # no tier needs space, so no other transfer is in flight
    store, keys = bench.store, chain(600)
    write_secret(store, keys)
    assert store.drain(PATIENCE_S)
    write(store, keys[-1:])  # stored already, so nothing is copied
    assert store.drain(PATIENCE_S)
    assert store.stats()["memory_only"] == 0
    for _ in range(40):
        bench.directory.writeback._next_spill = 0.0
        store.poll()
        assert store.drain(PATIENCE_S)
    assert all(Tier.NVME in where(store, key) for key in keys)
    bench.close()


def test_a_memory_only_page_before_a_stored_one_may_be_stored(store: TierStore, disk: Path) -> None:
    keys = chain(2)
    write(store, keys)
    store.flush()
    store.evict(keys[:1])
    write_secret(store, keys)
    assert not secret(store, keys[0])
    store.flush()
    assert store.match(keys).num_pages == 2
    assert all(Tier.NVME in where(store, key) for key in keys)


def test_memory_only_ends_with_the_last_copy(disk: Path) -> None:
    with TierStore.open(tiers(2, None, disk), SPEC, pump=False) as store:
        directory = store._directory
        keys = chain(500)
        for i in range(lanes.examples(20_000, 100_000)):
            key = keys[i % 500]
            slot = directory.residency.take(Tier.HBM)
            directory.sealed.put([key], [slot], None, None, written=True, memory_only=True)
            if i % 3:
                assert directory.evict([key], list(directory.residency.tables)) == 1
            directory.residency.dropped.clear()
            if i % 3 and i % 5 == 0:
                assert key not in directory.residency.memory_only
        directory.evict(keys, list(directory.residency.tables))
        assert not directory.residency.memory_only.keys
        assert not directory.residency.memory_only.lifting
        write(store, keys[:1])
        assert not secret(store, keys[0])
        store.flush()
        assert Tier.NVME in where(store, keys[0])
        store.check()


def test_page_whose_source_is_evicted_during_a_copy_stays_memory_only(bench: Bench, disk: Path) -> None:
    store, keys = bench.store, chain(1)
    bench.copies.hold(OUT)
    write_secret(store, keys)
    store.demote(keys, Tier.HOST)
    store.poll()
    assert bench.copies.waiting(OUT)
    assert store.evict(keys, Tier.HBM) == 1
    assert store.match(keys).num_pages == 0
    bench.copies.open()
    assert store.drain(PATIENCE_S)
    assert where(store, keys[0]) == {Tier.HOST: "ready"}
    assert secret(store, keys[0])
    store.flush()
    assert store.drain(PATIENCE_S)
    store.close()
    assert not on_disk(disk, keys[0])


def test_a_page_put_before_it_is_written_is_memory_only_too(bench: Bench, disk: Path) -> None:
    store, keys = bench.store, chain(1)
    event = ManualEvent()
    slots = store.allocate(1)
    store.put(keys, slots, after=event, memory_only=True)
    store.demote(keys, Tier.NVME)
    store.poll()
    fill(store, keys, slots)
    event.happen()
    assert store.drain(PATIENCE_S)
    assert where(store, keys[0]) == {Tier.HOST: "ready"}
    store.close()
    assert not on_disk(disk, keys[0])


def test_flush_and_close_do_not_wait_for_memory_only_pages(bench: Bench) -> None:
    bench.copies.hold(OUT)
    write_secret(bench.store, chain(2))
    bench.store.flush()
    assert bench.directory.writeback.sinks.open == {}
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)


# -- HBM that belongs to an engine --------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Engine:
    return page_major()


@pytest.fixture
def engine_bench(engine: Engine, disk: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(SLOTS, 4, disk, hbm_more={"owner": "engine"}), SPEC, spill=True)
    bench.store.register(engine.pages)
    yield bench
    invariants.check(bench.directory, bench.store._pump.events)
    bench.close()


def put_engine(bench: Bench, engine: Engine, keys: list[PageKey], *, memory_only: bool) -> None:
    slots = list(range(len(keys)))
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, slots, memory_only=memory_only)
    assert bench.store.drain(PATIENCE_S)
    assert sorted(bench.store.poll()) == slots
    bench.store.check()


def test_memory_only_engine_pages_reach_host_but_not_disk(
    engine_bench: Bench, engine: Engine, disk: Path
) -> None:
    store = engine_bench.store
    secrets = [chain(3, f"secret{i}") for i in range(4)]
    for keys in secrets:
        put_engine(engine_bench, engine, keys, memory_only=True)
        assert store.match(keys).tiers == (Tier.HOST,) * 3
    put_engine(engine_bench, engine, chain(4, "other"), memory_only=False)
    store.flush()
    assert store.match(chain(4, "other")).num_pages == 4
    put_engine(engine_bench, engine, secrets[0], memory_only=True)
    assert store.demote(secrets[0], Tier.NVME) == 3
    assert store.drain(PATIENCE_S)
    engine.wipe()
    with store.acquire(secrets[0], into=[3, 4, 5]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert all(engine.holds(slot, key) for slot, key in zip([3, 4, 5], secrets[0], strict=True))
    assert all(secret(store, key) for key in secrets[0])
    store.close()
    assert not any(on_disk(disk, key) for keys in secrets for key in keys)
    assert all(on_disk(disk, key) for key in chain(4, "other"))


def test_ordinary_engine_put_lifts_the_pages_and_their_ancestors(
    engine_bench: Bench, engine: Engine, disk: Path
) -> None:
    keys = chain(4)
    put_engine(engine_bench, engine, keys[:3], memory_only=True)
    put_engine(engine_bench, engine, keys[1:], memory_only=False)
    engine_bench.store.flush()
    assert [Tier.NVME in where(engine_bench.store, key) for key in keys] == [True] * 4
