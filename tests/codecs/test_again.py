"""Test that encoding and decoding a page repeatedly adds almost no error after the first time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.holding import (
    FEATURES,
    FLOATS,
    Bytes,
    decoded,
    encoded,
    page_like_kv,
    spec_of,
    values_of,
)
from tests.support import lanes
from tierstore.codecs import LOSSY, lossy
from tierstore.page import PageLayout

FIXED = [name for name, codec in LOSSY.items() if not codec.zstd]


@pytest.fixture(autouse=True)
def small_pages_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "MOST_STORED", 100.0)


def again(name: str, layout: PageLayout, page: Bytes) -> Bytes:
    payload = encoded(LOSSY[name], layout, page)
    assert payload is not None
    return decoded(LOSSY[name], layout, payload)


@settings(deadline=None, max_examples=lanes.examples(15, 60))
@given(
    st.sampled_from(FLOATS),
    st.integers(1, 40),
    st.sampled_from([1, 5, 64, 80]),
    st.frozensets(st.sampled_from([name for name in FEATURES if name != "extremes"])),
    st.integers(0, 1 << 30),
)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_third_encoding_changes_nothing(
    name: str, dtype: str, tokens: int, dim: int, wanted: frozenset[str], seed: int
) -> None:
    """Encode and decode a page three times.

    The second time changes an int8 page only where 127 times the scale is not a bfloat16 number.
    """
    layout = PageLayout.of(spec_of(dtype, 2, tokens, 2, dim))
    first = again(name, layout, page_like_kv(layout, seed, wanted))
    second = again(name, layout, first)
    np.testing.assert_array_equal(again(name, layout, second), second)
    if dtype != "bfloat16":
        np.testing.assert_array_equal(second, first)
    else:
        assert (second != first).mean() <= 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    lanes.some(product(FIXED, FLOATS), lambda name, dtype: name == "int8" or dtype == "bfloat16"),
)
def test_error_after_fifty_encodings_is_nearly_that_of_the_first(name: str, dtype: str) -> None:
    spec = spec_of(dtype, 2, 64, 2, 64)
    layout = PageLayout.of(spec)
    page = page_like_kv(layout, 5, frozenset({"offsets", "outliers"}))
    exact = values_of(page, spec)
    first = page = again(name, layout, page)
    for _ in range(50):
        page = again(name, layout, page)
    once, at_last = (np.linalg.norm(values_of(one, spec) - exact) for one in (first, page))
    assert at_last <= 1.08 * once
