"""Determines the geometry of a model's pages, and checks whether the adapter supports the model."""

# transformers leaves some functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from tierstore.adapters.huggingface.attention import ATTENTION
from tierstore.adapters.huggingface.identity import (
    model_identity,
    plain_model,
    remember,
    require_in_memory,
)
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.errors import ConfigError
from tierstore.page import PageLayout, PageSpec


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of a model layer's K and V in the pages: the KV group, and the layer's index in the group."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of a model's K and V: the place of each layer, and the window of each KV group.

    The group with full attention comes first, then the group with sliding windows. A model whose layers are
    all of one kind has a single group.
    """

    places: tuple[LayerPlace, ...]
    windows: tuple[int | None, ...]
    """For each group, the number of tokens that a query sees, including its own. None for all."""
    num_kv_heads: int
    head_dim: int

    @property
    def window(self) -> int | None:
        """Return the largest window of any layer, in tokens, or None if a layer has full attention."""
        spans = [span for span in self.windows if span is not None]
        return max(spans) if len(spans) == len(self.windows) else None


def kv_shape(config: PreTrainedConfig) -> KvShape:
    """Return the shape of a model's K and V.

    Raises:
        ValueError: The adapter does not support the model.
    """
    text = config.get_text_config(decoder=True).to_dict()
    kinds = layer_kinds(text)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    _require_equal_heads(text, heads, head_dim)
    order: list[str] = [kind for kind in ("full_attention", "sliding_attention") if kind in kinds]
    counts = dict.fromkeys(order, 0)
    places = []
    for kind in kinds:
        places.append(LayerPlace(order.index(kind), counts[kind]))
        counts[kind] += 1
    return KvShape(
        places=tuple(places),
        windows=tuple(text["sliding_window"] if kind == "sliding_attention" else None for kind in order),
        num_kv_heads=heads,
        head_dim=head_dim,
    )


def page_spec(config: PreTrainedConfig, page_size: int, dtype: torch.dtype | str, model_id: str) -> PageSpec:
    """Return the page geometry of a model whose layers all have full attention, or all have sliding windows.

    Args:
        config: The model's configuration.
        page_size: Tokens per page.
        dtype: Dtype of the K/V that the model computes (``model.dtype``).
        model_id: A string that must change whenever equal tokens would produce different K/V (see
            ``model_identity``).

    Raises:
        ValueError: The adapter does not support the model, or the model needs several KV groups (see
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
    """Return the page geometry of a model: one PageSpec for each KV group of the model and its draft model.

    A model whose layers are all of one kind has one group. A model with full attention and sliding windows
    (Gemma 3) has two. The groups of the draft model come last. With a draft model, a page contains the K/V of
    both models for the same tokens under one key, so neither can be stored without the other. Reads all
    weights, as ``model_identity`` does, unless ``model_id`` is given.

    Args:
        model: The model.
        page_size: Tokens per page.
        draft: The model passed to ``generate`` as ``assistant_model``.
        model_id: A name for the weights, so that they need not be read. It must change whenever equal tokens
            would produce different K/V.

    Raises:
        ValueError: The adapter does not support the models.
    """
    models = [plain_model(each) for each in ((model,) if draft is None else (model, draft))]
    for each in models:
        check_model(each)
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


@contextmanager
def model_of_option(folder: Path | str) -> Iterator[None]:
    """Convert errors of transformers and this adapter into a ConfigError that names the model's folder.

    Such an error occurs, for example, if the model in the folder of ``--model`` needs a package that is not installed
    (quantised weights), or if the folder is incomplete or inconsistent.
    """
    try:
        yield
    except ConfigError:
        raise
    except _LOAD_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--model {folder}: the model cannot be loaded or served: {reason}") from error


_LOAD_ERRORS = (
    AttributeError,
    ImportError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def check_model(model: PreTrainedModel) -> KvShape:
    """Check that the adapter supports a model, and return the shape of the model's K and V.

    Raises:
        ValueError: The model has state other than K and V of the preceding tokens, its weights are not in
            memory, its modules do not match its configuration, or pages cannot represent its attention.
    """
    name = type(model).__name__
    if model._is_stateful:
        raise ValueError(
            f"{name} keeps a state in addition to K and V of the tokens (recurrent or convolution layers), which is "
            f"not supported. {_INSTEAD}"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} has an encoder and a decoder, but only decoder models are supported. {_INSTEAD}"
        )
    require_in_memory(model)
    shape = kv_shape(model.config)
    layers = set()
    for layer, module in _attention_modules(model):
        _check_heads(layer, module, shape)
        _check_extras(layer, module)
        layers.add(layer)
    if layers and layers != set(range(len(shape.places))):
        raise ValueError(
            f"{name} has attention in layers {sorted(layers)}, but its configuration says "
            f"{len(shape.places)} layers: set num_hidden_layers to the number of layers that the model has"
        )
    _checked[model] = shape
    return shape


_checked: WeakKeyDictionary[PreTrainedModel, KvShape] = WeakKeyDictionary()
"""The shape of K and V of each model that passed ``check_model``."""

_INSTEAD = "Use this model without TierStoreCache"
"""The last sentence of the error messages about unsupported models."""

_EXTRAS = (
    ("sinks", "s_aux", "attention sinks (a learned logit per head)"),
    ("attn_logit_softcapping", "softcap", "a soft cap on attention logits"),
)
"""Unsupported features of attention.

For each: the attribute of the attention module that contains the value, the keyword that passes the value to
the attention function, and a description for the error message.
"""


def _attention_modules(model: PreTrainedModel) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield the decoder's modules that compute K and V, each with the index of its layer."""
    decoder = model.get_decoder()
    for module in decoder.modules() if isinstance(decoder, torch.nn.Module) else ():
        layer = getattr(module, "layer_idx", None)
        computes = "k_proj" in module._modules or isinstance(getattr(module, "head_dim", None), int)
        if isinstance(layer, int) and computes:
            yield layer, module


def _check_heads(layer: int, module: torch.nn.Module, shape: KvShape) -> None:
    """Raise ValueError if the heads of K or V in a layer do not match the configuration."""
    found = getattr(module, "head_dim", None)
    head_dim = found if isinstance(found, int) else shape.head_dim
    for name in ("K", "V"):
        width = getattr(module._modules.get(f"{name.lower()}_proj"), "out_features", None)
        width = width if isinstance(width, int) else shape.num_kv_heads * head_dim
        if (width, head_dim) != (shape.num_kv_heads * shape.head_dim, shape.head_dim):
            raise ValueError(
                f"layer {layer} ({type(module).__name__}) computes {name} with {width / head_dim:g} heads of dimension "
                f"{head_dim}, but the model's configuration says {shape.num_kv_heads} heads of dimension "
                f"{shape.head_dim}: pages need the same K/V heads in all layers. {_INSTEAD}"
            )


def _check_extras(layer: int, module: torch.nn.Module) -> None:
    """Raise ValueError if a layer's attention is more than a softmax over visible keys."""
    for attribute, keyword, words in _EXTRAS:
        given = getattr(module, attribute, None)
        if given is not None and keyword in _keywords_of(type(module).forward):
            shown = "" if isinstance(given, torch.Tensor) else f" of {given}"
            raise ValueError(
                f"layer {layer} ({type(module).__name__}) has {words}{shown}, which attention over pages does not "
                f"support yet. {_INSTEAD}"
            )


@cache
def _keywords_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the keywords that a module's ``forward`` passes to the functions it calls.

    They are taken from the constants in its code, so the result may contain other strings, too.
    """
    code = inspect.unwrap(forward).__code__
    tuples = [each for each in code.co_consts if isinstance(each, tuple)]
    return frozenset(name for each in tuples for name in each if isinstance(name, str))


def _require_equal_heads(text: dict[str, Any], heads: int, head_dim: int) -> None:
    """Raise ValueError if the configuration specifies different K/V heads for some layers."""
    wanted = {"head_dim": head_dim, "num_key_value_heads": heads}
    for layer, own in (text.get("per_layer_config") or {}).items():
        for name, value in wanted.items():
            if own.get(name) not in (None, value):
                raise ValueError(
                    f"the model's configuration has {name}={own[name]} for layer {layer} but {name}={value} for "
                    f"others: pages need the same K/V heads in all layers. {_INSTEAD}"
                )


def layer_kinds(text: dict[str, Any]) -> list[str]:
    """Return "full_attention" or "sliding_attention" for each layer of a text model's configuration.

    Raises:
        ValueError: The adapter does not support a layer. The message gives the reason.
    """
    refused = _why_refused(text)
    if refused is not None:
        raise ValueError(f"{refused}. {_INSTEAD}")
    windowed = text.get("sliding_window") is not None and text.get("use_sliding_window", True)
    kinds: list[str] = text.get("layer_types") or (
        ["sliding_attention" if windowed else "full_attention"] * text["num_hidden_layers"]
    )
    others = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(
            f"layers of type {', '.join(others)} are not supported, only full_attention and sliding_attention. "
            f"{_INSTEAD}"
        )
    if "sliding_attention" in kinds and not text.get("sliding_window"):
        raise ValueError(
            "the model has sliding-window layers, but its configuration has no sliding_window: set it to the number "
            "of tokens in a window"
        )
    return kinds


def _why_refused(text: dict[str, Any]) -> str | None:
    """Return why models with this configuration are not supported, or None if no reason is found."""
    missing = [
        name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if name not in text
    ]
    if missing:
        return f"the model's configuration has no {', '.join(missing)}: only models of the Llama family are supported"
    if text.get("kv_lora_rank") is not None:
        return (
            "multi-head latent attention (kv_lora_rank) is not supported: its cache is not K and V per head"
        )
    if text.get("index_topk") is not None:
        return "sparse attention with an index of keys (index_topk) is not supported: pages have no place for the index"
    if text.get("use_bidirectional_attention"):
        return "bidirectional attention is not supported: earlier K/V would depend on later tokens"
    shared = [mode for mode in text.get("kv_sharing_modes") or () if mode == "reuse"]
    if shared or text.get("num_kv_shared_layers"):
        return (
            "layers that use another layer's K/V (num_kv_shared_layers) are not supported, but the model has "
            f"{text.get('num_kv_shared_layers') or len(shared)} of them"
        )
    if text.get("cross_attention_layers"):
        return (
            "cross-attention layers (cross_attention_layers) are not supported: they keep K and V of images"
        )
    moving = sorted(kind for kind in _rope_types(text) if kind in ("longrope", "su") or "dynamic" in kind)
    if moving:
        return (
            f"{', '.join(moving)} rotary embeddings are not supported: K of a token would depend on the "
            "length of the request that computes it"
        )
    return None


def _rope_types(text: dict[str, Any]) -> set[str]:
    """Return the types of rotary embeddings in a configuration, which may differ between types of layers."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    each = [given, *(value for value in given.values() if isinstance(value, dict))]
    return {str(kind) for one in each for kind in (one.get("rope_type"), one.get("type")) if kind}


def checked_shape(model: PreTrainedModel) -> KvShape:
    """Check a model for a request, and return the shape of its K and V.

    The model's modules are examined only the first time, and again after the configuration has changed.

    Raises:
        ValueError: The model is not supported (see ``check_model``), or it was not loaded with "tierstore"
            attention.
    """
    if _checked.get(model) != kv_shape(model.config):
        check_model(model)
    shape = _checked[model]
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f'the model uses attention "{config._attn_implementation}": '
            f'load it with attn_implementation="{ATTENTION}"'
        )
    return shape


def check_pages(pages: PageGroups, shapes: Sequence[KvShape]) -> None:
    """Raise ValueError unless the store's KV groups match these models."""
    wanted = [
        (sum(place.group == group for place in shape.places), shape.num_kv_heads, shape.head_dim)
        for shape in shapes
        for group in range(len(shape.windows))
    ]
    found = [(group.shape[1], group.shape[4], group.shape[5]) for group in pages.groups]
    if wanted != found:
        raise ValueError(
            f"the store has KV groups of {_shown(found)}, but the model needs {_shown(wanted)}: open the store with "
            "page_specs of this model, and pass draft= to both page_specs and the cache, or to neither"
        )


def _shown(groups: Sequence[tuple[int, int, int]]) -> str:
    return " and ".join(
        f"{layers} layers with {heads} heads of dimension {dim}" for layers, heads, dim in groups
    )


def common_window(shapes: Sequence[KvShape]) -> int | None:
    """Return the largest window of any layer, in tokens, or None if a layer of a model has full attention."""
    windows = [shape.window for shape in shapes if shape.window is not None]
    return max(windows) if len(windows) == len(shapes) else None
