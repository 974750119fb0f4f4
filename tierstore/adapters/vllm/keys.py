"""Page keys under vLLM: derived from the identities of model and LoRA adapter, and from vLLM's block hashes.

A key combines a namespace with a block hash. The block hash covers the tokens of the whole prefix, LoRA name
and path, cache salt and multimodal items (vLLM's ``hash_block_tokens``). The namespace covers everything else
that the KV depends on: weights, dtype, distribution over ranks, and an adapter's files. Keys are computed in bulk
for speed: a prompt with 131,072 tokens has 8,192 blocks to look up before its first token.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import iter_unpack
from typing import Any, Protocol

import numpy as np

from tierstore.adapters.model_files import Signature, adapter_digest, adapter_signature, weights_digest
from tierstore.keys import EXACT
from tierstore.types import PageKey

_SUFFIX = bytes(4)
_HASH_NBYTES = 32
_KEY_NBYTES = _HASH_NBYTES + len(_SUFFIX)


class Hashed(Protocol):
    """The attributes of a vLLM request from which this module derives keys."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Return one hash per full hash block, in order. The sequence grows as tokens are added."""
        ...


class KeyChain:
    """The keys of one request's blocks. Each key is computed once.

    Args:
        request: The request. Its hashes may grow.
        namespace: The namespace of the keys, 32 bytes.
        stride: Number of hashes per block. A block's key is derived from the last of its hashes.
    """

    def __init__(self, request: Hashed, namespace: bytes, stride: int = 1) -> None:
        self._request = request
        self._namespace = namespace
        self._stride = stride
        self._keys: list[PageKey] = []

    def first(self, blocks: int) -> list[PageKey]:
        """Return the keys of the first ``blocks`` blocks, or of all full blocks if there are fewer."""
        return self._keys[: self._grown(blocks)]

    def between(self, first: int, end: int) -> list[PageKey]:
        """Return the keys of blocks ``first`` to ``end - 1``, without those of blocks that are not full."""
        return self._keys[first : self._grown(end)]

    def at(self, number: int) -> PageKey | None:
        """Return the key of one block, or None if the block is not full."""
        return self._keys[number] if number < self._grown(number + 1) else None

    def ending(self, hashes: Iterable[int]) -> list[PageKey]:
        """Return the keys of pages that end after these numbers of hashes, also inside a block.

        Pages that end after the request's last hash are left out.
        """
        found = self._request.block_hashes
        ends = [found[number - 1] for number in hashes if number <= len(found)]
        return page_keys(self._namespace, ends) if ends else []

    @property
    def hashes(self) -> int:
        """Return the number of hashes that the request has so far."""
        return len(self._request.block_hashes)

    def _grown(self, blocks: int) -> int:
        hashes, stride = self._request.block_hashes, self._stride
        start, end = len(self._keys), min(blocks, len(hashes) // stride)
        if start < end:
            self._keys += page_keys(self._namespace, hashes[(start + 1) * stride - 1 : end * stride : stride])
        return end


def namespace(identity: str) -> bytes:
    """Return the key namespace of an identity: a digest of 32 bytes."""
    return blake2b(
        identity.encode("utf-8", "surrogatepass"), digest_size=32, person=b"tierstore-vllm"
    ).digest()


def page_keys(namespace: bytes, hashes: Sequence[bytes]) -> list[PageKey]:
    """Return the key of each block. Two keys are equal only if both namespace and hash are equal.

    Hashes of 32 bytes (vLLM's SHA-256) are digests already. They are combined with the namespace, which is
    also a digest, by XOR. Keys in two namespaces collide only if their hashes differ in exactly the bits in
    which the namespaces differ. Hashes of other lengths are digested together with the namespace.
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
"""Config entries that only say how a model is stored or run.

``identity`` leaves them out, and has a separate entry for the dtype.
"""


def identity(vllm_config: Any, model_id: str, loss_class: str = EXACT) -> str:
    """Return the identity of the model as JSON.

    It includes the model, its weights, dtypes, attention and parallel configuration, the user's ``model_id``, and the
    loss class of the codec. Weights in a local directory are identified by samples of every file, at most 1 MiB each;
    weights from a hub by their commit. The scheduler and all workers compute the same string, and so does a
    later process with the same files.
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
    unquantized = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if unquantized:  # left out if empty, so that pages stored before this entry existed are found
        parts["unquantized_layers"] = sorted(map(str, unquantized))
    if loss_class != EXACT:  # left out otherwise, for the same reason
        parts["loss_class"] = loss_class
    return json.dumps(parts, sort_keys=True, default=_named)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, as used by one request."""

    number: int
    """vLLM's ``lora_int_id``, which identifies the adapter that vLLM has loaded."""
    digest: str
    """Digest of the adapter's files. It is part of the namespace of the request's keys."""
    generation: int
    """How many times the files under this ``lora_int_id`` were found to have changed."""
    reloads: bool
    """Whether the request makes vLLM reload the files."""


@dataclass(slots=True)
class _Loaded:
    """The adapter that vLLM has loaded under one ``lora_int_id``, as far as the files on disk show."""

    path: Path
    signature: Signature
    digest: str | None
    """Digest of the loaded files. None if it is unknown whether vLLM loaded them before or after a change."""
    generation: int = 0
    pending: bool = False
    """Whether vLLM has yet to reload the changed files, for a request with ``load_inplace``."""


class Adapters:
    """The LoRA adapters of one engine, identified by their files. Used only by the scheduler's thread.

    vLLM loads an adapter when its ``lora_int_id`` is first used and keeps it, but may drop it and load it
    again. If the files change in between, it is unknown which weights vLLM uses. The pages of requests with that
    ``lora_int_id`` are then neither reused nor stored until a request makes vLLM reload the adapter
    (``load_inplace``). A newly trained adapter needs a new ``lora_int_id``, or a restart.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}
        self._warned: set[tuple[int, str]] = set()

    def of(self, lora: Any) -> Adapter | None:
        """Return the adapter of vLLM's ``LoRARequest``.

        If it is unknown which weights vLLM uses, log a warning and return None. Each call examines the files, and
        reads their contents the first time and whenever names, sizes, inodes or times have changed.
        """
        number, path = int(lora.lora_int_id), _adapter_folder(lora)
        reloads = bool(getattr(lora, "load_inplace", False))
        signature = None if path is None else adapter_signature(path)
        if path is None or signature is None:
            self._warn(number, lora, "it is not a local folder with readable adapter files")
            self._unclear(number)
            return None
        known = self._loaded.get(number)
        if known is None or known.path != path or known.signature != signature:
            digest = adapter_digest(path, signature)
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
            known.digest, known.pending = adapter_digest(path, signature), True
        if known.digest is None or (known.pending and not reloads):
            self._warn(
                number, lora, "its files have changed, and vLLM may have loaded the old or the new ones"
            )
            return None
        return Adapter(number, known.digest, known.generation, reloads)

    def holds(self, adapter: Adapter, *, look: bool = False) -> bool:
        """Return whether vLLM still uses the weights that ``adapter`` stands for.

        With ``look``, also check whether the files on disk have changed.
        """
        known = self._loaded[adapter.number]
        if (
            look
            and known.generation == adapter.generation
            and adapter_signature(known.path) != known.signature
        ):
            self._unclear(adapter.number)
        return known.generation == adapter.generation and known.digest == adapter.digest

    def runs(self, adapter: Adapter) -> None:
        """Record that a request with the adapter is running.

        If the request makes vLLM reload the adapter's files, vLLM has now done so.
        """
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
                "TierStore: KV of LoRA adapter %r (id %d, path %r) is neither reused nor stored: %s. Load adapters "
                "from local folders, and give a changed adapter another lora_int_id",
                lora.lora_name,
                number,
                getattr(lora, "lora_path", ""),
                why,
            )


def _adapter_folder(lora: Any) -> Path | None:
    """Return the directory that vLLM loads the adapter from, or None if it is not loaded from a directory."""
    given = str(getattr(lora, "lora_path", "") or "")
    elsewhere = ("tensorizer_config_dict", "lora_tensors")
    if not given or any(getattr(lora, name, None) is not None for name in elsewhere):
        return None
    path = Path(given).expanduser()
    return path.absolute() if path.is_dir() else None


def _named(found: object) -> str:
    """Return a string for a value that JSON cannot encode. It is the same in every process."""
    text = str(found)
    return type(found).__qualname__ if " at 0x" in text else text


def _config(hf_config: Any) -> dict[str, Any]:
    found = hf_config.to_dict()
    return {key: value for key, value in found.items() if key not in _STORED_OR_RUN}


def _draft(vllm_config: Any) -> str:
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return "" if draft is None else f"{draft.model} {getattr(speculative, 'method', '')}"
