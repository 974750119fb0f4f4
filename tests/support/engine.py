"""KV tensors of a simulated engine, in several layouts, with a uniform view of each layer of a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support import pages as support
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, content, tiers
from tierstore.gpu.engine_pages import EnginePages
from tierstore.types import PageKey

SLOTS = 6
OWNED_BY_ENGINE: dict[str, object] = {"owner": "engine"}
LAYERS, PLANES, TOKENS, HEADS, DIM = SPEC.shape


@dataclass
class Engine:
    """KV tensors of an engine.

    ``layer(slot, i)`` returns a view of layer ``i`` of the page in ``slot``, ``[planes, tokens, heads, dim]``.
    """

    pages: EnginePages
    layer: Callable[[int, int], torch.Tensor]

    def fill(self, slot: int, key: PageKey) -> None:
        """Write the content of a key's page into a slot."""
        for i, layer in enumerate(content(key)):
            self.layer(slot, i).copy_(layer)
        support.settle()

    def holds(self, slot: int, key: PageKey) -> bool:
        """Return whether the slot has exactly the bytes of the key's page."""
        return all(
            torch.equal(self.layer(slot, i).cpu().contiguous().view(torch.uint8), layer.view(torch.uint8))
            for i, layer in enumerate(content(key))
        )

    def wipe(self) -> None:
        for slot in range(SLOTS):
            for i in range(LAYERS):
                self.layer(slot, i).zero_()
        support.settle()


def _empty(*shape: int) -> torch.Tensor:
    found = torch.zeros(shape, dtype=torch.float16, device=support.DEVICE)
    support.settle()
    return found


def page_major() -> Engine:
    whole = _empty(SLOTS, LAYERS, PLANES, TOKENS, HEADS, DIM)
    return Engine(EnginePages([whole], "BLKNHD"), lambda slot, i: whole[slot, i])


def planes_first() -> Engine:
    layers = [_empty(PLANES, SLOTS, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
    return Engine(EnginePages(layers, "KBNHD"), lambda slot, i: layers[i][:, slot])


def blocks_first() -> Engine:
    layers = [_empty(SLOTS, PLANES, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
    return Engine(EnginePages(layers, "BKNHD"), lambda slot, i: layers[i][slot])


def planes_merged_with_dim() -> Engine:
    layers = [_empty(SLOTS, HEADS, TOKENS, PLANES * DIM) for _ in range(LAYERS)]

    def layer(slot: int, i: int) -> torch.Tensor:
        return layers[i][slot].view(HEADS, TOKENS, PLANES, DIM).permute(2, 1, 0, 3)

    return Engine(EnginePages(layers, "BHNC"), layer)


def permuted_with_an_offset() -> Engine:
    storage = _empty(3 + SLOTS * LAYERS * PLANES * TOKENS * HEADS * DIM)
    whole = storage[3:].view(HEADS, SLOTS, TOKENS, LAYERS, DIM, PLANES).permute(1, 3, 5, 2, 0, 4)
    assert not whole.is_contiguous()
    return Engine(EnginePages([whole], "BLKNHD"), lambda slot, i: whole[slot, i])


def every_other_block() -> Engine:
    whole = _empty(2 * SLOTS, LAYERS, PLANES, TOKENS, HEADS, DIM)[1::2]
    return Engine(EnginePages([whole], "BLKNHD"), lambda slot, i: whole[slot, i])


ENGINES = (
    page_major,
    planes_first,
    blocks_first,
    planes_merged_with_dim,
    permuted_with_an_offset,
    every_other_block,
)


def open_engine_bench(engine: Engine, host: int = 8, nvme: Path | None = None) -> Bench:
    """Open a store whose HBM slots are the engine's."""
    bench = open_bench(tiers(SLOTS, host, nvme, hbm_more=OWNED_BY_ENGINE), SPEC)
    bench.store.register(engine.pages)
    return bench


def save(bench: Bench, engine: Engine, keys: list[PageKey], slots: list[int]) -> None:
    """Fill slots, put their pages, and wait until the engine may reuse the slots."""
    for key, slot in zip(keys, slots, strict=True):
        engine.fill(slot, key)
    assert bench.store.put(keys, slots) == slots
    assert bench.store.drain(PATIENCE_S)
    assert sorted(bench.store.poll()) == sorted(slots)
