"""Page keys under vLLM: the identity of a model and its LoRA adapters, and vLLM's block hashes.

A key is the namespace and the block hash, which covers the whole prefix, made one. A block hash covers tokens, LoRA
name and path, cache salt and multimodal items (vLLM's ``hash_block_tokens``). The namespace covers everything else
that decides what a model computes: weights, dtype, how it is spread over ranks, an adapter's files.
A prompt of 131,072 tokens has 8,192 blocks to look up before its first token, so keys are made all at once.
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
    """A request with the hashes of its full blocks so far."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One a hash block, in order; grows as tokens come."""
        ...


class KeyChain:
    """The keys of one request's blocks, each computed once. ``stride``: hashes of a block, of which the last counts."""

    def __init__(self, request: Hashed, namespace: bytes, stride: int = 1) -> None:
        self._request = request
        self._namespace = namespace
        self._stride = stride
        self._keys: list[PageKey] = []

    def first(self, blocks: int) -> list[PageKey]:
        """The keys of so many blocks from the first on; fewer if fewer are full."""
        return self._keys[: self._grown(blocks)]

    def at(self, number: int) -> PageKey | None:
        """The key of one block; None: it is not full."""
        return self._keys[number] if number < self._grown(number + 1) else None

    def _grown(self, blocks: int) -> int:
        hashes, stride = self._request.block_hashes, self._stride
        start, end = len(self._keys), min(blocks, len(hashes) // stride)
        if start < end:
            self._keys += page_keys(self._namespace, hashes[(start + 1) * stride - 1 : end * stride : stride])
        return end


def namespace(identity: str) -> bytes:
    """32 bytes; equal only for equal identities."""
    return blake2b(
        identity.encode("utf-8", "surrogatepass"), digest_size=32, person=b"tierstore-vllm"
    ).digest()


def page_keys(namespace: bytes, hashes: Sequence[bytes]) -> list[PageKey]:
    """The key of each block, equal only for equal namespace and hash.

    Hashes of 32 bytes, vLLM's SHA-256, are digests already: the namespace, a digest too, is laid over them, bit by
    bit. Who wanted two keys of different namespaces to meet would have to find hashes that differ by exactly that.
    Others are digested.
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
        _feed_samples(digest, file, size)
    return digest.hexdigest()


def _feed_samples(digest: hashlib._Hash, file: Path, size: int) -> None:
    with file.open("rb") as stream:
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_NBYTES) * i // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_NBYTES))


_ALL_OF_ADAPTER = 256 << 20
"""An adapter's file is read whole up to this size; of a larger one samples are read."""
_OF_ADAPTER = ("adapter_config.json", *_WEIGHTS)

Signature = tuple[tuple[str, int, int, int, int], ...]
"""Name, length, inode and times of each file of an adapter: as long as they stay, its content does."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as one request uses it."""

    number: int
    """vLLM's ``lora_int_id``, by which it knows what it has loaded."""
    digest: str
    """Of its files; part of the identity."""
    generation: int
    """Counts how often files of this number were found changed."""
    reloads: bool
    """Whether the request makes vLLM load the files again."""


@dataclass(slots=True)
class _Loaded:
    """What vLLM has loaded under a number, as far as the files tell."""

    path: Path
    signature: Signature
    digest: str | None
    """None: it cannot be told whether vLLM has the files before or after a change."""
    generation: int = 0
    pending: bool = False
    """Whether the load of changed files is still to come, with a request that asks for it."""


class Adapters:
    """The LoRA adapters of one engine, told apart by their files. For the scheduler's thread.

    vLLM loads an adapter when its ``lora_int_id`` is first used, keeps it, may drop it and load it again. Files that
    change meanwhile leave open which weights it computes with: nothing of that number is reused or stored any more,
    until a request loads it again (``load_inplace``). An adapter trained anew gets another number, or a restart.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}
        self._warned: set[tuple[int, str]] = set()

    def of(self, lora: Any) -> Adapter | None:
        """Return the adapter of vLLM's ``LoRARequest``; None, with a warning, if what vLLM computes cannot be told.

        Looks at the files' times for every request and reads their content when these change.
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
        """Whether what the request computes is still of these files. ``look``: at the files too."""
        known = self._loaded[adapter.number]
        if look and known.generation == adapter.generation and _signature(known.path) != known.signature:
            self._unclear(adapter.number)
        return known.generation == adapter.generation and known.digest == adapter.digest

    def runs(self, adapter: Adapter) -> None:
        """A request with the adapter runs: if it makes vLLM load the files again, they are loaded now."""
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
    """Where vLLM loads the adapter from, as it resolves the path; None: not from files of this machine."""
    given = str(getattr(lora, "lora_path", "") or "")
    elsewhere = ("tensorizer_config_dict", "lora_tensors")
    if not given or any(getattr(lora, name, None) is not None for name in elsewhere):
        return None
    path = Path(given).expanduser()
    return path.absolute() if path.is_dir() else None


def _files_of_adapter(folder: Path) -> list[Path]:
    return sorted({file for kind in _OF_ADAPTER for file in folder.glob(kind)})


def _signature(folder: Path) -> Signature | None:
    """None if a file cannot be looked at, or there are no weights."""
    try:
        found = [(file.name, file.stat()) for file in _files_of_adapter(folder)]
    except OSError:
        return None
    if not any(name != _OF_ADAPTER[0] for name, _ in found):
        return None
    return tuple((name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def _digest(folder: Path, signature: Signature) -> str | None:
    """Of the files with this signature; None if they cannot be read, or changed meanwhile."""
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
    """Hex digest of the files of several adapters, in any order. ConfigError for a folder without adapter files."""
    found = []
    for folder in folders:
        signature = _signature(folder)
        digest = None if signature is None else _digest(folder, signature)
        if digest is None:
            raise ConfigError(
                f"adapters: {folder} is no folder with adapter files that can be read; give folders of LoRA adapters"
            )
        found.append(digest)
    return sha256("".join(sorted(found)).encode()).hexdigest() if found else ""


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
