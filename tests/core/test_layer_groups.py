"""Layer groups: parts that make up the page, no smaller than is worth a copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.segments import groups_of_pool, of_pool
from tierstore.layout import PageLayout
from tierstore.types import PageSpec

LLAMA = PageSpec(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="m")


def layout_of(*layers: int, head_dim: int = 7) -> PageLayout:
    return PageLayout.of(
        [
            PageSpec(num_layers=n, page_size=4, num_kv_heads=1, head_dim=head_dim, dtype="float16", model="m")
            for n in layers
        ]
    )


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 20), st.sampled_from([1, 300, 10**9])
)
def test_parts_lie_one_after_the_other_and_make_up_the_blob(
    layers: list[int], most: int, smallest: int
) -> None:
    layout = layout_of(*layers)
    groups = LayerGroups.of(layout, most, smallest)
    assert 1 <= len(groups) <= most
    parts = sorted((part for parts in groups.parts for part in parts), key=lambda part: part.offset)
    assert parts[0].offset == 0
    assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(parts))
    assert parts[-1].offset + parts[-1].nbytes == layout.blob_nbytes
    for index, spec in enumerate(layout.specs):
        covered = [layer for part in parts if part.spec == index for layer in range(part.first, part.end)]
        assert covered == list(range(spec.num_layers))
    for layer in range(max(layers)):
        held = groups.parts[groups.holding(layer)]
        assert {part.spec for part in held if part.first <= layer < part.end} == {
            index for index, count in enumerate(layers) if layer < count
        }


@pytest.mark.parametrize(
    ("tokens", "number", "smallest"), [(64, 16, 512 << 10), (16, 4, 512 << 10), (8, 2, 512 << 10), (1, 1, 0)]
)
def test_small_pages_have_fewer_groups(tokens: int, number: int, smallest: int) -> None:
    spec = PageSpec(
        num_layers=32, page_size=tokens, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="m"
    )
    groups = LayerGroups.of(PageLayout.of(spec))
    assert len(groups) == number
    assert min(part.nbytes for parts in groups.parts for part in parts) >= smallest


def test_pieces_of_the_groups_of_a_slot_are_those_of_the_slot() -> None:
    layout = PageLayout.of(LLAMA)
    whole = of_pool(1 << 20, layout)
    groups = groups_of_pool(1 << 20, layout, LayerGroups.of(layout))
    assert sum(int(found.nbytes.sum()) for found in groups) == int(whole.nbytes[0])
    assert [int(found.base[0]) for found in groups] == [(1 << 20) + int(found.offset[0]) for found in groups]
    assert {int(found.stride[0]) for found in groups} == {int(whole.stride[0])}
