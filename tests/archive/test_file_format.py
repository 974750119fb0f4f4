"""Test the bytes of an archive: parts are decoded as they were encoded, and changed bytes are detected."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from tests.archive.rig import DESCRIPTION, LAYOUT
from tests.support.pages import SPEC, chain
from tierstore.archive import file_format
from tierstore.errors import ArchiveError
from tierstore.nvme.record_format import HEAD_NBYTES
from tierstore.page import PageLayout, PageSpec

NBYTES = LAYOUT.blob_nbytes


@st.composite
def forests(draw: st.DrawFn) -> list[file_format.Item]:
    """Draw contiguous records. The parent of a record can be None, anywhere in the file, or missing from it."""
    keys = chain(draw(st.integers(0, 12)))
    outside = chain(1, "outside")[0]
    parents = [draw(st.sampled_from([None, outside, *keys[:i]])) for i in range(len(keys))]
    order = draw(st.permutations(range(len(keys))))
    items, offset = [], len(file_format.header(DESCRIPTION))
    for i in order:
        stored = draw(st.integers(1, NBYTES))
        items.append(
            file_format.Item(
                keys[i], parents[i], draw(st.integers(0, 255)), NBYTES, stored, offset, bytes([i]) * 16
            )
        )
        offset += HEAD_NBYTES + stored
    return items


@given(forests())
def test_an_index_is_decoded_with_parents_before_children(items: list[file_format.Item]) -> None:
    head = file_format.header(DESCRIPTION)
    ordered = file_format.parents_first(items)
    indexed = file_format.index(ordered)
    start = items[-1].end if items else len(head)
    end = file_format.trailer(head[-16:], start, indexed)
    trailer = file_format.parse_trailer(end, start + len(indexed) + len(end), head[-16:])
    found = file_format.parse_index(indexed, trailer, len(head), NBYTES)
    assert found == ordered
    assert sorted(found) == sorted(items, key=tuple) or set(found) == set(items)
    places = {item.key: i for i, item in enumerate(found)}
    assert all(places[item.parent] < i for i, item in enumerate(found) if item.parent in places)


specs = st.builds(
    PageSpec,
    kind=st.sampled_from(["mha", "mla", "state"]),
    num_layers=st.integers(1, 80),
    page_size=st.just(16),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
    group=st.integers(0, 9),
    shard=st.just(3),
    model=st.text(min_size=1, max_size=40).filter(
        lambda text: bool(text.strip()) and text.encode("utf-8", "replace").decode() == text
    ),
)


@given(st.lists(specs, min_size=1, max_size=3), st.sampled_from(["exact", "int8"]))
def test_a_description_is_decoded_unchanged(groups: list[PageSpec], loss_class: str) -> None:
    described = file_format.Description(PageLayout.of(groups), loss_class)
    raw = file_format.header(described)
    assert file_format.header_nbytes(raw) == len(raw)
    assert file_format.parse_header(raw) == described
    assert file_format.parse_header(raw).fingerprint == described.fingerprint


def test_every_flipped_bit_of_header_index_and_trailer_is_detected() -> None:
    head = file_format.header(DESCRIPTION)
    keys = chain(2)
    items = [
        file_format.Item(keys[0], None, 0, NBYTES, NBYTES, len(head), bytes(16)),
        file_format.Item(keys[1], keys[0], 0, NBYTES, NBYTES, len(head) + HEAD_NBYTES + NBYTES, bytes(16)),
    ]
    indexed = file_format.index(items)
    start = items[-1].end
    end = file_format.trailer(head[-16:], start, indexed)
    nbytes = start + len(indexed) + len(end)

    def read(head: bytes, indexed: bytes, end: bytes) -> None:
        file_format.parse_header(head[: file_format.header_nbytes(head)])
        trailer = file_format.parse_trailer(end, nbytes, head[-16:])
        file_format.parse_index(indexed, trailer, len(head), NBYTES)

    read(head, indexed, end)
    parts = (head, indexed, end)
    for which in range(3):
        for position in range(len(parts[which])):
            changed = [*parts]
            spoiled = bytearray(parts[which])
            spoiled[position] ^= 1 << (position % 8)
            changed[which] = bytes(spoiled)
            with pytest.raises(ArchiveError):
                read(*changed)


def summed(version: int, described: dict[str, object]) -> bytes:
    """Return a header with a correct checksum."""
    body = json.dumps(described).encode()
    raw = b"TierArch" + version.to_bytes(2, "little") + bytes(2) + len(body).to_bytes(4, "little") + body
    return raw + xxh3_128_digest(raw)


def test_a_newer_version_is_named_before_anything_else() -> None:
    raw = bytearray(file_format.header(DESCRIPTION))
    raw[8] = file_format.VERSION + 1
    with pytest.raises(ArchiveError, match=r"in format version 2, but this TierStore reads version 1"):
        file_format.parse_header(bytes(raw))


@pytest.mark.parametrize(
    "change",
    [
        {"groups": []},
        {"groups": [{}]},
        {"groups": None},
        {"fingerprint": "00"},
        {"page_nbytes": 1},
        {"groups": [{**vars_of, "kind": "holographic"} for vars_of in ({"num_layers": 2},)]},
    ],
)
def test_a_header_that_describes_unknown_pages_is_refused_though_its_checksum_is_right(
    change: dict[str, object],
) -> None:
    raw = file_format.header(DESCRIPTION)
    described = json.loads(raw[file_format.PRELUDE_NBYTES : -16])
    assert file_format.parse_header(summed(1, described)) == DESCRIPTION
    with pytest.raises(ArchiveError):
        file_format.parse_header(summed(1, {**described, **change}))


def test_description_too_long_for_the_header_is_refused_at_write() -> None:
    spec = replace(SPEC, model="x" * (1 << 20))
    with pytest.raises(ArchiveError, match="shorter model name"):
        file_format.header(file_format.Description(PageLayout.of(spec)))


@pytest.mark.parametrize("fault", ["twice", "child first", "gap", "too long", "other page"])
def test_impossible_index_with_a_valid_checksum_is_refused(fault: str) -> None:
    head_end = len(file_format.header(DESCRIPTION))
    keys = chain(2)
    one = file_format.Item(keys[0], None, 0, NBYTES, NBYTES, head_end, bytes(16))
    two = file_format.Item(keys[1], keys[0], 0, NBYTES, NBYTES, one.end, bytes(16))
    items = {
        "twice": [one, two._replace(key=keys[0], parent=None)],
        "child first": [two, one],
        "gap": [one, two._replace(offset=two.offset + 1)],
        "too long": [one, two._replace(stored_nbytes=NBYTES + 1)],
        "other page": [one, two._replace(raw_nbytes=NBYTES + 1)],
    }[fault]
    indexed = file_format.index(items)
    end = file_format.trailer(bytes(16), two.end, indexed)
    trailer = file_format.parse_trailer(end, two.end + len(indexed) + len(end), bytes(16))
    with pytest.raises(ArchiveError, match="its index is damaged"):
        file_format.parse_index(indexed, trailer, head_end, NBYTES)


def test_random_bytes_are_refused_as_an_archive() -> None:
    for seed in range(200):
        raw = random.Random(seed).randbytes(seed)
        with pytest.raises(ArchiveError, match="not a page archive"):
            file_format.header_nbytes(raw)
