"""Pages for tests of lossy codecs, and checks of what every such codec guarantees, computed independently of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.codecs.lossy import Decoder, Encoder, Lossy, Scheme
from tierstore.codecs.quantization import HALF_ULP, LARGEST, TINY
from tierstore.page import PageLayout, PageSpec

Bytes = NDArray[np.uint8]
Doubles = NDArray[np.float64]

GUARD = 64
FLOATS = ("bfloat16", "float16", "float32")
FEATURES = ("outliers", "zeros", "constants", "offsets", "subnormals", "extremes", "tiny")


def spec_of(
    dtype: str, layers: int, tokens: int, heads: int, dim: int, group: int = 0, kind: Any = "mha"
) -> PageSpec:
    return PageSpec(
        kind=kind,
        num_layers=layers,
        page_size=tokens,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        group=group,
        model="codecs",
    )


def words_of(numbers: NDArray[np.float32], dtype: str) -> Bytes:
    """Return the numbers as bytes of ``dtype``: rounded, or truncated for bfloat16, which is close enough for tests."""
    flat = numbers.reshape(-1)
    if dtype == "bfloat16":
        return (flat.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return flat.astype("<f2" if dtype == "float16" else "<f4").view(np.uint8)


def values_of(page: Bytes, spec: PageSpec, offset: int = 0) -> Doubles:
    """Return the exact elements of one KV group as float64, in the spec's shape."""
    raw = page[offset : offset + spec.page_nbytes]
    if spec.dtype == "bfloat16":
        numbers: NDArray[Any] = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = raw.view("<f2" if spec.dtype == "float16" else "<f4")
    return numbers.astype(np.float64).reshape(spec.shape)


def numbers_like_kv(
    chance: np.random.Generator, spec: PageSpec, features: frozenset[str]
) -> NDArray[np.float32]:
    """Return normally distributed numbers, scaled per channel, with the given FEATURES. All of them can be encoded."""
    channels = (spec.shape[0], spec.shape[1], 1, *spec.shape[3:])
    found = chance.standard_normal(spec.shape) * np.exp2(chance.integers(-4, 5, channels))
    if "offsets" in features:
        found += np.where(chance.random(channels) < 0.3, chance.normal(0, 50, channels), 0)
    if "constants" in features:
        found = np.where(chance.random(channels) < 0.3, chance.normal(0, 3, channels), found)
    if "outliers" in features:
        found *= np.where(chance.random(spec.shape) < 0.02, 500.0, 1.0)
    if "tiny" in features:
        found *= 2.0**-20
    if "subnormals" in features:
        found = np.where(chance.random(spec.shape) < 0.3, found * TINY[spec.dtype], found)
    if "zeros" in features:
        found *= np.where(chance.random((*channels[:2], spec.shape[2], *channels[3:])) < 0.3, 0.0, -1.0)
    largest = LARGEST[spec.dtype]
    if "extremes" in features:
        found = np.where(chance.random(spec.shape) < 0.02, np.sign(found) * largest, found)
    return np.clip(found, -largest, largest).astype(np.float32)


def page_like_kv(layout: PageLayout, seed: int, features: frozenset[str] = frozenset()) -> Bytes:
    """Return a page of ``numbers_like_kv``, with noise between groups and in groups that lossy codecs do not encode."""
    chance = np.random.default_rng(seed)
    page = chance.integers(0, 256, layout.blob_nbytes, dtype=np.uint8)
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        if spec.dtype in FLOATS and spec.kind != "state":
            numbers = numbers_like_kv(chance, spec, features)
            page[offset : offset + spec.page_nbytes] = words_of(numbers, spec.dtype)
    return page


def encoded(codec: Lossy, layout: PageLayout, page: Bytes) -> Bytes | None:
    """Return the payload, or None if the page is left raw. Require that encoding does not change the page.

    The output buffer is larger than the page: the payload of a very small page can be larger than the page.
    """
    out = np.full(4 * page.nbytes + 4096, 0xA5, dtype=np.uint8)
    before = page.copy()
    length = Encoder(codec, layout).encode(page, out)
    np.testing.assert_array_equal(page, before)
    return None if length is None else out[:length].copy()


def decoded(codec: Lossy, layout: PageLayout, payload: Bytes) -> Bytes:
    """Return the decoded page. Require that the decoder does not write into the guard bytes before and after it."""
    memory = np.full(layout.blob_nbytes + 2 * GUARD, 0x5A, dtype=np.uint8)
    page = memory[GUARD:-GUARD]
    try:
        Decoder(codec, layout).decode(payload, page)
    finally:
        assert (memory[:GUARD] == 0x5A).all()
        assert (memory[-GUARD:] == 0x5A).all()
    return page


def assert_holds(codec: Lossy, layout: PageLayout, page: Bytes) -> None:
    """Require that the codec encodes this page, with errors within its bounds and all other bytes unchanged."""
    payload = encoded(codec, layout, page)
    assert payload is not None
    back = decoded(codec, layout, payload)
    same = np.ones(layout.blob_nbytes, dtype=bool)
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        if spec.dtype not in FLOATS or spec.kind == "state":
            continue
        same[offset : offset + spec.page_nbytes] = False
        before, after = values_of(page, spec, offset), values_of(back, spec, offset)
        for plane, scheme in enumerate((codec.keys, codec.values)[: spec.shape[1]]):
            shares = sharing(codec.name, "KV"[plane], spec.shape)
            _within(scheme, spec.dtype, shares, before[:, plane], after[:, plane])
    np.testing.assert_array_equal(back[same], page[same])


def sharing(name: str, plane: str, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Return an index per element, ``[layers, tokens, heads, dim]``. Elements that share a scale share an index."""
    layers, _, tokens, heads, dim = shape
    layer, token, head, at = np.indices((layers, tokens, heads, dim))
    parts: tuple[NDArray[np.intp], ...]
    match name.partition("+")[0], plane:
        case "fp8", _:
            parts = (layer,)
        case "int8", _:
            parts = (layer, token, head, at // 64)
        case ("k8v4" | "int4-64", "K"):
            parts = (layer, token // 64, head, at)
        case ("int4", "K"):
            parts = (layer, token // 32, head, at)
        case ("k8v4" | "int4", "V"):
            parts = (layer, token, head, at // 32)
        case ("int4-64", "V"):
            parts = (layer, token, head, at // 64)
        case _:
            raise AssertionError(f"{name} is not described")
    key: NDArray[np.intp] = np.zeros_like(layer)
    for part in parts:
        key = key * (int(part.max()) + 1) + part
    return key


def _within(scheme: Scheme, dtype: str, shares: NDArray[np.intp], before: Doubles, after: Doubles) -> None:
    assert np.isfinite(after).all()
    bound, errors = scheme.bound, np.abs(after - before)
    extent = _extents(before, shares, signed=bound.signed)
    allowed = bound.of_extent * extent + bound.of_value * np.abs(before)
    allowed += HALF_ULP[dtype] * np.maximum(np.abs(before), np.abs(after)) + TINY[dtype]
    worst = np.unravel_index(np.argmax(errors - allowed), errors.shape)
    assert errors[worst] <= allowed[worst], f"{before[worst]} came back as {after[worst]}"
    members = int(np.bincount(shares.reshape(-1)).max())
    scale = max(np.abs(before).max(), 1e-300)  # the squares of the largest elements would overflow
    norm, moved = np.linalg.norm(before / scale), np.linalg.norm(errors / scale)
    slack = TINY[dtype] / scale * before.size**0.5
    assert moved <= bound.frobenius(members, dtype) * norm + slack


def _extents(numbers: Doubles, shares: NDArray[np.intp], *, signed: bool) -> Doubles:
    """Return, per element, the largest magnitude (if ``signed``) or the range of all elements that share its scale."""
    high = np.full(int(shares.max()) + 1, -np.inf)
    low = -high
    np.maximum.at(high, shares, np.abs(numbers) if signed else numbers)
    np.minimum.at(low, shares, numbers)
    return high[shares] if signed else high[shares] - low[shares]


def without_zstd(codec: Lossy) -> Lossy:
    """Return the codec without zstd. Decoded pages are the same, and all parts of a payload have fixed offsets."""
    return replace(codec, zstd=False)
