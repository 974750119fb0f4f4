"""Test that each lossy codec decodes any page within its declared error bounds and leaves everything else unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.codecs.holding import (
    FEATURES,
    FLOATS,
    assert_holds,
    decoded,
    encoded,
    page_like_kv,
    spec_of,
    values_of,
    words_of,
)
from tests.support import lanes
from tierstore.codecs import LOSSY, lossy
from tierstore.codecs.quantization import LARGEST, Shape
from tierstore.page import PageLayout

NAMES = list(LOSSY)

dtypes = st.sampled_from([*FLOATS, "bfloat16", "float64", "uint8", "float8_e5m2"])
kinds = st.sampled_from(["mha", "mha", "mha", "mla", "state"])
dims = st.sampled_from([1, 2, 5, 31, 32, 33, 64, 80])
groups = st.lists(
    st.tuples(dtypes, kinds, st.integers(1, 3), st.integers(1, 3), dims), min_size=1, max_size=3
)
features = st.frozensets(st.sampled_from(FEATURES))


@pytest.fixture(autouse=True)
def small_pages_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "MOST_STORED", 100.0)


def layout_of(drawn: list[tuple[str, Any, int, int, int]], tokens: int) -> PageLayout:
    specs = [
        spec_of(dtype, layers, tokens, heads, dim, group, kind)
        for group, (dtype, kind, layers, heads, dim) in enumerate(drawn)
    ]
    return PageLayout.of(specs)


def has_numbers(layout: PageLayout) -> bool:
    return any(spec.dtype in FLOATS and spec.kind != "state" for spec in layout.specs)


@settings(deadline=None, max_examples=lanes.examples(8, 60))
@given(groups, st.integers(1, 70), features, st.integers(0, 1 << 30))
@example([("bfloat16", "mha", 2, 2, 64)], 64, frozenset(FEATURES), 0)
@example([("float16", "mha", 2, 2, 64)], 65, frozenset({"extremes", "outliers"}), 1)
@example([("float32", "mha", 2, 2, 64)], 33, frozenset({"extremes", "tiny", "subnormals"}), 2)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_decoded_within_the_bounds(
    name: str, drawn: list[tuple[str, Any, int, int, int]], tokens: int, wanted: frozenset[str], seed: int
) -> None:
    layout = layout_of(drawn, tokens)
    page = page_like_kv(layout, seed, wanted)
    if has_numbers(layout):
        assert_holds(LOSSY[name], layout, page)
    else:
        assert encoded(LOSSY[name], layout, page) is None


patterns = st.lists(
    st.one_of(
        st.sampled_from([0, 0x8000, 0x0001, 0x807F, 0x0080, 0x7E7F, 0x3F80, 0xBF80, 0x3C00, 0x7BFF, 0xFBFF]),
        st.integers(0, 0x7BFF),
        st.integers(0x8000, 0xFBFF),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=lanes.examples(8, 60))
@given(patterns, st.sampled_from(FLOATS), st.integers(1, 40), st.integers(0, 1 << 30))
@pytest.mark.parametrize("name", NAMES)
def test_any_finite_patterns_are_decoded_within_the_bounds(
    name: str, pattern: list[int], dtype: str, tokens: int, seed: int
) -> None:
    layout = PageLayout.of(spec_of(dtype, 2, tokens, 1, 40))
    chance = np.random.default_rng(seed)
    count = layout.blob_nbytes // (4 if dtype == "float32" else 2)
    words = chance.choice(np.array(pattern, dtype="<u2"), count)
    page = (words.astype("<u4") << 16 if dtype == "float32" else words).view(np.uint8)
    if np.abs(values_of(page, layout.specs[0])).max() <= LARGEST[dtype]:
        assert_holds(LOSSY[name], layout, page)
    else:
        assert encoded(LOSSY[name], layout, page) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_are_decoded_as_zeros_and_constant_channels_exactly(name: str, dtype: str) -> None:
    spec = spec_of(dtype, 2, 40, 2, 64)
    layout = PageLayout.of(spec)
    zeros = np.zeros(spec.page_nbytes, dtype=np.uint8)
    payload = encoded(LOSSY[name], layout, zeros)
    assert payload is not None
    assert not values_of(decoded(LOSSY[name], layout, payload), spec).any()
    channels = np.random.default_rng(0).normal(0, 100, (2, 2, 1, 2, 64)).astype(np.float32)
    page = words_of(np.broadcast_to(channels, spec.shape).copy(), dtype)
    payload = encoded(LOSSY[name], layout, page)
    assert payload is not None
    keys = values_of(decoded(LOSSY[name], layout, payload), spec)[:, 0]
    if LOSSY[name].keys.floored:
        np.testing.assert_array_equal(keys, values_of(page, spec)[:, 0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_page_with_one_number_that_is_not_finite_or_too_large_is_kept_raw(name: str, dtype: str) -> None:
    layout = PageLayout.of([spec_of(dtype, 3, 20, 2, 16, 0), spec_of(dtype, 3, 20, 2, 16, 1)])
    good = page_like_kv(layout, 0)
    assert encoded(LOSSY[name], layout, good) is not None
    word = np.dtype("<u4" if dtype == "float32" else "<u2")
    bad = {"bfloat16": [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x7E81, 0xFE81], "float16": [0x7C00, 0xFE01]}
    patterns = bad.get(dtype, [0x7F800000, 0xFF800000, 0x7F800001, 0x7E800001])
    chance = np.random.default_rng(1)
    for pattern in patterns:
        for offset, spec in zip(layout.offsets, layout.specs, strict=True):
            page = good.copy()
            numbers = page[offset : offset + spec.page_nbytes].view(word)
            numbers[chance.integers(numbers.size)] = pattern
            assert encoded(LOSSY[name], layout, page) is None


@pytest.mark.parametrize("name", NAMES)
def test_one_outlier_does_not_affect_numbers_with_another_scale(name: str) -> None:
    spec = spec_of("bfloat16", 2, 64, 2, 64)
    layout = PageLayout.of(spec)
    page = page_like_kv(layout, 3)
    spoilt = page.copy()
    spoilt.view("<u2").reshape(spec.shape)[0, 0, 5, 1, 7] = 0x4900  # 524288
    back = []
    for each in (page, spoilt):
        payload = encoded(LOSSY[name], layout, each)
        assert payload is not None
        back.append(values_of(decoded(LOSSY[name], layout, payload), spec))
    differs = back[0] != back[1]
    assert differs.any()
    assert not differs[1].any()
    assert not differs[:, 1].any()
    if name.startswith("int8"):
        assert not np.delete(differs[0, 0], 5, axis=0).any()
    elif not name.startswith("fp8"):
        assert not np.delete(differs[0, 0].reshape(64, 128), 64 + 7, axis=1).any()


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("fp8", 0.07, 0.07),
        ("fp8+zstd", 0.07, 0.07),
        ("int8", 0.036, 0.036),
        ("int8+zstd", 0.036, 0.036),
        ("k8v4", 0.028, 0.28),
        ("int4", 0.28, 0.28),
        ("int4-64", 0.39, 0.39),
    ],
)
def test_declared_error_norm_bound_is_tight(name: str, keys: float, values: float) -> None:
    """Compare the bounds for 64 tokens of one bfloat16 head of 64 dimensions with ``keys`` and ``values``."""
    for scheme, most in ((LOSSY[name].keys, keys), (LOSSY[name].values, values)):
        members = scheme.members(Shape(64, 1, 64))
        assert 0.9 * most < scheme.bound.frobenius(members, "bfloat16") <= most
