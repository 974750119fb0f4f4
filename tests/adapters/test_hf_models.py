"""Test the models of transformers: answers with a store equal those without one, or the model is refused."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    PreTrainedModel,
)

from tests.adapters.tiny import PAGE, VOCABULARY, generate, open_store, pad_left, plain, random_prompt, strong
from tests.adapters.zoo import Outcome, classes, outcome
from tests.support import lanes
from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_specs

EQUAL = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "PhimoeForCausalLM",  # only its mask has the window
    "MixtralForCausalLM",
    "Cohere2ForCausalLM",
    "Olmo2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
)
OF_EACH_KIND = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "PhimoeForCausalLM",
    "MixtralForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Models with plain attention, windows, a window only in the mask, experts, images, and images with own positions."""

REFUSED = {
    "DiffLlamaForCausalLM": "that the cache returned",
    "BertLMHeadModel": "custom attention mask",
    "GptOssForCausalLM": "has attention sinks",
    "GraniteSWAForCausalLM": "has attention sinks",
    "Gemma2ForCausalLM": "has a soft cap on attention logits",
    "VaultGemmaForCausalLM": "has a soft cap on attention logits",
    "Gemma4ForCausalLM": "head_dim=512 for layer 3 but head_dim=8 for others",
    "JetMoeForCausalLM": "computes K with 2 heads of dimension 128",
    "DogeForCausalLM": " to the K or V that the cache returned",
    "MiMoV2FlashForCausalLM": "computes K with 4 heads",
    "RecurrentGemmaForCausalLM": "keeps a state in addition to K and V",
    "FalconH1ForCausalLM": "keeps a state in addition to K and V",
    "MllamaForCausalLM": "cross_attention_layers",
    "HYV4ForCausalLM": "kv_lora_rank",
    "PaliGemmaForConditionalGeneration": "bidirectional attention",
}
ALIKE = ("GraniteSWAForCausalLM", "VaultGemmaForCausalLM", "FalconH1ForCausalLM")
"""Classes that are refused for the same reason as another class above."""

PARTS = 8


def of_class(name: str) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers deprecates parts of its own models
        found = [outcome(*each) for each in classes(name.__eq__)]
    gc.collect()
    return found[-1]


@pytest.mark.parametrize("name", lanes.some(EQUAL, OF_EACH_KIND.__contains__))
def test_logits_over_a_store_are_those_of_plain_transformers(name: str) -> None:
    found = of_class(name)
    assert found.kind == "equal", found
    assert found.control > 50, "another token at the beginning hardly shows: this shows nothing"


@pytest.mark.parametrize(
    ("name", "why"), lanes.some(REFUSED.items(), lambda name, why: name not in ALIKE), ids=REFUSED
)
def test_models_with_attention_that_pages_cannot_represent_are_refused(name: str, why: str) -> None:
    found = of_class(name)
    assert (found.kind, why in found.why) == ("refused", True), found


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def model_of(kind: str, **more: Any) -> PreTrainedModel:
    """Return a small model with ``kind`` as its ``model_type`` in transformers."""
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind, **{**SIZES, **more})
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(known)
    return strong(model)


def without_layers() -> Any:
    model: Any = model_of("llama")
    model.model.layers = model.model.layers[:2]
    return strong(model)


def with_a_layer_of_more_heads() -> Any:
    """Return a model whose layer 2 has twice as many K/V heads as its configuration says."""
    model: Any = model_of("llama")
    attention = model.model.layers[2].self_attn
    attention.k_proj, attention.v_proj = (torch.nn.Linear(32, 32, bias=False) for _ in "kv")
    attention.num_key_value_groups = 1
    return strong(model)


def with_longer_values() -> Any:
    model: Any = model_of("llama")
    attention = model.model.layers[3].self_attn
    attention.v_proj = torch.nn.Linear(32, 32, bias=False)
    attention.o_proj = torch.nn.Linear(64, 32, bias=False)
    return strong(model)


GEMMA4 = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 16,
    "sliding_window": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
    "factor": 4.0,
}
REFUSED_AT_ONCE = {
    "heads of several sizes": (
        partial(model_of, "gemma4_text", **GEMMA4 | {"global_head_dim": 32}),
        "head_dim=32 for layer 5 but head_dim=16 for others",
    ),
    "several numbers of heads": (
        partial(model_of, "gemma4_text", **GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True),
        "num_key_value_heads=1 for layer 5 but num_key_value_heads=2 for others",
    ),
    "layers that share K/V": (
        partial(
            model_of,
            "gemma4_text",
            **GEMMA4
            | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
        ),
        "layers that use another layer's K/V .* the model has 2 of them",
    ),
    "more heads than configured": (
        with_a_layer_of_more_heads,
        r"layer 2 .* computes K with 4 heads of dimension 8",
    ),
    "longer V than K": (with_longer_values, r"layer 3 .* computes V with 4 heads of dimension 8"),
    "fewer layers than configured": (without_layers, r"attention in layers \[0, 1\].* 4 layers"),
    "a soft cap": (partial(model_of, "gemma2", attn_logit_softcapping=30.0), "soft cap on .* of 30.0"),
    "longrope": (
        partial(model_of, "phi3", rope_parameters=LONG, original_max_position_embeddings=128),
        "longrope rotary embeddings",
    ),
    "chunks": (
        partial(
            model_of,
            "llama4_text",
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=16,
            intermediate_size_mlp=64,
        ),
        "layers of type chunked_attention",
    ),
    "recurrent layers": (
        partial(
            model_of,
            "jamba",
            num_experts=2,
            use_mamba_kernels=False,
            attn_layer_period=2,
            attn_layer_offset=1,
        ),
        "keeps a state in addition to K and V",
    ),
}


@pytest.mark.parametrize(("make", "why"), REFUSED_AT_ONCE.values(), ids=REFUSED_AT_ONCE)
def test_models_that_pages_cannot_serve_are_refused_before_a_store_is_opened(
    make: Callable[[], PreTrainedModel], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        page_specs(make(), PAGE)


def test_accepted_model_is_checked_again_when_its_configuration_changes() -> None:
    model = model_of("llama")
    with open_store(model) as store:
        TierStoreCache(store, random_prompt(9), model=model).close()
        model.config.num_hidden_layers = 3
        with pytest.raises(ValueError, match=r"attention in layers \[0, 1, 2, 3\].* 3 layers"):
            TierStoreCache(store, random_prompt(9), model=model)


@pytest.mark.parametrize(
    "make",
    [
        partial(model_of, "gemma2", attn_logit_softcapping=None, sliding_window=16),
        partial(model_of, "gemma4_text", **GEMMA4),
        partial(model_of, "gemma4_text", **GEMMA4, attention_k_eq_v=True),
    ],
    ids=["Gemma 2 without a soft cap", "Gemma 4 with equal heads", "Gemma 4 with K for V"],
)
def test_relatives_of_refused_models_that_pages_can_serve_answer_as_without_a_store(
    make: Callable[[], PreTrainedModel],
) -> None:
    model = make()
    prompt = random_prompt(5 * PAGE + 3)
    model.set_attn_implementation("eager")
    wanted = generate(model, prompt, None)
    model.set_attn_implementation(ATTENTION)
    with open_store(model, hbm=64) as store:
        for reused in (0, len(prompt) - 1):
            with TierStoreCache(store, prompt, model=model) as cache:
                assert cache.reused_tokens == reused
                assert generate(model, prompt, cache) == wanted


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_no_model_class_is_answered_wrongly(part: int) -> None:
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
    """Use Ministral 3, which passes no positions to its attention, so K of a padded row would get wrong positions."""
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
            pytest.raises(ValueError, match="pass position_ids"),
        ):
            model(ids, attention_mask=mask, **{name: cache})
        assert store.match(store.keys(short)).num_pages == 0
        with TierStoreCache(store, ids, mask, model=model) as cache:
            model(ids, attention_mask=mask, position_ids=positions, **{name: cache})
        with TierStoreCache(store, short, model=model) as cache:
            assert cache.reused_tokens == 2 * PAGE - 1
            assert generate(model, short, cache) == plain(model, short)
