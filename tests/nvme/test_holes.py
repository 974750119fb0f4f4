"""Tests of free blocks of extent files: best-fit allocation, and moving records when every free run is too short."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvme.rig import LAYOUT, PATIENCE_S, catalogue_of, on_disk, wait_until_writable
from tests.nvme.test_encoded import NBYTES, NOISE, ExpRig
from tests.support import lanes
from tierstore.nvme import extent_allocator
from tierstore.nvme.extent_allocator import FreeRuns, Place, Slots
from tierstore.nvme.extents import ExtentRecords
from tierstore.types import Failure

CAPACITY = 6 << 20
LONGEST = 8


def blocks(first: int, length: int) -> set[int]:
    return set(range(first, first + length))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, LONGEST), st.integers(0, 99)), max_size=80))
def test_free_runs_are_the_freed_space_not_taken(steps: list[tuple[bool, int, int]]) -> None:
    runs, free, held = FreeRuns(LONGEST), blocks(0, 40), list[tuple[int, int]]()
    runs.give(0, 40)
    for takes, length, which in steps:
        if takes:
            first = runs.take(length)
            possible = [at for at in range(40) if blocks(at, length) <= free]
            assert (first is None) == (not possible)
            if first is not None:
                assert blocks(first, length) <= free
                free -= blocks(first, length)
                held.append((first, length))
        elif held:
            first, length = held.pop(which % len(held))
            runs.give(first, length)
            free |= blocks(first, length)
        assert runs.num_blocks == len(free)


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_the_shortest_run_that_is_long_enough_is_cut(lengths: list[int], chance: random.Random) -> None:
    runs, gaps = FreeRuns(LONGEST), {1000 * number: length for number, length in enumerate(lengths)}
    for first in chance.sample(sorted(gaps), len(gaps)):
        runs.give(first, gaps[first])
    wanted = chance.randint(1, LONGEST)
    fitting = [(length, first) for first, length in gaps.items() if length >= wanted]
    assert runs.take(wanted) == (min(fitting)[1] if fitting else None)


@settings(max_examples=lanes.examples(300, 1500))
@given(st.data())
def test_moving_records_frees_space_and_changes_nothing_else(data: st.DataObject) -> None:
    """Plan moves among random records and taken slots that no entry names.

    The moves must never overlap, and must free a run of slots.
    """
    slots, named = Slots(LONGEST), dict[int, list[tuple[int, int]]]()
    hidden: list[Place] = []
    for number in (1, 2):
        at, used = 0, list[tuple[int, int]]()
        while at < 60:
            gap, length = data.draw(st.integers(0, 5)), data.draw(st.integers(2, LONGEST))
            at += gap
            if at + length > 60:
                break
            used.append((at, length))
            at += length
        slots.add_extent(number, 60, used)
        named[number] = used
    for length in (*[LONGEST] * 16, 2):
        if (place := slots.take(length)) is not None:
            hidden.append(place)
    taken = {Place(number, *span) for number, spans in named.items() for span in spans} | set(hidden)
    free = slots.num_free
    extents = {number: (60, spans) for number, spans in named.items()}
    with extent_allocator.moves(slots, extents, LONGEST, 2) as planned:
        olds, news = {move.old for move in planned}, [move.new for move in planned]
        assert olds <= taken - set(hidden)
        assert all(move.old.blocks == move.new.blocks for move in planned)
        cells = [(each.extent, block) for each in (*taken, *news) for block in blocks(*each[1:])]
        assert len(cells) == len(set(cells)), "two records overlap after the moves"
    slots.free(olds)
    assert slots.num_free == free
    assert not planned or slots.take(LONGEST) is not None


def fill(rig: ExpRig, numbers: range) -> dict[int, int]:
    """Write pages until the budget is used up. Returns the stored size of each page in bytes, by number."""
    held: dict[int, int] = {}
    for number in numbers:
        if sum(held.values()) + rig.tier.record_nbytes > rig.tier.budget_nbytes:
            break
        ack = rig.write([number])
        assert ack.ok
        held[number] = ack.nbytes
    return held


def replace_some(rig: ExpRig, held: dict[int, int], fresh: range, seed: int) -> list[int]:
    """Write the pages ``fresh`` one by one, and erase random pages to stay within the budget.

    Return the numbers of the pages whose writes were refused.
    """
    chance, refused = random.Random(seed), []
    for number in fresh:
        while sum(held.values()) + rig.tier.record_nbytes > rig.tier.budget_nbytes:
            victim = chance.choice(sorted(held))
            del held[victim]
            rig.erase([victim])
        ack = rig.write([number])
        if ack.ok:
            held[number] = ack.nbytes
        else:
            refused.append(number)
    return refused


def open_at(home: Path) -> ExpRig:
    return ExpRig(home, capacity=CAPACITY, page_nbytes=NBYTES, payload="extents", codec="exp", layout=LAYOUT)


def free_and_used(rig: ExpRig) -> tuple[int, int]:
    records = catalogue_of(rig.tier)._records
    assert isinstance(records, ExtentRecords)
    return records._slots.num_free, records._slots.total


def test_long_records_fit_into_a_tier_full_of_short_ones(tmp_path: Path) -> None:
    rig = open_at(tmp_path / "home")
    held = fill(rig, range(1000))
    assert len(held) > 100
    assert replace_some(rig, held, NOISE[:300], seed=1) == []
    assert replace_some(rig, held, range(500, 800), seed=2) == []
    rig.require(sorted(held))
    assert rig.live_nbytes() == sum(held.values())
    assert on_disk(rig.home) <= CAPACITY
    rig.close()
    rig = open_at(tmp_path / "home")
    assert {nbytes for _, _, nbytes in rig.tier.records()} == set(held.values())
    rig.require(sorted(held))
    free, total = free_and_used(rig)
    assert (total - free) * 4096 == sum(nbytes - 1024 for nbytes in held.values())
    rig.close()


def test_a_move_that_the_disk_refuses_loses_no_record_and_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Callable[..., None]
) -> None:
    rig = open_at(tmp_path / "home")
    held = fill(rig, range(1000))
    copied: list[int] = []

    def refused(files: object, planned: list[extent_allocator.Move]) -> None:
        copied.append(len(planned))
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tierstore.nvme.extents.copy_records", refused)
    chance = random.Random(3)
    for number in NOISE[:300]:
        while sum(held.values()) + rig.tier.record_nbytes > rig.tier.budget_nbytes:
            victim = chance.choice(sorted(held))
            del held[victim]
            rig.erase([victim])
        ack = rig.write([number])
        if copied:
            break
        held[number] = ack.nbytes
    assert copied
    assert ack.failures == ((0, Failure.IO_ERROR),)
    monkeypatch.undo()
    wait_until_writable(rig)
    assert rig.tier.sync(PATIENCE_S)
    rig.require(sorted(held))
    free, total = free_and_used(rig)
    assert (total - free) * 4096 == sum(nbytes - 1024 for nbytes in held.values())
    assert rig.write([number]).ok
    rig.close()
