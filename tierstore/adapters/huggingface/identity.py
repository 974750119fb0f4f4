"""What a model's pages look like, and whose they are."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tierstore.types import PageSpec

_NOT_IDENTITY = (
    "_name_or_path",
    "_attn_implementation",
    "attn_implementation",
    "architectures",
    "transformers_version",
    "dtype",
)
"""Config entries that say how a model is stored or run, not what it computes (class and dtype are hashed apart)."""


def page_spec(config: PreTrainedConfig, page_size: int, dtype: torch.dtype | str, model_id: str) -> PageSpec:
    """Return the page geometry of a model with full attention and K and V per head.

    ``page_size`` in tokens; ``dtype`` is that of the K/V the model computes (``model.dtype``); ``model_id`` must
    change whenever equal tokens would give other K/V (``model_identity``). Raises ValueError for models that this
    adapter cannot serve: sliding windows, linear or latent attention.
    """
    text = config.get_text_config(decoder=True).to_dict()
    check_supported(text)
    return PageSpec(
        num_layers=text["num_hidden_layers"],
        page_size=page_size,
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        dtype=str(dtype).removeprefix("torch."),
        model=model_id,
    )


def check_supported(text: dict[str, Any]) -> None:
    """Raise ValueError, naming the reason, unless every layer keeps K and V per head of all tokens."""
    missing = [
        name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if name not in text
    ]
    if missing:
        raise ValueError(
            f"the model's configuration has no {', '.join(missing)}: only models of the Llama family are supported"
        )
    if text.get("kv_lora_rank") is not None:
        raise ValueError(
            "multi-head latent attention (kv_lora_rank) is not supported: its cache is not K and V per head"
        )
    kinds = text.get("layer_types") or ["full_attention"]
    if text.get("layer_types") is None and text.get("sliding_window") is not None:
        kinds = ["sliding_attention"]
    others = sorted({kind for kind in kinds if kind != "full_attention"})
    if others:
        raise ValueError(f"layers of type {', '.join(others)} are not supported: only full attention is")
    if any(mode == "reuse" for mode in text.get("kv_sharing_modes") or ()):
        raise ValueError("layers that share another layer's K/V are not supported")


def model_identity(model: PreTrainedModel) -> str:
    """Return a SHA-256 over everything that decides a model's K/V: its class, config, parameters and buffers.

    It reads the tensors in memory, every byte, so weights edited in place, merged adapters or another dtype give
    another identity, whatever the files on disk say. Call it after the last edit; it takes about a second per
    gigabyte. Not covered, pass them as ``extra`` or ``salt``: adapters switched on and off without touching a
    parameter, and code that computes something else from equal weights.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_IDENTITY}
    digest = hashlib.sha256()
    _feed(digest, type(model).__name__.encode())
    _feed(digest, json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _feed(digest, f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        _feed(digest, raw.numpy().data)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, raw: bytes | memoryview) -> None:
    """Length first: no two lists of fields have the same bytes."""
    digest.update(len(raw).to_bytes(8, "little"))
    digest.update(raw)
