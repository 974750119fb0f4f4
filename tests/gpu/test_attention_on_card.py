"""Tests of attention over pages on a GPU: all backends agree with float64, and a recorded graph follows new plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.attention.cases import Case, Scene, cases
from tierstore.gpu.attention.gathered import Gathered, Sdpa
from tierstore.gpu.attention.in_place import InPlace
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda:0")

LLAMA = Case([3000, 0, 64, 1], num_kv_heads=8, group=4, head_dim=128, page_size=64, dtype=torch.bfloat16)
GEMMA = Case([1700, 17], num_kv_heads=1, group=4, head_dim=256, window_left=511, dtype=torch.bfloat16)
SMOL = Case([700, 17], num_kv_heads=3, group=3, head_dim=64)
LATENT = Case([1700, 17], num_kv_heads=1, group=16, head_dim=576, value_dim=512, dtype=torch.bfloat16)


def filling(case: Case, *widths: int) -> Case:
    return replace(case, widths=widths)


DECODING = {"llama": LLAMA, "gemma": GEMMA, "smol": SMOL, "latent": LATENT}
FILLING = {
    "llama": filling(LLAMA, 300, 0, 64, 1),
    "gemma": filling(GEMMA, 300, 5),
    "smol": filling(SMOL, 70, 17),
    "latent": filling(LATENT, 70, 17),
}


@pytest.mark.parametrize(
    "case",
    [*DECODING.values(), *FILLING.values()],
    ids=[*DECODING, *(f"{name}, filling" for name in FILLING)],
)
def test_kernels_in_place_are_right(case: Case) -> None:
    scene = Scene.of(case, "cuda:0")
    scene.require_right(*scene.run(InPlace(CARD)))


@pytest.mark.parametrize("sdpa", ["flash", "cudnn"])
@pytest.mark.parametrize("causal", [True, False])
def test_gathered_pages_are_attended_in_parts_of_any_number(sdpa: Sdpa, causal: bool) -> None:
    case = filling(LLAMA, 300, 0, 64, 1)
    scene = Scene.of(replace(case, causal=causal), "cuda:0")
    for tokens in (64, 1024, 100_000):
        scene.require_right(*scene.run(Gathered(CARD, sdpa=sdpa, tokens=tokens)))


@given(case=cases([torch.bfloat16, torch.float16], many=False, largest=700))
@settings(max_examples=12, deadline=None)
def test_one_query_a_sequence_of_any_shape(case: Case) -> None:
    scene = Scene.of(case, "cuda:0")
    scene.require_right(*scene.run(InPlace(CARD)))


@given(case=cases([torch.bfloat16, torch.float32], many=True, largest=700))
@settings(max_examples=12, deadline=None)
def test_many_queries_of_any_shape(case: Case) -> None:
    scene = Scene.of(case, "cuda:0")
    scene.require_right(*scene.run(InPlace(CARD)))


def test_recorded_graph_follows_the_last_plan() -> None:
    way = InPlace(CARD, max_pages=200)
    scene = Scene.of(replace(LLAMA, lens=[9000, 0, 64]), "cuda:0")
    scene.require_right(*scene.run(way))
    size = (3, scene.table.shape.num_qo_heads, scene.table.shape.head_dim)
    out, lse = torch.empty(size, device=CARD), torch.empty(size[:2], device=CARD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way.run(scene.q, scene.pages, out, lse)
    for lens in ([8000, 200, 65], [0, 0, 0], [3000, 5000, 1], [1, 1, 8000]):
        other = Scene.of(replace(LLAMA, lens=lens), "cuda:0")
        scene.pages[: len(other.pages)] = other.pages  # the recorded graph reads these tensors
        scene.q.copy_(other.q)
        way.plan(other.table)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        other.require_right(out, lse)


def test_decode_and_prefill_agree_and_report_their_backend() -> None:
    case = replace(LLAMA, lens=[3000, 777])
    scene = Scene.of(case, "cuda:0")
    table, shape = scene.table, scene.table.shape
    last = (table.kv_lens - 1) % shape.page_size + 1
    sizes = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
    one, many = PagedDecode("cuda:0"), PagedPrefill("cuda:0")
    one.plan(table.indptr, table.indices, last, *sizes, o_data_type=torch.float32)
    many.plan(np.arange(3), table.indptr, table.indices, last, *sizes, causal=True, o_data_type=torch.float32)
    assert (one.backend, many.backend) == ("triton", "triton")
    first, second = one.run(scene.q, scene.pages), many.run(scene.q, scene.pages)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    torch.testing.assert_close(first, second)
