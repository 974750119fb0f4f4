"""The shape of a model's K and V, and the number of operations of its prefill, both derived from its config.

The config is a model's own config.json, or an entry in the table of known models.

This module reads files and does not import torch. It understands the field names that transformers writes. A
config in which a relevant field has an unknown value is rejected. Otherwise, a plan for pages of the wrong size
could go unnoticed.

A prefill takes two operations (a multiplication and an addition) per weight and token, and two for each
multiplication in attention scores and in weighted sums of values. The output layer is counted for the last token
only. Norms, activation functions and rotary embeddings are not counted.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from tierstore.errors import ConfigError
from tierstore.page import DTYPE_NBYTES, PageSpec

_TWO_MATRICES = frozenset({"gpt_neox", "phi", "starcoder2", "nemotron"})
"""Model types whose feed-forward layers have two weight matrices instead of three, because they have no gate."""

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
"""Optional fields that determine the work of prefill. If present, each must be an integer of at least 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Quantities that determine how many operations the prefill of a prompt takes.

    Attributes:
        weights: Number of weights that each token is multiplied by, over all layers. Only the weights of the
            chosen experts are counted.
        head: Number of weights of the output layer, which is computed for the last token only.
        score: Number of elements in a query plus number of elements in a value, over all heads of a layer.
        windows: Attention window of each layer in tokens, or None if the layer attends to all tokens.
        hidden: Number of rows of a typical weight matrix.
        inner: Number of columns of a typical weight matrix.
    """

    weights: int
    head: int
    score: int
    windows: tuple[int | None, ...]
    hidden: int
    inner: int

    def operations(self, tokens: int) -> int:
        """Return how many floating-point operations the prefill of ``tokens`` tokens takes.

        The number includes the output layer for the first token of the answer, and assumes causal attention.
        """
        pairs = sum(_pairs(tokens, window) for window in self.windows)
        return 2 * (self.weights * tokens + self.head + self.score * pairs)


def prefill_of(config: Mapping[str, Any], *, head_dim: int, windows: Sequence[int | None]) -> Prefill:
    """Return the prefill quantities of the model that ``config`` describes.

    The config must contain the hidden size, the number of attention heads, the intermediate size and the
    vocabulary size.
    """
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
    """Return the number of pairs of a query and a key that one causal layer computes for ``tokens`` tokens."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def _heads(config: Mapping[str, Any], head_dim: int) -> tuple[int, int]:
    """Return ``(weights, score)`` of one attention layer that stores K and V per head. See ``Prefill``."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads), 2 * heads * head_dim


def _latent(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return ``(weights, score)`` of one layer of multi-head latent attention during prefill. See ``Prefill``."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    low = config.get("q_lora_rank")
    query = heads * (nope + rope) * (low or hidden) + (hidden * low if low else 0)
    rest = hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return query + rest, heads * (nope + rope + value)


def _feed_forward(config: Mapping[str, Any], layer: int) -> int:
    """Return the number of weights that each token is multiplied by in the feed-forward part of ``layer``.

    In a mixture-of-experts layer, these are the weights of the router, the shared experts and the chosen
    experts.
    """
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
    """Return whether this layer of a mixture-of-experts model has a dense feed-forward part, without experts."""
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return True
    if config.get("decoder_sparse_step"):
        return bool((layer + 1) % config["decoder_sparse_step"])
    return bool(layer % (config.get("moe_layer_freq") or 1))


_OTHER_CACHES = {
    "layers_block_type": "layers that keep a state",
    "hybrid_override_pattern": "layers that keep a state",
    "attn_layer_period": "layers that keep a state",
    "full_attention_interval": "layers that keep a state",
    "num_kv_shared_layers": "layers that share another layer's K and V",
    "kv_sharing_modes": "layers that share another layer's K and V",
    "global_head_dim": "layers with heads of different sizes",
    "num_global_key_value_heads": "layers with different numbers of heads",
    "swa_num_key_value_heads": "layers with different numbers of heads",
    "index_head_dim": "a separate index in addition to the latents",
    "is_encoder_decoder": "an encoder",
}
"""Config fields of models whose cache cannot be stored as pages, each with the feature that prevents it."""

_SHORT = {"smollm2": "smollm2-135m", "gemma3": "gemma-3-270m", "gemma3-270m": "gemma-3-270m"}
"""Short names that other commands use, with the names of the models in the table."""

_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""For each model type, a number n: every n-th layer has full attention, unless the config says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of the K and V that a model stores per token.

    Attributes:
        name: The model's name, or the path of its config.
        kind: ``mha`` if K and V are stored per head, ``mla`` if one latent vector is stored instead.
        num_layers: Number of layers.
        num_kv_heads: Number of KV heads per layer.
        head_dim: Number of elements per head.
        dtype: The model's own dtype, or None if its config names none.
        windows: Attention window of each layer in tokens, or None if the layer attends to all tokens.
        prefill: The quantities that determine the work of prefill, or the reason why they are unknown.
    """

    name: str
    kind: Literal["mha", "mla"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str | None
    windows: tuple[int | None, ...]
    prefill: Prefill | str

    def specs(self, page_size: int, dtype: str | None = None) -> tuple[PageSpec, ...]:
        """Return the specification of each KV group, for pages of ``page_size`` tokens.

        If only some layers have a window, these layers form a separate group.

        Args:
            page_size: Number of tokens per page.
            dtype: The dtype of the pages. None means the model's own dtype.

        Raises:
            ConfigError: The dtype is not supported, or the model's config names none.
        """
        chosen = dtype or self.dtype
        if chosen not in DTYPE_NBYTES:
            fault = "names no dtype" if chosen is None else f"has dtype {chosen!r}"
            fault = fault if dtype is None else f"cannot have pages of dtype {dtype!r}"
            raise ConfigError(
                f"model {self.name} {fault}; --dtype must be one of {', '.join(sorted(DTYPE_NBYTES))}"
            )
        full = sum(window is None for window in self.windows)
        layers = [count for count in (full, self.num_layers - full) if count]
        return tuple(
            PageSpec(
                kind=self.kind,
                num_layers=count,
                page_size=page_size,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=chosen,
                group=group,
                model=self.name,
            )
            for group, count in enumerate(layers)
        )


class Fields:
    """The fields of one config. Those of a nested ``text_config`` are used if there is one.

    Methods that check a value raise ConfigError, whose message names the source, the field and the expected
    value.
    """

    def __init__(self, source: str, tree: Mapping[str, Any]) -> None:
        nested = tree.get("text_config")
        self.source = source
        self.top = tree
        self.tree: Mapping[str, Any] = nested if isinstance(nested, Mapping) else tree

    def get(self, name: str) -> Any:
        """Return the value of a field, or None if it is missing."""
        return self.tree.get(name)

    def count(self, name: str) -> int | None:
        """Return the value of an integer field, or None if it is missing or null.

        Raises:
            ConfigError: The value is not an integer of at least 1.
        """
        value = self.tree.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {name} must be an integer of at least 1, got {value!r}")
        return value

    def needed(self, name: str) -> int:
        """Return the value of a required integer field.

        Raises:
            ConfigError: The field is missing, or its value is not an integer of at least 1.
        """
        value = self.count(name)
        if value is None:
            raise ConfigError(
                f"{self.source}: {name} is missing; a decoder's config needs num_hidden_layers, "
                "num_attention_heads and hidden_size, and may have num_key_value_heads and head_dim"
            )
        return value


def known_models() -> dict[str, Mapping[str, Any]]:
    """Return the fields of each known model's config, by the name of the model's repository."""
    text = (files("tierstore.plan") / "models.yaml").read_text(encoding="utf-8")
    table: dict[str, Mapping[str, Any]] = yaml.safe_load(text)
    return table


def read_model(model: str) -> Geometry:
    """Return the geometry of a model.

    Args:
        model: A folder with a config.json, the path of such a file, or the name of a known model. Names are
            case-insensitive.

    Raises:
        ConfigError: The name is unknown (the message suggests similar names), the config cannot be read, or the
            model cannot be stored as pages.
    """
    if not model.strip():
        raise ConfigError(
            f"the model must be a folder with a config.json or one of {', '.join(known_models())}, got {model!r}"
        )
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() or path.name == "config.json":
        return geometry(str(path), _read(path))
    names = {key.lower(): key for key in known_models()}
    names |= {key.rpartition("/")[2]: full for key, full in names.items()}
    plain = model.lower().removesuffix("-instruct")
    full = names.get(model.lower()) or names.get(_SHORT.get(plain, plain))
    if full is None:
        raise _unknown(model, names)
    return geometry(full.rpartition("/")[2], known_models()[full])


def geometry(source: str, tree: Mapping[str, Any]) -> Geometry:
    """Return the geometry of the model that a config describes.

    Args:
        source: The model's name or the path of its config. Used as the geometry's name and in messages.
        tree: The config, as parsed from JSON.

    Raises:
        ConfigError: A field is missing or has an unknown value, or the model cannot be stored as pages. The
            message names ``source``, the field and the expected value.
    """
    fields = Fields(source, tree)
    _require_pages(fields)
    layers = fields.needed("num_hidden_layers")
    windows = _windows(fields, layers)
    latent = fields.count("kv_lora_rank")
    if latent is not None:
        kv_heads, head_dim = 1, latent + fields.needed("qk_rope_head_dim")
    else:
        kv_heads = fields.count("num_key_value_heads") or fields.needed("num_attention_heads")
        head_dim = fields.count("head_dim") or _head_dim(fields)
    return Geometry(
        name=source,
        kind="mha" if latent is None else "mla",
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=_dtype(fields),
        windows=windows,
        prefill=_prefill(fields, head_dim, windows),
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the model's config.json: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the model's config.json is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: a model's config.json must contain a JSON object, got {type(tree).__name__}"
        )
    return tree


def _unknown(model: str, names: Mapping[str, str]) -> ConfigError:
    known = sorted({key.rpartition("/")[2] for key in names.values()}, key=str.lower)
    near = difflib.get_close_matches(model.lower().rpartition("/")[2], list(names), n=3, cutoff=0.5)
    named = list(dict.fromkeys(names[key].rpartition("/")[2] for key in near))
    guess = f"did you mean {' or '.join(named)}? " if named else ""
    return ConfigError(
        f"model {model!r} is neither a folder with a config.json nor a known name; {guess}"
        f"known names: {', '.join(known)}"
    )


def _require_pages(fields: Fields) -> None:
    for name, what in _OTHER_CACHES.items():
        value = fields.get(name)
        if name == "kv_sharing_modes":
            value = any(mode == "reuse" for mode in value or ())
        if value:
            raise ConfigError(
                f"{fields.source}: {name} is {fields.get(name)!r}, so the model has {what}, which is not supported; "
                "each layer must store K and V, or one latent vector, for every token"
            )
    if fields.get("v_head_dim") not in (None, fields.get("head_dim")) and not fields.get("kv_lora_rank"):
        raise ConfigError(
            f"{fields.source}: v_head_dim must equal head_dim or be missing, got {fields.get('v_head_dim')!r}"
        )


def _head_dim(fields: Fields) -> int:
    hidden, heads = fields.needed("hidden_size"), fields.needed("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"{fields.source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
            "the config must contain head_dim"
        )
    return hidden // heads


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens, or None if the layer attends to all tokens."""
    window = fields.count("sliding_window") if fields.get("use_sliding_window") is not False else None
    kinds = fields.get("layer_types")
    if kinds is not None:
        return tuple(_window(fields, kind) for kind in _layer_types(fields, kinds, layers))
    if window is None:
        return (None,) * layers
    pattern = fields.count("sliding_window_pattern") or fields.count("_sliding_window_pattern")
    pattern = pattern or _PATTERNS.get(str(fields.get("model_type")))
    if pattern is not None:
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
    full = fields.count("max_window_layers") or 0 if fields.get("use_sliding_window") else 0
    return tuple(None if layer < full else window for layer in range(layers))


def _layer_types(fields: Fields, kinds: Any, layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(
            f"{fields.source}: layer_types must be a list of {layers} types, one type per layer"
        )
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"{fields.source}: every entry of layer_types must be full_attention or sliding_attention, "
            f"got {', '.join(others)}"
        )
    return kinds


def _window(fields: Fields, kind: str) -> int | None:
    return fields.needed("sliding_window") if kind == "sliding_attention" else None


def _dtype(fields: Fields) -> str | None:
    trees = (fields.tree, fields.top)
    found = next((t[n] for t in trees for n in ("dtype", "torch_dtype") if isinstance(t.get(n), str)), None)
    return None if found in (None, "auto") else str(found).removeprefix("torch.")


def _prefill(fields: Fields, head_dim: int, windows: tuple[int | None, ...]) -> Prefill | str:
    names = ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
    if fields.get("kv_lora_rank"):
        names += ["qk_nope_head_dim", "v_head_dim"]
    missing = [name for name in names if fields.count(name) is None]
    if missing:
        return f"{fields.source} has no {', '.join(missing)}"
    for name in OPTIONAL:
        value = fields.get(name)
        if value is not None and (not isinstance(value, int) or value < 0):
            return f"{fields.source}: cannot interpret {name} {value!r}"
    return prefill_of(fields.tree, head_dim=head_dim, windows=windows)
