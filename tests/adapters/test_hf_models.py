"""Models as transformers has them: answers over a store are theirs, or the model is refused; never anything else."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from itertools import count

import pytest
import torch
from transformers import Ministral3Config, Ministral3ForCausalLM

from tests.adapters.tiny import PAGE, VOCABULARY, generate, open_store, pad_left, plain, random_prompt, strong
from tests.adapters.zoo import Outcome, classes, outcome
from tierstore.adapters.huggingface import TierStoreCache, cache_argument

EQUAL = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "PhimoeForCausalLM",  # its window is in the mask alone
    "MixtralForCausalLM",
    "Cohere2ForCausalLM",
    "Olmo2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
)
REFUSED = {
    "DiffLlamaForCausalLM": "as the cache returned them",
    "BertLMHeadModel": "attention mask of its own",
    "GptOssForCausalLM": "does not support s_aux",
    "DogeForCausalLM": "computes with K or V",
    "MiMoV2FlashForCausalLM": "computes K in 4 heads",
    "RecurrentGemmaForCausalLM": "keeps a state besides K and V",
    "FalconH1ForCausalLM": "keeps a state besides K and V",
    "MllamaForCausalLM": "cross_attention_layers",
    "HYV4ForCausalLM": "kv_lora_rank",
    "PaliGemmaForConditionalGeneration": "bidirectional attention",
}
PARTS = 8


def of_class(name: str) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers deprecates in its own models
        found = [outcome(*each) for each in classes(name.__eq__)]
    gc.collect()
    return found[-1]


@pytest.mark.parametrize("name", EQUAL)
def test_logits_over_a_store_are_those_of_plain_transformers(name: str) -> None:
    found = of_class(name)
    assert found.kind == "equal", found
    assert found.control > 50, "another token at the beginning hardly shows: this shows nothing"


@pytest.mark.parametrize(("name", "why"), REFUSED.items(), ids=REFUSED)
def test_models_whose_attention_pages_do_not_express_are_refused(name: str, why: str) -> None:
    found = of_class(name)
    assert (found.kind, why in found.why) == ("refused", True), found


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_no_class_of_models_is_answered_wrongly(part: int) -> None:
    numbers = count()
    found: list[Outcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in classes(lambda name: next(numbers) % PARTS == part):
            found.append(outcome(*each))
            if len(found) % 8 == 0:
                gc.collect()
    assert [each for each in found if each.kind in ("wrong", "error")] == []
    counts = Counter(each.kind for each in found)
    assert counts["equal"] > 40 // PARTS, counts
    assert counts["refused"] > 30 // PARTS, counts


def test_a_padded_batch_without_positions_is_refused_where_attention_shows_none() -> None:
    """Ministral 3 hands no positions to its attention: K of a padded row would be that of later positions."""
    torch.manual_seed(0)
    config = Ministral3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=None,
        pad_token_id=0,
    )
    model = strong(Ministral3ForCausalLM(config))
    short = random_prompt(2 * PAGE, seed=1)
    ids, mask = pad_left([random_prompt(3 * PAGE), short])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    name = cache_argument(model)
    with open_store(model, hbm=64) as store, torch.no_grad():
        with (
            TierStoreCache(store, ids, mask, model=model) as cache,
            pytest.raises(ValueError, match="fed without position_ids"),
        ):
            model(ids, attention_mask=mask, **{name: cache})
        assert store.match(store.keys(short)).num_pages == 0
        with TierStoreCache(store, ids, mask, model=model) as cache:
            model(ids, attention_mask=mask, position_ids=positions, **{name: cache})
        with TierStoreCache(store, short, model=model) as cache:
            assert cache.reused_tokens == 2 * PAGE - 1
            assert generate(model, short, cache) == plain(model, short)
