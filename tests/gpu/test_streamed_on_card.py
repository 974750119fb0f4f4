"""Tests of streamed attention on a GPU, compared with attention over pages that are all in HBM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierstore.bench.link import locked_arena
from tierstore.gpu.attention.page_stream import PageStream
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill
from tierstore.gpu.attention.streamed import StreamedDecode, StreamedPrefill
from tierstore.gpu.copy_routes import own_pool_route
from tierstore.gpu.driver import Driver
from tierstore.gpu.pool import CudaPool
from tierstore.gpu.quant.encoded_routes import encoded_route
from tierstore.page import PageLayout, PageSpec

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda:0")
LAYERS, PAGES, SHARED = 3, 200, 120
LLAMA = PageSpec(
    num_layers=LAYERS, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="streamed"
)
SMALL = PageSpec(
    num_layers=LAYERS, page_size=16, num_kv_heads=3, head_dim=64, dtype="float32", model="streamed"
)


class Scene:
    """Four sequences with a common prefix. All pages are in HBM, and also in host memory."""

    def __init__(self, spec: PageSpec, codec: str) -> None:
        torch.manual_seed(0)
        self.spec, layout = spec, PageLayout.of(spec)
        self.dtype = getattr(torch, spec.dtype)
        self.pool = CudaPool(layout, PAGES, CARD)
        assert isinstance(self.pool.pages, torch.Tensor)
        self.pages = self.pool.pages
        self.pages.normal_()
        self.arena = locked_arena("cuda:0", layout, PAGES, codec)
        driver = Driver(0)
        route: Any = (
            own_pool_route(self.pool, layout, driver, CARD)
            if codec == "none"
            else encoded_route(self.pool, self.arena.held, driver, CARD)
        )
        self.slots = np.random.default_rng(0).permutation(PAGES)
        stream, each = driver.stream(0), np.arange(PAGES)
        torch.cuda.synchronize()
        flags = [route.save(each, self.arena.addresses(self.slots), stream)]
        torch.cuda.synchronize()
        if codec != "none":  # the reference sees what the codec has kept
            flags.append(route.load(each, self.arena.addresses(self.slots), stream))
            torch.cuda.synchronize()
        assert all(each is None or not each.any() for each in flags)
        own = np.arange(SHARED, PAGES).reshape(4, -1)
        self.tables = [np.concatenate([np.arange(SHARED), each]) for each in own]

    def require_right(self, way: Any, other: Any, widths: list[int], share: float, heads: int) -> None:
        spec, size = self.spec, self.spec.page_size
        stream = PageStream.open(
            self.arena, CARD, ring_nbytes=40 * spec.layer_nbytes, slab_nbytes=7 * spec.layer_nbytes
        )
        ours, theirs = way(stream), other(CARD)
        chance = np.random.default_rng(1)
        host = chance.random(PAGES) < share
        hbm = self.pages.clone()
        hbm[torch.from_numpy(np.flatnonzero(host)).to(CARD)] = torch.nan
        shape = (heads, spec.num_kv_heads, spec.head_dim, size)
        lens = [len(table) * size - 5 for table in self.tables]
        for step in range(3):
            used = [table[: -(-n // size)] for table, n in zip(self.tables, lens, strict=True)]
            pages, indptr = np.concatenate(used), np.cumsum([0, *map(len, used)])
            last = [(n - 1) % size + 1 for n in lens]
            first = () if way is StreamedDecode else (np.cumsum([0, *widths]),)
            options: dict[str, Any] = {"q_data_type": self.dtype, "o_data_type": torch.float32}
            causal = {} if way is StreamedDecode else {"causal": True}
            slots = np.where(host[pages], self.slots[pages], pages)
            ours.plan(*first, indptr, slots, last, *shape, in_host=host[pages], **options)
            theirs.plan(*first, indptr, pages, last, *shape, **options, **causal)
            q = torch.randn(LAYERS, sum(widths), heads, spec.head_dim, device=CARD).to(self.dtype)
            for layer in range(LAYERS):
                out, lse = ours.run(q[layer], hbm[:, layer], layer, return_lse=True)
                want, want_lse = theirs.run(q[layer], self.pages[:, layer], return_lse=True)
                error = float((out - want).norm() / want.norm())
                assert error < (2e-3 if self.dtype == torch.bfloat16 else 2e-6), f"step {step}, layer {layer}"
                torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
            lens = [n + 1 for n in lens]
        torch.cuda.synchronize()
        stream.check()
        stream.close()


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_questions_on_one_document(codec: str, share: float) -> None:
    Scene(LLAMA, codec).require_right(StreamedDecode, PagedDecode, [1] * 4, share, 32)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_chunks_of_prompts(codec: str) -> None:
    Scene(LLAMA, codec).require_right(StreamedPrefill, PagedPrefill, [700, 1, 64, 90], 0.6, 32)


def test_small_pages_in_float32() -> None:
    scene = Scene(SMALL, "none")
    scene.require_right(StreamedDecode, PagedDecode, [1] * 4, 0.6, 9)
    scene.require_right(StreamedPrefill, PagedPrefill, [100, 1, 64, 90], 0.6, 9)
