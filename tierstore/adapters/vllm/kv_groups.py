"""vLLM's KV cache groups: layers that share a block table. Each group has its own blocks and page keys.

All groups take blocks from one pool, and a block is the same bytes of the same tensors whichever group owns it. So a
page is a block here, too, and groups differ only in their keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.keys import KeyChain, namespace
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.adapters.vllm.keys import Hashed

NULL_BLOCK = 0
"""First block of vLLM's pool. In a block table it replaces a block that the group has given back."""

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = "SlidingWindowSpec"
_CHUNK = "ChunkedLocalAttentionSpec"
_OTHERS = (
    "SinkFullAttentionSpec",
    "RSWASpec",
    "HiddenStateCacheSpec",
    "SlidingWindowMLASpec",
    "CircularBufferSpec",
)
"""Kinds derived from a supported kind whose blocks are managed differently."""


@dataclass(frozen=True)
class Group:
    """One KV group.

    Attributes:
        stride: Block hashes per block.
        window: Tokens that a token sees, itself included, or None.
        chunk: Size of the chunk whose tokens a token sees, or None. With neither, it sees all tokens.
    """

    number: int
    block_size: int
    stride: int = 1
    window: int | None = None
    chunk: int | None = None
    layers: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether blocks are given back while a request runs."""
        return self.window is not None or self.chunk is not None

    def first_needed(self, tokens: int) -> int:
        """Return the first block needed to continue after ``tokens`` tokens.

        vLLM may have given back the blocks before it.
        """
        seen_from = 0
        if self.window is not None:
            seen_from = max(0, tokens - self.window + 1)
        elif self.chunk is not None:
            seen_from = tokens // self.chunk * self.chunk
        return seen_from // self.block_size


@dataclass(frozen=True)
class Groups:
    """All groups of a model, by number."""

    all: tuple[Group, ...]

    @property
    def whole(self) -> bool:
        """Whether there is one group with full attention, so that the first blocks of a failed load are usable."""
        return len(self.all) == 1 and not self.all[0].partial

    @property
    def unit(self) -> int:
        """Hits are multiples of this number of tokens: whole blocks in every group."""
        return math.lcm(*(group.block_size for group in self.all))

    @property
    def spine(self) -> Group | None:
        """The first group with full attention, whose pages are the parents of the pages of windows."""
        return next((group for group in self.all if not group.partial), None)

    @property
    def name(self) -> str:
        """Description of the groups for the identity of pages, because a block's content depends on them.

        Empty for a single group of all layers.
        """
        return (
            ""
            if len(self.all) == 1
            else repr([(g.block_size, g.window, g.chunk, g.layers) for g in self.all])
        )

    def namespaces(self, identity: str) -> tuple[bytes, ...]:
        """Return the key namespace of each group. They differ, so no group finds another's pages."""
        if len(self.all) == 1:
            return (namespace(identity),)
        return tuple(namespace(f"{self.name} {group.number} {identity}") for group in self.all)

    def chains(self, request: Hashed, namespaces: Iterable[bytes]) -> tuple[KeyChain, ...]:
        """Return the keys of a request's blocks in each group."""
        return tuple(
            KeyChain(request, name, group.stride) for group, name in zip(self.all, namespaces, strict=True)
        )


def groups_of(kv_cache_config: Any) -> Groups:
    """Return the groups of vLLM's ``KVCacheConfig``. ConfigError, naming the layers, if a kind is not supported."""
    found = kv_cache_config.kv_cache_groups
    sizes = [group.kv_cache_spec.block_size for group in found]
    hash_size = compat.hash_block_size(kv_cache_config) or math.gcd(*sizes)
    return Groups(tuple(_group(number, group, hash_size) for number, group in enumerate(found)))


def _group(number: int, group: Any, hash_size: int) -> Group:
    spec = group.kv_cache_spec
    layers = tuple(group.layer_names)
    size: int = spec.block_size
    windows = {_sight(each, layers) for each in compat.layer_specs(spec)}
    if len(windows) != 1 or not compat.is_transferred(group):
        raise _not_served(spec, layers)
    ((window, chunk),) = windows
    return Group(number, size, size // hash_size, window, chunk, layers)


def _sight(spec: Any, layers: tuple[str, ...]) -> tuple[int | None, int | None]:
    """Return window and chunk of a spec of a supported kind."""
    known = (*_FULL, _WINDOW, _CHUNK, *_OTHERS)
    kind = next((c.__name__ for c in type(spec).__mro__ if c.__name__ in known), "")
    if kind in _FULL:
        return None, None
    if kind == _WINDOW:
        return compat.sliding_window(spec), None
    if kind == _CHUNK:
        return None, spec.attention_chunk_size
    raise _not_served(spec, layers)


def _not_served(spec: Any, layers: tuple[str, ...]) -> ConfigError:
    named = ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")
    return ConfigError(
        f"layers {named} keep their KV as {type(spec).__name__}; TierStoreConnector supports full attention, sliding "
        "windows and local chunks, each in groups of their own. Try --disable-hybrid-kv-cache-manager, with which "
        "vLLM may make one group of full attention of all layers"
    )
