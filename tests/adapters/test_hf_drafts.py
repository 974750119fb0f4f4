"""Tests of assisted decoding: each page holds the K/V of the same tokens for a model and for its draft model."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.tiny import PAGE, generate, open_store, plain, random_prompt, tiny_llama, watch
from tests.support import lanes
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import TierStoreCache, cache_argument, page_specs
from tierstore.types import Tier


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def draft(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a draft model made of the model's first layers. Some of its guesses are accepted and some are rejected."""
    found = tiny_llama(num_layers=2)
    own = model.state_dict()
    found.load_state_dict({name: own[name] for name in found.state_dict()})
    found.generation_config.num_assistant_tokens = 4
    found.generation_config.num_assistant_tokens_schedule = "constant"
    found.generation_config.assistant_confidence_threshold = 0.0
    return found


def test_a_page_holds_both_models(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    specs = page_specs(model, PAGE, draft=draft)
    assert [(spec.group, spec.num_layers) for spec in specs] == [(0, 3), (1, 2)]
    assert specs[0].model != specs[1].model


@pytest.mark.parametrize("length", lanes.some([3, PAGE, 4 * PAGE, 4 * PAGE + 5], (4 * PAGE + 5).__eq__))
def test_cold_and_warm_answers_equal_plain_transformers(
    model: LlamaForCausalLM, draft: LlamaForCausalLM, length: int
) -> None:
    prompt = random_prompt(length)
    expected = plain(model, prompt, max_new_tokens=30)
    with open_store(model, draft=draft) as store:
        for turn in range(3):
            with (
                watch(model) as fed,
                watch(draft) as drafted,
                TierStoreCache(store, prompt, model=model, draft=draft) as cache,
            ):
                start = cache.get_seq_length()
                assert start == (length - 1 if turn else 0)
                answer = generate(model, prompt, cache, assistant_model=cache.draft_model, max_new_tokens=30)
                store.check()
                assert cache.get_seq_length() == length + 30 - 1
            assert answer == expected
            assert max(fed.widths[1:]) > 1, "no draft was ever tried: this shows nothing"
            # Neither model computes tokens that the pages hold.
            assert fed.widths[0] <= length - start + 4
            assert drafted.widths[0] == length - start


# F067
def test_pages_with_a_draft_are_loaded_from_lower_tiers_with_both(
    model: LlamaForCausalLM, draft: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt = random_prompt(5 * PAGE)
    expected = plain(model, prompt, max_new_tokens=20)
    with open_store(model, draft=draft, host=32, disk=tmp_path) as store:
        with TierStoreCache(store, prompt, model=model, draft=draft) as cache:
            generate(model, prompt, cache, assistant_model=cache.draft_model, max_new_tokens=20)
        store.demote(store.keys(prompt), Tier.NVME)
        assert store.drain(PATIENCE_S)
    with open_store(model, draft=draft, host=32, disk=tmp_path) as store:
        with watch(draft) as drafted, TierStoreCache(store, prompt, model=model, draft=draft) as cache:
            assert cache.reused_by_tier == {Tier.NVME: 5 * PAGE - 1}
            answer = generate(model, prompt, cache, assistant_model=cache.draft_model, max_new_tokens=20)
        assert answer == expected
        assert drafted.widths[0] == 1


# F067
def test_page_that_only_one_model_filled_is_not_stored(
    model: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    prompt = random_prompt(4 * PAGE)
    with (
        open_store(model, draft=draft) as store,
        torch.no_grad(),
        TierStoreCache(store, prompt, model=model, draft=draft) as cache,
    ):
        model(torch.tensor([prompt]), **{cache_argument(model): cache})
        assert store.match(store.keys(prompt)).num_pages == 0
        draft(torch.tensor([prompt[: 2 * PAGE + 3]]), **{cache_argument(draft): cache.draft_model.cache})
        assert store.match(store.keys(prompt)).num_pages == 2


def test_sampling_with_a_draft_keeps_its_seed(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE + 2)
    options = {"do_sample": True, "max_new_tokens": 20}
    with open_store(model, draft=draft) as store:
        found = []
        for _ in range(3):
            torch.manual_seed(7)
            with TierStoreCache(store, prompt, model=model, draft=draft) as cache:
                found.append(generate(model, prompt, cache, assistant_model=cache.draft_model, **options))
        torch.manual_seed(7)
        assert found == [plain(model, prompt, assistant_model=draft, **options)] * 3


def test_a_cache_without_a_draft_has_no_draft_model(model: LlamaForCausalLM) -> None:
    with (
        open_store(model) as store,
        TierStoreCache(store, random_prompt(9), model=model) as cache,
        pytest.raises(ValueError, match="without a draft"),
    ):
        _ = cache.draft_model


# A rollback frees slots that are then overwritten, so the draft's K/V in them must be discarded too.
def test_rollback_removes_the_drafts_tokens_too(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 5)
    with (
        open_store(model, draft=draft) as store,
        torch.no_grad(),
        TierStoreCache(store, prompt, model=model, draft=draft) as cache,
    ):
        paged = cache.draft_model.cache
        draft(torch.tensor([prompt]), **{cache_argument(draft): paged})
        model(torch.tensor([prompt]), **{cache_argument(model): cache})
        cache.crop(-5)
        spoilt = store.allocate(28)
        for slot in spoilt:
            for pages in store.pages[slot]:
                pages.fill_(9.0)
        store.free(spoilt)
        model(torch.tensor([prompt[2 * PAGE :]]), **{cache_argument(model): cache})
        found = draft(torch.tensor([prompt[2 * PAGE :]]), **{cache_argument(draft): paged}).logits[0]
        expected = draft(torch.tensor([prompt]), use_cache=False).logits[0, 2 * PAGE :]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_rejected_drafts_leave_no_page_in_the_store(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    prompt = random_prompt(4 * PAGE - 2)
    with open_store(model, draft=draft) as store:
        with TierStoreCache(store, prompt, model=model, draft=draft) as cache:
            answer = generate(model, prompt, cache, assistant_model=cache.draft_model, max_new_tokens=30)
        assert store.drain(PATIENCE_S)
        held: Any = store.stats()["tiers"]
        written = prompt + answer[:-1]
        assert held["HBM"]["resident"] == store.match(store.keys(written)).num_pages == len(written) // PAGE


def test_tokens_last_accepted_by_prompt_lookup_are_stored_at_close(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(6) * 4
    with open_store(model) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            answer = generate(model, prompt, cache, prompt_lookup_num_tokens=4, max_new_tokens=25)
        written = prompt + answer[:-1]
        held: Any = store.stats()["tiers"]
        assert held["HBM"]["resident"] == store.match(store.keys(written)).num_pages == len(written) // PAGE


def test_pad_token_within_the_text_is_kept(model: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """A pad token may be part of the text. The draft model must keep it, although it gets no attention mask."""
    prompt = [*random_prompt(PAGE), 0, *random_prompt(3, seed=1)]
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    with (
        open_store(model, draft=draft) as store,
        watch(draft) as drafted,
        TierStoreCache(store, prompt, model=model, draft=draft) as cache,
    ):
        answer = generate(model, prompt, cache, assistant_model=cache.draft_model, attention_mask=mask)
        assert drafted.widths
    assert answer == plain(model, prompt, attention_mask=mask)
