"""Test that slots of extent files are allocated, freed and pinned correctly, and that freed space is used again."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.nvme.rig import (
    CAPACITY,
    PAGE,
    PATIENCE_S,
    Rig,
    catalogue_of,
    extent_files,
    first_size,
    key,
    on_disk,
    page,
    wait_until_writable,
)
from tests.nvme.watch import Watch, watching
from tierstore.errors import ConfigError, IntegrityError
from tierstore.nvme import catalogue_entry
from tierstore.nvme.directory_layout import disk_nbytes
from tierstore.nvme.extent_allocator import Place, Slots
from tierstore.types import Failure

SLOT = 4096 + PAGE


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home", payload="extents")
    yield rig
    rig.close()


def take(slots: Slots, *lengths: int) -> list[Place]:
    places = [slots.take(blocks) for blocks in lengths]
    return [place for place in places if place is not None]


def test_slot_being_read_is_not_rewritten(rig: Rig, calls: Callable[..., None]) -> None:
    count = rig.tier.budget_nbytes // rig.tier.record_nbytes
    assert rig.write(range(count)).ok
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return os.preadv(fd, buffers, offset)

    calls(preadv=slow)
    read, out = rig.submit_read([5])
    assert begun.wait(PATIENCE_S)
    rig.erase(range(count))
    assert rig.tier.sync(PATIENCE_S)
    assert rig.write(range(1000, 1000 + count)).ok
    go_on.set()
    assert rig.ack(read).ok
    np.testing.assert_array_equal(out[0], page(5))
    calls()
    assert rig.present([5, *range(1000, 1000 + count)]) == set(range(1000, 1000 + count))


def test_page_erased_between_lookup_and_pin_is_a_miss_not_damage(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.write([5]).ok
    pinned = Slots.pinned

    def late(self: Slots, place: Place) -> Any:
        monkeypatch.setattr(Slots, "pinned", pinned)
        rig.erase([5])
        rig.submit_write(range(100, 140))
        assert rig.tier.sync(PATIENCE_S)
        return pinned(self, place)

    monkeypatch.setattr(Slots, "pinned", late)
    ack, _ = rig.read([5])
    assert ack.failures == ((0, Failure.NOT_FOUND),)


def test_page_rewritten_between_lookup_and_pin_is_read_in_its_old_or_new_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.write([5]).ok
    pinned = Slots.pinned

    def late(self: Slots, place: Place) -> Any:
        monkeypatch.setattr(Slots, "pinned", pinned)
        rig.submit_write([5], version=1)
        assert rig.tier.sync(PATIENCE_S)
        return pinned(self, place)

    monkeypatch.setattr(Slots, "pinned", late)
    ack, (found,) = rig.read([5])
    assert ack.ok
    assert any((found == page(5, version)).all() for version in (0, 1))
    assert rig.tier.stats()["read_integrity"] == 0


def test_a_pinned_slot_is_freed_with_its_last_pin() -> None:
    slots = Slots(3)
    slots.add_extent(1, 6)
    first, second = take(slots, 3, 3)
    assert slots.take(3) is None
    with slots.pinned(first):
        with slots.pinned(first):
            slots.free([first, second])
            assert (slots.num_free, slots.num_waiting) == (3, 3)
        assert take(slots, 3, 3) == [second]
    assert (slots.num_free, slots.num_waiting) == (3, 0)
    assert slots.take(3) == first


def test_adjacent_slots_are_taken_together_lowest_first() -> None:
    slots = Slots(3)
    slots.add_extent(1, 12)
    slots.add_extent(2, 12)
    taken = take(slots, *[3] * 6)
    assert taken == [*(Place(1, 3 * i, 3) for i in range(4)), Place(2, 0, 3), Place(2, 3, 3)]
    slots.free([taken[1], taken[5]])
    assert take(slots, *[3] * 3) == [taken[1], taken[5], Place(2, 6, 3)]


@pytest.mark.parametrize("used", [[(0, 3), (0, 3)], [(0, 3), (2, 3)], [(10, 3)], [(12, 3)]])
def test_records_with_invalid_or_shared_slots_are_refused(used: list[tuple[int, int]]) -> None:
    with pytest.raises(IntegrityError):
        Slots(3).add_extent(1, 12, used)


@pytest.mark.parametrize("committed", [True, False])
def test_no_slot_is_lost_whether_or_not_a_failed_commit_took_effect(
    rig: Rig, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.write(range(8)).ok
    catalogue = catalogue_of(rig.tier)

    class Broken:
        """Wraps the environment. The next write transaction raises an error at its end, after or without a commit."""

        def __getattr__(self, name: str) -> Any:
            return getattr(env, name)

        def begin(self, *args: Any, **more: Any) -> Any:
            use = env.begin(*args, **more)
            if not more.get("write"):
                return use
            catalogue._env = env
            return Failing(use)

    class Failing:
        def __init__(self, use: Any) -> None:
            self._use = use

        def __enter__(self) -> Any:
            return self._use.__enter__()

        def __exit__(self, *error: object) -> None:
            why = None if committed else KeyError()
            self._use.__exit__(None if why is None else KeyError, why, None)
            raise lmdb.DiskError("as if")

    env = catalogue._env
    catalogue._env = Broken()  # type: ignore[assignment]
    ack = rig.write(range(4, 12), version=1)
    assert len(ack.failures) == 8
    wait_until_writable(rig)
    assert rig.tier.sync(PATIENCE_S)
    assert rig.present(range(12)) == set(range(4))
    slots = catalogue._records._slots  # type: ignore[attr-defined]
    assert slots.total - slots.num_free == 4 * SLOT // 4096


def test_freed_space_is_reused_without_growth(rig: Rig) -> None:
    count = rig.tier.budget_nbytes // rig.tier.record_nbytes
    assert rig.write(range(count)).ok
    files = extent_files(rig.home)
    for turn in range(1, 6):
        rig.erase(range((turn - 1) * count, turn * count))
        assert rig.write(range(turn * count, (turn + 1) * count)).ok
    assert len(extent_files(rig.home)) <= len(files) + 2
    assert on_disk(rig.home) <= CAPACITY


def test_files_are_created_as_they_are_needed(rig: Rig) -> None:
    assert extent_files(rig.home) == []
    assert rig.write([0]).ok
    (first,) = extent_files(rig.home)
    assert first.stat().st_blocks * 512 >= first.stat().st_size > 0
    assert rig.tier.stats()["disk_nbytes"] == disk_nbytes(first.parent)


def test_a_lower_capacity_removes_the_last_files_and_drops_only_their_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    rig = Rig(home, payload="extents")
    count = rig.tier.budget_nbytes // rig.tier.record_nbytes
    assert rig.write(range(count)).ok
    rig.close()
    for capacity in (3 << 20, 2 << 20, 1 << 20):
        before = extent_files(home)
        with caplog.at_level(logging.WARNING):
            rig = Rig(home, capacity=capacity)
        assert "dropped" in caplog.text
        left = extent_files(home)
        assert left == before[: len(left)]
        assert len(left) < len(before)
        kept = [record[0] for record in rig.tier.records()]
        assert kept
        assert rig.tier.sync(PATIENCE_S)
        assert {key(n) for n in rig.present(range(count))} == set(kept)
        assert on_disk(home) <= capacity
        rig.close()
    rig = Rig(home, capacity=CAPACITY)
    assert rig.write(range(1000, 1000 + count // 2)).ok
    rig.close()
    assert on_disk(home) <= CAPACITY


def test_a_lower_capacity_drops_nothing_while_the_last_files_are_empty(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rig = Rig(home, payload="extents")
    count = rig.tier.budget_nbytes // rig.tier.record_nbytes
    assert rig.write(range(count)).ok
    rig.erase(range(20, count))
    rig.close()
    rig = Rig(home, capacity=2 << 20)
    assert rig.present(range(count)) == set(range(20))
    rig.close()
    assert on_disk(home) <= 2 << 20


@pytest.mark.parametrize("nbytes", [1, 4096, PAGE, 100_000, 8 << 20])
def test_the_smallest_capacity_that_opens_holds_a_page(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(
        ConfigError, match=r"nvme\.capacity must be at least .* for pages of .*, got 4 KiB \(4,096 bytes\)"
    ) as caught:
        Rig(tmp_path / "home", capacity=4096, page_nbytes=nbytes, payload="extents")
    least = first_size(str(caught.value))
    rig = Rig(tmp_path / "home", capacity=least, page_nbytes=nbytes, payload="extents")
    for number in range(4):
        assert rig.write([number]).ok
        assert rig.present([number]) == {number}
        rig.erase([number])
    assert on_disk(rig.home) <= least
    rig.close()


def test_slots_in_the_catalogue_are_never_overwritten_under_churn(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home", payload="extents")
    catalogue = catalogue_of(rig.tier)

    def named() -> set[Place]:
        with catalogue._env.begin() as txn:
            found = [catalogue_entry.unpack(k, raw) for k, raw in txn.cursor(db=catalogue._env.catalogue)]
        return {Place(each.extent, each.block, SLOT // 4096) for each in found}

    watch = Watch(rig.home, named)
    chance = np.random.default_rng(5)
    with watching(watch):
        live: set[int] = set()
        for turn in range(25):
            gone = {
                int(n) for n in chance.choice(sorted(live) or [0], size=min(len(live), 30), replace=False)
            }
            rig.erase(sorted(gone))
            fresh = range(turn * 60, turn * 60 + 60 if len(live) < 120 else turn * 60 + 30)
            again = sorted(live - gone)[:5]
            live = live - gone | set(fresh)
            assert rig.write([*fresh, *again]).ok
            assert not watch.dirty
        assert rig.present(range(1500)) == live
    rig.close()
