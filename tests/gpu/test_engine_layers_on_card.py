"""Test on a GPU that an engine's layers are correct once their events have completed.

Later layers are still being copied through slabs at that time.
"""

from __future__ import annotations

import random
from time import sleep

import numpy as np
import pytest
import torch

from tests.gpu.card import delay
from tests.gpu.test_tiers_on_card import DEVICE, PATIENCE_S, card_engine, pinned
from tierstore.gpu.copy_queue import Pace
from tierstore.gpu.copy_routes import through_slabs
from tierstore.gpu.cpu_copy_engine import CopyEngine
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Ack, PageKey, Tier, Transfer

pytestmark = pytest.mark.gpu

SPEC = PageSpec(num_layers=8, page_size=16, num_kv_heads=8, head_dim=64, dtype="bfloat16", model="engine")
"""Pages of 256 KiB, in pieces of 16 KiB."""

PAGES, SLOTS, ROUNDS = 96, 256, 300


def gently(engine: CopyEngine) -> list[Ack]:
    """Poll the copy engine after a short pause, as a waiting lease does."""
    sleep(0.0002)
    return engine.poll()


def test_layers_are_right_once_their_events_complete_in_every_round() -> None:
    layout = PageLayout.of(SPEC)
    layers = LayerGroups.of(layout, 8, 1)
    whole = torch.zeros(8, 2, SLOTS, 16, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    pool, arena = EnginePool(layout, [EnginePages(list(whole), "KBNHD")]), pinned(layout, PAGES)
    numbers = np.random.default_rng(3).integers(
        -(2**15), 2**15, (PAGES, layout.slot_nbytes // 2), dtype=np.int16
    )
    arena.memory[:] = numbers.view(np.uint8).reshape(arena.memory.shape)
    want = torch.from_numpy(numbers).to(DEVICE)[:, : SPEC.page_nbytes // 2].view(PAGES, 8, 2, -1)
    words = whole.view(torch.int16).flatten(3)
    engine = card_engine(
        pool,
        arena,
        layout,
        lambda driver: through_slabs(pool.layers, layout, driver, DEVICE, layers),
        Pace(whole=0, together=4 << 20),
    )
    chance, wrong = random.Random(5), torch.zeros((), dtype=torch.int64, device=DEVICE)
    parents = (None,) * PAGES
    for number in range(ROUNDS):
        slots = chance.sample(range(SLOTS), PAGES)
        there = torch.tensor(slots, device=DEVICE)
        words.fill_(number % 7)
        torch.cuda.synchronize()
        keys = (PageKey(bytes(36)),) * PAGES
        engine.submit(
            Transfer(number, keys, Tier.HOST, tuple(range(PAGES)), Tier.HBM, tuple(slots), 0, parents)
        )
        if chance.random() < 0.3:
            delay(0.2)
        acks: list[Ack] = []
        for layer in range(8):
            # Once the transfer has ended, ``arriving`` no longer reports it. The ack says that all layers have arrived.
            while not (arriving := engine.arriving(slots, layer)).submitted and not acks:
                acks += gently(engine)
            if isinstance(arriving.event, torch.cuda.Event):
                torch.cuda.current_stream().wait_event(arriving.event)
            found = words[layer].index_select(1, there).transpose(0, 1)
            wrong += (found != want[:, layer]).sum()
        while not acks:
            acks += gently(engine)
        assert [(ack.transfer_id, ack.ok) for ack in acks] == [(number, True)]
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} wrong numbers"
    assert engine.close(PATIENCE_S)
    arena.close()
