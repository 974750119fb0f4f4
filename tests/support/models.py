"""Small model configurations, and functions that return what ``tierstore plan`` reads from them."""

from __future__ import annotations

from typing import Any

from tierstore.plan.geometry import Geometry, Prefill, geometry

GQA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
MLA = GQA | {
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
}
WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


def read(fields: dict[str, Any]) -> Geometry:
    return geometry("config.json", fields)


def work(fields: dict[str, Any]) -> Prefill:
    found = read(fields).prefill
    assert isinstance(found, Prefill)
    return found
