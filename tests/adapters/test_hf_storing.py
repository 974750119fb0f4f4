"""Test that a request stores only what its ``storing`` option allows."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.adapters.tiny import PAGE, ask, generate, open_store, plain, random_prompt, tiny_llama
from tierstore.adapters.huggingface import TierStoreCache
from tierstore.types import Tier


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.mark.parametrize(("storing", "reused"), [("read-only", 2 * PAGE), ("no-store", 0)])
def test_request_that_stores_nothing(model: LlamaForCausalLM, storing: Any, reused: int) -> None:
    prompt = random_prompt(4 * PAGE + 3)
    with open_store(model) as store:
        ask(store, model, prompt[: 2 * PAGE], max_new_tokens=1)
        for _ in range(2):
            with TierStoreCache(store, prompt, model=model, storing=storing) as cache:
                assert generate(model, prompt, cache) == plain(model, prompt)
                assert cache.reused_tokens == reused
            assert store.match(store.keys(prompt)).num_pages == 2


def test_memory_only_request_is_found_again_but_never_written_to_disk(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt, other = random_prompt(4 * PAGE, seed=1), random_prompt(4 * PAGE, seed=2)
    with open_store(model, host=16, disk=tmp_path) as store:
        with TierStoreCache(store, prompt, model=model, storing="memory-only") as cache:
            generate(model, prompt, cache)
        ask(store, model, other)
        store.flush()
        assert Tier.NVME not in store.match(store.keys(prompt)).tiers
        assert ask(store, model, prompt[: 3 * PAGE])[1].reused_tokens == 3 * PAGE - 1
    with open_store(model, host=16, disk=tmp_path) as store:
        assert store.match(store.keys(other)).num_pages == 4


def test_pages_of_a_memory_only_request_are_not_found_after_a_restart(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt = random_prompt(4 * PAGE)
    with (
        open_store(model, host=16, disk=tmp_path) as store,
        TierStoreCache(store, prompt, model=model, storing="memory-only") as cache,
    ):
        generate(model, prompt, cache)
    with open_store(model, host=16, disk=tmp_path) as store:
        assert store.match(store.keys(prompt)).num_pages == 0
