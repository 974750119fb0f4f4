"""Test ``plan`` and ``run`` on the CPU: the reference against torch's attention, merged states, and rejected input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from tests.attention.cases import Case, Scene, cases
from tierstore.gpu.attention.backends import attend, gather
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill, merge_states


def by_sdpa(scene: Scene) -> torch.Tensor:
    """Compute each sequence's attention with torch's SDPA in float64, over gathered keys and values, with a mask."""
    table, shape = scene.table, scene.table.shape
    found = []
    for row in range(table.batch):
        q = scene.q[table.qo_indptr[row] : table.qo_indptr[row + 1]].double()
        first, length = int(table.first_seen[row]), int(table.kv_lens[row])
        if not len(q) or not length:
            found.append(q.new_zeros(len(q), shape.num_qo_heads, shape.head_dim_vo))
            continue
        planes = gather(scene.pages, table, row, first, length).double()
        keys, values = planes[0].transpose(0, 1), planes[-1][..., : shape.head_dim_vo].transpose(0, 1)
        mask = torch.ones(len(q), length, dtype=torch.bool)
        if shape.causal:
            mask = mask.tril(length - len(q))
        if shape.window_left >= 0:
            mask = mask.triu(length - len(q) - shape.window_left)
        out = scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, mask[:, first:], scale=shape.sm_scale, enable_gqa=True
        )
        found.append(out.transpose(0, 1))
    return torch.cat(found)


@given(case=cases([torch.float32], many=True))
@settings(max_examples=25, deadline=None)
def test_the_reference_is_what_torch_computes(case: Case) -> None:
    scene = Scene.of(case)
    out, _ = attend(scene.q, scene.pages, scene.table, torch.float64)
    torch.testing.assert_close(out, by_sdpa(scene), rtol=1e-9, atol=1e-9)


@given(case=cases([torch.float32, torch.bfloat16], many=False))
@settings(max_examples=15, deadline=None)
def test_decoding_is_right_on_the_cpu(case: Case) -> None:
    scene = Scene.of(case)
    table, shape = scene.table, scene.table.shape
    way = PagedDecode("cpu")
    way.plan(
        table.indptr, table.indices, [(n - 1) % shape.page_size + 1 for n in table.kv_lens],
        shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size,
        head_dim_vo=shape.head_dim_vo, window_left=shape.window_left, sm_scale=shape.sm_scale,
        q_data_type=shape.dtype, o_data_type=torch.float32,
    )  # fmt: skip
    found = way.run(scene.q, scene.pages, return_lse=True)
    assert isinstance(found, tuple)
    scene.require_right(*found)
    assert way.backend == "reference"


def test_states_over_two_sets_of_keys_merge_to_that_over_both() -> None:
    scene = Scene.of(Case([64], num_kv_heads=1))
    both = attend(scene.q, scene.pages, scene.table, torch.float64)
    table, shape = scene.table, scene.table.shape
    parts = []
    for pages in (slice(0, 1), slice(1, 4), slice(0, 0)):
        slots = table.indices[pages]
        part = type(table).of(None, [0, len(slots)], slots, [16], shape)
        parts.append(attend(scene.q, scene.pages, part, torch.float64))
    out, lse = merge_states(torch.stack([o for o, _ in parts]), torch.stack([x for _, x in parts]))
    torch.testing.assert_close(out, both[0])
    torch.testing.assert_close(lse, both[1])


def test_empty_states_merge_to_an_empty_state() -> None:
    out, lse = merge_states(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    assert not out.any()
    assert (lse == -torch.inf).all()


RIGHT: dict[str, Any] = {
    "indptr": [0, 2],
    "indices": [4, 1],
    "last_page_len": [3],
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "page_size": 16,
    "q_data_type": torch.float32,
}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"indptr": [0, 3]}, "indptr"),
        ({"indptr": [1, 2]}, "indptr"),
        ({"indptr": [0, 2, 1]}, "indptr"),
        ({"last_page_len": [0]}, "last_page_len"),
        ({"last_page_len": [17]}, "last_page_len"),
        ({"last_page_len": [2.5]}, "last_page_len"),
        ({"indices": torch.tensor([4.0, 1.0])}, "indices"),
        ({"num_qo_heads": 4.0}, "num_qo_heads"),
        ({"window_left": 1.5}, "window_left"),
        ({"num_qo_heads": 3}, "num_qo_heads"),
        ({"page_size": 0}, "page_size"),
        ({"head_dim_vo": 17}, "head_dim_vo"),
        ({"window_left": -2}, "window_left"),
        ({"q_data_type": torch.float64}, "dtype"),
    ],
)
def test_invalid_plan_is_refused_and_the_previous_one_stays(wrong: dict[str, Any], what: str) -> None:
    way = PagedDecode("cpu")
    way.plan(**RIGHT)
    before = way.planned
    with pytest.raises(ValueError, match=rf"{what} must be .*, got "):
        way.plan(**{**RIGHT, **wrong})
    assert way.planned is before


@pytest.mark.parametrize(
    ("q", "pages", "what"),
    [
        (torch.zeros(2, 4, 16), torch.zeros(5, 2, 16, 2, 16), "the shape of q"),
        (torch.zeros(1, 4, 16).half(), torch.zeros(5, 2, 16, 2, 16), "the dtype of q"),
        (torch.zeros(1, 4, 16), torch.zeros(5, 2, 8, 2, 16), "the shape of paged_kv_cache"),
        (torch.zeros(1, 4, 16), torch.zeros(5, 2, 16, 2, 16).half(), "the dtype of paged_kv_cache"),
        (torch.zeros(1, 4, 16), torch.zeros(5, 2, 16, 16, 2).mT, "the last stride"),
    ],
)
def test_tensors_other_than_planned_are_refused(q: torch.Tensor, pages: torch.Tensor, what: str) -> None:
    way = PagedDecode("cpu")
    way.plan(**RIGHT)
    with pytest.raises(ValueError, match=what):
        way.run(q, pages)


def test_running_before_planning_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan yet"):
        PagedPrefill("cpu").run(torch.zeros(1, 4, 16), torch.zeros(5, 2, 16, 2, 16))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"causal": True, "qo_indptr": [0, 20]}, "no more queries than tokens"),
        ({"window_left": 3}, "causal"),
        ({"qo_indptr": [0, 3, 4]}, "qo_indptr"),
    ],
)
def test_impossible_prefill_plans_are_refused(changed: dict[str, Any], what: str) -> None:
    right = {
        "qo_indptr": [0, 4], "paged_kv_indptr": [0, 2], "paged_kv_indices": [4, 1],
        "paged_kv_last_page_len": [3], "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16, "page_size": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=what):
        PagedPrefill("cpu").plan(**{**right, **changed})


@pytest.mark.parametrize("way", [PagedDecode, PagedPrefill])
@pytest.mark.parametrize("name", ["triton", "gathered", "flash"])
def test_unavailable_backends_are_refused_by_name_before_a_plan(way: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf'backend .*"{name}"'):
        way("cpu", backend=name)


@pytest.mark.parametrize(
    ("indptr", "what"), [([0, 2, 4], r"at most max_pages \(3\) pages, got 4"), ([0, 1], "got a batch of 1")]
)
def test_a_plan_beyond_the_buffers_of_a_graph_is_refused_on_the_cpu_too(indptr: list[int], what: str) -> None:
    decode = PagedDecode("cpu", max_pages=3)
    decode.plan([0, 1, 3], range(3), [1, 1], 4, 2, 16, 8, q_data_type=torch.float32)
    before = decode.planned
    with pytest.raises(ValueError, match=what):
        decode.plan(
            indptr, range(indptr[-1]), [1] * (len(indptr) - 1), 4, 2, 16, 8, q_data_type=torch.float32
        )
    assert decode.planned is before


def test_decoding_never_gathers() -> None:
    with pytest.raises(ValueError, match='cannot decode: use "auto", "reference" or "triton"'):
        PagedDecode("cpu", backend="gathered")


@pytest.mark.parametrize("way", [PagedDecode, PagedPrefill])
def test_missing_gpu_is_refused_by_name_with_those_present(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r'device must be one of cpu on this machine, got "cuda:0"$'):
        way("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r'one of cpu, cuda:0, cuda:1 on this machine, got "cuda:2"$'):
        way("cuda:2")
    way("cuda:1")


def test_results_are_written_to_out_and_lse_only() -> None:
    way = PagedDecode("cpu")
    way.plan(**RIGHT, o_data_type=torch.float32)
    q, pages = torch.randn(1, 4, 16), torch.randn(5, 2, 16, 2, 16)
    want = way.run(q, pages)
    assert isinstance(want, torch.Tensor)
    out, lse = torch.empty(1, 4, 16), torch.empty(1, 4)
    assert way.run(q, pages, out=out, lse=lse) is out
    torch.testing.assert_close(out, want)
    for wrong in (torch.empty(1, 4, 8), torch.empty(1, 4, 16).half(), torch.empty(1, 16, 4).mT):
        with pytest.raises(ValueError, match="out must be a contiguous tensor"):
            way.run(q, pages, out=wrong)
