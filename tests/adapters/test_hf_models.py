"""Models as transformers has them: answers over a store are theirs, or the model is refused; never anything else."""

from __future__ import annotations

import gc
import warnings
from collections import Counter

import pytest

from tests.adapters.zoo import Outcome, classes, outcome

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
    "MiMoV2FlashForCausalLM": "computes K of 4 heads",
    "RecurrentGemmaForCausalLM": "keeps a state besides K and V",
    "FalconH1ForCausalLM": "keeps a state besides K and V",
    "MllamaForCausalLM": "cross_attention_layers",
    "HYV4ForCausalLM": "kv_lora_rank",
    "PaliGemmaForConditionalGeneration": "bidirectional attention",
}


def of_class(name: str) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers deprecates in its own models
        found = [outcome(*each) for each in classes() if each[1].__name__ == name]
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


@pytest.mark.long
def test_no_class_of_models_is_answered_wrongly() -> None:
    found: list[Outcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in classes():
            found.append(outcome(*each))
            gc.collect()
    assert [each for each in found if each.kind in ("wrong", "error")] == []
    counts = Counter(each.kind for each in found)
    assert counts["equal"] > 80, counts
    assert counts["refused"] > 60, counts
