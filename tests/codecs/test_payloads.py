"""Tests of payloads: their length and format, which pages are left raw, and how invalid payloads are rejected."""

from __future__ import annotations

import random
import re
from hashlib import sha256
from itertools import product
from threading import Barrier, Thread

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.holding import FLOATS, Bytes, decoded, encoded, page_like_kv, spec_of, values_of, words_of
from tests.support import lanes
from tierstore import codecs
from tierstore.codecs import LOSSY, lossy
from tierstore.codecs.lossy import Decoder, Encoder, PayloadLayout
from tierstore.codecs.quantization import Shape
from tierstore.errors import IntegrityError
from tierstore.page import PageLayout
from tierstore.types import exact_size

NAMES = list(LOSSY)
FIXED = [name for name in NAMES if not LOSSY[name].zstd]
COMPRESSED = [name for name in NAMES if LOSSY[name].zstd]

LAYOUT = PageLayout.of(spec_of("bfloat16", 4, 64, 2, 64))


def payload_of(name: str, layout: PageLayout = LAYOUT, seed: int = 0) -> Bytes:
    payload = encoded(LOSSY[name], layout, page_like_kv(layout, seed))
    assert payload is not None
    return payload


@pytest.mark.parametrize("name", FIXED)
def test_payload_length_depends_only_on_the_layout(name: str) -> None:
    for layout in (LAYOUT, PageLayout.of([spec_of("float16", 2, 33, 3, 80), spec_of("uint8", 1, 33, 1, 7)])):
        wanted = codecs.fixed_nbytes(name, layout)
        assert wanted is not None
        page = np.zeros(layout.blob_nbytes, dtype=np.uint8)
        lengths = {payload_of(name, layout, seed).nbytes for seed in range(3)}
        zeros = encoded(LOSSY[name], layout, page)
        assert zeros is not None
        assert lengths | {zeros.nbytes} == {wanted}


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("int8", 2 * 64 / 66), ("int4", 3.2), ("int4-64", 64 / 18), ("k8v4", 4 / (68 / 64 + 40 / 64))],
)
def test_compression_ratio_for_head_dim_64(name: str, ratio: float) -> None:
    nbytes = codecs.fixed_nbytes(name, LAYOUT)
    assert nbytes is not None
    assert LAYOUT.blob_nbytes / nbytes == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_codes_are_shorter_and_stand_for_the_same_numbers(name: str) -> None:
    short, long = payload_of(name), payload_of(name.removesuffix("+zstd"))
    assert short.nbytes < long.nbytes
    assert codecs.fixed_nbytes(name, LAYOUT) is None
    np.testing.assert_array_equal(
        decoded(LOSSY[name], LAYOUT, short), decoded(LOSSY[name.removesuffix("+zstd")], LAYOUT, long)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_page_that_would_save_less_than_a_tenth_is_left_raw(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_like_kv(LAYOUT, 0)
    share = payload_of(name).nbytes / page.nbytes
    out = np.empty_like(page)
    monkeypatch.setattr(lossy, "MOST_STORED", share + 1e-6)
    assert Encoder(LOSSY[name], LAYOUT).encode(page, out) is not None
    monkeypatch.setattr(lossy, "MOST_STORED", share - 1e-6)
    assert Encoder(LOSSY[name], LAYOUT).encode(page, out) is None
    assert codecs.fixed_nbytes(name, LAYOUT) is None


@pytest.mark.parametrize("name", NAMES)
def test_page_without_numbers_is_left_raw(name: str) -> None:
    layout = PageLayout.of([spec_of("uint8", 2, 16, 2, 64), spec_of("float32", 2, 16, 2, 64, 1, "state")])
    assert encoded(LOSSY[name], layout, page_like_kv(layout, 0)) is None
    assert codecs.fixed_nbytes(name, layout) is None
    for length in (0, layout.blob_nbytes):
        with pytest.raises(IntegrityError):
            decoded(LOSSY[name], layout, np.zeros(length, dtype=np.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_any_size_give_the_same_payload_and_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PageLayout.of([spec_of("bfloat16", 7, 33, 3, 40), spec_of("float16", 3, 33, 2, 64)])
    found = set()
    for part in (1, 5000, 1 << 20):
        monkeypatch.setattr(lossy, "_PART", part)
        payload = payload_of(name, layout)
        found.add((payload.tobytes(), decoded(LOSSY[name], layout, payload).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("name", NAMES)
def test_encoder_keeps_no_state_between_pages(name: str) -> None:
    encoder, decoder = Encoder(LOSSY[name], LAYOUT), Decoder(LOSSY[name], LAYOUT)
    out, back = np.empty(LAYOUT.blob_nbytes, np.uint8), np.empty(LAYOUT.blob_nbytes, np.uint8)
    spoilt = page_like_kv(LAYOUT, 9)
    spoilt.view("<u2")[-1] = 0x7FC0
    for page in (page_like_kv(LAYOUT, 1), spoilt, page_like_kv(LAYOUT, 2)):
        length, fresh = encoder.encode(page, out), encoded(LOSSY[name], LAYOUT, page)
        if length is None:
            assert page is spoilt
            assert fresh is None
            continue
        assert fresh is not None
        np.testing.assert_array_equal(out[:length], fresh)
        decoder.decode(fresh, back)
        np.testing.assert_array_equal(back, decoded(LOSSY[name], LAYOUT, fresh))


@pytest.mark.parametrize("name", NAMES)
def test_pages_and_payloads_at_odd_addresses_are_decoded_alike(name: str) -> None:
    memory = np.empty(LAYOUT.blob_nbytes + 1, dtype=np.uint8)
    memory[1:] = page_like_kv(LAYOUT, 0)
    out = np.empty(LAYOUT.blob_nbytes + 1, dtype=np.uint8)
    length = Encoder(LOSSY[name], LAYOUT).encode(memory[1:], out[1:])
    assert length is not None
    np.testing.assert_array_equal(out[1 : 1 + length], payload_of(name))
    back = np.zeros_like(memory)
    Decoder(LOSSY[name], LAYOUT).decode(out[1 : 1 + length], back[1:])
    np.testing.assert_array_equal(back[1:], decoded(LOSSY[name], LAYOUT, payload_of(name)))
    assert back[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_or_longer_payload_and_a_page_of_another_length_are_errors(name: str) -> None:
    payload = payload_of(name)
    for cut in (0, 1, payload.nbytes // 2, payload.nbytes - 1):
        with pytest.raises(IntegrityError):
            decoded(LOSSY[name], LAYOUT, payload[:cut])
    with pytest.raises(IntegrityError):
        decoded(LOSSY[name], LAYOUT, np.concatenate([payload, payload[:1]]))
    with pytest.raises(IntegrityError):
        Decoder(LOSSY[name], LAYOUT).decode(payload, np.empty(LAYOUT.blob_nbytes - 1, dtype=np.uint8))


@settings(deadline=None, max_examples=lanes.examples(15, 60))
@given(st.data())
@pytest.mark.parametrize(
    ("dtype", "name"),
    lanes.some(product(FLOATS, NAMES), lambda dtype, name: dtype == "bfloat16" or name == "int8"),
)
def test_a_damaged_payload_is_an_error_or_finite_numbers(dtype: str, name: str, data: st.DataObject) -> None:
    spec = spec_of(dtype, 2, 17, 2, 32)
    layout = PageLayout.of(spec)
    payload = payload_of(name, layout)
    start = data.draw(st.sampled_from([0, 0, payload.nbytes // 2]))
    for _ in range(data.draw(st.integers(1, 8))):
        payload[data.draw(st.integers(start, payload.nbytes - 1))] ^= data.draw(st.integers(1, 255))
    try:
        page = decoded(LOSSY[name], layout, payload)  # this also checks the guards around the page
    except IntegrityError:
        return
    assert np.isfinite(values_of(page, spec)).all()


@settings(deadline=None, max_examples=lanes.examples(15, 60))
@given(st.binary(max_size=6000))
@pytest.mark.parametrize("name", COMPRESSED)
def test_noise_is_refused_as_a_payload(name: str, noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        decoded(
            LOSSY[name], PageLayout.of(spec_of("bfloat16", 2, 4, 2, 64)), np.frombuffer(noise, dtype=np.uint8)
        )


@pytest.mark.parametrize("name", FIXED)
def test_scales_that_are_negative_not_finite_or_too_large_are_errors(name: str) -> None:
    for word in (0x7F80, 0x7FC0, 0x8001, 0xBF80, 0x7F00):
        payload = payload_of(name)
        payload[:2].view("<u2")[0] = word
        with pytest.raises(IntegrityError, match=r"scales (outside|that are too large)"):
            decoded(LOSSY[name], LAYOUT, payload)


@pytest.mark.parametrize("name", ["k8v4", "int4", "int4-64"])
def test_minimums_that_are_not_finite_or_too_large_are_errors(name: str) -> None:
    start = 4 * int(np.prod(LOSSY[name].keys.sides(Shape(64, 2, 64)))) * 2
    for word in (0x7F80, 0xFF80, 0x7FC0, 0x7E81):
        payload = payload_of(name)
        payload[start : start + 2].view("<u2")[0] = word
        with pytest.raises(IntegrityError, match="minimums outside the codec's range"):
            decoded(LOSSY[name], LAYOUT, payload)


@pytest.mark.parametrize(("name", "code"), [("fp8", 0x7F), ("fp8", 0xFF), ("int8", 0x80)])
def test_codes_that_no_number_has_are_errors(name: str, code: int) -> None:
    payload = payload_of(name)
    payload[-5] = code
    with pytest.raises(IntegrityError):
        decoded(LOSSY[name], LAYOUT, payload)


@pytest.mark.parametrize("name", ["int4", "int4-64"])
def test_codes_after_the_last_token_are_errors(name: str) -> None:
    layout = PageLayout.of(spec_of("bfloat16", 1, 3, 1, 64))
    payload = payload_of(name, layout)
    assert (payload[-64:] < 16).all()
    payload[-1] |= 0x10
    with pytest.raises(IntegrityError, match="codes for tokens that the page does not have"):
        decoded(LOSSY[name], layout, payload)


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("stated", [0, 1, 1 << 40])
def test_frame_with_another_size_is_an_error_before_memory_is_allocated(name: str, stated: int) -> None:
    header = np.frombuffer(b"\x28\xb5\x2f\xfd\xe0" + stated.to_bytes(8, "little"), dtype=np.uint8)
    payload = payload_of(name)
    kept = payload_of(name.removesuffix("+zstd")).nbytes - LAYOUT.blob_nbytes // 2
    assert zstandard.frame_content_size(payload[kept:].tobytes()) == LAYOUT.blob_nbytes // 2
    with pytest.raises(IntegrityError, match=re.escape(exact_size(stated))):
        decoded(LOSSY[name], LAYOUT, np.concatenate([payload[:kept], header]))


def test_int4_is_laid_out_as_documented() -> None:
    """Encode one layer, one head of two numbers, three tokens: K (0, 7), (1, 7), (15, 7); V (1, 0), (0, 30), (2, 2)."""
    numbers = np.array([0, 7, 1, 7, 15, 7, 1, 0, 0, 30, 2, 2], dtype=np.float32)
    layout = PageLayout.of(spec_of("bfloat16", 1, 3, 1, 2))
    payload = encoded_small("int4", layout, words_of(numbers, "bfloat16"))
    one, two, seven, fifteenth = 0x3F80, 0x4000, 0x40E0, 0x3D89  # 1/15, rounded to bfloat16
    scales_and_floors = [one, 0, 0, seven, fifteenth, two, 0, 0, 0, two]
    np.testing.assert_array_equal(payload[:20].view("<u2"), scales_and_floors)
    np.testing.assert_array_equal(payload[20:], [0xF0, 0x00, 0x01, 0x00, 0x0F, 0x00, 0x00, 0x0F])


def encoded_small(name: str, layout: PageLayout, page: Bytes) -> Bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossy, "MOST_STORED", 100.0)
        payload = encoded(LOSSY[name], layout, page)
    assert payload is not None
    return payload


GOLDEN = {
    "fp8": "bb4b0f063b118572",
    "int8": "9db254b5e6e1980c",
    "k8v4": "af6b2ca95d781b70",
    "int4": "1e733527bd72a4cf",
    "int4-64": "22796b9a1c2969fe",
}


@pytest.mark.parametrize("name", FIXED)
def test_a_payload_is_the_same_bytes_in_every_version(name: str) -> None:
    """Use computed input, because a random generator could change. A different digest means that the format changed."""
    layout = PageLayout.of([spec_of("bfloat16", 2, 35, 2, 40, 0), spec_of("float16", 1, 35, 1, 64, 1)])
    count = layout.blob_nbytes // 2
    numbers = ((np.arange(count) * 2654435761 % 4093) - 2046).astype(np.float32) / np.float32(64)
    first = layout.specs[0].page_nbytes // 2
    page = np.concatenate([words_of(numbers[:first], "bfloat16"), words_of(numbers[first:], "float16")])
    payload = encoded_small(name, layout, page)
    assert sha256(payload.tobytes()).hexdigest()[:16] == GOLDEN[name]


def test_threads_with_own_codecs_encode_and_decode_like_one() -> None:
    made = [page_like_kv(LAYOUT, seed) for seed in range(4)]
    alone = {name: [encoded(LOSSY[name], LAYOUT, page) for page in made] for name in NAMES}
    back = {
        name: [decoded(LOSSY[name], LAYOUT, each) for each in found if each is not None]
        for name, found in alone.items()
    }
    barrier, wrong = Barrier(8), [0] * 8

    def work(index: int) -> None:
        chance = random.Random(index)
        out, page = np.empty(LAYOUT.blob_nbytes, np.uint8), np.empty(LAYOUT.blob_nbytes, np.uint8)
        name = NAMES[index % len(NAMES)]
        encoder, decoder = Encoder(LOSSY[name], LAYOUT), Decoder(LOSSY[name], LAYOUT)
        barrier.wait()
        for _ in range(60):
            number = chance.randrange(len(made))
            length, expected = encoder.encode(made[number], out), alone[name][number]
            assert expected is not None
            wrong[index] += length is None or out[:length].tobytes() != expected.tobytes()
            decoder.decode(expected, page)
            wrong[index] += page.tobytes() != back[name][number].tobytes()

    threads = [Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 8


def test_codecs_are_created_by_name() -> None:
    for name in codecs.LOSS_CLASSES:
        made = (codecs.encoder(name, LAYOUT), codecs.decoder(name, LAYOUT))
        assert {None if each is None else each.name for each in made} == {None if name == "none" else name}
    assert codecs.fixed_nbytes("none", LAYOUT) == LAYOUT.blob_nbytes
    assert codecs.fixed_nbytes("exp", LAYOUT) is None
    for make in (codecs.encoder, codecs.decoder, codecs.fixed_nbytes):
        with pytest.raises(ValueError, match=r"codec must be one of none, exp, fp8, .*int4-64, got 'int5'"):
            make("int5", LAYOUT)


def test_codecs_decode_equal_numbers_exactly_within_one_loss_class() -> None:
    page = page_like_kv(LAYOUT, 0)
    found: dict[str, set[bytes]] = {}
    for name, loss_class in codecs.LOSS_CLASSES.items():
        back = page
        if name in LOSSY:
            back = decoded(LOSSY[name], LAYOUT, payload_of(name))
        found.setdefault(loss_class, set()).add(back.tobytes())
    assert set(found) == {"exact", "fp8", "int8", "k8v4", "int4", "int4-64"}
    assert all(len(each) == 1 for each in found.values())
    assert len(set.union(*found.values())) == len(found)


@pytest.mark.parametrize("name", ["k8v4", "int4", "int4-64"])
def test_minimum_of_signed_zeros_is_stored_as_positive_zero_in_any_order(name: str) -> None:
    layout = PageLayout.of(spec_of("bfloat16", 1, 64, 2, 64))
    for seed in range(3):
        words = np.random.default_rng(seed).choice(
            np.array([0, 0x8000, 0x3F80], "<u2"), layout.blob_nbytes // 2
        )
        for page in (words.view(np.uint8), np.full_like(words, 0x8000).view(np.uint8)):
            payload = encoded(LOSSY[name], layout, page)
            assert payload is not None
            places = PayloadLayout.of(layout, LOSSY[name])
            for _, parts in places.parts(payload[: places.kept_nbytes], payload[places.kept_nbytes :]):
                assert not parts.floors.any()
