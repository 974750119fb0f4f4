"""Test attention on gathered parts, and the merge of their results.

The kernels run in Triton's interpreter, and plain torch replaces SDPA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from tests.attention.cases import LAYOUTS, Case, Scene
from tests.attention.interpreted import interpreted
from tests.support import lanes
from tests.support.planting import Bug, write
from tierstore.gpu.attention import gathered
from tierstore.gpu.attention.backends import attend, for_many
from tierstore.gpu.attention.gathered import Gathered
from tierstore.gpu.attention.page_table import Paging

KERNELS_HERE = interpreted()


def plain_sdpa(
    which: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for ``gathered.sdpa`` on the CPU. As in cuDNN's SDPA, ``causal`` requires as many queries as keys."""
    group = q.shape[1] // keys.shape[1]
    scores = q[0] @ keys[0].repeat_interleave(group, 0).mT * scale
    if causal:
        assert scores.shape[1] == scores.shape[2]
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    lse = torch.logsumexp(scores.float(), -1)
    return torch.softmax(scores, -1) @ values[0].repeat_interleave(group, 0), lse


@pytest.fixture(autouse=True)
def without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "sdpa", plain_sdpa)


def steps() -> st.SearchStrategy[Case]:
    @st.composite
    def draw_one(draw: st.DrawFn) -> Case:
        lens = draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
        causal = draw(st.booleans())
        widths = [draw(st.integers(0, min(length, 20) if causal else 20)) for length in lens]
        sizes = st.sampled_from([8, 16])
        layout = draw(st.sampled_from(LAYOUTS))
        page_size, head_dim = draw(sizes), draw(sizes)
        return Case(lens, widths, causal=causal, page_size=page_size, head_dim=head_dim, layout=layout)

    return draw_one()


@given(case=steps(), tokens=st.sampled_from([1, 16, 48, 1000]))
@settings(max_examples=lanes.examples(4, 60))
def test_parts_of_any_size_merge_to_the_whole(case: Case, tokens: int) -> None:
    scene = Scene.of(case)
    scene.require_right(*scene.run(Gathered(torch.device("cpu"), tokens=tokens, kernels=KERNELS_HERE)))


def test_only_the_tokens_in_the_given_pages_are_gathered() -> None:
    scene = Scene.of(Case([90], [8], page_size=8))
    table = replace(
        scene.table, indptr=np.array([0, 3]), indices=scene.table.indices[:3], ends=np.array([24])
    )
    assert gathered.fits(replace(table, shape=replace(table.shape, dtype=torch.bfloat16)))
    way = Gathered(torch.device("cpu"), tokens=16, kernels=KERNELS_HERE)
    way.plan(table)
    out, lse = torch.empty(scene.q.shape), torch.empty(scene.q.shape[:2])
    way.run(scene.q, scene.pages, out, lse)
    want, want_lse = attend(scene.q, scene.pages, table)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


def test_memory_is_bounded_by_the_tokens_gathered_at_once() -> None:
    way = Gathered(torch.device("cpu"), tokens=32, kernels=KERNELS_HERE)
    way.plan(Scene.of(Case([200], [8])).table)
    small = way.nbytes
    way.plan(Scene.of(Case([900], [8])).table)
    assert way.nbytes == small


def test_pages_of_one_plane_are_refused() -> None:
    scene = Scene.of(Case([40], [8], value_dim=16, num_kv_heads=1))
    with pytest.raises(ValueError, match="needs pages with 2 planes, got 1"):
        scene.run(Gathered(torch.device("cpu"), kernels=KERNELS_HERE))


@pytest.mark.parametrize(
    "case",
    [
        Case([500], [400], window_left=3, dtype=torch.bfloat16),
        Case([500], [400], dtype=torch.float32),
        Case([500], [400], head_dim=24, value_dim=16, dtype=torch.bfloat16),
        Case([500], [400], head_dim=256, dtype=torch.bfloat16),
    ],
)
def test_shapes_unsupported_by_torch_kernels_are_attended_in_place(case: Case) -> None:
    table = Scene.of(case).table
    assert for_many(torch.device("cuda"), "auto", table) == "triton"
    with pytest.raises(ValueError, match='"gathered" needs window_left -1'):
        for_many(torch.device("cuda"), "gathered", table)


@pytest.mark.parametrize(
    ("tokens", "queries", "way"),
    [(131072, 64, "triton"), (131072, 4096, "gathered"), (8192, 1024, "triton"), (8192, 4096, "gathered")],
)
def test_many_queries_over_a_long_context_use_gathered_pages(tokens: int, queries: int, way: str) -> None:
    shape = Case([], num_kv_heads=8, group=4, head_dim=128, page_size=64, dtype=torch.bfloat16).shape
    pages = range(tokens // 64)
    table = Paging.of([0, queries], [0, len(pages)], pages, [64], shape)
    assert for_many(torch.device("cuda"), "auto", table) == way


BUGS = [
    Bug("parts weigh the same", "(mixed * mine + sums_here * other)", "(mixed + sums_here)"),
    Bug("the planes are one", "* kv_page + plane * kv_plane", "* kv_page"),
    Bug("the first pages again", "kv += tl.load(table + first + page)", "kv += tl.load(table + page)"),
    Bug("heads next to each other", "i // DIM % HEADS * kv_head", "i // DIM % HEADS * DIM"),
]


def require_every_layout(way: Gathered) -> None:
    for layout in LAYOUTS:
        scene = Scene.of(Case([90, 40], [12, 3], layout=layout))
        scene.require_right(*scene.run(way))


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug, tmp_path: Path) -> None:
    kernels = interpreted(write("tierstore.gpu.attention", bug, tmp_path))
    way = Gathered(torch.device("cpu"), tokens=32, kernels=kernels)
    with pytest.raises((AssertionError, InterpreterError)):
        require_every_layout(way)
