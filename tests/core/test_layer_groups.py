"""Tests of layer groups: their parts make up the page, and none is too small to be worth a copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.gpu.addresses import pool_group_segments, pool_segments
from tierstore.gpu.layer_groups import Cut, LayerGroups
from tierstore.page import PageLayout, PageSpec

LLAMA = PageSpec(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="m")


def layout_of(*layers: int, head_dim: int = 7) -> PageLayout:
    return PageLayout.of(
        [
            PageSpec(num_layers=n, page_size=4, num_kv_heads=1, head_dim=head_dim, dtype="float16", model="m")
            for n in layers
        ]
    )


def require_groups_make_up_the_blob(groups: LayerGroups, layout: PageLayout) -> None:
    parts = sorted((part for parts in groups.parts for part in parts), key=lambda part: part.offset)
    assert parts[0].offset == 0
    assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(parts))
    assert parts[-1].offset + parts[-1].nbytes == layout.blob_nbytes
    for index, spec in enumerate(layout.specs):
        covered = [layer for part in parts if part.spec == index for layer in range(part.first, part.end)]
        assert covered == list(range(spec.num_layers))
    for layer in range(max(spec.num_layers for spec in layout.specs)):
        held = groups.parts[groups.holding(layer)]
        assert {part.spec for part in held if part.first <= layer < part.end} == {
            index for index, spec in enumerate(layout.specs) if layer < spec.num_layers
        }


LAYERS = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@given(LAYERS, st.integers(1, 20), st.sampled_from([1, 300, 10**9]))
def test_consecutive_parts_make_up_the_blob(layers: list[int], most: int, smallest: int) -> None:
    layout = layout_of(*layers)
    groups = LayerGroups.of(layout, most, smallest)
    assert 1 <= len(groups) <= most
    require_groups_make_up_the_blob(groups, layout)


@given(LAYERS, st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([1, 300, 10**9]))
def test_unequal_groups_make_up_the_blob_too(layers: list[int], shares: list[int], smallest: int) -> None:
    layout = layout_of(*layers)
    groups = LayerGroups.by_shares(layout, [Cut(tuple(shares), smallest)])
    assert len(groups) in (1, len(shares))
    assert all(groups.parts)
    require_groups_make_up_the_blob(groups, layout)
    sizes = [sum(part.nbytes for part in parts) for parts in groups.parts]
    assert groups.divide(layout.blob_nbytes) == sizes
    assert groups.divide(3 * layout.blob_nbytes) == [3 * size for size in sizes]
    if len(groups) > 1:
        assert all(size >= smallest * len(parts) for size, parts in zip(sizes, groups.parts, strict=True))


@pytest.mark.parametrize(
    ("tokens", "starts"), [(64, (0, 20)), (32, (0, 20)), (16, (0, 16)), (8, (0,))], ids=str
)
def test_first_split_with_large_groups_is_used(tokens: int, starts: tuple[int, ...]) -> None:
    spec = PageSpec(
        num_layers=32, page_size=tokens, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="m"
    )
    groups = LayerGroups.by_shares(PageLayout.of(spec), [Cut((5, 3), 1 << 20), Cut((1, 1), 1 << 20)])
    assert groups.starts == starts


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
    whole = pool_segments(1 << 20, layout)
    groups = pool_group_segments(1 << 20, layout, LayerGroups.of(layout))
    assert sum(int(found.nbytes.sum()) for found in groups) == int(whole.nbytes[0])
    assert [int(found.base[0]) for found in groups] == [(1 << 20) + int(found.offset[0]) for found in groups]
    assert {int(found.stride[0]) for found in groups} == {int(whole.stride[0])}
