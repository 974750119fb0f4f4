"""Whose pages these are: everything besides tokens that decides what a model computes, as one string."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

_STORED_OR_RUN = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")
"""Config entries that say how a model is stored or run; its dtype is named apart."""
_SAMPLES = 16
_SAMPLE_NBYTES = 64 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def identity(vllm_config: Any, model_id: str) -> str:
    """JSON of the model, its weights, dtypes, attention and parallel layout, and of what the user says in ``model_id``.

    Weights of a local folder are told apart by samples of every file, 1 MiB of each at most; those of a hub by their
    commit. Both halves come to the same string, as does the next process for the same files.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    folder = Path(model.model)
    local = folder.exists()
    parts = {
        "model": "" if local else model.model,
        "revision": "" if local else str(getattr(model.hf_config, "_commit_hash", None) or model.revision),
        "weights": weights_digest(folder) if local else "",
        "config": _config(model.hf_config),
        "load_format": str(getattr(vllm_config.load_config, "load_format", "")),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "hash": str(getattr(cache, "prefix_caching_hash_algo", "")),
        "draft": _draft(vllm_config),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "id": model_id,
    }
    return json.dumps(parts, sort_keys=True, default=_named)


def weights_digest(path: Path) -> str:
    """Hex digest of the names, lengths and samples of all weight files in a folder, or of one file.

    Samples: the first 64 KiB, where safetensors keep their header, the last, and 14 between.
    """
    files = [path] if path.is_file() else sorted(f for kind in _WEIGHTS for f in path.glob(kind))
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogatepass"))
        with file.open("rb") as stream:
            for i in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_NBYTES) * i // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_NBYTES))
    return digest.hexdigest()


def _named(found: object) -> str:
    """What JSON does not know; nothing that names an address, which the next process would not have."""
    text = str(found)
    return type(found).__qualname__ if " at 0x" in text else text


def _config(hf_config: Any) -> dict[str, Any]:
    found = hf_config.to_dict()
    return {key: value for key, value in found.items() if key not in _STORED_OR_RUN}


def _draft(vllm_config: Any) -> str:
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return "" if draft is None else f"{draft.model} {getattr(speculative, 'method', '')}"
