"""Test attention over pages in HBM and pages that stream from host memory, against results in float64.

Copies run on a thread that stalls. Slabs contain NaN until a copy has arrived."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import sleep
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support import lanes
from tierstore.gpu.attention.backends import attend
from tierstore.gpu.attention.page_stream import PageStream
from tierstore.gpu.attention.page_table import Paging
from tierstore.gpu.attention.paged import shape_of
from tierstore.gpu.attention.streamed import StreamedDecode, StreamedPrefill
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout, PageSpec

LAYERS = 3
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Step:
    """The sequences of a step.

    Attributes:
        prefixes: For each prefix that several sequences share, its number of pages.
        of: For each sequence, the index of its prefix.
        own: For each sequence, its number of tokens after the prefix.
        widths: For each sequence, its number of queries.
        share: Probability that a page is in host memory.
    """

    prefixes: Sequence[int]
    of: Sequence[int]
    own: Sequence[int]
    widths: Sequence[int]
    page_size: int = 4
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    window_left: int = -1
    rows: int = 2
    slabs: int = 3
    share: float = 0.7
    seed: int = 0
    codec: str = "none"


class Scene:
    """A step with its pages: all of them in one pool for the reference, and divided into two pools."""

    def __init__(self, step: Step, ring: int | None = None) -> None:
        self.step = step
        chance = np.random.default_rng(step.seed)
        size = step.page_size
        dtype = "float32" if step.codec == "none" else "bfloat16"
        self.spec = PageSpec(
            num_layers=LAYERS, page_size=size, num_kv_heads=step.num_kv_heads, head_dim=step.head_dim,
            dtype=dtype, model="streamed",
        )  # fmt: skip
        self.dtype = getattr(torch, dtype)
        shared, tables, total = [], [], 0
        for pages in step.prefixes:
            shared.append(np.arange(total, total + pages))
            total += pages
        for prefix, own in zip(step.of, step.own, strict=True):
            count = -(-own // size)
            tables.append(np.concatenate([shared[prefix], np.arange(total, total + count)]))
            total += count
        self.lens = [len(shared[prefix]) * size + own for prefix, own in zip(step.of, step.own, strict=True)]
        torch.manual_seed(step.seed)
        self.whole = torch.randn(max(1, total), *self.spec.shape).to(self.dtype)
        host = chance.random(max(1, total)) < step.share
        self.arena = HostArena(PageLayout.of(self.spec), max(1, int(host.sum())), codec=step.codec)
        slot = np.where(host, np.cumsum(host) - 1, np.cumsum(~host) - 1)
        places = chance.permutation(max(1, int(host.sum())))
        slot[host] = places[slot[host]]
        self.hbm = torch.full((max(1, int((~host).sum())), *self.spec.shape), torch.nan, dtype=self.dtype)
        self.hbm[torch.from_numpy(slot[~host])] = self.whole[torch.from_numpy(~host)]
        self.fill_host(np.flatnonzero(host), slot[host])
        self.pages = np.concatenate(tables) if tables else np.empty(0, dtype=np.int64)
        self.indptr = np.cumsum([0, *map(len, tables)])
        self.last = [(n - 1) % size + 1 if n else 0 for n in self.lens]
        self.in_host, self.slots = host[self.pages], slot[self.pages]
        self.queries = np.cumsum([0, *step.widths])
        self.q = torch.randn(LAYERS, int(self.queries[-1]), step.num_kv_heads * step.group, step.head_dim)
        self.q = self.q.to(self.dtype)
        nbytes = self.spec.layer_nbytes * step.rows
        self.stream = PageStream.open(
            self.arena, "cpu", ring_nbytes=nbytes * (ring or step.slabs), slab_nbytes=nbytes
        )

    def fill_host(self, pages: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            raw = self.whole[page].contiguous().view(torch.uint8).numpy().reshape(-1)
            self.arena.view(slot)[: len(raw)] = raw

    @property
    def heads(self) -> tuple[int, int, int, int]:
        step = self.step
        return (step.num_kv_heads * step.group, step.num_kv_heads, step.head_dim, step.page_size)

    def plan(self, way: Any) -> None:
        options = {
            "in_host": self.in_host, "window_left": self.step.window_left, "q_data_type": self.dtype,
            "o_data_type": torch.float32,
        }  # fmt: skip
        if isinstance(way, StreamedDecode):
            way.plan(self.indptr, self.slots, self.last, *self.heads, **options)
        else:
            way.plan(self.queries, self.indptr, self.slots, self.last, *self.heads, **options)

    def want(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = shape_of(*self.heads, None, True, self.step.window_left, None, self.dtype, torch.float32)
        decode = all(width == 1 for width in self.step.widths)  # then a sequence may be empty
        table = Paging.of(None if decode else self.queries, self.indptr, self.pages, self.last, shape)
        return attend(self.q[layer], self.whole[:, layer], table, torch.float64)

    def require_right(self, way: Any, layers: Sequence[int] = range(LAYERS)) -> None:
        for layer in layers:
            out, lse = way.run(self.q[layer], self.hbm[:, layer], layer, return_lse=True)
            want, want_lse = self.want(layer)
            blind = want_lse == -torch.inf
            assert torch.equal(lse == -torch.inf, blind)
            error = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
            assert float(error) <= TOLERANCE, f"relative error {float(error):.2e} in layer {layer}"
            torch.testing.assert_close(lse[~blind].double(), want_lse[~blind], rtol=1e-5, atol=1e-4)


@st.composite
def steps(draw: st.DrawFn, decode: bool) -> Step:
    prefixes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    count = draw(st.integers(1, 5))
    of = [draw(st.integers(0, len(prefixes) - 1)) for _ in range(count)]
    page_size = draw(st.sampled_from([1, 4, 6]))
    own = [draw(st.integers(0, 25)) for _ in range(count)]
    widths = [1] * count
    if not decode:
        lens = [prefixes[i] * page_size + n for i, n in zip(of, own, strict=True)]
        widths = [draw(st.integers(0, min(20, length))) for length in lens]
    return Step(
        prefixes, of, own, widths,
        page_size=page_size,
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3])),
        window_left=draw(st.sampled_from([-1, -1, 0, 7])),
        rows=draw(st.integers(1, 5)),
        slabs=draw(st.sampled_from([4, 5, 9])),
        share=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@given(step=steps(decode=True))
@settings(max_examples=lanes.examples(40, 400), deadline=None)
def test_decoding_is_exact_for_any_mix_of_pools(step: Step) -> None:
    scene = Scene(step)
    way = StreamedDecode(scene.stream)
    for _ in range(2):
        scene.plan(way)
        scene.require_right(way)


@given(step=steps(decode=False))
@settings(max_examples=lanes.examples(40, 400), deadline=None)
def test_prefill_is_exact_for_any_mix_of_pools(step: Step) -> None:
    scene = Scene(step)
    way = StreamedPrefill(scene.stream)
    for _ in range(2):
        scene.plan(way)
        scene.require_right(way)
