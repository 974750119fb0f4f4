"""Test the codec ``exp``: it restores every page bit for bit, and it rejects bytes that are not a payload."""

from __future__ import annotations

import random
import re
from threading import Barrier, Thread

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierstore.codecs import exp
from tierstore.codecs.exp import Decoder, Encoder, Geometry, Group
from tierstore.errors import IntegrityError
from tierstore.page import PageLayout, PageSpec
from tierstore.types import exact_size

Bytes = NDArray[np.uint8]

GUARD = 64


def spec_of(
    dtype: str, layers: int = 2, tokens: int = 3, heads: int = 2, dim: int = 5, group: int = 0
) -> PageSpec:
    return PageSpec(
        num_layers=layers,
        page_size=tokens,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        group=group,
        model="codec",
    )


def encoded(geometry: Geometry, page: Bytes) -> Bytes | None:
    out = np.empty(page.nbytes, dtype=np.uint8)
    before = page.copy()
    length = Encoder(geometry).encode(page, out)
    np.testing.assert_array_equal(page, before)
    return None if length is None else out[:length]


def decoded(geometry: Geometry, payload: Bytes) -> Bytes:
    """Return the decoded page. Require that the decoder does not write into the guard bytes before and after it."""
    memory = np.full(geometry.page_nbytes + 2 * GUARD, 0x5A, dtype=np.uint8)
    page = memory[GUARD:-GUARD]
    try:
        Decoder(geometry).decode(payload, page)
    finally:
        assert (memory[:GUARD] == 0x5A).all()
        assert (memory[-GUARD:] == 0x5A).all()
    return page


def forced(geometry: Geometry, page: Bytes, monkeypatch: pytest.MonkeyPatch) -> Bytes:
    """Return the payload even if it saves too little to be used."""
    monkeypatch.setattr(exp, "MOST_STORED", 100.0)
    out = np.empty(2 * page.nbytes + 1024, dtype=np.uint8)
    length = Encoder(geometry).encode(page, out)
    assert length is not None
    return out[:length]


def activations(numbers: int, seed: int = 0) -> NDArray[np.float32]:
    """Return this many random numbers, in 64 channels that each have their own scale."""
    chance = np.random.default_rng(seed)
    scales = np.exp2(chance.integers(-4, 4, 64))
    drawn = chance.normal(size=(numbers // 64, 64)) * scales
    return drawn.astype(np.float32).reshape(-1)


def bfloat16(numbers: NDArray[np.float32]) -> Bytes:
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


dtypes = st.sampled_from(["bfloat16", "float16", "float32", "uint8", "float8_e5m2"])
small = st.integers(1, 5)
specs = st.lists(st.tuples(dtypes, small, small, small), min_size=1, max_size=3)
words = st.one_of(
    st.just([0]),
    st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40),
    st.lists(
        st.sampled_from([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x807F, 0xFFFF, 0x3F80, 0x7C00]),
        min_size=1,
    ),
)


@settings(deadline=None)
@given(specs, st.integers(1, 20), words, st.integers(0, 1 << 30))
def test_any_bits_in_any_groups_are_restored(
    groups: list[tuple[str, int, int, int]], tokens: int, pattern: list[int], seed: int
) -> None:
    layout = PageLayout.of(
        [spec_of(dtype, a, tokens, b, c, group=i) for i, (dtype, a, b, c) in enumerate(groups)]
    )
    geometry = Geometry.of(layout)
    chance = np.random.default_rng(seed)
    drawn = chance.choice(np.array(pattern, dtype="<u2"), -(-layout.blob_nbytes // 2))
    page = drawn.view(np.uint8)[: layout.blob_nbytes]
    with pytest.MonkeyPatch.context() as patch:
        if geometry.groups:
            np.testing.assert_array_equal(decoded(geometry, forced(geometry, page, patch)), page)
        else:
            assert encoded(geometry, page) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_of_the_65536_patterns_is_restored_next_to_each_kind_of_neighbour(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = np.arange(1 << 16, dtype="<u2")
    geometry = Geometry.of(PageLayout.of(spec_of(dtype, 1, 512, 2, 64)))
    for order in (every, every[::-1], np.random.default_rng(0).permutation(every)):
        page = np.concatenate([order, every]).astype("<u2").view(np.uint8)
        np.testing.assert_array_equal(decoded(geometry, forced(geometry, page, monkeypatch)), page)


def test_pages_larger_than_a_part_and_rows_larger_than_one_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = np.random.default_rng(1)
    for part in (1, 64, 1000, 1 << 19):
        monkeypatch.setattr(exp, "_PART", part)
        geometry = Geometry.of(
            PageLayout.of([spec_of("bfloat16", 7, 4, 3, 11), spec_of("float16", 3, 4, 2, 8)])
        )
        page = chance.integers(0, 256, geometry.page_nbytes, dtype=np.uint8)
        np.testing.assert_array_equal(decoded(geometry, forced(geometry, page, monkeypatch)), page)


def test_pages_at_an_odd_address_are_restored() -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 2, 16, 2, 64)))
    memory = np.empty(geometry.page_nbytes + 1, dtype=np.uint8)
    memory[1:] = bfloat16(activations(geometry.numbers))
    payload = encoded(geometry, memory[1:])
    assert payload is not None
    back = np.zeros_like(memory)
    Decoder(geometry).decode(payload, back[1:])
    np.testing.assert_array_equal(back[1:], memory[1:])
    assert back[0] == 0


def test_pages_like_real_kv_shrink_by_at_least_a_quarter() -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 4, 64, 2, 64)))
    payload = encoded(geometry, bfloat16(activations(geometry.numbers)))
    assert payload is not None
    assert payload.nbytes < 0.75 * geometry.page_nbytes


def test_float16_saves_less_and_still_a_tenth() -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("float16", 4, 64, 2, 64)))
    page = activations(geometry.numbers).astype("<f2").view(np.uint8)
    payload = encoded(geometry, page)
    assert payload is not None
    assert 0.75 * page.nbytes < payload.nbytes < 0.9 * page.nbytes
    np.testing.assert_array_equal(decoded(geometry, payload), page)


def test_page_of_one_value_shrinks_to_about_half() -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 4, 64, 2, 64)))
    for value in (0, 0x3F80, 0xFFFF):
        payload = encoded(geometry, np.full(geometry.numbers, value, dtype="<u2").view(np.uint8))
        assert payload is not None
        assert payload.nbytes < 0.51 * geometry.page_nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
def test_noise_and_other_dtypes_are_left_raw(dtype: str) -> None:
    geometry = Geometry.of(PageLayout.of(spec_of(dtype, 4, 64, 2, 64)))
    noise = np.random.default_rng(0).integers(0, 256, geometry.page_nbytes, dtype=np.uint8)
    assert encoded(geometry, noise) is None


def test_a_saving_below_a_tenth_is_left_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 4, 64, 2, 64)))
    page = bfloat16(activations(geometry.numbers))
    payload = encoded(geometry, page)
    assert payload is not None
    share = payload.nbytes / page.nbytes
    monkeypatch.setattr(exp, "MOST_STORED", share + 1e-6)
    assert encoded(geometry, page) is not None
    monkeypatch.setattr(exp, "MOST_STORED", share - 1e-6)
    assert encoded(geometry, page) is None


def test_bytes_between_and_outside_the_groups_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(100, (Group(7, 1, 2, 3), Group(30, 2, 1, 4, slack=7)))
    page = np.random.default_rng(3).integers(0, 256, 100, dtype=np.uint8)
    payload = forced(geometry, page, monkeypatch)
    np.testing.assert_array_equal(decoded(geometry, payload), page)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_payload_is_an_error_or_other_bytes_of_the_same_page(data: st.DataObject) -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 2, 16, 2, 64)))
    payload = encoded(geometry, bfloat16(activations(geometry.numbers)))
    assert payload is not None
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, payload.nbytes - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded(geometry, payload)  # this also checks the guards around the page
    except IntegrityError:
        return


@settings(deadline=None)
@given(st.binary(max_size=6000))
def test_noise_is_refused_as_a_payload(noise: bytes) -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 2, 4, 2, 64)))
    with pytest.raises(IntegrityError):
        decoded(geometry, np.frombuffer(noise, dtype=np.uint8))


def test_a_cut_or_longer_payload_and_a_page_of_another_length_are_errors() -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 2, 16, 2, 64)))
    payload = encoded(geometry, bfloat16(activations(geometry.numbers)))
    assert payload is not None
    for cut in (0, 1, payload.nbytes // 2, payload.nbytes - 1):
        with pytest.raises(IntegrityError):
            decoded(geometry, payload[:cut])
    with pytest.raises(IntegrityError):
        decoded(geometry, np.concatenate([payload, payload[:1]]))
    with pytest.raises(IntegrityError):
        Decoder(geometry).decode(payload, np.empty(geometry.page_nbytes - 1, dtype=np.uint8))


@pytest.mark.parametrize("stated", [0, 1, 1 << 40])
def test_frame_with_another_size_is_an_error_before_memory_is_allocated(stated: int) -> None:
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 2, 16, 2, 64)))
    header = b"\x28\xb5\x2f\xfd\xe0" + stated.to_bytes(8, "little")
    assert zstandard.frame_content_size(header) == stated
    payload = np.frombuffer(header + bytes(geometry.kept_nbytes), dtype=np.uint8)
    with pytest.raises(IntegrityError, match=re.escape(exact_size(stated))):
        decoded(geometry, payload)


def test_sixteen_threads_with_own_codecs_encode_and_decode_like_one() -> None:
    # F108: with one context shared by all threads, results were silently wrong
    geometry = Geometry.of(PageLayout.of(spec_of("bfloat16", 2, 16, 2, 64)))
    pages = [bfloat16(activations(geometry.numbers, seed)) for seed in range(8)]
    alone = [encoded(geometry, page) for page in pages]
    barrier, wrong = Barrier(16), [0] * 16

    def work(index: int) -> None:
        encoder, decoder, chance = Encoder(geometry), Decoder(geometry), random.Random(index)
        out, back = np.empty(geometry.page_nbytes, np.uint8), np.empty(geometry.page_nbytes, np.uint8)
        barrier.wait()
        for _ in range(300):
            number = chance.randrange(8)
            length = encoder.encode(pages[number], out)
            expected = alone[number]
            assert expected is not None
            wrong[index] += out[:length].tobytes() != expected.tobytes()
            decoder.decode(expected, back)
            wrong[index] += back.tobytes() != pages[number].tobytes()

    threads = [Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 16
