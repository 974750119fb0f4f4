"""Page keys out of vLLM's block hashes: the namespace and the hash, which covers the whole prefix, made one.

A block hash covers tokens, LoRA name and path, cache salt and multimodal items (vLLM's ``hash_block_tokens``); not the
model, its dtype, how it is spread over ranks or an adapter's files: these are the namespace. A prompt of 131,072 tokens
has 8,192 of them to look up before its first token: keys are made all at once.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import iter_unpack
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.types import PageKey

if TYPE_CHECKING:
    from collections.abc import Sequence

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
