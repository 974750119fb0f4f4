"""Small random models on disk, for engines that are to do much in little time, on several ranks too."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
PAGE_NBYTES = 2 * 32 * 2 * 4 * 32 * 4
"""Of 32 tokens: layers, tokens, K and V, heads, dimensions, bytes a number; of the model with windows of each group."""

WINDOW = 48
"""Tokens that a layer with a window sees."""


def save(folder: Path) -> Path:
    """Write a Llama to ``folder``. Large weights, so that logits lie far apart and equal answers mean something."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _written(LlamaForCausalLM(config), folder)


def save_with_windows(folder: Path) -> Path:
    """The same of a Gemma 3, of whose six layers four have a window: vLLM makes three groups of two layers each."""
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


def _written(model: LlamaForCausalLM | Gemma3ForCausalLM, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Token ids that no two prompts begin alike with."""
    return [
        [random.Random(f"{number} {place}").randrange(3, VOCABULARY) for place in range(tokens)]
        for number in range(count)
    ]
