"""A small random Llama on disk, for engines that are to do much in little time, on several ranks too."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512
PAGE_NBYTES = 2 * 32 * 2 * 4 * 32 * 4
"""Of 32 tokens: layers, tokens, K and V, heads, dimensions, bytes a number."""


def save(folder: Path) -> Path:
    """Write it to ``folder``. Large weights, so that logits lie far apart and equal answers mean something."""
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
    model = LlamaForCausalLM(config)
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
