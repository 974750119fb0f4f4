"""Functions that write small random models to disk, for fast tests of engines, including engines with several ranks."""

# Some functions of transformers have no types:
# mypy: allow-untyped-calls
from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 512
PAGE_NBYTES = 2 * 32 * 2 * 4 * 32 * 4
"""Bytes of a page: layers x tokens x 2 (K and V) x heads x head dimension x bytes per element.

In the models with windows, this is the size of a page of each group.
"""

WINDOW = 48
"""Size of a sliding window in tokens."""


def save(folder: Path, layers: int = 2, kv_heads: int = 4) -> Path:
    """Write a Llama to ``folder``. Its weights are large, so that different tokens have clearly different logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _written(LlamaForCausalLM(config), folder)


def save_with_windows(folder: Path) -> Path:
    """Write a small Gemma 3 model. Four of its six layers have a window, so vLLM makes three groups of two layers."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=1024,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _written(Gemma3ForCausalLM(config), folder)


def save_with_shared_layers(folder: Path) -> Path:
    """Write a small Gemma 3n model.

    Its last two layers use the KV of earlier layers: one with a window and one with full attention.
    """
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=128,
        hidden_size_per_layer_input=16,
        intermediate_size=256,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _written(Gemma3nForCausalLM(config), folder)


def save_with_mla(folder: Path) -> Path:
    """Write a DeepSeek V2 with dense layers. It has MLA, for which vLLM has no prefix caching on most CPUs."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _written(DeepseekV2ForCausalLM(config), folder)


def _written(
    model: LlamaForCausalLM | Gemma3ForCausalLM | Gemma3nForCausalLM | DeepseekV2ForCausalLM, folder: Path
) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Return random prompts as token IDs. No two prompts share their first tokens."""
    return [
        [random.Random(f"{number} {place}").randrange(3, VOCABULARY) for place in range(tokens)]
        for number in range(count)
    ]


def of_many_lengths() -> list[list[int]]:
    """Return nine prompts: three fill blocks of 32 tokens, three are a token longer, three are shorter than a block."""
    lengths = [192] * 3 + [193] * 3 + [31] * 3
    return [prompt[:length] for prompt, length in zip(prompts(9, 193), lengths, strict=True)]
