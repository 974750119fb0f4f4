"""Tests of the layout of a page: blobs are aligned, in order and disjoint. ``page_nbytes`` excludes padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.page import ALIGNMENT, PageLayout, PageSpec


def spec(**changes: Any) -> PageSpec:
    values: dict[str, Any] = {
        "num_layers": 2,
        "page_size": 16,
        "num_kv_heads": 1,
        "head_dim": 24,
        "dtype": "bfloat16",
        "model": "m",
    }
    return PageSpec(**values | changes)


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_pages_of_a_model_without_a_name_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"PageSpec\.model must name the model and its revision"):
        spec(model=name)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=4))
def test_blobs_are_aligned_in_order_and_do_not_touch(sizes: list[tuple[int, int]]) -> None:
    specs = [spec(num_layers=n, head_dim=d, group=i) for i, (n, d) in enumerate(sizes)]
    layout = PageLayout.of(specs)
    ends = [start + s.page_nbytes for start, s in zip(layout.offsets, specs, strict=True)]
    assert layout.offsets[0] == 0
    assert all(start % ALIGNMENT == 0 for start in layout.offsets)
    assert all(0 <= start - end < ALIGNMENT for end, start in zip(ends[:-1], layout.offsets[1:], strict=True))
    assert layout.page_nbytes == sum(s.page_nbytes for s in specs)
    assert layout.blob_nbytes == ends[-1]
    assert layout.slot_nbytes % ALIGNMENT == 0
    assert 0 <= layout.slot_nbytes - layout.blob_nbytes < ALIGNMENT


def test_single_group_keeps_its_own_fingerprint() -> None:
    assert PageLayout.of(spec()).fingerprint == spec().fingerprint
    assert PageLayout.of([spec()]) == PageLayout.of(spec())


def test_other_groups_or_another_order_change_the_fingerprint() -> None:
    a, b = spec(), spec(head_dim=8, group=1)
    prints = {PageLayout.of(groups).fingerprint for groups in ([a], [b], [a, b], [b, a])}
    assert len(prints) == 4


def test_the_shard_is_no_part_of_the_fingerprint() -> None:
    groups = [spec(), spec(group=1)]
    others = [dataclasses.replace(g, shard=3) for g in groups]
    assert PageLayout.of(groups).fingerprint == PageLayout.of(others).fingerprint
    assert PageLayout.of(others).shard == 3


@pytest.mark.parametrize(
    ("specs", "named"),
    [([], "empty"), ([spec(), spec(page_size=32)], "page_size"), ([spec(), spec(shard=1)], "shard")],
)
def test_groups_that_cannot_share_a_page_are_refused(specs: list[PageSpec], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PageLayout.of(specs)
