"""The work of computing a prompt: multiplications by weights, and attention. Pure arithmetic.

Counted as two operations for each weight and token, and for each score and each weighted value. Norms, activations,
rotary embeddings and softmax are left out, as is customary: far less work, though not always far less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TWO_MATRICES = frozenset({"gpt_neox", "phi", "starcoder2", "nemotron"})
"""Models whose feed-forward layers have no gate."""

OPTIONAL = (
    "q_lora_rank",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "moe_layer_freq",
)
"""Fields that are whole numbers of at least 0 where a config has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """``weights``: those a token is multiplied by, in all layers (of experts, the chosen ones); ``head``: those of
    the output layer, for the last token alone. ``score``: elements of a query and of a value, over all heads.
    ``hidden``, ``inner``: the shape of a typical weight matrix.
    """

    weights: int
    head: int
    score: int
    windows: tuple[int | None, ...]
    hidden: int
    inner: int

    def operations(self, tokens: int) -> int:
        """Floating-point operations from ``tokens`` ids to the first new token, causal attention."""
        pairs = sum(_pairs(tokens, window) for window in self.windows)
        return 2 * (self.weights * tokens + self.head + self.score * pairs)


def prefill_of(config: Mapping[str, Any], *, head_dim: int, windows: Sequence[int | None]) -> Prefill:
    """The work described by the fields of a config, which has hidden, intermediate and vocabulary sizes."""
    layers = len(windows)
    attention, score = _latent(config) if config.get("kv_lora_rank") else _heads(config, head_dim)
    inner = config.get("moe_intermediate_size") if _experts(config) else None
    return Prefill(
        weights=layers * attention + sum(_feed_forward(config, layer) for layer in range(layers)),
        head=config["hidden_size"] * config["vocab_size"],
        score=score,
        windows=tuple(windows),
        hidden=config["hidden_size"],
        inner=inner or config["intermediate_size"],
    )


def _pairs(tokens: int, window: int | None) -> int:
    """Query and key pairs of one causal layer."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def _heads(config: Mapping[str, Any], head_dim: int) -> tuple[int, int]:
    """Weights of one attention layer with K and V per head, and elements of a score."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads), 2 * heads * head_dim


def _latent(config: Mapping[str, Any]) -> tuple[int, int]:
    """The same of multi-head latent attention, its latents expanded to heads as in prefill."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    low = config.get("q_lora_rank")
    query = heads * (nope + rope) * (low or hidden) + (hidden * low if low else 0)
    rest = hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return query + rest, heads * (nope + rope + value)


def _feed_forward(config: Mapping[str, Any], layer: int) -> int:
    """Weights a token meets in one feed-forward layer: the dense ones, or router, shared and chosen experts."""
    hidden = config["hidden_size"]
    matrices = 2 if config.get("model_type") in _TWO_MATRICES else 3
    experts = _experts(config)
    if not experts or _is_dense(config, layer):
        return int(matrices * hidden * config["intermediate_size"])
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    chosen = width * (config.get("num_experts_per_tok") or 1)
    return int(matrices * hidden * (chosen + shared) + hidden * experts)


def _experts(config: Mapping[str, Any]) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer of a model with experts has none."""
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return True
    if config.get("decoder_sparse_step"):
        return bool((layer + 1) % config["decoder_sparse_step"])
    return bool(layer % (config.get("moe_layer_freq") or 1))
