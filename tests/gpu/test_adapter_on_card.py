"""Test that transformers answers the same with a store as without it, if the model and HBM are on a GPU."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapters.tiny import PAGE, ask, open_store, plain, random_prompt, tiny_llama
from tests.support.pages import PATIENCE_S
from tierstore.types import Tier

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("length", [PAGE + 1, 5 * PAGE + 3])
def test_answers_equal_plain_transformers_wherever_the_prefix_comes_from(
    tmp_path: Path, tier: Tier, length: int
) -> None:
    model = tiny_llama()
    torch.nn.Module.to(model, "cuda:0")
    prompt = random_prompt(length)
    expected = plain(model, prompt)
    with open_store(model, hbm=32, host=32, disk=tmp_path) as store:
        cold, _ = ask(store, model, prompt)
        keys = store.keys(prompt)
        if tier != Tier.HBM:
            store.demote(keys, tier)
            assert store.drain(PATIENCE_S)
            assert set(store.match(keys).tiers) == {tier}
        warm, cache = ask(store, model, prompt)
        assert cache.reused_tokens >= length // PAGE * PAGE - 1
    assert cold == expected
    assert warm == expected
