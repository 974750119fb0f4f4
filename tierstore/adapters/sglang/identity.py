"""The identity of SGLang's pages: everything that determines what the bytes of a page mean.

A page is found only by an engine whose identity is the same. SGLang's keys cover the tokens, and the name and path of
a LoRA adapter, but neither weights nor dtypes nor the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tierstore.adapters.model_files import adapters_digest, hub_folder, model_digest

_WEIGHTS = (
    "model_path",
    "revision",
    "load_format",
    "model_impl",
    "quantization",
    "quantization_param_path",
    "rl_quant_profile",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "kt_weight_path",
    "kt_method",
    "decrypted_config_file",
    "remote_instance_weight_loader_backend",
    "remote_instance_weight_loader_seed_instance_ip",
    "json_model_override_args",
    "dtype",
    "kv_cache_dtype",
)
_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "decrypted_draft_config_file",
)
_GEOMETRY = (
    "layout",
    "page_size",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)
_SPREAD = ("tp_size", "pp_size", "pp_rank", "attn_cp_size", "tp_lcm_size", "should_split_heads")


def identity(
    pool: str, host: Any, config: Any, args: Any, *, model: str | None, parts: object, page_nbytes: int
) -> dict[str, object]:
    """Return everything that determines what the bytes of a page mean, as values that JSON can represent.

    Args:
        pool: The name of the pool.
        host: SGLang's host pool.
        config: SGLang's ``HiCacheStorageConfig``.
        args: SGLang's server arguments, or None.
        model: The user's name for the weights, or None to identify them by SGLang's arguments and the model's files.
        parts: How a page is divided into buffers.
        page_nbytes: Size of a page in bytes.
    """
    weights = {each: _plain(getattr(args, each, None)) for each in _WEIGHTS}
    if model is not None:
        weights.pop("model_path"), weights.pop("revision")
    return {
        "engine": "sglang",
        "pool": pool,
        "model": config.model_name if model is None else model,
        "weights": weights,
        "digest": _model_digest(args, "model_path", "revision") if model is None else "",
        "draft": {each: _plain(getattr(args, each, None)) for each in _DRAFT},
        "draft_digest": _model_digest(
            args, "speculative_draft_model_path", "speculative_draft_model_revision"
        ),
        "adapters": adapters_digest(_adapters(args)),
        "class": type(host).__name__,
        "geometry": {each: _plain(getattr(host, each, None)) for each in _GEOMETRY},
        "dtypes": _dtypes(host),
        "parts": parts,
        "page_nbytes": page_nbytes,
        "parallel": {each: _plain(getattr(config, each)) for each in _SPREAD},
    }


def _dtypes(pool: Any) -> dict[str, str]:
    """Return the dtypes of a host pool, and the dtypes and shapes of its states.

    States of different dtypes may have the same size.
    """
    found = {each: str(value) for each, value in vars(pool).items() if isinstance(value, torch.dtype)}
    found["dtype"] = str(pool.dtype)
    for each in ("conv_state_shapes", "temporal_state_shape"):
        found[each] = str(getattr(pool, each, None))
    states = getattr(pool, "slot_state_buffers", ())
    found["slot_state_buffers"] = str([(str(state.dtype), tuple(state.shape[1:])) for state in states])
    return found


def _model_digest(args: Any, path: str, revision: str) -> str:
    """Return the digest of the model that two of SGLang's arguments name, or ""."""
    name = getattr(args, path, None)
    if not name:
        return ""
    return model_digest(str(name), getattr(args, revision, None), getattr(args, "download_dir", None))


def _adapters(args: Any) -> list[Path]:
    """Return the folders of the LoRA adapters that SGLang loads at the start.

    SGLang's keys identify an adapter by its name and path, not by its weights.
    """
    paths = getattr(args, "lora_paths", None)
    folders = []
    for ref in list(paths.values()) if isinstance(paths, dict) else list(paths or ()):
        path = ref.get("lora_path") if isinstance(ref, dict) else getattr(ref, "lora_path", None) or ref
        name = str(path).rpartition("=")[2]
        folder: Path | None = Path(name).expanduser()
        if folder is not None and not folder.is_dir():
            folder = hub_folder(name, "adapter_config.json", None, getattr(args, "download_dir", None))
        if folder is not None:
            folders.append(folder)
    return folders


def _plain(value: object) -> object:
    """Return a value that JSON can represent."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
