"""Tests of block tables at page boundaries, and with a real store: rollback, preemption and copy-on-write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    fill,
    read,
    require_nothing_held,
    tier_stats,
    tiers,
)
from tests.support.stalls import OUT
from tierstore.block_table import NO_PAGE, BlockTable, PageCopy, PrivateSlots
from tierstore.types import Tier

SIZE = SPEC.page_size  # 4


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=4, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def table_of(num_tokens: int, *slots: int) -> BlockTable:
    """Return a table of a new family, with ``num_tokens`` written tokens in these slots."""
    table = BlockTable(SIZE)
    assert table.extend(num_tokens, slots) == []
    table.advance(num_tokens)
    return table


def test_a_page_is_taken_when_its_first_token_is_written_and_not_before() -> None:
    table = BlockTable(SIZE)
    assert [table.missing_slots(stop) for stop in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    table.extend(4, [7])
    table.advance(4)
    assert [table.missing_slots(stop) for stop in (4, 5)] == [0, 1]
    assert [table.place(position) for position in (0, 3)] == [(7, 0), (7, 3)]


def test_truncate_to_a_boundary_keeps_the_page_before_it_and_frees_the_one_after() -> None:
    table = table_of(9, 1, 2, 3)
    assert table.truncate(8) == [3]
    assert table.truncate(5) == []
    assert table.truncate(4) == [2]
    assert table.truncate(0) == [1]
    assert (table.slots, len(table.private)) == ([], 0)


def test_truncate_frees_slots_that_were_reserved_and_never_written() -> None:
    table = table_of(4, 1)
    table.extend(12, [2, 3])
    assert table.truncate(4) == [2, 3]
    assert table.slots == [1]


def test_rejected_drafts_that_crossed_a_boundary_leave_no_stale_slot(bench: Bench) -> None:
    # F063: append 5 tokens over a boundary, truncate them, reuse the freed page, save and load both pages
    store, mine, others = bench.store, chain(2, "mine"), chain(1, "others")
    table = BlockTable(SIZE)
    table.extend(3, store.allocate(1))
    table.advance(3)
    table.extend(8, store.allocate(table.missing_slots(8)))
    table.advance(8)  # five drafted tokens
    freed = table.truncate(3)
    store.free(freed)
    reused = store.allocate(3)  # all remaining HBM slots, including the freed one
    assert len(freed) == 1
    assert freed[0] in reused
    assert freed[0] not in table.slots
    assert freed[0] not in table.private

    fill(store, others, freed)
    store.put(others, freed)
    fill(store, mine[:1], table.slots)
    table.advance(4)
    assert list(table.sealable()) == [0]
    assert table.seal(0, store.put(mine[:1], table.slots), table.generation)
    assert table.clear() == []
    store.free([slot for slot in reused if slot not in freed])
    for tier in (Tier.HOST, Tier.NVME):
        store.demote([*mine[:1], *others], tier)
        assert store.drain(PATIENCE_S)
        assert [read(store, mine[:1]), read(store, others)] == [1, 1]
    require_nothing_held(store)


def test_seal_after_a_preemption_does_not_affect_the_reused_table(bench: Bench) -> None:
    # F041: put with a stalled writer, preempt, resume the same sequence and put it again; then both puts end
    store, keys = bench.store, chain(2)
    bench.copies.hold(OUT)
    table = BlockTable(SIZE)
    table.extend(8, store.allocate(2))
    table.advance(8)
    first_life = table.generation
    fill(store, keys, table.slots)
    sealed = store.put(keys, table.slots)  # the test holds back the save
    assert table.seal(0, sealed, first_life)
    assert table.clear() == []

    table.extend(8, store.allocate(2))
    table.advance(8)
    second = list(table.slots)
    assert not table.seal(0, sealed, first_life)
    assert (table.slots, len(table.private)) == (second, 2)
    fill(store, keys, second)
    with store.acquire([]) as lease:
        assert table.seal(0, store.put(keys, second, lease=lease), table.generation)
        assert table.slots == sealed  # the slots of the first put; the store freed those of the second
        bench.open_gates()
        bench.settle()
        assert table.clear() == []
    assert read(store, keys) == 2
    assert tier_stats(store, Tier.HBM)["owned"] == 0
    require_nothing_held(store)


def test_writing_to_a_shared_page_copies_it_and_the_last_holder_writes_in_place() -> None:
    table = table_of(6, 1, 2)
    fork = table.fork()
    assert (table.missing_slots(7), fork.missing_slots(7)) == (1, 1)
    assert fork.extend(7, [3]) == [PageCopy(2, 3)]
    assert (table.slots, fork.slots) == ([1, 2], [1, 3])
    assert table.missing_slots(7) == 0
    assert table.extend(7, []) == []


def test_a_fork_at_a_boundary_copies_nothing() -> None:
    table = table_of(8, 1, 2)
    fork = table.fork()
    assert fork.extend(9, [3]) == []
    assert table.extend(9, [4]) == []
    assert (table.slots, fork.slots) == ([1, 2, 4], [1, 2, 3])


def test_shared_slots_are_freed_once_by_the_last_holder() -> None:
    table = table_of(6, 1, 2)
    fork, other = table.fork(), table.fork()
    assert table.clear() == []
    assert fork.truncate(4) == []
    assert other.clear() == [2]
    assert fork.clear() == [1]
    assert [each.clear() for each in (table, fork, other)] == [[], [], []]
    assert len(table.private) == 0


def test_a_sealed_page_is_never_written_even_by_its_only_reader() -> None:
    """The last token of a fully cached prompt is computed on a copy of its page."""
    table = BlockTable(SIZE)
    table.reuse([11, 12])
    assert table.truncate(7) == []  # the store frees sealed pages
    assert table.missing_slots(8) == 1
    assert table.extend(8, [3]) == [PageCopy(12, 3)]
    assert table.slots == [11, 3]
    table.advance(8)
    assert list(table.sealable()) == [1]


def test_an_overwrite_copies_each_page_that_others_read() -> None:
    table = table_of(10, 1, 2, 3)
    fork = table.fork()
    assert fork.missing_slots(10, first=3) == 3
    assert {copy.src for copy in fork.extend(10, [4, 5, 6], first=3)} == {1, 2, 3}
    assert not set(table.slots) & set(fork.slots)


def test_a_sealed_page_may_be_returned_in_another_slot() -> None:
    table = table_of(9, 1, 2, 3)
    assert table.seal(0, [21, 2], table.generation)
    assert table.slots == [21, 2, 3]
    assert table.clear() == [3]


def test_a_page_that_others_point_at_is_not_sealed() -> None:
    table = table_of(8, 1, 2)
    fork = table.fork()
    assert list(table.sealable()) == []
    with pytest.raises(ValueError, match="is shared with another table"):
        table.seal(0, [1], table.generation)
    fork.clear()
    assert list(table.sealable()) == [0, 1]
    assert list(table.sealable(7)) == [0]


def test_the_window_drops_a_page_when_its_last_token_is_behind_it() -> None:
    table = table_of(9, 1, 2, 3)
    assert table.drop_before(3) == []
    assert table.drop_before(4) == [1]
    assert table.drop_before(7) == []
    assert table.drop_before(100) == [2]  # the page that is not full yet is kept
    assert (table.slots, table.first_page) == ([NO_PAGE, NO_PAGE, 3], 2)
    with pytest.raises(ValueError, match="position 7"):
        table.place(7)
    with pytest.raises(ValueError, match=r"must be between 8 .* and 9"):
        table.truncate(7)
    assert table.truncate(8) == [3]
    assert table.clear() == []


def test_a_window_that_moves_on_in_one_fork_keeps_the_pages_of_the_other() -> None:
    table = table_of(8, 1, 2)
    fork = table.fork()
    assert table.drop_before(8) == []
    assert fork.drop_before(4) == [1]
    assert fork.place(4) == (2, 0)
    assert fork.clear() == [2]


def test_slots_that_are_owned_already_are_refused_and_nothing_changes() -> None:
    private = PrivateSlots()
    table, other = BlockTable(SIZE, private), BlockTable(SIZE, private)
    table.extend(4, [1])
    for wrong in ([2, 1], [1, 2], [2, 2], [2], [2, 3, 4]):
        with pytest.raises(ValueError, match="slots"):
            other.extend(8, wrong)
        assert (other.slots, len(private)) == ([], 1)
    with pytest.raises(ValueError, match="slot 1 is already owned by this family"):
        private.take(1)


def test_only_an_empty_table_begins_with_pages_of_the_store() -> None:
    table = table_of(1, 1)
    with pytest.raises(ValueError, match="needs an empty table"):
        table.reuse([2])
    table.clear()
    table.reuse([2], first_page=1)
    assert (table.slots, table.num_tokens) == ([NO_PAGE, 2], 8)
