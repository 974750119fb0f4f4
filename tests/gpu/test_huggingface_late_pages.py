"""Test the transformers adapter on a GPU with late copies: the stream waits for each layer, the CPU does not."""

# mypy: allow-untyped-calls
from __future__ import annotations

import pytest
import torch

from tests.adapters.tiny import PAGE, generate, open_store, plain, random_prompt, tiny_llama, watch
from tests.gpu.card import delay
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import TierStoreCache
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.gpu.copy_queue import Pace
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.mover import LocalMover
from tierstore.types import Tier

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("whole", [True, False], ids=["whole pages", "by layers"])
@pytest.mark.parametrize("inside", [False, True], ids=["pages", "half a page"])
def test_answers_are_right_over_pages_that_are_late(whole: bool, inside: bool) -> None:
    model, prompt = tiny_llama(num_layers=4), random_prompt(9 * PAGE + 3)
    torch.nn.Module.to(model, "cuda:0")
    other = prompt[: 5 * PAGE + 5] + random_prompt(6, seed=4) if inside else prompt
    expected = plain(model, other)
    with open_store(model, hbm=32, host=32) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            generate(model, prompt, cache)
        assert isinstance(store._pump.mover, LocalMover)
        copies = store._pump.mover._copies
        assert isinstance(copies, CudaCopyEngine)
        if not whole:
            copies._pace = Pace(whole=0)
        for _ in range(3):
            store.demote(store.keys(prompt), Tier.HOST)
            assert store.drain(PATIENCE_S)
            slots = store.allocate(28, timeout_s=PATIENCE_S)
            for group in PageGroups(store).groups:
                group[slots] = 1e3
            store.free(slots)
            torch.cuda.synchronize()
            delay(40, copies._lanes[Tier.HBM].stream)
            with watch(model) as fed, TierStoreCache(store, other, model=model) as cache:
                assert cache.reused_tokens >= 5 * PAGE
                assert generate(model, other, cache) == expected
                assert sum(fed.widths) == cache.get_seq_length() - cache.reused_tokens
