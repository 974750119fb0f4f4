"""Page keys under vLLM: the identity of a model and its LoRA adapters, combined with vLLM's block hashes.

A key combines the namespace and the block hash, which covers the whole prefix. A block hash covers tokens, LoRA name
and path, cache salt and multimodal items (vLLM's ``hash_block_tokens``). The namespace covers everything else that
decides what a model computes: weights, dtype, distribution over ranks, and an adapter's files. A prompt of 131,072
tokens has 8,192 blocks to look up before its first token, so keys are made in bulk.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from struct import iter_unpack
from typing import Any, Protocol

import numpy as np

from tierstore.errors import ConfigError
from tierstore.types import PageKey

_SUFFIX = bytes(4)
_HASH_NBYTES = 32
_KEY_NBYTES = _HASH_NBYTES + len(_SUFFIX)


class Hashed(Protocol):
    """The part of vLLM's request that is used here."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per full hash block, in order. The sequence grows as tokens are added."""
        ...


class KeyChain:
    """The keys of one request's blocks, each computed once.

    Args:
        request: The request, whose hashes may grow.
        namespace: 32 bytes, the namespace of the keys.
        stride: Hashes per block. The key of a block is made of the last one.
    """

    def __init__(self, request: Hashed, namespace: bytes, stride: int = 1) -> None:
        self._request = request
        self._namespace = namespace
        self._stride = stride
        self._keys: list[PageKey] = []

    def first(self, blocks: int) -> list[PageKey]:
        """Return the keys of the first ``blocks`` blocks; fewer if fewer are full."""
        return self._keys[: self._grown(blocks)]

    def at(self, number: int) -> PageKey | None:
        """Return the key of one block; None if it is not full."""
        return self._keys[number] if number < self._grown(number + 1) else None

    def _grown(self, blocks: int) -> int:
        hashes, stride = self._request.block_hashes, self._stride
        start, end = len(self._keys), min(blocks, len(hashes) // stride)
        if start < end:
            self._keys += page_keys(self._namespace, hashes[(start + 1) * stride - 1 : end * stride : stride])
        return end


def namespace(identity: str) -> bytes:
    """Return 32 bytes that are equal only for equal identities."""
    return blake2b(
        identity.encode("utf-8", "surrogatepass"), digest_size=32, person=b"tierstore-vllm"
    ).digest()


def page_keys(namespace: bytes, hashes: Sequence[bytes]) -> list[PageKey]:
    """Return the key of each block. Two keys are equal only if both their namespaces and hashes are.

    Hashes of 32 bytes (vLLM's SHA-256) are digests already, and are combined bit by bit (XOR) with the
    namespace, which is a digest, too. Keys of two namespaces collide only if their hashes differ in exactly
    the bits in which the namespaces differ. Hashes of other lengths are digested together with the namespace.
    """
    if set(map(len, hashes)) != {_HASH_NBYTES}:
        return [
            PageKey(blake2b(h, key=namespace, digest_size=_HASH_NBYTES).digest() + _SUFFIX) for h in hashes
        ]
    keys = np.zeros((len(hashes), _KEY_NBYTES), dtype=np.uint8)
    joined = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, _HASH_NBYTES)
    np.bitwise_xor(joined, np.frombuffer(namespace, dtype=np.uint8), out=keys[:, :_HASH_NBYTES])
    return [PageKey(key) for (key,) in iter_unpack(f"{_KEY_NBYTES}s", keys.tobytes())]


_log = logging.getLogger("tierstore.adapters.vllm.identity")

_STORED_OR_RUN = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")
"""Config entries that say how a model is stored or run. ``identity`` adds the dtype separately."""
_SAMPLES = 16
_SAMPLE_NBYTES = 64 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def identity(vllm_config: Any, model_id: str) -> str:
    """Return, as JSON, the model, its weights, dtypes, attention and parallel layout, and the user's ``model_id``.

    Weights in a local folder are identified by samples of every file, at most 1 MiB each; weights from a hub
    by their commit. Scheduler and workers compute the same string, and so does the next process for the same
    files.
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
    """Return a hex digest of names, lengths and samples of all weight files in a folder, or of one file.

    The samples of a file are its first 64 KiB, where safetensors files have their header, its last 64 KiB,
    and 14 pieces of that size in between.
    """
    files = [path] if path.is_file() else sorted(f for kind in _WEIGHTS for f in path.glob(kind))
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogatepass"))
        _feed_samples(digest, file, size)
    return digest.hexdigest()


def _feed_samples(digest: hashlib._Hash, file: Path, size: int) -> None:
    with file.open("rb") as stream:
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_NBYTES) * i // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_NBYTES))


_ALL_OF_ADAPTER = 256 << 20
"""Largest file of an adapter that is digested completely. Larger files are sampled."""
_OF_ADAPTER = ("adapter_config.json", *_WEIGHTS)

Signature = tuple[tuple[str, int, int, int, int], ...]
"""Name, length, inode and times of each file of an adapter. Equal signatures are taken as equal content."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as one request uses it."""

    number: int
    """vLLM's ``lora_int_id``, which identifies what vLLM has loaded."""
    digest: str
    """Digest of its files. The namespace of the request's keys includes it."""
    generation: int
    """How often the files of this number were found to have changed."""
    reloads: bool
    """Whether the request makes vLLM load the files again."""


@dataclass(slots=True)
class _Loaded:
    """The adapter that vLLM has loaded under a number, as far as the files show."""

    path: Path
    signature: Signature
    digest: str | None
    """None if it is unknown whether vLLM has the files from before or after a change."""
    generation: int = 0
    pending: bool = False
    """Whether vLLM has yet to load the changed files, for a request with ``load_inplace``."""


class Adapters:
    """The LoRA adapters of one engine, identified by their files. Use it from the scheduler's thread only.

    vLLM loads an adapter when its ``lora_int_id`` is first used, keeps it, and may drop it and load it again.
    If the files change in between, it is unknown which weights vLLM computes with. Pages of that
    ``lora_int_id`` are then neither reused nor stored until a request makes vLLM reload the adapter
    (``load_inplace``). A newly trained adapter needs another ``lora_int_id``, or a restart.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}
        self._warned: set[tuple[int, str]] = set()

    def of(self, lora: Any) -> Adapter | None:
        """Return the adapter of vLLM's ``LoRARequest``. None, with a warning, if its weights are unknown.

        Checks the files' signature for every request, and reads their content when the signature changes.
        """
        number, path = int(lora.lora_int_id), _adapter_folder(lora)
        reloads = bool(getattr(lora, "load_inplace", False))
        signature = None if path is None else _signature(path)
        if path is None or signature is None:
            self._warn(number, lora, "it is no folder with adapter files that can be read here")
            self._unclear(number)
            return None
        known = self._loaded.get(number)
        if known is None or known.path != path or known.signature != signature:
            digest = _digest(path, signature)
            if known is None:
                known = self._loaded[number] = _Loaded(path, signature, digest)
            elif digest is not None and digest == known.digest:
                known.path, known.signature = path, signature
            elif reloads:
                generation = known.generation + 1
                known = self._loaded[number] = _Loaded(path, signature, digest, generation, pending=True)
            else:
                known.path, known.signature = path, signature
                self._unclear(number)
        elif known.digest is None and reloads:
            known.digest, known.pending = _digest(path, signature), True
        if known.digest is None or (known.pending and not reloads):
            self._warn(number, lora, "its files have changed since vLLM may have loaded them")
            return None
        return Adapter(number, known.digest, known.generation, reloads)

    def holds(self, adapter: Adapter, *, look: bool = False) -> bool:
        """Return whether vLLM still computes with these files. With ``look``, check the files as well."""
        known = self._loaded[adapter.number]
        if look and known.generation == adapter.generation and _signature(known.path) != known.signature:
            self._unclear(adapter.number)
        return known.generation == adapter.generation and known.digest == adapter.digest

    def runs(self, adapter: Adapter) -> None:
        """Record that a request with the adapter runs. If it makes vLLM reload the files, this is done."""
        known = self._loaded[adapter.number]
        if adapter.reloads and known.generation == adapter.generation:
            known.pending = False

    def _unclear(self, number: int) -> None:
        known = self._loaded.get(number)
        if known is not None:
            known.digest, known.generation = None, known.generation + 1

    def _warn(self, number: int, lora: Any, why: str) -> None:
        if (number, why) not in self._warned:
            self._warned.add((number, why))
            _log.warning(
                "TierStore: KV of LoRA adapter %r (id %d, path %r) is neither reused nor stored: %s. Give adapters as "
                "local folders, and a changed adapter another lora_int_id",
                lora.lora_name,
                number,
                getattr(lora, "lora_path", ""),
                why,
            )


def _adapter_folder(lora: Any) -> Path | None:
    """Return the folder from which vLLM loads the adapter; None if the adapter is not in a local folder."""
    given = str(getattr(lora, "lora_path", "") or "")
    elsewhere = ("tensorizer_config_dict", "lora_tensors")
    if not given or any(getattr(lora, name, None) is not None for name in elsewhere):
        return None
    path = Path(given).expanduser()
    return path.absolute() if path.is_dir() else None


def _files_of_adapter(folder: Path) -> list[Path]:
    return sorted({file for kind in _OF_ADAPTER for file in folder.glob(kind)})


def _signature(folder: Path) -> Signature | None:
    """Return the signature of a folder, or None if a file cannot be examined or there are no weights."""
    try:
        found = [(file.name, file.stat()) for file in _files_of_adapter(folder)]
    except OSError:
        return None
    if not any(name != _OF_ADAPTER[0] for name, _ in found):
        return None
    return tuple((name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def _digest(folder: Path, signature: Signature) -> str | None:
    """Return a digest of the files; None if they cannot be read or no longer have ``signature``."""
    digest = sha256()
    try:
        for file in _files_of_adapter(folder):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogatepass"))
            if size > _ALL_OF_ADAPTER:
                _feed_samples(digest, file, size)
            else:
                digest.update(file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if _signature(folder) == signature else None


def adapters_digest(folders: Sequence[Path]) -> str:
    """Return a hex digest of the files of several adapters, whatever the order of ``folders``.

    ConfigError for a folder without readable adapter files.
    """
    found = []
    for folder in folders:
        signature = _signature(folder)
        digest = None if signature is None else _digest(folder, signature)
        if digest is None:
            raise ConfigError(
                f"adapters: {folder} is not a folder with readable adapter files; name folders of LoRA adapters"
            )
        found.append(digest)
    return sha256("".join(sorted(found)).encode()).hexdigest() if found else ""


def _named(found: object) -> str:
    """Return a string for a value that JSON cannot encode. It is the same in the next process."""
    text = str(found)
    return type(found).__qualname__ if " at 0x" in text else text


def _config(hf_config: Any) -> dict[str, Any]:
    found = hf_config.to_dict()
    return {key: value for key, value in found.items() if key not in _STORED_OR_RUN}


def _draft(vllm_config: Any) -> str:
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return "" if draft is None else f"{draft.model} {getattr(speculative, 'method', '')}"
