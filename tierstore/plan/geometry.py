"""A model's geometry, from its folder's config.json or from the table of known models, and the work of its prefill.

Reads files; imports no torch. The fields are those that transformers writes. A field value that this reader does not
know is refused by name: pages of a wrong size would look right and be worth nothing.

The work of computing a prompt counts two operations for each weight and token, and for each attention score and
each weighted value. Norms, activations, rotations and the head that gives the next token are left out.
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
    "index_head_dim": "an index of its own beside the latents",
    "is_encoder_decoder": "an encoder",
}
"""Fields that, when set, mean a cache this reader has no pages for."""

_SHORT = {"smollm2": "smollm2-135m", "gemma3": "gemma-3-270m", "gemma3-270m": "gemma-3-270m"}
"""What other commands call models of the table."""

_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Every how many layers one is full, where a config does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a model keeps of one token. ``dtype`` is the model's own, None where its config names none.

    ``windows``: a layer each, the tokens it attends to, None for all. ``prefill``: its work, or why it is not known.
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
        """The pages, in ``dtype`` or the model's own: one KV group, or one of full layers and one of windows.

        ConfigError if the dtype is not one that pages can have.
        """
        chosen = dtype or self.dtype
        if chosen not in DTYPE_NBYTES:
            fault = "names no dtype" if chosen is None else f"has dtype {chosen!r}"
            fault = fault if dtype is None else f"was asked for in dtype {dtype!r}"
            raise ConfigError(
                f"model {self.name} {fault}; allowed with --dtype: {', '.join(sorted(DTYPE_NBYTES))}"
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
    """The fields of one config, asked for by name; ConfigError names the source, the field and what is allowed."""

    def __init__(self, source: str, tree: Mapping[str, Any]) -> None:
        nested = tree.get("text_config")
        self.source = source
        self.top = tree
        self.tree: Mapping[str, Any] = nested if isinstance(nested, Mapping) else tree

    def get(self, name: str) -> Any:
        """The value, or None."""
        return self.tree.get(name)

    def count(self, name: str) -> int | None:
        """A whole number of at least 1, or None where the field is missing or null."""
        value = self.tree.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {name} is {value!r}; allowed: an integer of at least 1")
        return value

    def needed(self, name: str) -> int:
        """A whole number that must be there."""
        value = self.count(name)
        if value is None:
            raise ConfigError(
                f"{self.source}: {name} is missing; allowed: a decoder's config with num_hidden_layers, "
                "num_attention_heads, hidden_size, and num_key_value_heads and head_dim where they differ"
            )
        return value


def known_models() -> dict[str, Mapping[str, Any]]:
    """The shipped table: repository name -> fields."""
    text = (files("tierstore.plan") / "models.yaml").read_text(encoding="utf-8")
    table: dict[str, Mapping[str, Any]] = yaml.safe_load(text)
    return table


def read_model(model: str) -> Geometry:
    """The geometry of a folder with a config.json, of such a file, or of a known model by name (any case).

    ConfigError for an unknown name, with the nearest ones, and for a config that cannot be read or understood.
    """
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
    """The geometry in the fields of a config. ConfigError names ``source``, the field and what is allowed."""
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
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; allowed: a folder with the config.json of a model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); allowed: a model's config.json") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; allowed: a model's config.json")
    return tree


def _unknown(model: str, names: Mapping[str, str]) -> ConfigError:
    known = sorted({key.rpartition("/")[2] for key in names.values()}, key=str.lower)
    near = difflib.get_close_matches(model.lower().rpartition("/")[2], list(names), n=3, cutoff=0.5)
    named = list(dict.fromkeys(names[key].rpartition("/")[2] for key in near))
    guess = f"did you mean {' or '.join(named)}? " if named else ""
    return ConfigError(
        f"model {model!r} is neither a folder with a config.json nor a known name; {guess}"
        f"allowed: such a folder, or {', '.join(known)}"
    )


def _require_pages(fields: Fields) -> None:
    for name, what in _OTHER_CACHES.items():
        value = fields.get(name)
        if name == "kv_sharing_modes":
            value = any(mode == "reuse" for mode in value or ())
        if value:
            raise ConfigError(
                f"{fields.source}: {name} is {fields.get(name)!r}: {what}; allowed: models whose layers each keep "
                "K and V, or one latent, of every token"
            )
    if fields.get("v_head_dim") not in (None, fields.get("head_dim")) and not fields.get("kv_lora_rank"):
        raise ConfigError(
            f"{fields.source}: v_head_dim is {fields.get('v_head_dim')!r}; allowed: head_dim, or none"
        )


def _head_dim(fields: Fields) -> int:
    hidden, heads = fields.needed("hidden_size"), fields.needed("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"{fields.source}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; "
            "allowed: one, or a head_dim"
        )
    return hidden // heads


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """A layer each: its window, None for all tokens."""
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
        raise ConfigError(f"{fields.source}: layer_types is no list of {layers}; allowed: one type a layer")
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"{fields.source}: layer_types has {', '.join(others)}; allowed: full_attention, sliding_attention"
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
            return f"{fields.source} has {name} {value!r}, which is not understood"
    return prefill_of(fields.tree, head_dim=head_dim, windows=windows)
