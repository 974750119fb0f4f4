"""Test the kernels that read pages in place, in Triton's interpreter, against results in float64.

Also tests that planted bugs are noticed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from tests.attention.cases import Case, Scene, cases
from tests.attention.interpreted import interpreted
from tests.support import lanes
from tests.support.planting import Bug, write
from tierstore.gpu.attention.in_place import InPlace, Tiles

CPU = torch.device("cpu")
KERNELS_HERE = interpreted()
SMALL = Tiles(16, 16, 4, 1, 4)
"""Tiles so small that even short sequences have several splits, each with several tiles."""
MANY_SPLITS = Tiles(16, 16, 4, 1, 40)

NAMED = {
    "a partial last page": Case([70, 33]),
    "a sequence of nothing": Case([0, 5, 0]),
    "many splits": Case([700], group=1),
    "heads beyond a block": Case([40], num_kv_heads=1, group=20),
    "a window": Case([90, 20], window_left=19, page_size=32),
    "latents": Case([50], num_kv_heads=1, group=16, head_dim=24, value_dim=16),
    "new tokens": Case([90, 40, 7], [21, 40, 1], page_size=32),
    "new tokens in a window": Case([90, 40], [21, 40], window_left=9),
    "not causal": Case([90, 40], [21, 3], causal=False),
    "an engine's layout": Case([70, 33], layout="LKBNHD"),
}


def require_right(case: Case, kernels: ModuleType = KERNELS_HERE, tiles: Tiles | None = SMALL) -> None:
    scene = Scene.of(case)
    scene.require_right(*scene.run(InPlace(CPU, kernels=kernels, tiles=tiles)))


def require_all_right(kernels: ModuleType = KERNELS_HERE) -> None:
    for case in NAMED.values():
        require_right(case, kernels)
    # This case has more parts than are merged at once.
    require_right(Case([600], num_kv_heads=1, group=1, head_dim=512), kernels, MANY_SPLITS)


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_results_are_those_of_float64(case: Case) -> None:
    require_right(case)


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_heads_that_are_not_a_power_of_two_use_padded_tiles(head_dim: int) -> None:
    case = Case([300, 33], num_kv_heads=1, group=3, head_dim=head_dim, page_size=48, dtype=torch.bfloat16)
    require_right(case, tiles=None)


@given(
    case=cases([torch.float32, torch.float16, torch.bfloat16], many=False),
    tiles=st.sampled_from([SMALL, None]),
)
@settings(max_examples=lanes.examples(3, 60))
def test_one_query_a_sequence_of_any_shape(case: Case, tiles: Tiles | None) -> None:
    require_right(case, tiles=tiles)


@given(
    case=cases([torch.float32], many=True, largest=100),
    tiles=st.sampled_from([Tiles(16, 16, 4, 1, 4), Tiles(32, 32, 4, 1, 4)]),
)
@settings(max_examples=lanes.examples(3, 60))
def test_many_queries_of_any_shape(case: Case, tiles: Tiles) -> None:
    require_right(case, tiles=tiles)


def test_next_run_follows_a_plan_into_the_same_buffers() -> None:
    way = InPlace(CPU, kernels=KERNELS_HERE, tiles=SMALL, max_pages=40)
    first = Scene.of(Case([300, 2, 0]))
    first.require_right(*first.run(way))
    places = (way._numbers.data_ptr(), way._parts.results.data_ptr(), way._items.shape)  # type: ignore[union-attr]
    for lens in ([5, 0, 400], [0, 0, 0], [100, 100, 100]):
        scene = Scene.of(Case(lens))
        scene.require_right(*scene.run(way))
        assert (way._numbers.data_ptr(), way._parts.results.data_ptr(), way._items.shape) == places  # type: ignore[union-attr]


def test_a_plan_that_does_not_fit_fixed_buffers_changes_nothing() -> None:
    way = InPlace(CPU, kernels=KERNELS_HERE, tiles=SMALL, max_pages=40)
    right = Scene.of(Case([300, 2]))
    before = right.run(way)
    for case in (Case([700, 1]), Case([30]), Case([30, 1], head_dim=32), Case([1, 2], [1, 2])):
        with pytest.raises(ValueError, match="max_pages"):
            way.plan(Scene.of(case).table)
    after = right.run_again(way)
    assert torch.equal(before[0], after[0])


BUGS = [
    Bug(
        "one token too many",
        "inside = (token >= first) & (token < end)",
        "inside = (token >= first) & (token <= end)",
    ),
    Bug(
        "one token too few",
        "inside = (token >= first) & (token < end)",
        "inside = (token >= first) & (token < end - 1)",
    ),
    Bug("no scale", "    score *= scale\n", ""),
    Bug(
        "parts weigh the same",
        "weight, decay = tl.exp(logs - floor), tl.exp(top - floor)",
        "weight, decay = tl.exp(logs * 0), tl.exp(top - floor)",
    ),
    Bug(
        "the first parts are not decayed",
        "mixed = mixed * decay + tl.reduce(weight[:, None] * found",
        "mixed = mixed + tl.reduce(weight[:, None] * found",
    ),
    Bug(
        "a sum is not decayed",
        "total = total * decay + tl.reduce(weight, 1, added)",
        "total = total + tl.reduce(weight, 1, added)",
    ),
    Bug(
        "queries see the token after theirs",
        "token[None, :] <= place[:, None]",
        "token[None, :] <= place[:, None] + 1",
    ),
    Bug(
        "a window one too wide",
        "token[None, :] >= place[:, None] - window",
        "token[None, :] >= place[:, None] - window - 1",
    ),
    Bug(
        "tiles that some rows do not see whole",
        "length - width + row0 // GROUP + 1",
        "length - width + row0 // GROUP + BLOCK_N",
    ),
    Bug("the page of the tile before", "pages = following", "pages = pages"),
    Bug(
        "all heads read the first one's",
        "keys = kv + head.to(tl.int64) * kv_head",
        "keys = kv + head.to(tl.int64) * 0",
    ),
    Bug(
        "keys for values",
        "value = tl.load(rows + kv_plane + dim[None, :], mask=known",
        "value = tl.load(rows + dim[None, :], mask=known",
    ),
    Bug(
        "logarithms of two",
        "(top + tl.log2(tl.where(nothing, 1.0, total))) * _LN2",
        "(top + tl.log2(tl.where(nothing, 1.0, total)))",
    ),
    Bug(
        "queries without keys are left as they were",
        "if splits == 1:\n        return",
        "if splits <= 1:\n        return",
    ),
    Bug(
        "the rest of a latent is left out",
        "score = tl.dot(qr, tl.trans(more), score",
        "tl.dot(qr, tl.trans(more), score",
    ),
]


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug, tmp_path: Path) -> None:
    kernels = interpreted(write("tierstore.gpu.attention", bug, tmp_path))
    with pytest.raises((AssertionError, InterpreterError)):
        require_all_right(kernels)
