"""Tests that payloads copied and decoded by layer group give the same bytes as payloads decoded as a whole."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from tests.codecs.holding import Bytes, decoded, page_like_kv, spec_of
from tests.core.test_codec_kernels import KERNELS_HERE, PAIRS
from tests.support import lanes
from tierstore.codecs import LOSSY
from tierstore.codecs.host_format import HostFormat, Packer
from tierstore.gpu import addresses, quant
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.layer_groups import Cut, LayerGroups
from tierstore.gpu.quant import encoded_routes
from tierstore.gpu.quant.coder import Coder
from tierstore.gpu.quant.encoded_routes import parts_of
from tierstore.gpu.slabs import Ring, SlabCopies, SlabRoute
from tierstore.page import PageLayout

LAYERS, TOKENS, HEADS, DIM = 5, 32, 2, 64
SLOTS = 7
CPU = torch.device("cpu")

Numbers = NDArray[np.int64]


def layout_of(dtype: str) -> PageLayout:
    return PageLayout.of(spec_of(dtype, LAYERS, TOKENS, HEADS, DIM))


class Driver:
    """A fake driver that copies immediately."""

    def copy(self, dst: Numbers, src: Numbers, nbytes: Numbers, stream: object) -> None:
        for move in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(*move)


class Stream:
    device = CPU

    def wait_event(self, event: object) -> None:
        """Do nothing: every event has already completed."""


class Event:
    def record(self, stream: object) -> None:
        """Do nothing: the event counts as completed."""


class Nothing:
    """A stand-in for the coder and the carrier of whole pages, which these tests do not use."""

    pieces = 1


class Card:
    event = Event

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def uploaded(self, slots: Numbers) -> torch.Tensor:
        return torch.from_numpy(slots)

    def flags(self, pages: int) -> torch.Tensor:
        return torch.zeros(pages, dtype=torch.int32)

    def using(self, stream: object) -> nullcontext[None]:
        return nullcontext()


@dataclass
class Bench:
    """Payloads in ordinary memory, slots to decode them into, and a route that decodes one layer group at a time."""

    held: HostFormat
    pool: Own | EnginePool
    route: SlabRoute
    payloads: Bytes
    pages: list[Bytes]

    def load(self, slots: Sequence[int], group: int) -> list[int]:
        """Load a layer group of the first payloads into ``slots``. Return an error flag per page."""
        there = np.array(slots, dtype=np.int64)
        here = self.payloads.ctypes.data + np.arange(len(slots), dtype=np.int64) * self.held.slot_nbytes
        stream: Any = Stream()
        flags = self.route.load_group(group, there, here, stream)
        assert flags is not None
        found: list[int] = flags.tolist()
        return found

    def page(self, slot: int) -> Bytes:
        found = np.zeros(self.held.layout.blob_nbytes, dtype=np.uint8)
        self.pool.read(slot, found)
        return found

    def wanted(self, number: int) -> Bytes:
        """Return the page of a payload, as decoded by ``tierstore.codecs``."""
        codec, payload = LOSSY[self.held.codec], self.payloads[number, : self.held.payload_nbytes]
        return decoded(codec, self.held.layout, payload)


class Own:
    """Slots of a pool that this object creates."""

    def __init__(self, layout: PageLayout) -> None:
        self._rows = torch.zeros(SLOTS, layout.slot_nbytes, dtype=torch.uint8)
        self.lots = addresses.pool_strides(self._rows.flatten(), layout)

    def read(self, slot: int, page: Bytes) -> None:
        np.copyto(page, self._rows[slot, : len(page)].numpy())


def engine_pool(layout: PageLayout) -> EnginePool:
    dtype = getattr(torch, layout.specs[0].dtype)
    layers = [torch.zeros(2, SLOTS, TOKENS, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)]
    return EnginePool(layout, [EnginePages(layers, "KBNHD")])


def open_bench(
    name: str,
    dtype: str,
    patch: pytest.MonkeyPatch,
    *,
    engine: bool = False,
    shares: tuple[int, ...] = (1, 2, 2),
) -> Bench:
    layout = layout_of(dtype)
    held = HostFormat.of(name, layout)
    patch.setattr(quant, "codec_kernels", KERNELS_HERE, raising=False)
    patch.setitem(sys.modules, "tierstore.gpu.quant.codec_kernels", KERNELS_HERE)
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(Coder, "compile_decoding", lambda self, share: None)
    patch.setattr(encoded_routes, "_any_share", lambda held, device: None)
    patch.setattr(encoded_routes, "CUTS", [Cut(shares, 1)])
    pool: Own | EnginePool = engine_pool(layout) if engine else Own(layout)
    if isinstance(pool, Own):
        found = pool.lots
        patch.setattr(encoded_routes, "_lots", lambda pool, held: found)
    stream: Any = Stream()
    ring, driver = Ring(2 * held.slot_nbytes, stream, Card()), Driver()
    layers, groups = encoded_routes._by_layers(pool, held, ring, driver, CPU)  # type: ignore[arg-type]
    nothing: Any = Nothing()
    whole = SlabCopies(ring, nothing, held.slot_nbytes, [nothing])
    route = SlabRoute(name, whole, whole, layers, groups)
    pages = [page_like_kv(layout, seed, frozenset({"outliers"})) for seed in range(5)]
    payloads, packer = np.zeros((len(pages), held.slot_nbytes), dtype=np.uint8), Packer(held)
    assert all(packer.pack(page, row) for page, row in zip(pages, payloads, strict=True))
    return Bench(held, pool, route, payloads, pages)


@pytest.mark.parametrize(
    ("name", "dtype"),
    lanes.some(PAIRS, lambda name, dtype: (name, dtype) in (("int8", "float32"), ("k8v4", "bfloat16"))),
)
def test_layer_groups_fill_only_their_layers_and_together_the_page(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(name, dtype, monkeypatch)
    layers = bench.route.layers
    assert layers is not None
    assert len(layers) == 3
    assert bench.route.group_pieces >= 4
    slots = [3, 0, 6, 1, 4]
    for group in (2, 0, 1):  # groups can be loaded in any order
        before = [bench.page(slot) for slot in range(SLOTS)]
        assert bench.load(slots, group) == [0] * len(slots)
        [part] = layers.parts[group]
        its = slice(part.offset, part.offset + part.nbytes)
        for slot in range(SLOTS):
            want = before[slot].copy()
            if slot in slots:
                want[its] = bench.wanted(slots.index(slot))[its]
            np.testing.assert_array_equal(bench.page(slot), want)


@pytest.mark.parametrize(
    ("name", "shares"),
    lanes.some(
        product(("int8", "k8v4"), ((1, 2, 2), (4, 1), (1, 3, 1))),
        lambda name, shares: name == "int8" or shares == (1, 3, 1),
    ),
    ids=str,
)
def test_an_engines_layers_are_filled_group_by_group(
    name: str, shares: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(name, "bfloat16", monkeypatch, engine=True, shares=shares)
    assert bench.route.layers is not None
    assert len(bench.route.layers) == len(shares)
    for group in range(len(shares)):
        assert bench.load([5, 2, 0], group) == [0, 0, 0]
    for number, slot in enumerate([5, 2, 0]):
        np.testing.assert_array_equal(bench.page(slot), bench.wanted(number))


def test_invalid_payload_is_reported_with_its_layer_group(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_bench("int8", "bfloat16", monkeypatch)
    bench.payloads[1, bench.held.payload_nbytes - 1] = 0x80  # the last code: values of the last layer
    told = [bench.load([3, 0, 6], group) for group in range(3)]
    assert told == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_pages_with_several_kv_groups_and_small_pages_are_loaded_whole() -> None:
    several = PageLayout.of([spec_of("bfloat16", 4, 32, 2, 64), spec_of("bfloat16", 4, 32, 2, 64)])
    assert parts_of(HostFormat.of("int8", several), LayerGroups.of(several, 3, 1)) == []
    small = layout_of("bfloat16")
    assert parts_of(HostFormat.of("int8", small), LayerGroups.of(small, 3, 1 << 20)) == []


def test_pieces_of_all_layer_groups_make_up_the_payload() -> None:
    """Divide pages of an 8B model into two layer groups of four pieces each. The second group is smaller."""
    layout = PageLayout.of(spec_of("bfloat16", 32, 64, 8, 128))
    held = HostFormat.of("int8", layout)
    parts = parts_of(held, LayerGroups.by_shares(layout, encoded_routes.CUTS))
    assert [(part.first, part.end) for part in parts] == [(0, 20), (20, 32)]
    assert [len(part.pieces) for part in parts] == [4, 4]
    pieces = sorted((there, nbytes) for part in parts for _, there, nbytes in part.pieces)
    assert pieces[0][0] == 0
    assert all(at + nbytes == after for (at, nbytes), (after, _) in pairwise(pieces))
    assert sum(pieces[-1]) == held.payload_nbytes


@pytest.mark.parametrize(("tokens", "groups"), [(16, 1), (32, 1), (64, 2), (128, 2)])
def test_pages_with_small_parts_are_loaded_whole(tokens: int, groups: int) -> None:
    """Use pages of an 8B model, which are 2 to 16 MiB each."""
    layout = PageLayout.of(spec_of("bfloat16", 32, tokens, 8, 128))
    assert len(LayerGroups.by_shares(layout, encoded_routes.CUTS)) == groups
