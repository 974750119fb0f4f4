"""Payloads that come by layer groups and are decoded group by group: to the byte the pages that they are as a whole."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from tests.codecs.holding import Bytes, decoded, page_like_kv, spec_of
from tests.core.test_codec_kernels import EACH, KERNELS_HERE
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
    """Copies at once."""

    def copy(self, dst: Numbers, src: Numbers, nbytes: Numbers, stream: object) -> None:
        for move in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(*move)


class Stream:
    device = CPU

    def wait_event(self, event: object) -> None:
        """Everything has happened."""


class Event:
    def record(self, stream: object) -> None:
        """It has happened."""


class Nothing:
    """A coder and a carrier of whole pages, which nobody asks for."""

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
    """Pages in slots of ordinary memory, their payloads in others, and the way between them by layers."""

    held: HostFormat
    pool: Own | EnginePool
    route: SlabRoute
    payloads: Bytes
    pages: list[Bytes]

    def load(self, slots: Sequence[int], group: int) -> list[int]:
        """From the first payloads; the flags."""
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
        """By ``tierstore.codecs``."""
        codec, payload = LOSSY[self.held.codec], self.payloads[number, : self.held.payload_nbytes]
        return decoded(codec, self.held.layout, payload)


class Own:
    """Slots of our own."""

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


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_groups_together_are_the_page_and_each_is_its_layers(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(name, dtype, monkeypatch)
    layers = bench.route.layers
    assert layers is not None
    assert len(layers) == 3
    assert bench.route.group_pieces >= 4
    slots = [3, 0, 6, 1, 4]
    for group in (2, 0, 1):  # in any order: each has what it needs
        before = [bench.page(slot) for slot in range(SLOTS)]
        assert bench.load(slots, group) == [0] * len(slots)
        [part] = layers.parts[group]
        its = slice(part.offset, part.offset + part.nbytes)
        for slot in range(SLOTS):
            want = before[slot].copy()
            if slot in slots:
                want[its] = bench.wanted(slots.index(slot))[its]
            np.testing.assert_array_equal(bench.page(slot), want)


@pytest.mark.parametrize("shares", [(1, 2, 2), (4, 1), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("name", ["int8", "k8v4"])
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


def test_a_payload_that_nobody_made_is_told_with_the_group_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_bench("int8", "bfloat16", monkeypatch)
    bench.payloads[1, bench.held.payload_nbytes - 1] = 0x80  # the last code: values of the last layer
    told = [bench.load([3, 0, 6], group) for group in range(3)]
    assert told == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_pages_of_several_kv_groups_go_whole_and_so_do_small_ones() -> None:
    several = PageLayout.of([spec_of("bfloat16", 4, 32, 2, 64), spec_of("bfloat16", 4, 32, 2, 64)])
    assert parts_of(HostFormat.of("int8", several), LayerGroups.of(several, 3, 1)) == []
    small = layout_of("bfloat16")
    assert parts_of(HostFormat.of("int8", small), LayerGroups.of(small, 3, 1 << 20)) == []


def test_the_pieces_of_all_groups_are_the_payload() -> None:
    """Of an 8B model's pages: two groups, the second the smaller one, and four pieces in each."""
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
def test_pages_whose_parts_would_be_small_pieces_go_whole(tokens: int, groups: int) -> None:
    """Of an 8B model, 2 to 16 MiB."""
    layout = PageLayout.of(spec_of("bfloat16", 32, tokens, 8, 128))
    assert len(LayerGroups.by_shares(layout, encoded_routes.CUTS)) == groups
