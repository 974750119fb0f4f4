"""The geometry of a model's pages, and checks whether this adapter can serve the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tierstore.adapters.huggingface.attention import ATTENTION
from tierstore.adapters.huggingface.identity import model_identity, plain_model, remember
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.page import PageLayout, PageSpec


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The KV group of a page that holds a model layer's K and V, and the layer's index in the group."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """The K and V of a model: the place of each layer, and how many tokens each KV group looks back.

    The group of full attention comes first, then the one of sliding windows. A model whose layers are all of
    one kind has one group.
    """

    places: tuple[LayerPlace, ...]
    windows: tuple[int | None, ...]
    """For each group, the tokens that a query sees, its own included; None for all."""
    num_kv_heads: int
    head_dim: int

    @property
    def window(self) -> int | None:
        """Most tokens that any layer looks back; None if a layer looks back to the first token."""
        spans = [span for span in self.windows if span is not None]
        return max(spans) if len(spans) == len(self.windows) else None


def kv_shape(config: PreTrainedConfig) -> KvShape:
    """Return the K and V of a model. ValueError, with the reason, if this adapter cannot serve the model."""
    text = config.get_text_config(decoder=True).to_dict()
    kinds = layer_kinds(text)
    order: list[str] = [kind for kind in ("full_attention", "sliding_attention") if kind in kinds]
    counts = dict.fromkeys(order, 0)
    places = []
    for kind in kinds:
        places.append(LayerPlace(order.index(kind), counts[kind]))
        counts[kind] += 1
    return KvShape(
        places=tuple(places),
        windows=tuple(text["sliding_window"] if kind == "sliding_attention" else None for kind in order),
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
    )


def page_spec(config: PreTrainedConfig, page_size: int, dtype: torch.dtype | str, model_id: str) -> PageSpec:
    """Return the page geometry of a model whose layers are all of one kind, with K and V per head.

    Args:
        config: The model's configuration.
        page_size: Tokens per page.
        dtype: Dtype of the K/V that the model computes (``model.dtype``).
        model_id: A string that must change whenever equal tokens would give other K/V (see
            ``model_identity``).

    Raises:
        ValueError: This adapter cannot serve the model, or the model needs several KV groups (see
            ``page_specs``).
    """
    specs = _specs(kv_shape(config), page_size, dtype, model_id, first_group=0)
    if len(specs) > 1:
        raise ValueError(
            "the model has both full and sliding-window attention, so it needs two KV groups: "
            "call page_specs, not page_spec"
        )
    remember(PageLayout.of(specs[0]).fingerprint, (model_id,))
    return specs[0]


def page_specs(
    model: PreTrainedModel,
    page_size: int,
    *,
    draft: PreTrainedModel | None = None,
    model_id: str | None = None,
) -> tuple[PageSpec, ...]:
    """Return the KV groups of a model's pages, followed by those of its draft model, if one is given.

    A model whose layers are all of one kind has one group; one with full attention and sliding windows (Gemma
    3) has two. With a draft model, a page holds the K/V of both models for the same tokens under one key, so
    neither can be stored without the other. Reads every weight, as ``model_identity`` does, unless
    ``model_id`` is given.

    Args:
        model: The model.
        page_size: Tokens per page.
        draft: The model that ``generate`` is given as ``assistant_model``.
        model_id: A name to use instead of the weights. It must change whenever equal tokens would give other K/V.

    Raises:
        ValueError: This adapter cannot serve the models.
    """
    models = [plain_model(each) for each in ((model,) if draft is None else (model, draft))]
    for each in models:
        check_kind(each)
    if model_id is not None:
        return _specs_of(models, page_size, [model_id] * len(models))
    identities = tuple(model_identity(each) for each in models)
    specs = _specs_of(models, page_size, identities)
    remember(PageLayout.of(specs).fingerprint, identities)
    return specs


def _specs_of(
    models: Sequence[PreTrainedModel], page_size: int, identities: Sequence[str]
) -> tuple[PageSpec, ...]:
    specs: tuple[PageSpec, ...] = ()
    for each, identity in zip(models, identities, strict=True):
        specs += _specs(kv_shape(each.config), page_size, each.dtype, identity, first_group=len(specs))
    return specs


def _specs(
    shape: KvShape, page_size: int, dtype: torch.dtype | str, model_id: str, *, first_group: int
) -> tuple[PageSpec, ...]:
    return tuple(
        PageSpec(
            num_layers=sum(place.group == group for place in shape.places),
            page_size=page_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            group=first_group + group,
            model=model_id,
        )
        for group in range(len(shape.windows))
    )


def check_kind(model: PreTrainedModel) -> None:
    """Raise ValueError if the model keeps a state other than K and V of the preceding tokens."""
    name = type(model).__name__
    if model._is_stateful:
        raise ValueError(
            f"{name} keeps a state besides K and V of the tokens (recurrent or convolution layers): it is not supported"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder and a decoder: only decoders are supported")


def layer_kinds(text: dict[str, Any]) -> list[str]:
    """Return "full_attention" or "sliding_attention" for each layer of a text model's configuration.

    Raises:
        ValueError: A layer does not keep K and V per head and token. The message gives the reason.
    """
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
    if text.get("index_topk") is not None:
        raise ValueError(
            "sparse attention by an index of keys (index_topk) is not supported: pages hold K and V alone"
        )
    if text.get("use_bidirectional_attention"):
        raise ValueError("bidirectional attention is not supported: earlier K/V would depend on later tokens")
    if any(mode == "reuse" for mode in text.get("kv_sharing_modes") or ()) or text.get(
        "num_kv_shared_layers"
    ):
        raise ValueError("layers that share another layer's K/V are not supported")
    if text.get("cross_attention_layers"):
        raise ValueError(
            "layers of cross-attention (cross_attention_layers) are not supported: they keep K and V of images"
        )
    moving = sorted(kind for kind in _rope_types(text) if kind in ("longrope", "su") or "dynamic" in kind)
    if moving:
        raise ValueError(
            f"{', '.join(moving)} rotary embeddings are not supported: K of a token would depend on how long the "
            "request is that computes it"
        )
    windowed = text.get("sliding_window") is not None and text.get("use_sliding_window", True)
    kinds: list[str] = text.get("layer_types") or (
        ["sliding_attention" if windowed else "full_attention"] * text["num_hidden_layers"]
    )
    others = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(f"layers of type {', '.join(others)} are not supported: only full and sliding are")
    if "sliding_attention" in kinds and not text.get("sliding_window"):
        raise ValueError("the model has sliding layers but its configuration no sliding_window")
    return kinds


def _rope_types(text: dict[str, Any]) -> set[str]:
    """Return the types of rotary embeddings in a configuration, which may give one per type of layer."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    each = [given, *(value for value in given.values() if isinstance(value, dict))]
    return {str(kind) for one in each for kind in (one.get("rope_type"), one.get("type")) if kind}


def checked_shape(model: PreTrainedModel) -> KvShape:
    check_kind(model)
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f'the model uses attention "{config._attn_implementation}": '
            f'load it with attn_implementation="{ATTENTION}"'
        )
    return kv_shape(model.config)


def check_pages(pages: PageGroups, shapes: Sequence[KvShape]) -> None:
    """Raise ValueError unless the store's KV groups are those of these models."""
    wanted = [
        (sum(place.group == group for place in shape.places), shape.num_kv_heads, shape.head_dim)
        for shape in shapes
        for group in range(len(shape.windows))
    ]
    found = [(group.shape[1], group.shape[4], group.shape[5]) for group in pages.groups]
    if wanted != found:
        raise ValueError(
            f"the store's KV groups have (layers, heads, head_dim) {found}, the model needs {wanted}: open the store "
            "with page_specs of this very model, and with draft= in both places or in neither"
        )


def common_window(shapes: Sequence[KvShape]) -> int | None:
    windows = [shape.window for shape in shapes if shape.window is not None]
    return max(windows) if len(windows) == len(shapes) else None
