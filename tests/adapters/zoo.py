"""Small random models of the transformers classes, and a check that a store does not change their logits."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.adapters.tiny import open_store
from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument

WINDOW = 16
MOST_PARAMETERS = 120_000_000
TOLERANCE = 1e-4
"""Largest allowed error, relative to the largest logit. A wrong page causes far larger errors (``Outcome.control``)."""

_TEXT: dict[str, Any] = {
    "attention_chunk_size": WINDOW,
    "bos_token_id": 1,
    "conv_kernel": 4,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "decoder_layers": 4,
    "embedding_size": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "encoder_layers": 1,
    "eos_token_id": None,
    "expert_ffn_hidden_size": 16,
    "expert_intermediate_size": 16,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "global_head_dim": 8,
    "head_dim": 8,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "kv_lora_rank": 8,
    "mamba_d_state": 8,
    "max_position_embeddings": 512,
    "mlp_intermediate_size": 64,
    "moe_intermediate_size": 16,
    "moe_layer_start_index": 1,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_embd": 32,
    "n_group": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 64,
    "n_layer": 4,
    "n_layers": 4,
    "n_positions": 512,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_local_experts": 4,
    "num_routed_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "shared_expert_intermediate_size": 16,
    "sliding_window": WINDOW,
    "state_size": 8,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "word_embed_proj_dim": 32,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "image_size": 28,
    "in_channels": 3,
    "intermediate_size": 64,
    "mlp_ratio": 2,
    "num_attention_heads": 4,
    "num_channels": 3,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
}
_ATTEMPTS: tuple[tuple[str, ...], ...] = (
    (),
    ("+mrope",),
    ("head_dim",),
    ("head_dim", "sliding_window"),
    ("kv_lora_rank",),
    ("num_experts_per_tok", "n_group"),
    ("num_key_value_heads",),
)
"""Which of the sizes above to omit. They are tried in order until a model works. ``+mrope`` adds rope parameters."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one class of models.

    equal      with the store, logits equal those of plain transformers
    refused    a ValueError before any answer
    wrong      with the store, logits differ from those of plain transformers
    error      any other error that occurs only with the store
    not run    a small model of the class cannot be created, or it cannot run even without a store
    """

    name: str
    kind: Literal["equal", "refused", "wrong", "error", "not run"]
    why: str
    control: float = 0.0
    """How far another token at the beginning moves the logits, in units of the tolerance."""


def classes(
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[type[PreTrainedConfig], type[PreTrainedModel]]]:
    """Yield the config class and the model class of each wanted model that generates text from text or images.

    Other models are not imported."""
    for mapping, names in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        for model_type, name in names.items():
            if wanted(name[0] if isinstance(name, tuple) else name):
                config = CONFIG_MAPPING[model_type]
                found: Any = mapping[config]
                yield config, found[0] if isinstance(found, tuple) else found


def outcome(config: type[PreTrainedConfig], kind: type[PreTrainedModel]) -> Outcome:
    """Make a small model of this class, and compare its logits with and without the store."""
    last: Outcome | None = None
    for without in _ATTEMPTS:
        model = _tiny(config, kind, without)
        found = Outcome(kind.__name__, "not run", model) if isinstance(model, str) else compare(model)
        if found.kind not in ("not run", "error"):
            return found
        if last is None or found.kind == "error":
            last = found
    assert last is not None
    return last


def compare(model: PreTrainedModel) -> Outcome:
    """Compare the logits computed with a store to those without a cache, for cold, warm and diverging prompts."""
    name = type(model).__name__
    first = _prompt(43, 0)
    parted = torch.cat([first[:, :29], _prompt(17, 1)], 1)
    other = first.clone()
    other[0, 2] = 91
    with torch.no_grad():
        try:
            expected = {ids: _plain(model, ids) for ids in (first, parted, other)}
        except Exception as error:  # noqa: BLE001 - transformers can raise anything for a model that it cannot run
            return Outcome(name, "not run", _short(error))
        model.set_attn_implementation(ATTENTION)
        try:
            worst = max(
                _difference(model, [(first, 36), (parted, 40), (first, 41), (parted, 40)], expected),
                float((model(input_ids=first, use_cache=False).logits[0] - expected[first]).abs().max()),
            )
        except ValueError as error:
            return Outcome(name, "refused", _short(error))
        except Exception as error:  # noqa: BLE001 - any other error is a finding
            return Outcome(name, "error", _short(error))
    allowed = TOLERANCE * max(1.0, float(expected[first].abs().max()))
    control = float((expected[other][-1] - expected[first][-1]).abs().max()) / allowed
    return Outcome(name, "equal" if worst <= allowed else "wrong", f"largest difference {worst:.2g}", control)


def _difference(
    model: PreTrainedModel,
    requests: list[tuple[torch.Tensor, int]],
    expected: Mapping[torch.Tensor, torch.Tensor],
) -> float:
    worst, name = 0.0, cache_argument(model)
    with open_store(model, hbm=64) as store:
        for number, (ids, cut) in enumerate(requests):
            with TierStoreCache(store, ids[:, :cut], model=model) as cache:
                start = cache.get_seq_length()
                assert (start > 0) == (number > 0)
                found = [model(input_ids=ids[:, start:cut], **{name: cache}).logits[0]]
                for column in range(cut, ids.shape[1]):
                    found.append(model(input_ids=ids[:, column : column + 1], **{name: cache}).logits[0])
            worst = max(worst, float((torch.cat(found) - expected[ids][start:]).abs().max()))
    return worst


def _plain(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits without a cache, ``[tokens, vocabulary]``, from eager attention or, failing that, from SDPA."""
    try:
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False).logits
    except (NotImplementedError, TypeError, ValueError, RuntimeError):
        model.set_attn_implementation("sdpa")
        logits = model(input_ids=ids, use_cache=False).logits
    found: torch.Tensor = logits[0]
    return found


def _tiny(
    config: type[PreTrainedConfig], kind: type[PreTrainedModel], without: tuple[str, ...]
) -> PreTrainedModel | str:
    """Return the model, or the reason why it cannot be made."""
    try:
        made = _config(config, without)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind(made).parameters())
        if size > MOST_PARAMETERS:
            return f"{size:,} parameters"
        torch.manual_seed(0)
        model: PreTrainedModel = kind(made).eval()
    except Exception as error:  # noqa: BLE001 - a class can raise anything for sizes that do not fit each other
        return _short(error)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def _config(kind: type[PreTrainedConfig], without: tuple[str, ...]) -> PreTrainedConfig:
    text = {name: value for name, value in _TEXT.items() if name not in without}
    given: dict[str, Any] = _known(kind, text)
    default: PreTrainedConfig | None = None
    parts: dict[str, type[PreTrainedConfig]] = kind.sub_configs or {}
    for name, part in parts.items():
        if part.__name__ == "AutoConfig":
            default = default or kind()
            found = getattr(default, name, None)
            if found is None:
                continue
            part = type(found)
        is_text = any(word in name for word in ("text", "decoder", "thinker", "llm", "language"))
        sizes = _known(part, text if is_text else _VISION)
        if is_text and "+mrope" in without:
            sizes["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        given[name] = part(**sizes)
    return kind(**given)


def _known(kind: type[PreTrainedConfig], sizes: dict[str, Any]) -> dict[str, Any]:
    names = (
        {field.name for field in fields(kind)}
        if is_dataclass(kind)
        else set(inspect.signature(kind.__init__).parameters)
    )
    return {name: value for name, value in sizes.items() if name in names}


def _prompt(length: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 90, (1, length), generator=torch.Generator().manual_seed(seed))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
