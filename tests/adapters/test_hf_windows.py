"""Tests of sliding windows: pages before the window are released, and answers equal those of plain transformers."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.adapters.tiny import (
    PAGE,
    VOCABULARY,
    ask,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    strong,
)
from tests.support import lanes
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import TierStoreCache, cache_argument, page_spec, page_specs
from tierstore.adapters.huggingface.prefix import ROLLBACK
from tierstore.types import Tier

WINDOW = 16


def tiny_gemma(seed: int = 0) -> Gemma3ForCausalLM:
    """Return a model of six layers. Every third has full attention, the others a window of two pages."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=8,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return strong(Gemma3ForCausalLM(config))


def tiny_mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return strong(MistralForCausalLM(config))


@pytest.fixture(scope="module", params=[tiny_gemma, tiny_mistral], ids=["mixed", "sliding only"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    found: PreTrainedModel = request.param()
    return found


def test_layers_with_and_without_a_window_are_kv_groups_of_one_page() -> None:
    model = tiny_gemma()
    specs = page_specs(model, PAGE)
    assert [(spec.group, spec.num_layers) for spec in specs] == [(0, 2), (1, 4)]
    with pytest.raises(ValueError, match="page_specs"):
        page_spec(model.config, PAGE, "float32", "m")
    assert page_spec(tiny_mistral().config, PAGE, "float32", "m").num_layers == 3


@pytest.mark.parametrize(
    "length",
    lanes.some([5, WINDOW, WINDOW + 1, 3 * WINDOW + 5, 9 * WINDOW], (WINDOW + 1, 9 * WINDOW).__contains__),
)
def test_cold_and_warm_answers_equal_plain_transformers(model: PreTrainedModel, length: int) -> None:
    prompt = random_prompt(length)
    expected = plain(model, prompt, max_new_tokens=20)
    with open_store(model) as store:
        for reused in (0, length - 1, length - 1):
            answer, cache = ask(store, model, prompt, max_new_tokens=20)
            assert (answer, cache.reused_tokens) == (expected, reused)


@pytest.mark.parametrize("chunk", [5, pytest.param(WINDOW, marks=pytest.mark.deep), 37])
def test_chunked_prefill(model: PreTrainedModel, chunk: int) -> None:
    prompt = random_prompt(5 * WINDOW + 3)
    expected = plain(model, prompt)
    with open_store(model) as store:
        ask(store, model, prompt[: 2 * WINDOW + 3])
        for _ in range(2):
            assert ask(store, model, prompt, prefill_chunk_size=chunk)[0] == expected


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_prefix_below_hbm_is_restored(model: PreTrainedModel, tier: Tier, tmp_path: Path) -> None:
    prompt = random_prompt(12 * PAGE)
    with open_store(model, host=32, disk=tmp_path) as store:
        expected, _ = ask(store, model, prompt)
        assert store.demote(store.keys(prompt), tier) == 12
        assert store.drain(PATIENCE_S)
        answer, cache = ask(store, model, prompt)
        assert answer == expected == plain(model, prompt)
        assert cache.reused_by_tier == {tier: 12 * PAGE - 1}


def test_padded_batches_and_beams(model: PreTrainedModel) -> None:
    prompts = [random_prompt(length, seed=length) for length in (6, 2 * WINDOW + 3, 4 * WINDOW)]
    ids, mask = pad_left(prompts)
    for options in ({}, {"num_beams": 2}, {"prefill_chunk_size": 11}):
        given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, **options}
        expected = plain_batch(model, ids, **given).tolist()
        with open_store(model, hbm=64) as store:
            for _ in range(2):
                with TierStoreCache(store, ids, mask, model=model) as cache:
                    assert generate_batch(model, ids, cache, **given).tolist() == expected


def test_prompt_that_leaves_a_stored_one_inside_a_page(model: PreTrainedModel) -> None:
    shared = random_prompt(4 * WINDOW + 5)
    with open_store(model) as store:
        ask(store, model, shared + random_prompt(9, seed=1))
        prompt = shared + random_prompt(9, seed=2)
        answer, cache = ask(store, model, prompt)
        assert (answer, cache.reused_tokens) == (plain(model, prompt), len(shared))


def test_context_longer_than_hbm_runs_where_every_layer_slides() -> None:
    model = tiny_mistral()
    prompt = random_prompt(40 * PAGE)
    expected = plain(model, prompt, max_new_tokens=30)
    # Pages for the window, for rollbacks beyond it, and for a chunk.
    room = (WINDOW + ROLLBACK) // PAGE + 4
    with open_store(model, hbm=room, host=64) as store:
        for reused in (0, len(prompt) - 1):
            answer, cache = ask(store, model, prompt, prefill_chunk_size=2 * PAGE, max_new_tokens=30)
            assert (answer, cache.reused_tokens) == (expected, reused)


# F065
@pytest.mark.parametrize("gone", lanes.some([0, 2, 10, 11], (0, 10).__contains__))
def test_hit_ends_at_a_gap_and_pages_before_it_are_used(model: PreTrainedModel, gone: int) -> None:
    prompt = random_prompt(12 * PAGE + 1)
    with open_store(model, host=32) as store:
        ask(store, model, prompt, max_new_tokens=1)
        keys = store.keys(prompt)
        store.demote(keys[:2], Tier.HOST)
        assert store.drain(PATIENCE_S)
        store.evict([keys[gone]])
        answer, cache = ask(store, model, prompt)
        assert (answer, cache.reused_tokens) == (plain(model, prompt), gone * PAGE)


def test_pages_behind_the_window_stay_where_they_are() -> None:
    model = tiny_mistral()
    prompt = random_prompt(30 * PAGE)
    with open_store(model, host=64) as store:
        expected, _ = ask(store, model, prompt)
        keys = store.keys(prompt)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        with TierStoreCache(store, prompt, model=model) as cache:
            assert cache.reused_by_tier == {Tier.HOST: 30 * PAGE - 1}
            tiers = store.match(keys).tiers
            brought = [tier == Tier.HBM for tier in tiers]
            assert brought == [False] * (30 - sum(brought)) + [True] * sum(brought)
            assert sum(brought) == (WINDOW + ROLLBACK) // PAGE
        assert ask(store, model, prompt)[0] == expected


def test_rollback_stays_within_what_is_kept_behind_the_window() -> None:
    model = tiny_mistral()
    prompt = random_prompt(30 * PAGE)
    with open_store(model) as store, torch.no_grad(), TierStoreCache(store, prompt, model=model) as cache:
        name = cache_argument(model)
        model(torch.tensor([prompt]), **{name: cache})
        cache.crop(-(ROLLBACK - PAGE))
        left = prompt[: cache.get_seq_length()]
        logits = model(torch.tensor([[7]]), **{name: cache}).logits[0, -1]
        expected = model(torch.tensor([[*left, 7]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        with pytest.raises(ValueError, match="window were dropped"):
            cache.crop(-(ROLLBACK + 2 * PAGE))
        assert cache.get_seq_length() == len(left) + 1


def test_model_without_the_store_keeps_its_windows(model: PreTrainedModel) -> None:
    prompts = [random_prompt(length, seed=length) for length in (6, 3 * WINDOW + 3)]
    ids, mask = pad_left(prompts)
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 7}):
        given: dict[str, Any] = {"attention_mask": mask, **options}
        assert generate_batch(model, ids, None, **given).tolist() == plain_batch(model, ids, **given).tolist()
