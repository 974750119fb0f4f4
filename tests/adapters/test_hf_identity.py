"""What a model's pages are called, and when that changes."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from tests.adapters.tiny import tiny_llama
from tierstore.adapters.huggingface import model_identity, page_spec


def test_geometry_comes_from_the_config() -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2)
    spec = page_spec(config, 16, torch.bfloat16, "m")
    assert spec.shape == (3, 2, 16, 2, 8)
    assert (spec.dtype, spec.model) == ("bfloat16", "m")
    assert page_spec(LlamaConfig(head_dim=6), 16, "float16", "m").head_dim == 6


def test_latent_attention_is_refused() -> None:
    config = LlamaConfig()
    config.kv_lora_rank = 64
    with pytest.raises(ValueError, match="kv_lora_rank"):
        page_spec(config, 16, "float32", "m")


def test_a_model_of_another_family_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        page_spec(GPT2Config(), 16, "float32", "m")


def test_identity_survives_saving_loading_and_the_choice_of_attention(tmp_path: Path) -> None:
    model = tiny_llama()
    identity = model_identity(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa")
    assert model_identity(again) == identity
    model.set_attn_implementation("eager")
    assert model_identity(model) == identity


def test_identity_changes_with_one_weight_the_config_or_the_dtype() -> None:
    # F010, F015
    seen = {model_identity(tiny_llama())}
    edited = tiny_llama()
    with torch.no_grad():
        edited.model.layers[2].self_attn.v_proj.weight[0, 0] += 1e-3
    seen.add(model_identity(edited))
    other = tiny_llama()
    other.config.rms_norm_eps = 1e-3
    seen.add(model_identity(other))
    seen.add(model_identity(tiny_llama().double()))
    assert len(seen) == 4
