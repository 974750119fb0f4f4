"""Tests that the pieces of a slot make up its page, for every layout that an engine may have."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.support.engine import ENGINES, SLOTS, Engine
from tests.support.pages import SPEC, chain, content
from tierstore.gpu.addresses import Segments, alignment, in_equal_pieces, pool_segments, tensor_segments
from tierstore.gpu.engine_pages import EnginePool
from tierstore.gpu.pool import CpuPool
from tierstore.page import PageLayout, PageSpec

LAYOUT = PageLayout.of(SPEC)
NO_LIMIT = 1 << 20

GROUPS = PageLayout.of(
    [
        PageSpec(num_layers=3, page_size=4, num_kv_heads=1, head_dim=5, dtype="float16", model="a"),
        PageSpec(
            kind="mla", num_layers=2, page_size=4, num_kv_heads=1, head_dim=7, dtype="float32", model="a"
        ),
    ]
)


def gathered(segments: Segments, slot: int, nbytes: int) -> bytes:
    """Return the page of a slot, read from the addresses of its pieces."""
    page = ctypes.create_string_buffer(nbytes)
    (addresses,) = segments.addresses(np.array([slot]))
    for address, offset, length in zip(addresses, segments.offset, segments.nbytes, strict=True):
        ctypes.memmove(ctypes.addressof(page) + int(offset), int(address), int(length))
    return page.raw


@pytest.mark.parametrize("make", ENGINES)
def test_the_pieces_of_an_engines_slot_make_up_its_page(make: type[Engine]) -> None:
    engine = make()  # type: ignore[call-arg]
    keys = chain(SLOTS)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    pool = EnginePool(LAYOUT, [engine.pages])
    segments = tensor_segments(pool.layers, LAYOUT, NO_LIMIT)
    assert segments is not None
    assert int(segments.nbytes.sum()) == SPEC.page_nbytes
    for slot, key in enumerate(keys):
        want = content(key).view(torch.uint8).numpy().tobytes()
        assert gathered(segments, slot, SPEC.page_nbytes) == want


def test_adjacent_pieces_are_merged() -> None:
    numbers = {}
    for make in ENGINES:
        pool = EnginePool(LAYOUT, [make().pages])
        segments = tensor_segments(pool.layers, LAYOUT, NO_LIMIT)
        assert segments is not None
        numbers[make.__name__] = len(segments)
    layers, planes, tokens, heads, dim = SPEC.shape
    assert numbers == {
        "page_major": 1,
        "planes_first": layers * planes,
        "blocks_first": layers,
        "planes_merged_with_dim": layers * planes * tokens * heads,
        "permuted_with_an_offset": SPEC.page_nbytes // 2,
        "every_other_block": 1,
    }
    assert dim > 1


def test_more_pieces_than_the_limit_are_not_listed() -> None:
    layers, planes, *_ = SPEC.shape
    pool = EnginePool(LAYOUT, [ENGINES[1]().pages])
    assert tensor_segments(pool.layers, LAYOUT, layers * planes) is not None
    assert tensor_segments(pool.layers, LAYOUT, layers * planes - 1) is None


@pytest.mark.parametrize("layout", [LAYOUT, GROUPS])
def test_store_owned_slot_is_one_piece(layout: PageLayout) -> None:
    pool = CpuPool(layout, 3)
    pages = [np.random.default_rng(slot).integers(0, 256, layout.blob_nbytes, np.uint8) for slot in range(3)]
    for slot, page in enumerate(pages):
        pool.write(slot, page)
    segments = pool_segments(pool.view(0).ctypes.data, layout)
    assert len(segments) == 1
    for slot, page in enumerate(pages):
        assert gathered(segments, slot, layout.blob_nbytes) == page.tobytes()


def test_groups_are_consecutive_in_the_blob() -> None:
    tensors = [
        [torch.zeros(2, *spec.shape[1:], dtype=getattr(torch, spec.dtype)) for _ in range(spec.num_layers)]
        for spec in GROUPS.specs
    ]
    segments = tensor_segments(tensors, GROUPS, NO_LIMIT)
    assert segments is not None
    first, second = GROUPS.specs
    want = [i * first.layer_nbytes for i in range(3)]
    want += [GROUPS.offsets[1] + i * second.layer_nbytes for i in range(2)]
    assert segments.offset.tolist() == want


@pytest.mark.parametrize("make", ENGINES)
def test_equal_pieces_are_the_same_bytes(make: type[Engine]) -> None:
    engine = make()  # type: ignore[call-arg]
    pool = EnginePool(LAYOUT, [engine.pages])
    segments = tensor_segments(pool.layers, LAYOUT, NO_LIMIT)
    assert segments is not None
    equal = in_equal_pieces(segments)
    if segments.smallest < 64:
        assert equal is None, "the pieces are too small for the kernel"
        return
    assert equal is not None
    for slot, key in enumerate(chain(SLOTS)):
        engine.fill(slot, key)
        want = content(key).view(torch.uint8).numpy().tobytes()
        assert gathered(equal, slot, SPEC.page_nbytes) == want


def test_pieces_of_several_lengths_are_cut_to_a_common_divisor() -> None:
    segments = Segments(*(np.array(x) for x in ([1000, 9000], [64, 640], [0, 384], [384, 256])))
    equal = in_equal_pieces(segments)
    assert equal is not None
    assert equal.base.tolist() == [1000, 1128, 1256, 9000, 9128]
    assert equal.stride.tolist() == [64, 64, 64, 640, 640]
    assert equal.offset.tolist() == [0, 128, 256, 384, 512]
    assert equal.nbytes.tolist() == [128] * 5


@pytest.mark.parametrize(
    ("base", "stride", "offset", "nbytes", "width"),
    [(0, 0, 0, 64, 16), (32, 4096, 48, 16, 16), (8, 4096, 0, 64, 8), (0, 4100, 0, 64, 4), (2, 0, 0, 64, 2)],
)
def test_a_width_divides_every_address_and_length(
    base: int, stride: int, offset: int, nbytes: int, width: int
) -> None:
    columns = [np.array([x, x + 1024 * (i == 0)]) for i, x in enumerate((base, stride, offset, nbytes))]
    assert alignment(Segments(*columns)) == width
