"""Test the record format: reading a record that is not exactly as it was written raises an IntegrityError."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierstore import codecs
from tierstore.codecs.exp import Decoder, Encoder, Geometry, Group
from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey

FINGERPRINT = record_format.fingerprint_digest("a model")
KEY = PageKey(bytes(range(36)))
PARENT = PageKey(bytes(reversed(range(36))))

payloads = st.binary(min_size=0, max_size=300)


GEOMETRY = Geometry(4096, (Group(0, 2, 16, 64),))
FLAT = np.full(4096, 0x3F, dtype=np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)


def exp_record(page: NDArray[np.uint8]) -> NDArray[np.uint8]:
    record = np.full(record_format.record_nbytes(page.nbytes), 0xEE, dtype=np.uint8)
    encoder = Encoder(GEOMETRY)
    length = record_format.encode(
        page, record, fingerprint=FINGERPRINT, key=KEY, parent=None, encoder=encoder
    )
    return record[:length]


def record_of(payload: bytes, parent: PageKey | None = PARENT) -> NDArray[np.uint8]:
    page = np.frombuffer(payload, dtype=np.uint8)
    record = np.full(record_format.record_nbytes(page.nbytes) + 7, 0xEE, dtype=np.uint8)
    length = record_format.encode(page, record, fingerprint=FINGERPRINT, key=KEY, parent=parent)
    return record[:length]


def read(
    record: NDArray[np.uint8], key: PageKey = KEY, fingerprint: bytes = FINGERPRINT
) -> record_format.Head:
    head, payload = record[: record_format.HEAD_NBYTES], record[record_format.HEAD_NBYTES :]
    return record_format.verify(head, payload, fingerprint=fingerprint, key=key)


@settings(deadline=None)
@given(payloads, st.sampled_from([None, PARENT]))
def test_a_record_is_decoded_to_its_page_and_head(payload: bytes, parent: PageKey | None) -> None:
    record = record_of(payload, parent)
    head = read(record)
    assert record[record_format.HEAD_NBYTES :].tobytes() == payload
    assert head == record_format.Head(
        fingerprint=FINGERPRINT,
        key=KEY,
        parent=parent,
        codec=record_format.Codec.NONE,
        raw_nbytes=len(payload),
        stored_nbytes=len(payload),
    )


@settings(deadline=None)
@given(payloads, st.data())
def test_any_changed_byte_is_found(payload: bytes, data: st.DataObject) -> None:
    record = record_of(payload)
    position = data.draw(st.integers(0, record.nbytes - 1))
    record[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IntegrityError):
        read(record)


def test_each_byte_of_the_head_is_covered() -> None:
    record = record_of(b"payload")
    for position in range(record.nbytes):
        record[position] ^= 1
        with pytest.raises(IntegrityError):
            read(record)
        record[position] ^= 1
    read(record)


@settings(deadline=None)
@given(payloads, st.data())
def test_a_cut_record_is_found(payload: bytes, data: st.DataObject) -> None:
    record = record_of(payload)
    with pytest.raises(IntegrityError):
        read(record[: data.draw(st.integers(0, record.nbytes - 1))])


@settings(deadline=None)
@given(payloads, st.binary(min_size=1, max_size=50))
def test_a_longer_record_is_found(payload: bytes, more: bytes) -> None:
    record = np.concatenate([record_of(payload), np.frombuffer(more, dtype=np.uint8)])
    with pytest.raises(IntegrityError):
        read(record)


@settings(deadline=None)
@given(st.binary(max_size=5000))
def test_noise_is_refused_as_a_record(noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        read(np.frombuffer(noise, dtype=np.uint8))


def test_an_intact_record_of_another_key_or_fingerprint_is_refused() -> None:
    # F016
    record = record_of(b"payload")
    with pytest.raises(IntegrityError, match="another key"):
        read(record, key=PARENT)
    with pytest.raises(IntegrityError, match="another fingerprint"):
        read(record, fingerprint=record_format.fingerprint_digest("another model"))


@pytest.mark.parametrize(("offset", "value"), [(0, b"X"), (8, struct.pack("<H", 99)), (10, b"\x07")])
def test_a_record_of_another_format_or_codec_is_refused(offset: int, value: bytes) -> None:
    record = record_of(b"payload")
    record[offset : offset + len(value)] = np.frombuffer(value, dtype=np.uint8)
    with pytest.raises(IntegrityError):
        record_format.parse(record[: record_format.HEAD_NBYTES].tobytes())


def test_record_head_and_lmdb_header_fill_one_block() -> None:
    assert record_format.HEAD_NBYTES + 16 == 4096
    record = record_of(b"")
    assert record.nbytes == record_format.HEAD_NBYTES


@pytest.mark.parametrize(
    ("fingerprint", "key", "parent"),
    [(b"", KEY, None), (FINGERPRINT, b"", None), (FINGERPRINT, KEY, b"short")],
)
def test_a_head_of_the_wrong_shape_is_not_written(
    fingerprint: bytes, key: bytes, parent: bytes | None
) -> None:
    head = record_format.Head(
        fingerprint=fingerprint,
        key=PageKey(key),
        parent=None if parent is None else PageKey(parent),
        codec=record_format.Codec.NONE,
        raw_nbytes=0,
        stored_nbytes=0,
    )
    with pytest.raises(ValueError, match="36"):
        record_format.seal(head, np.empty(0, dtype=np.uint8))


def test_a_record_of_another_generation_is_refused() -> None:
    payload = np.arange(50, dtype=np.uint8)
    head = record_format.Head(
        fingerprint=FINGERPRINT,
        key=KEY,
        parent=None,
        codec=record_format.Codec.NONE,
        raw_nbytes=50,
        stored_nbytes=50,
        generation=2**63 + 5,
    )
    sealed = record_format.seal(head, payload)
    found = record_format.verify(sealed, payload, fingerprint=FINGERPRINT, key=KEY, generation=2**63 + 5)
    assert found == head
    with pytest.raises(IntegrityError, match="generation"):
        record_format.verify(sealed, payload, fingerprint=FINGERPRINT, key=KEY, generation=6)


def test_a_page_worth_encoding_is_stored_encoded_and_decoded() -> None:
    record = exp_record(FLAT)
    head = read(record)
    assert (head.codec, head.raw_nbytes, head.stored_nbytes) == (
        record_format.Codec.EXP,
        4096,
        record.nbytes - 4080,
    )
    assert head.stored_nbytes < 3000
    page = np.zeros(4096, dtype=np.uint8)
    record_format.decode(head, record[record_format.HEAD_NBYTES :], page, Decoder(GEOMETRY))
    np.testing.assert_array_equal(page, FLAT)


def test_page_not_worth_encoding_is_stored_raw_and_needs_no_decoder() -> None:
    record = exp_record(NOISE)
    head = read(record)
    assert (head.codec, head.raw_nbytes, head.stored_nbytes) == (record_format.Codec.NONE, 4096, 4096)
    page = np.zeros(4096, dtype=np.uint8)
    record_format.decode(head, record[record_format.HEAD_NBYTES :], page, None)
    np.testing.assert_array_equal(page, NOISE)


def test_each_changed_byte_of_an_encoded_record_is_found() -> None:
    record = exp_record(FLAT)
    for position in range(record.nbytes):
        record[position] ^= 0x10
        with pytest.raises(IntegrityError):
            read(record)
        record[position] ^= 0x10
    read(record)


def test_an_encoded_page_of_another_length_or_geometry_is_refused() -> None:
    record = exp_record(FLAT)
    head, payload = read(record), record[record_format.HEAD_NBYTES :]
    with pytest.raises(IntegrityError, match="layout needed to decode it is unknown"):
        record_format.decode(head, payload, np.empty(4096, dtype=np.uint8), None)
    with pytest.raises(IntegrityError, match=r"expected 4\.0 KiB \(4,095 bytes\)"):
        record_format.decode(head, payload, np.empty(4095, dtype=np.uint8), Decoder(GEOMETRY))
    other = Decoder(Geometry(4096, (Group(0, 1, 16, 64),)))
    with pytest.raises(IntegrityError):
        record_format.decode(head, payload, np.empty(4096, dtype=np.uint8), other)


LAYOUT = PageLayout.of(
    PageSpec(num_layers=1, page_size=16, num_kv_heads=1, head_dim=64, dtype="bfloat16", model="codec")
)


@pytest.mark.parametrize("name", codecs.LOSSY)
def test_record_is_decoded_only_by_its_own_codec(name: str) -> None:
    page = (np.random.default_rng(0).normal(size=2048).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    record = np.empty(record_format.record_nbytes(4096), dtype=np.uint8)
    length = record_format.encode(
        page.view(np.uint8),
        record,
        fingerprint=FINGERPRINT,
        key=KEY,
        parent=None,
        encoder=codecs.encoder(name, LAYOUT),
    )
    head, payload = read(record[:length]), record[record_format.HEAD_NBYTES : length]
    assert head.codec is record_format.CODECS[name]
    found, wanted = np.zeros(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    record_format.decode(head, payload, found, codecs.decoder(name, LAYOUT))
    decoder = codecs.decoder(name, LAYOUT)
    assert decoder is not None
    decoder.decode(payload, wanted)
    np.testing.assert_array_equal(found, wanted)
    assert found.any()
    for other in set(codecs.LOSSY) - {name} | {"exp"}:
        with pytest.raises(IntegrityError, match="the record has codec"):
            record_format.decode(head, payload, found, codecs.decoder(other, LAYOUT))


def test_codecs_keep_their_numbers_and_every_codec_has_one() -> None:
    assert {name: int(number) for name, number in record_format.CODECS.items()} == {
        "none": 0,
        "exp": 1,
        "fp8": 2,
        "fp8+zstd": 3,
        "int8": 4,
        "int8+zstd": 5,
        "k8v4": 6,
        "int4": 7,
        "int4-64": 8,
    }
    assert set(record_format.CODECS) == set(codecs.LOSS_CLASSES)
    assert set(record_format.CODECS.values()) == set(record_format.Codec)


@pytest.mark.parametrize(
    ("kind", "raw", "stored"), [(1, 4096, 4096), (1, 100, 4096), (0, 4096, 100), (9, 4096, 100), (8, 64, 64)]
)
def test_lengths_that_do_not_go_with_the_codec_are_refused(kind: int, raw: int, stored: int) -> None:
    head = record_format.Head(
        fingerprint=FINGERPRINT,
        key=KEY,
        parent=None,
        codec=record_format.Codec.NONE,
        raw_nbytes=raw,
        stored_nbytes=stored,
    )
    sealed = bytearray(record_format.seal(head, np.zeros(stored, dtype=np.uint8)))
    sealed[10] = kind
    with pytest.raises(IntegrityError, match="no writer"):
        record_format.parse(bytes(sealed))
