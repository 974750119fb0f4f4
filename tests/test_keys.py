"""Tests of page keys: equal in every process, and different whenever the bytes of the pages would differ."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections import UserList, deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import lanes
from tierstore.keys import Extra, namespace, page_keys
from tierstore.page import PageSpec
from tierstore.types import PageKey

SPEC = PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float32", model="m-1")
GOLDEN = (
    "from tierstore.keys import namespace, page_keys\n"
    "from tierstore.page import PageSpec\n"
    "spec = PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype='float32', model='m-1')\n"
    "keys = page_keys(range(9), page_size=4, namespace=namespace(spec), group=1, shard=2, salt=b'tenant',\n"
    "    extra=('lora-7', b'\\0', -1, (5, b'image')))\n"
    "print(*(key.hex() for key in keys))\n"
)
GOLDEN_KEYS = (
    "8359316964f63dad0d60c18bb224402cdeebf701a2565b9ef7e7a9ff5eed68a400010002",
    "1684ccefe33b6719a7b2c679c9f165ee0a79ba3bbdf870fbcd13172c2ded320400010002",
)


def keys_of(tokens: Any, extra: Any = (), **changes: Any) -> list[PageKey]:
    arguments: dict[str, Any] = {"page_size": 4, "namespace": b"n"} | changes
    return page_keys(tokens, extra=extra, **arguments)


@pytest.mark.parametrize("seed", ["0", "1", None])
def test_keys_are_the_same_in_every_process_with_any_hash_seed(seed: str | None) -> None:
    # F071
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    child = subprocess.run(
        [sys.executable, "-c", GOLDEN],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert tuple(child.stdout.split()) == GOLDEN_KEYS


def test_only_full_pages_have_keys() -> None:
    assert [len(keys_of(range(n))) for n in (0, 1, 3, 4, 5, 7, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_key_ends_in_group_and_shard_and_they_change_nothing_else() -> None:
    key = keys_of(range(4), group=0x0102, shard=0xFFFE)[0]
    assert len(key) == 36
    assert key[32:] == b"\x01\x02\xff\xfe"
    assert key[:32] == keys_of(range(4))[0][:32]


def test_a_longer_sequence_keeps_the_keys_of_its_prefix() -> None:
    assert keys_of(range(40))[:5] == keys_of(range(20))


def test_a_key_depends_on_every_token_before_it() -> None:
    changed = keys_of([99, *range(1, 12)])
    assert all(ours != other for ours, other in zip(keys_of(range(12)), changed, strict=True))


def test_equal_pages_at_other_positions_have_other_keys() -> None:
    keys = keys_of([7] * 40)
    assert len(set(keys)) == len(keys)


def test_pages_of_another_size_have_other_keys() -> None:
    assert not set(keys_of(range(16), page_size=4)) & set(keys_of(range(16), page_size=8))


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(range(-2, 10)),
        range(-2, 10),
        array("i", range(-2, 10)),
        deque(range(-2, 10)),
        UserList(range(-2, 10)),
        [np.int32(token) for token in range(-2, 10)],
        np.arange(-2, 10),
        np.arange(-2, 10, dtype=np.int8),
        np.arange(-2, 10, dtype=">i4"),
        np.repeat(np.arange(-2, 10), 2)[::2],
        torch.arange(-2, 10),
        torch.arange(-2, 10, dtype=torch.int32),
        torch.arange(-2, 10).repeat_interleave(2)[::2],
    ],
)
def test_keys_do_not_depend_on_the_token_container(tokens: Any) -> None:
    assert keys_of(tokens) == keys_of(list(range(-2, 10)))


@pytest.mark.parametrize(
    ("tokens", "error", "named"),
    [
        ([1, 2.0], TypeError, r"token_ids\[1\] must .*got 2.0 \(float\)"),
        ([1, True], TypeError, r"token_ids\[1\] must .*got True \(bool\)"),
        ([1, "2"], TypeError, r"token_ids\[1\] must .*got '2' \(str\)"),
        ([1, None], TypeError, r"token_ids\[1\] must .*got None"),
        ([[1, 2]], TypeError, r"token_ids\[0\] must .*got \[1, 2\] \(list\)"),
        ([0, 1 << 63], ValueError, r"token_ids\[1\] must .*got 9223372036854775808"),
        (
            np.array([0, 1 << 63], dtype=np.uint64),
            ValueError,
            r"token_ids\[1\] must .*got 9223372036854775808",
        ),
        (torch.tensor([1.0]), TypeError, "float32"),
        (torch.tensor([True]), TypeError, "bool"),
        (torch.tensor([[1, 2]]), ValueError, r"shape \(1, 2\)"),
        (torch.tensor([1], device="meta"), TypeError, "cannot be read"),
        (np.array([1, None]), TypeError, "object"),
        (np.array(3), ValueError, r"shape \(\)"),
        (iter([1, 2]), TypeError, "object"),
        (b"ab", TypeError, "bytes"),
        ("ab", TypeError, "str"),
    ],
)
def test_non_integer_sequences_are_refused_by_name(tokens: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        keys_of(tokens)


@pytest.mark.parametrize(
    ("extra", "error", "named"),
    [
        ("lora", TypeError, r"extra must .*got 'lora'"),
        (b"lora", TypeError, r"extra must .*got b'lora'"),
        (("a", True), TypeError, r"extra\[1\] must .*got True"),
        ((1.5,), TypeError, r"extra\[0\] must .*got 1.5"),
        ((None,), TypeError, r"extra\[0\] must .*got None"),
        (((1, b"x", 2),), ValueError, r"extra\[0\]"),
        (((-1, b"x"),), ValueError, r"extra\[0\]\[0\] must .*got -1"),
        (((True, b"x"),), TypeError, r"extra\[0\]\[0\] must .*got True"),
        ((("a", b"x"),), TypeError, r"extra\[0\]\[0\] must .*got 'a'"),
        (((1, "x"),), TypeError, r"extra\[0\]\[1\] must .*got 'x'"),
    ],
)
def test_extras_of_another_form_are_refused_by_name(extra: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        keys_of(range(4), extra)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 0},
        {"page_size": True},
        {"group": 1 << 16},
        {"shard": -1},
        {"namespace": "n"},
        {"salt": "s"},
    ],
)
def test_other_arguments_out_of_range_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(changes))):
        keys_of(range(4), **changes)


def test_tenants_with_other_salts_share_nothing() -> None:
    # F106
    keys = [keys_of(range(40), salt=salt) for salt in (b"", b"a", b"b", b"a\0")]
    assert len({key for sequence in keys for key in sequence}) == 40


def test_the_same_adapter_name_of_another_type_is_another_adapter() -> None:
    first = [keys_of(range(4), (item,))[0] for item in ("1", b"1", 1, -1, "", b"", 0)]
    assert len(set(first)) == len(first)


def test_extras_of_the_whole_sequence_change_every_page_and_keep_their_order() -> None:
    plain, one, two = keys_of(range(12)), keys_of(range(12), ("a", "b")), keys_of(range(12), ("b", "a"))
    assert len({*plain, *one, *two}) == 9


@pytest.mark.parametrize("offset", range(12))
def test_an_image_changes_the_page_that_holds_its_offset_and_those_after_it(offset: int) -> None:
    plain, image = keys_of(range(12)), keys_of(range(12), ((offset, b"image"),))
    page = offset // 4
    assert image[:page] == plain[:page]
    assert not set(image[page:]) & set(plain)


def test_the_same_image_at_another_offset_of_the_same_page_has_another_key() -> None:
    # F012
    assert keys_of(range(4), ((1, b"image"),)) != keys_of(range(4), ((2, b"image"),))


def test_images_equal_in_their_last_bytes_have_other_keys() -> None:
    # F012
    images = (bytes([n]) + bytes(31) for n in range(50))
    assert len({keys_of(range(4), ((0, image),))[0] for image in images}) == 50


def test_images_may_come_in_any_order_and_several_at_one_offset() -> None:
    images: list[Extra] = [(5, b"b"), (0, b"a"), (5, b"a"), "lora"]
    assert keys_of(range(12), images) == keys_of(range(12), images[::-1])
    assert keys_of(range(12), images) != keys_of(range(12), images[1:])


def test_an_image_beyond_the_last_full_page_changes_nothing_yet() -> None:
    assert keys_of(range(7), ((5, b"image"),)) == keys_of(range(7))
    assert keys_of(range(8), ((5, b"image"),))[1] != keys_of(range(8))[1]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"model": "m-2"},
        {"num_layers": 3},
        {"page_size": 8},
        {"num_kv_heads": 4},
        {"head_dim": 16},
        {"kind": "mla"},
        {"group": 1},
    ],
)
def test_pages_of_another_model_dtype_or_shape_have_another_namespace(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "page_size": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "model": "m-1",
    }
    other = namespace(PageSpec(**(fields | change)))
    assert other != namespace(SPEC)
    assert not set(keys_of(range(8), namespace=other)) & set(keys_of(range(8), namespace=namespace(SPEC)))


def test_each_loss_class_has_its_own_namespace_and_exact_pages_keep_theirs() -> None:
    classes = ["exact", "int8", "int4", "int4-64", ""]
    names = [namespace(SPEC, loss_class=each) for each in classes]
    assert len(set(names)) == len(classes)
    assert names[0] == namespace(SPEC)
    assert namespace([SPEC, SPEC]) not in names


def test_all_shards_share_one_namespace() -> None:
    fields: dict[str, Any] = {
        "num_layers": 1,
        "page_size": 4,
        "num_kv_heads": 1,
        "head_dim": 8,
        "dtype": "int8",
    }
    assert namespace(PageSpec(model="m", shard=0, **fields)) == namespace(
        PageSpec(model="m", shard=3, **fields)
    )


def test_the_namespace_of_groups_counts_them_and_their_order() -> None:
    other = PageSpec(
        num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", model="m-1", group=1
    )
    names = [namespace(specs) for specs in ([SPEC], [SPEC, SPEC], [SPEC, other], [other, SPEC])]
    assert len(set(names)) == 4
    assert namespace(SPEC) == namespace([SPEC])
    with pytest.raises(ValueError, match="at least one"):
        namespace([])


texts = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["@@", "/", "\0", "\u00e9", "e\u0301", "\ud800"]
)
blobs = st.binary(max_size=6)
extras = st.lists(
    texts | blobs | st.integers(-(1 << 70), 1 << 70) | st.tuples(st.integers(0, 11), blobs), max_size=4
)
inputs = st.tuples(
    st.lists(st.integers(-3, 3), min_size=12, max_size=12), st.sampled_from([1, 2, 3]), blobs, blobs, extras
)


def identity(case: tuple[list[int], int, bytes, bytes, list[Any]]) -> tuple[Any, ...]:
    """Return everything that the bytes of the last page depend on, as plain values instead of an encoded key."""
    tokens, page_size, name, salt, extra = case
    shared = [(type(item), item) for item in extra if not isinstance(item, tuple)]
    return tokens, page_size, name, salt, shared, sorted(item for item in extra if isinstance(item, tuple))


@settings(max_examples=lanes.examples(60, 300), deadline=None)
@given(inputs, inputs)
def test_keys_are_equal_exactly_when_all_inputs_are(one: Any, two: Any) -> None:
    # F014
    for other in (two, (one[0], *two[1:]), (*one[:2], one[3], one[2], one[4]), (*one[:4], two[4]), one):
        last = [
            page_keys(tokens, page_size=size, namespace=name, salt=salt, extra=extra)[-1]
            for tokens, size, name, salt, extra in (one, other)
        ]
        assert (last[0] == last[1]) == (identity(one) == identity(other))


@settings(max_examples=lanes.examples(25, 100), deadline=None)
@given(st.lists(blobs, min_size=2, max_size=5))
def test_moving_bytes_between_fields_makes_other_keys(parts: list[bytes]) -> None:
    # F014
    whole = b"".join(parts)
    splits = {(whole[:cut], whole[cut:]) for cut in range(len(whole) + 1)}
    keys = [keys_of(range(4), namespace=left, salt=right)[0] for left, right in splits]
    keys += [keys_of(range(4), (left, right))[0] for left, right in splits]
    assert len(set(keys)) == len(keys)


def test_each_page_of_a_chain_differs_from_its_parent() -> None:
    assert all(parent != child for parent, child in pairwise(keys_of([0] * 400)))
