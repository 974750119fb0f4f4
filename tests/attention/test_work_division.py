"""Test how a step is divided among programs: each row sees every visible token exactly once, for all sizes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cases import Case
from tests.support import lanes
from tests.support.planting import Bug, load
from tierstore.gpu.attention import in_place
from tierstore.gpu.attention.page_table import Paging


def table_of(case: Case) -> Paging:
    counts = [-(-length // case.page_size) for length in case.lens]
    last = [(length - 1) % case.page_size + 1 if length else 0 for length in case.lens]
    starts = np.concatenate([[0], np.cumsum(counts)])
    queries = None if case.widths is None else np.concatenate([[0], np.cumsum(case.widths)])
    return Paging.of(queries, starts, list(range(sum(counts))), last, case.shape)


@st.composite
def steps(draw: st.DrawFn) -> Case:
    lens = draw(st.lists(st.integers(0, 900), min_size=1, max_size=5))
    causal = draw(st.booleans())
    widths = [draw(st.integers(0, min(length, 50) if causal else 50)) for length in lens]
    return Case(
        lens=lens,
        widths=draw(st.sampled_from([None, widths])) if causal else widths,
        group=draw(st.sampled_from([1, 3, 20])),
        causal=causal,
        window_left=draw(st.sampled_from([-1, 0, 40])) if causal else -1,
    )


def require_whole(case: Case, work: in_place.Work, block_m: int, block_n: int) -> None:
    """Require that each row's items exactly cover the tokens it sees, and that no two rows share a partial result."""
    table = table_of(case)
    group = table.shape.group
    written: Counter[tuple[int, int]] = Counter()
    seen: dict[int, list[tuple[int, int]]] = {}
    for place, length, first, end, query0, width, row0, part, splits in work.items.tolist():
        assert row0 % block_m == 0
        sequence = int(np.searchsorted(table.qo_indptr, query0, side="right")) - 1
        assert (place, length) == (table.indptr[sequence], table.kv_lens[sequence])
        for row in range(row0, min(row0 + block_m, width * group)):
            query = row // group
            seen.setdefault(query0 * group + row, []).append((first, end))
            assert splits == work.queries[query0 + query, 1]
            if splits > 1:
                written[part + query * splits, row % group] += 1
    assert set(written.values()) <= {1}
    assert {part for part, _ in written} == set(range(work.num_parts))
    for first_part, splits in work.queries.tolist():
        assert splits <= 1 or all((first_part + i, 0) in written for i in range(splits))
    for sequence in range(table.batch):
        for number in range(int(table.widths[sequence])):
            query = int(table.qo_indptr[sequence]) + number
            for row in range(query * group, (query + 1) * group):
                require_tiled(table, sequence, number, sorted(seen.get(row, [])), block_n)
    assert work.merges == bool((work.queries[:, 1] != 1).any())


def require_tiled(table: Paging, row: int, number: int, ranges: list[tuple[int, int]], block_n: int) -> None:
    shape = table.shape
    place = int(table.kv_lens[row] - table.widths[row]) + number
    end = min(place + 1, int(table.kv_lens[row])) if shape.causal else int(table.kv_lens[row])
    first = max(0, place - shape.window_left) if shape.window_left >= 0 else 0
    full = [(a, b) for a, b in ranges if a < b]
    if not table.kv_lens[row]:
        assert not full
        return
    assert full[0][0] <= first
    assert full[-1][1] >= end
    assert all(left[1] == right[0] for left, right in pairwise(full))
    assert all(a % block_n == 0 for a, _ in full[1:])


BLOCKS = st.sampled_from([(16, 16), (16, 64), (32, 32)])


def check(module: object, case: Case, blocks: tuple[int, int], programs: int) -> None:
    divide, room = vars(module)["divide"], vars(module)["Room"]
    require_whole(case, divide(table_of(case), *blocks, room(programs)), *blocks)


@given(case=steps(), blocks=BLOCKS, programs=st.sampled_from([1, 8, 264]))
@settings(max_examples=lanes.examples(30, 150), deadline=None)
def test_every_row_attends_to_its_visible_tokens_once(
    case: Case, blocks: tuple[int, int], programs: int
) -> None:
    check(in_place, case, blocks, programs)


@given(
    lens=st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    programs=st.integers(1, 300),
    group=st.sampled_from([1, 20]),
)
@settings(max_examples=lanes.examples(25, 100), deadline=None)
def test_work_items_fit_the_maximum_for_that_many_sequences(
    lens: list[int], programs: int, group: int
) -> None:
    table = table_of(Case(lens, group=group))
    most = in_place.most_items(len(lens), -(-group // 16), table.shape.num_kv_heads, programs)
    work = in_place.divide(table, 16, 16, in_place.Room(programs, most))
    assert len(work.items) <= most
    assert work.num_parts <= most


def test_one_long_sequence_fills_the_programs_once() -> None:
    case = Case([131072], num_kv_heads=8, group=4, head_dim=128, page_size=64)
    work = in_place.divide(table_of(case), 16, 64, in_place.Room(264))
    assert 0.95 <= len(work.items) * 8 / 264 <= 1


BUGS = [
    Bug(
        "the last tile is left out",
        "-(-(table.ends - start) // block_n)",
        "(table.ends - start) // block_n",
    ),
    Bug("splits overlap", "start[of] + split * step", "start[of] + split * step - 16"),
    Bug("sequences share parts", "np.cumsum(parts) - parts", "np.cumsum(parts) * 0"),
    Bug(
        "causal ends one short",
        "length - width + last_row // group + 1",
        "length - width + last_row // group",
    ),
    Bug(
        "blocks of rows too few",
        "-(-table.widths * table.shape.group // block_m)",
        "(table.widths // block_m)",
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    planted = load(in_place, bug)

    @given(case=steps(), blocks=BLOCKS, programs=st.sampled_from([1, 8, 264]))
    @settings(max_examples=150, deadline=None, database=None)
    def search(case: Case, blocks: tuple[int, int], programs: int) -> None:
        check(planted, case, blocks, programs)

    with pytest.raises((AssertionError, IndexError, ValueError, ExceptionGroup)):
        search()
