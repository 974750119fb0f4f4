"""Tests of requests that no well-behaved engine makes, and of directories moved or deleted while in use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    fill,
    read,
    require_nothing_held,
    require_right,
    tiers,
    where,
    write,
    write_each,
)
from tierstore.errors import ConfigError
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


def test_a_key_named_twice_in_a_put_is_one_page_and_the_second_slot_is_free_again(tmp_path: Path) -> None:
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        keys = chain(1) * 2
        slots = store.allocate(2)
        fill(store, keys, slots)
        kept = store.put(keys, slots)
        assert kept[0] == kept[1]
        store.flush()
        assert read(store, keys) == 2
        require_nothing_held(store)


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
def test_key_repeated_in_an_acquire_is_loaded_once_and_pinned_each_time(tmp_path: Path, tier: Tier) -> None:
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        first, second = chain(2)
        write(store, [first, second])
        if tier is not Tier.HBM:
            store.demote([first, second, first], tier)
            assert store.drain(PATIENCE_S)
        with store.acquire([first, first, second, first]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 4
            assert len(set(lease.slots)) == 2
            require_right(store, lease)
            store.check()
            store.evict([first, first])
            require_right(store, lease)
        assert where(store, first) == {}
        require_nothing_held(store)


def test_a_key_named_twice_is_demoted_and_saved_once(tmp_path: Path) -> None:
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        keys = chain(3)
        write(store, keys)
        store.demote(keys * 2, Tier.NVME)
        store.flush()
        assert [where(store, key) for key in keys] == [{Tier.NVME: "ready"}] * 3
        assert store.evict(keys * 2) == 3
        store.check()


@pytest.mark.parametrize("host", [None, 2])
@pytest.mark.parametrize("pages", [None, 4])
def test_pages_whose_parents_form_a_ring_are_evicted_like_others(
    tmp_path: Path, host: int | None, pages: int | None
) -> None:
    config = tiers(3, host, None if pages is None else tmp_path, nvme_pages=pages or 1)
    with TierStore.open(config, SPEC) as store:
        ring = chain(3)
        for keys in (ring, [ring[2], ring[0]], [ring[0], ring[0]]):
            write(store, keys)
        store.put([ring[1]], write_to(store, ring[1]), parent=ring[1])
        store.check()
        for key in chain(20, "other"):
            write(store, [key])
            store.check()
        require_nothing_held(store)


def write_to(store: TierStore, key: PageKey) -> list[int]:
    slots = store.allocate(1, PATIENCE_S)
    fill(store, [key], slots)
    return slots


@pytest.mark.parametrize("deadline_s", [0, -1, 1e-9])
def test_a_deadline_that_has_passed_still_returns_pages_in_hbm_and_no_others(
    tmp_path: Path, deadline_s: float
) -> None:
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        keys = chain(4)
        write(store, keys)
        store.demote(keys[2:], Tier.NVME)
        assert store.drain(PATIENCE_S)
        with store.acquire(keys, deadline_s=deadline_s) as lease:
            assert lease.wait(0) is LeaseState.READY
            assert lease.num_pages == 2
            assert lease.ready(0, timeout_s=0) is None
            require_right(store, lease)
        assert counter(store, "misses_pages", "deadline") == 1
        require_nothing_held(store)


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_directory_that_is_moved_under_its_store_works_and_stays_locked(
    tmp_path: Path, payload: str
) -> None:
    old, new, more = tmp_path / "old", tmp_path / "new", {"payload": payload}
    keys = chain(12)
    with TierStore.open(tiers(4, 4, old, nvme_more=more), SPEC) as store:
        write_each(store, keys[:6])
        store.flush()
        old.rename(new)
        write_each(store, keys[6:])
        store.flush()
        assert store.match(keys).num_pages == 12
        with pytest.raises(ConfigError, match="in use by process"):
            TierStore.open(tiers(4, 4, new, nvme_more=more), SPEC)
    with TierStore.open(tiers(4, 4, new, nvme_more=more), SPEC) as store:
        assert [read(store, [key]) for key in keys] == [1] * 12


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_store_whose_directory_was_deleted_does_not_touch_a_new_one_in_its_place(
    tmp_path: Path, payload: str
) -> None:
    config = tiers(4, 4, tmp_path / "d", nvme_more={"payload": payload})
    keys, others = chain(8), chain(4, "others")
    with TierStore.open(config, SPEC) as store:
        write_each(store, keys[:4])
        store.flush()
        shutil.rmtree(tmp_path / "d")
        with TierStore.open(config, SPEC) as second:
            write(second, others)
            second.flush()
            write_each(store, keys[4:])
            store.flush()
            for key in keys:
                read(store, [key])
            store.close()
            assert read(second, others) == 4
    with TierStore.open(config, SPEC) as third:
        assert read(third, others) == 4
        assert third.match(keys).num_pages == 0


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_copy_of_a_directory_in_use_serves_only_its_intact_pages(tmp_path: Path, payload: str) -> None:
    keys, more = chain(8), {"payload": payload}
    with TierStore.open(tiers(4, 4, tmp_path / "a", nvme_more=more), SPEC) as store:
        write_each(store, keys)
        store.flush()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with TierStore.open(tiers(4, 4, tmp_path / "b", nvme_more=more), SPEC) as copy:
            assert [read(copy, [key]) for key in keys] == [1] * 8
            copy.evict(keys)
            copy.flush()
        assert [read(store, [key]) for key in keys] == [1] * 8


def test_relative_path_is_resolved_when_the_configuration_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = tiers(4, 4, Path("here"), nvme_more={"payload": "extents"})
    keys = chain(40)
    for part in (keys[:20], keys[20:]):
        with TierStore.open(config, SPEC) as store:
            monkeypatch.chdir(tmp_path / "elsewhere")
            write_each(store, part)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with TierStore.open(config, SPEC) as store:
        assert [read(store, [key]) for key in keys] == [1] * 40
