"""Page keys out of vLLM's block hashes: a digest of the namespace and of the hash, which covers the whole prefix.

A block hash covers tokens, LoRA name and path, cache salt and multimodal items (vLLM's ``hash_block_tokens``); not the
model, its dtype or how it is spread over ranks: these are the namespace.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from tierstore.types import PageKey

if TYPE_CHECKING:
    from collections.abc import Sequence

_SUFFIX = bytes(4)


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
        end = min(blocks, len(hashes) // stride)
        for i in range(len(self._keys), end):
            self._keys.append(page_key(self._namespace, hashes[(i + 1) * stride - 1]))
        return end


def namespace(identity: str) -> bytes:
    """32 bytes; equal only for equal identities."""
    return blake2b(
        identity.encode("utf-8", "surrogatepass"), digest_size=32, person=b"tierstore-vllm"
    ).digest()


def page_key(namespace: bytes, block_hash: bytes) -> PageKey:
    """The key of a block."""
    return PageKey(blake2b(block_hash, key=namespace, digest_size=32).digest() + _SUFFIX)
