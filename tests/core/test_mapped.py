"""Tests that the interpreted kernel decodes payloads in host memory to the same bytes as the codecs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from tests.codecs.holding import FEATURES, Bytes, decoded, encoded, page_like_kv, spec_of
from tests.core import virtual_link
from tests.core.interpreted import interpreted
from tests.support import lanes
from tests.support.planting import Bug, write
from tierstore.codecs import LOSSY
from tierstore.codecs.host_format import HostFormat
from tierstore.errors import IntegrityError
from tierstore.gpu import addresses, cuda_copy_engine
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.quant import encoded_routes
from tierstore.gpu.quant.coder import Coder, Grid, can_fetch
from tierstore.page import PageLayout

FETCHING_HERE = interpreted()
NAMES = [name for name, codec in LOSSY.items() if not codec.zstd]
SMALL = Grid(3, 4, 1024, 2048, 1)
"""A launch configuration with several tiles per plane, iterations per tile, and tiles per program."""

SLOTS, FILL = 5, 0xA5


class Card:
    """A fake GPU with ordinary memory."""

    def flags(self, pages: int) -> torch.Tensor:
        return torch.zeros(pages, dtype=torch.int32)

    def using(self, stream: object) -> nullcontext[None]:
        return nullcontext()


class NoRing:
    card = Card()


class NoSaves:
    """A stand-in for the saves of the route, which no test uses."""

    ends_on = None
    ring = NoRing()


class Bench:
    """Payloads in rows of ordinary memory, and slots to decode them into, in a pool or in an engine's tensors."""

    def __init__(
        self,
        name: str,
        layout: PageLayout,
        pages: Sequence[Bytes],
        engine: Sequence[EnginePages] = (),
        groups: int = 1,
        grid: Grid = SMALL,
        kernels: ModuleType = FETCHING_HERE,
    ) -> None:
        self.codec, self.layout = LOSSY[name], layout
        found = [encoded(self.codec, layout, page) for page in pages]
        self.payloads = [payload for payload in found if payload is not None]
        assert len(self.payloads) == len(pages)
        length = len(self.payloads[0])
        self._memory = np.full((len(pages), -(-length // 64) * 64 + 64), FILL, dtype=np.uint8)
        self._start = -self._memory.ctypes.data % 16
        self._length = length
        self._rows = torch.full((SLOTS * layout.slot_nbytes,), FILL, dtype=torch.uint8)
        self._pool = EnginePool(layout, engine) if engine else None
        layers = LayerGroups.of(layout, groups, 1)
        where = (
            addresses.tensor_strides(self._pool.layers)
            if self._pool
            else addresses.pool_strides(self._rows, layout)
        )
        assert where is not None
        coder = Coder(self.codec, layout, where, None, -(-length // 16) * 16, kernels, grid)
        saves: Any = NoSaves()
        self.route = encoded_routes.mapped_route("here", coder, saves, layers)

    def load(self, slots: Sequence[int], group: int | None = None) -> list[int]:
        """Load the first payloads into ``slots``, or only one layer group of them. Return an error flag per page."""
        for row, payload in zip(self._memory, self.payloads, strict=True):
            row[self._start : self._start + self._length] = payload
        there = np.array(slots, dtype=np.int64)
        stride = self._memory.strides[0]
        here: NDArray[np.int64] = (
            self._memory.ctypes.data + self._start + np.arange(len(slots), dtype=np.int64) * stride
        )
        stream: Any = None
        with np.errstate(over="ignore", invalid="ignore"):
            if group is None:
                flags = self.route.load(there, here, stream)
            else:
                flags = self.route.load_group(group, there, here, stream)
        assert flags is not None
        found: list[int] = flags.tolist()
        return found

    def page(self, slot: int) -> Bytes:
        if self._pool is not None:
            found = np.zeros(self.layout.blob_nbytes, dtype=np.uint8)
            self._pool.read(slot, found)
            return found
        return np.array(self._rows.view(SLOTS, -1)[slot, : self.layout.blob_nbytes].numpy())

    def wanted(self, number: int) -> Bytes:
        return decoded(self.codec, self.layout, self.payloads[number])

    def accepted(self, number: int) -> bool:
        """Return whether ``tierstore.codecs`` decodes the payload without an IntegrityError."""
        try:
            self.wanted(number)
        except IntegrityError:
            return False
        return True


def some_pages(layout: PageLayout, number: int = 3) -> list[Bytes]:
    features = [frozenset[str](), frozenset(FEATURES), frozenset({"outliers", "subnormals", "tiny"})]
    return [page_like_kv(layout, seed, features[seed % 3]) for seed in range(number)]


def require_same(bench: Bench, slots: Sequence[int] = (3, 0, 4)) -> None:
    assert bench.load(slots) == [0] * len(slots)
    for number, slot in enumerate(slots):
        np.testing.assert_array_equal(bench.page(slot), bench.wanted(number))


SHAPES = [
    ("bfloat16", 32, 2, 64),
    ("bfloat16", 64, 1, 128),
    ("bfloat16", 33, 3, 32),
    ("bfloat16", 70, 1, 24),
    ("bfloat16", 3, 1, 16),
    ("float16", 34, 1, 64),
    ("float32", 64, 1, 64),
]
"""Dtype, tokens, KV heads and head dimension of a page.

The cases are, in order: one group of tokens, two groups, a group and one more token, rows of an odd size, few elements,
and two other dtypes.
"""


@pytest.mark.parametrize(
    ("name", "shape"),
    # Every shape with int8 (a byte per element), three with int4 (half a byte), and one with every other codec
    lanes.some(
        product(NAMES, SHAPES),
        lambda name, shape: name == "int8" or shape == SHAPES[0] or (name == "int4" and shape in SHAPES[2:4]),
    ),
    ids=str,
)
def test_pages_equal_those_of_the_cpu(name: str, shape: tuple[str, int, int, int]) -> None:
    layout = PageLayout.of(spec_of(shape[0], 1, *shape[1:]))
    if not can_fetch(LOSSY[name], layout):
        # The two codes in a byte are of different tokens, and here their scales change at different bytes.
        size = {"int4": 32, "int4-64": 64}[name]
        assert shape[1] > size
        assert (shape[1] + 1) // 2 % size
        return
    require_same(Bench(name, layout, some_pages(layout)))


@pytest.mark.parametrize("name", lanes.some(NAMES, "k8v4".__eq__))
def test_pages_of_several_kv_groups_are_loaded(name: str) -> None:
    layout = PageLayout.of([spec_of("bfloat16", 2, 32, 2, 64), spec_of("bfloat16", 1, 32, 1, 64, 1, "mla")])
    bench = Bench(name, layout, some_pages(layout))
    require_same(bench)


def test_layouts_that_a_tile_cannot_hold_are_not_fetched() -> None:
    left = PageLayout.of(spec_of("bfloat16", 2, 32, 2, 80))  # each head is divided into 64 and 16 elements
    kept = PageLayout.of([spec_of("bfloat16", 2, 32, 2, 64), spec_of("uint8", 2, 32, 1, 7, 1)])
    for layout in (left, kept):
        assert not can_fetch(LOSSY["int8"], layout)


@pytest.mark.parametrize(
    "name",
    lanes.some(NAMES, "int4".__eq__),
)
def test_loading_a_layer_group_writes_only_its_layers(name: str) -> None:
    layout = PageLayout.of(spec_of("bfloat16", 5, 32, 1, 64))
    bench = Bench(name, layout, some_pages(layout), groups=3)
    layers = bench.route.layers
    assert layers is not None
    assert len(layers) == 3
    slots = [3, 0, 4]
    for group in (2, 0, 1):
        before = [bench.page(slot) for slot in range(SLOTS)]
        assert bench.load(slots, group) == [0, 0, 0]
        [part] = layers.parts[group]
        its = slice(part.offset, part.offset + part.nbytes)
        for slot in range(SLOTS):
            want = before[slot].copy()
            if slot in slots:
                want[its] = bench.wanted(slots.index(slot))[its]
            np.testing.assert_array_equal(bench.page(slot), want)


@pytest.mark.parametrize("letters", ["BKNHD", "BHNKD", "DNHKB"])
@pytest.mark.parametrize("name", ["int8", pytest.param("k8v4", marks=pytest.mark.deep)])
def test_an_engines_layers_are_filled_in_place(name: str, letters: str) -> None:
    layout = PageLayout.of(spec_of("bfloat16", 3, 16, 2, 64))
    sizes = dict(zip("BKNHD", (SLOTS, 2, 16, 2, 64), strict=True))
    tensors = [torch.zeros([sizes[x] for x in letters], dtype=torch.bfloat16) for _ in range(3)]
    require_same(Bench(name, layout, some_pages(layout), [EnginePages(tensors, letters)]))


@pytest.mark.deep
@pytest.mark.parametrize("grid", [Grid(1, 4, 64, 64, 1), Grid(500, 4, 4096, 1 << 20, 1)], ids=["one", "many"])
@pytest.mark.parametrize("name", ["int8", "k8v4", "fp8"])
def test_any_program_count_and_tile_size_give_the_same_result(name: str, grid: Grid) -> None:
    layout = PageLayout.of(spec_of("bfloat16", 1, 16, 2, 64))
    require_same(Bench(name, layout, some_pages(layout), grid=grid))


@pytest.mark.parametrize(
    "name",
    lanes.some(NAMES, ("fp8",).__contains__),
)
def test_invalid_payload_bytes_are_reported_for_their_page_only(name: str) -> None:
    """Overwrite single bytes of a payload with values that may be invalid as a scale, a minimum or a code."""
    layout = PageLayout.of(spec_of("float16", 1, 16, 1, 64))
    bench = Bench(name, layout, some_pages(layout), grid=Grid(2, 4, 2048, 4096, 1))
    good = bench.payloads[1].copy()
    told, refused = [], []
    for at in [1, 3, *range(5, 150, 36), *range(len(good) - 1, len(good) // 2, -397)]:
        for byte in (0x80, 0xFF):
            bench.payloads[1] = good.copy()
            bench.payloads[1][at] = byte
            refused.append(int(not bench.accepted(1)))
            flags = bench.load([3, 0, 4])
            told.append(flags[1])
            assert flags[::2] == [0, 0]
    assert told == refused
    assert any(told)
    assert name == "fp8" or not all(told)


def test_invalid_code_is_reported_with_its_layer_group() -> None:
    layout = PageLayout.of(spec_of("bfloat16", 5, 32, 1, 64))
    bench = Bench("int8", layout, some_pages(layout), groups=3)
    bench.payloads[1][-1] = 0x80  # the last code, which is in the last layer's values
    assert [bench.load([3, 0, 4], group) for group in range(3)] == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


class NoPieces(virtual_link.Link):
    """A route whose launches cost the caller the same for any number of pages."""

    def __init__(
        self,
        clock: virtual_link.Clock,
        held: HostFormat,
        processor: virtual_link.Processor,
        most_groups: int,
    ) -> None:
        super().__init__(clock, held, processor, most_groups)
        self.layers = LayerGroups.by_shares(held.layout, encoded_routes.MAPPED_CUTS)
        self.group_pieces = 0
        self._sizes = self.layers.divide(held.payload_nbytes)


@pytest.mark.parametrize("processor", [virtual_link.FAST, virtual_link.SLOW], ids=["fast", "slow"])
def test_pages_without_pieces_are_launched_in_large_batches_ahead(
    processor: virtual_link.Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restore 131,072 tokens of an 8B model while the caller computes twice for 30 ms without polling.

    Launches must be few and large, and the link must be idle for only a few milliseconds. With slabs, it would be
    idle for most of these 60 ms.
    """
    monkeypatch.setattr(virtual_link, "Link", NoPieces)
    found = virtual_link.restore(cuda_copy_engine, 16 << 30, processor, codec="int8", away=0.03)
    assert found.launches < 30
    assert found.idle < 0.02
    assert found.whole < found.link + found.idle + 0.001


def require_all_right(kernels: ModuleType) -> None:
    """Assert that pages of even and odd length are decoded correctly by layer group. Invalid payloads are flagged."""
    for name, tokens in (("int8", 16), ("k8v4", 15), ("int4-64", 15)):
        layout = PageLayout.of(spec_of("bfloat16", 3, tokens, 1, 64))
        bench = Bench(
            name, layout, some_pages(layout), groups=2, grid=Grid(2, 4, 256, 512, 1), kernels=kernels
        )
        for group in range(2):
            assert bench.load([3, 0, 4], group) == [0, 0, 0]
        for number, slot in enumerate([3, 0, 4]):
            np.testing.assert_array_equal(bench.page(slot), bench.wanted(number))
        for payload in bench.payloads[:2]:
            payload[:2] = 0xFF  # an invalid scale
        bench.payloads[1][:2] = 0xFF, 0x7F
        assert bench.load([3, 0, 4]) == [1, 1, 0]


BUGS = [
    Bug(
        "the next tile is read from the page of this one",
        "page = (tile + tl.num_programs(0)) // each",
        "page = tile // each",
    ),
    Bug(
        "the last tile is left out",
        "pages * each, tl.num_programs(0)",
        "pages * each - 1, tl.num_programs(0)",
    ),
    Bug("every group begins at the first layer", "layer = first + rest", "layer = rest"),
    Bug(
        "values are decoded with the scales of keys",
        "plane * SIDES_NEXT) // 2\n        floors",
        "0) // 2\n        floors",
    ),
    Bug(
        "all iterations of a tile use its first scales",
        "layer * SIDES, row + ROWS, here",
        "layer * SIDES, row, here",
    ),
    Bug(
        "both codes are read from the low half of a byte",
        "                    code = (found >> (4 * part))",
        "                    code = (found >> 0)",
    ),
    Bug(
        "tokens beyond the page are written",
        "                mask = inside & (i < NUMBERS)",
        "                mask = inside",
    ),
    Bug(
        "the error flag of another page is set",
        "tl.store(flags + page +",
        "tl.store(flags + pages - 1 - page +",
    ),
    Bug(
        "invalid scales are accepted",
        "                bad = mask & (stored > MOST_SCALE)",
        "                bad = mask & (stored > 0xFFFF)",
    ),
]


@pytest.mark.deep
def test_kernel_without_a_bug_is_correct() -> None:
    require_all_right(FETCHING_HERE)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug, tmp_path: Path) -> None:
    kernels = interpreted(write("tierstore.gpu.quant", bug, tmp_path))
    with pytest.raises(AssertionError):
        require_all_right(kernels)
