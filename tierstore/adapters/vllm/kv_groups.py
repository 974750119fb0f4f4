"""vLLM's KV cache groups: layers that share a block table. Each group has its own blocks and page keys.

All groups allocate blocks from one pool. A block consists of the same bytes of the same tensors whichever group
owns it, so one page is always one block. Groups differ in their keys and in their kind. The kind determines which
blocks of the group a request needs to continue, and when a block may be stored.

Groups whose contents vLLM computes again for each request do not take part: their blocks are neither stored nor
loaded. vLLM's list of block tables includes them, so tables and key chains are indexed by vLLM's group number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.keys import KeyChain, namespace
from tierstore.codecs.quantization import WORDS
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tierstore.adapters.vllm.keys import Hashed

    Chains = Mapping[int, KeyChain]
    """The keys of a request's blocks, by group number."""

NULL_BLOCK = 0
"""Number of vLLM's null block. In a block table, it stands in place of blocks that the group has freed."""


@dataclass(frozen=True)
class Kind:
    """Policy of a group. The base class itself stands for full attention: a token sees all earlier tokens.

    Attributes:
        partial: Whether the group frees blocks while a request runs, because later tokens do not need them.
        handed_over: Whether blocks are stored only when vLLM offers them, because their contents do not
            follow from their position in the block table.
        sparse: Whether only blocks that a hit is likely to need are stored; see ``Groups.reachable``.
    """

    partial: ClassVar[bool] = False
    handed_over: ClassVar[bool] = False
    sparse: ClassVar[bool] = False

    def first_needed(self, tokens: int, block_size: int) -> int:
        """Return the number of the first block that a request needs to continue after ``tokens`` tokens.

        vLLM may have freed the blocks before it.
        """
        return 0

    @property
    def terms(self) -> tuple[object, ...]:
        """Return the values, besides layers and block size, on which the contents of the group's blocks depend.

        They are part of the identity of pages.
        """
        return None, None


@dataclass(frozen=True)
class Window(Kind):
    """A sliding window: a token sees ``tokens`` tokens, including itself."""

    tokens: int
    partial: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    def first_needed(self, tokens: int, block_size: int) -> int:
        """See ``Kind``."""
        return max(0, tokens - self.tokens + 1) // block_size

    @property
    def terms(self) -> tuple[object, ...]:
        """See ``Kind``."""
        return self.tokens, None


@dataclass(frozen=True)
class Chunk(Kind):
    """Local chunks of ``tokens`` tokens: a token sees itself and the earlier tokens of its chunk."""

    tokens: int
    partial: ClassVar[bool] = True

    def first_needed(self, tokens: int, block_size: int) -> int:
        """See ``Kind``."""
        return tokens // self.tokens * self.tokens // block_size

    @property
    def terms(self) -> tuple[object, ...]:
        """See ``Kind``."""
        return None, self.tokens


@dataclass(frozen=True)
class State(Kind):
    """Recurrent states: a block contains the state after its last token, and only the last block is needed.

    vLLM keeps the states at some block boundaries only, and overwrites the others in place. It offers each kept
    block to the connector once.

    Attributes:
        contents: Shape and dtype of each part of a state. Different dtypes may have the same size.
    """

    contents: tuple[tuple[tuple[int, ...], str], ...] = ()
    partial: ClassVar[bool] = True
    handed_over: ClassVar[bool] = True

    def first_needed(self, tokens: int, block_size: int) -> int:
        """See ``Kind``."""
        return max(0, tokens // block_size - 1)

    @property
    def terms(self) -> tuple[object, ...]:
        """See ``Kind``."""
        return "state", self.contents


@dataclass(frozen=True)
class Prompt(Kind):
    """Reference windows (R-SWA): a token sees the prompt, and the last ``tokens`` generated tokens.

    The KV of a generated token therefore differs from the KV of the same token in a prompt. Only blocks of prompts
    are stored and found, in all groups of the model.
    """

    tokens: int

    @property
    def terms(self) -> tuple[object, ...]:
        """See ``Kind``."""
        return "prompt", self.tokens


FULL = Kind()


@dataclass(frozen=True)
class Group:
    """One KV group whose blocks are stored and loaded.

    Attributes:
        number: vLLM's index of the group.
        block_size: Tokens per block. With decode context parallelism, these are the tokens of all ranks.
        stride: Block hashes per block.
        kind: Policy of the group.
        layers: Names of the layers.
        draft: Whether a draft model uses the group. A draft model's KV for a token depends on the next token, so a
            hit must end one block before the end of the pages that match.
        ranks: Number of ranks over which decode context parallelism distributes the tokens of a block. 1 if each rank
            has all tokens.
    """

    number: int
    block_size: int
    stride: int = 1
    kind: Kind = FULL
    layers: tuple[str, ...] = ()
    draft: bool = False
    ranks: int = 1

    @property
    def tokens_per_rank(self) -> int:
        """Return how many tokens of a block each rank has."""
        return self.block_size // self.ranks

    @property
    def partial(self) -> bool:
        """Return whether the group frees blocks while a request runs."""
        return self.kind.partial

    @property
    def proof(self) -> int:
        """Return how many tokens after the end of a hit must match too: one block for a draft model, else 0."""
        return self.block_size if self.draft else 0

    def first_needed(self, tokens: int) -> int:
        """Return the number of the first block that a request needs to continue after ``tokens`` tokens."""
        return self.kind.first_needed(tokens, self.block_size)


@dataclass(frozen=True)
class Groups:
    """The KV groups of a model.

    Attributes:
        all: The groups whose blocks are stored and loaded, in the order of their numbers.
        skipped: Layers of the other groups.
        replayed: Number of tokens at the end of a hit that vLLM computes again, to fill a skipped group.
        replicated: Whether the KV is the same on all tensor-parallel ranks, because all layers have MLA.
        interval: Distance in tokens between the positions at which windows are always stored. 0 means that there
            are no such positions. None means that all windows are stored.
    """

    all: tuple[Group, ...]
    skipped: tuple[str, ...] = ()
    replayed: int = 0
    interval: int | None = None
    replicated: bool = False

    @cached_property
    def whole(self) -> bool:
        """Return whether the model has a single group, with full attention.

        In that case, when a load fails, the blocks before the first missing page are still usable.
        """
        return len(self.all) == 1 and not self.all[0].partial and not self.skipped

    @cached_property
    def unit(self) -> int:
        """Return the granularity of hits in tokens: whole blocks in every group. See also ``tail_unit``."""
        return math.lcm(*(group.block_size for group in self.all))

    @cached_property
    def tail_unit(self) -> int:
        """Return the granularity, in tokens, of hits that end inside a block. 0 if all hits end at block boundaries.

        If a prompt ends inside a block, vLLM caches the state there only if it hashes parts of blocks
        (``--prefix-match-unit``). Only groups with states or full attention have pages that end inside a block.
        """
        first, *others = self.all
        plain = all(group.kind == FULL or group.kind.handed_over for group in self.all)
        alike = all((other.block_size, other.stride) == (first.block_size, first.stride) for other in others)
        if not self.states or first.stride == 1 or not (plain and alike) or self.skipped or self.replayed:
            return 0
        return 0 if any(group.draft for group in self.all) else first.block_size // first.stride

    @cached_property
    def spine(self) -> Group | None:
        """Return the first group with full attention, or None.

        Its pages are the parents of the pages in the other kinds of groups.
        """
        return next((group for group in self.all if not group.partial), None)

    @cached_property
    def prompts_only(self) -> bool:
        """Return whether only blocks of prompts are stored and found."""
        return any(isinstance(group.kind, Prompt) for group in self.all)

    def ends(self, tokens: Iterable[int]) -> frozenset[int]:
        """Return the positions at which a hit may end if the matching pages cover one of these numbers of tokens."""
        last = {token // self.unit * self.unit for token in tokens}
        drafts = any(group.draft for group in self.all)
        return frozenset(last | {max(0, token - self.unit) for token in last} if drafts else last)

    def reachable(self, group: Group, block: int, ends: Iterable[int]) -> bool:
        """Return whether a hit that ends at one of ``ends``, or at a multiple of ``interval``, needs a block.

        ``block`` is the number of the block in the group. The result is always True if the model has recurrent
        states, because hits then end where vLLM offers a state. It is also always True if no group has full
        attention, because only pages of such a group show that several requests share a prefix.
        """
        if self.interval is None or not group.kind.sparse or self.spine is None or self.states:
            return True
        after = (block + 1) * group.block_size
        if self.interval:
            ends = (*ends, -(-after // self.interval) * self.interval)
        return any(after <= end + group.proof and group.first_needed(end) <= block for end in ends)

    @cached_property
    def states(self) -> tuple[Group, ...]:
        """Return the groups whose blocks are stored only when vLLM offers them."""
        return tuple(group for group in self.all if group.kind.handed_over)

    @property
    def name(self) -> str:
        """Return a description of the groups, which becomes part of the identity of pages.

        The result is empty for a single group with all layers.
        """
        if len(self.all) == 1 and not self.skipped:
            return ""
        named = repr([(g.block_size, *g.kind.terms, g.layers) for g in self.all])
        return f"{named} without {self.skipped}" if self.skipped else named

    def namespaces(self, identity: str) -> tuple[bytes, ...]:
        """Return the key namespace of each group. They all differ, so no group finds another group's pages."""
        if not self.name:
            return (namespace(identity),)
        return tuple(namespace(f"{self.name} {group.number} {identity}") for group in self.all)

    def chains(self, request: Hashed, namespaces: Iterable[bytes]) -> Chains:
        """Return the keys of a request's blocks, by group number."""
        pairs = zip(self.all, namespaces, strict=True)
        return {group.number: KeyChain(request, name, group.stride) for group, name in pairs}


@dataclass(frozen=True)
class Heads:
    """How a block is divided into rows, each of which a codec encodes as a unit.

    Attributes:
        planes: 2 if a token has a key and a value of equal size in each head, else 1.
        dim: Elements per token, head and plane, which is the length of a row.
        dtype: Name of the dtype of the elements.
    """

    planes: int
    dim: int
    dtype: str


def heads_of(kv_cache_config: Any, codec: str) -> Heads:
    """Return the ``Heads`` with which ``host.codec`` encodes pages, the same for all layers in ``KVCacheConfig``.

    Raises:
        ConfigError: Some layers have no heads with floating-point elements, or not all layers have the same heads.
            The message names the codec and the layers.
    """
    found: dict[Heads, tuple[str, ...]] = {}
    for group in kv_cache_config.kv_cache_groups:
        layers = tuple(group.layer_names)
        for spec in compat.layer_specs(group.kv_cache_spec):
            found.setdefault(_heads(spec, layers, codec), layers)
    if len(found) > 1:
        described = " and ".join(
            f"{heads.planes} x {heads.dim} elements of {heads.dtype} per token and head (layers {_some(layers)})"
            for heads, layers in found.items()
        )
        raise codec_refused(
            codec, f"the codec needs the same heads in all layers, but this model has {described}"
        )
    return next(iter(found))


def codec_refused(codec: str, reason: str) -> ConfigError:
    """Return the error for a model whose pages ``host.codec`` cannot encode."""
    return ConfigError(
        f"host.codec must be none with this model under vLLM, got {codec!r}: {reason}; set host.codec to none"
    )


def _heads(spec: Any, layers: tuple[str, ...], codec: str) -> Heads:
    name = _named(spec)
    if name not in _KINDS:
        held = "recurrent states" if name == _STATE else f"KV of type {type(spec).__name__}"
        raise codec_refused(
            codec,
            f"the codec must encode the pages of all layers, but cannot encode {held} (layers {_some(layers)})",
        )
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in WORDS or getattr(spec, "kv_quant_mode", False):
        allowed = ", ".join(WORDS)
        raise codec_refused(
            codec,
            f"layers {_some(layers)} keep KV in {dtype}, quantized by vLLM, but the codec needs one of {allowed}",
        )
    packed = getattr(spec, "state_content_bytes", None) is not None
    if packed or getattr(spec, "tokens_per_state", 1) != 1:
        raise codec_refused(
            codec, f"layers {_some(layers)} keep packed KV, not one row of elements per token"
        )
    key: int = spec.head_size
    value: int = getattr(spec, "head_size_v", key)
    return Heads(2, key, dtype) if key == value else Heads(1, key + value, dtype)


def groups_of(kv_cache_config: Any, ranks: int = 1) -> Groups:
    """Return the groups in vLLM's ``KVCacheConfig``.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``. Its block sizes are those of one rank.
        ranks: vLLM's ``decode_context_parallel_size``. A block of the scheduler consists of one block on each of these
            ranks, and covers the tokens of all of them.

    Raises:
        ConfigError: The kind of some layers is not supported. The message names the layers.
    """
    found = list(enumerate(kv_cache_config.kv_cache_groups))
    for _, group in found:
        _require_known(group)
    taken = [(number, group) for number, group in found if compat.takes_part(group)]
    if not taken:
        raise ConfigError(
            "TierStoreConnector cannot store any layer of this model, because vLLM computes the KV of all layers again "
            "for each request; remove the connector"
        )
    sizes = [group.kv_cache_spec.block_size * _ranks(group.kv_cache_spec, ranks) for _, group in taken]
    hash_size = compat.hash_block_size(kv_cache_config) or math.gcd(*sizes)
    skipped = [layer for _, group in found if not compat.takes_part(group) for layer in group.layer_names]
    return Groups(
        tuple(_group(number, group, hash_size, ranks) for number, group in taken),
        tuple(skipped),
        max(compat.replayed_tokens(group) for _, group in found),
        compat.retention_interval(kv_cache_config),
        all(_named(spec) in _MLA for _, group in found for spec in compat.layer_specs(group.kv_cache_spec)),
    )


def _ranks(spec: Any, ranks: int) -> int:
    """Return over how many of the ``ranks`` of decode context parallelism the tokens of a block are distributed."""
    return ranks if compat.is_distributed(spec) else 1


def _group(number: int, group: Any, hash_size: int, context_ranks: int) -> Group:
    spec = group.kv_cache_spec
    layers = tuple(group.layer_names)
    ranks = _ranks(spec, context_ranks)
    size: int = spec.block_size * ranks
    kinds = list(dict.fromkeys(_kind(each, layers) for each in compat.layer_specs(spec)))
    states = [kind for kind in kinds if isinstance(kind, State)]
    if states and len(states) == len(kinds):  # one block table, although the layers' states differ
        kinds = [State(tuple(part for kind in states for part in kind.contents))]
    if len(kinds) != 1:
        raise _not_served(spec, layers)
    if ranks > 1 and kinds[0].partial:
        raise ConfigError(
            f"decode_context_parallel_size must be 1 for layers {_some(layers)} with a {type(spec).__name__}, got "
            f"{ranks}: vLLM distributes tokens over ranks only in layers with full attention. Try "
            "--disable-hybrid-kv-cache-manager, with which vLLM may put all layers into one group of full attention"
        )
    draft = bool(getattr(group, "is_eagle_group", False))
    return Group(number, size, size // hash_size, kinds[0], layers, draft, ranks)


_REFUSED = {
    "HiddenStateCacheSpec": "they keep hidden states for extract_hidden_states, which are not KV",
    "CrossAttentionSpec": "they use cross attention, whose KV depends on the encoder's input, not on a prefix",
    "EncoderOnlyAttentionSpec": "they belong to an encoder, whose attention keeps no KV",
    "HiSparseHotSpec": "with HiSparse, vLLM itself moves their KV to host memory; leave out --hisparse-config",
    "HiSparseResidentSpec": "with HiSparse, vLLM itself moves their KV to host memory; leave out --hisparse-config",
}
"""Specs of layers that are not supported, with the reason for the error message."""

_STATE = "MambaSpec"
_MLA = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""Specs of layers with a single vector per token, from which each rank computes the keys and values of its heads."""

_KINDS: dict[str, Callable[[Any], Kind]] = {
    "FullAttentionSpec": lambda spec: FULL,
    "MLAAttentionSpec": lambda spec: FULL,
    "SinkFullAttentionSpec": lambda spec: FULL,  # the blocks of sinks are in no request's table
    "RSWASpec": lambda spec: Prompt(spec.rswa_window),
    "SlidingWindowSpec": lambda spec: Window(compat.sliding_window(spec)),
    "SlidingWindowMLASpec": lambda spec: Window(compat.sliding_window(spec)),
    "ChunkedLocalAttentionSpec": lambda spec: Chunk(spec.attention_chunk_size),
}


def _named(spec: Any) -> str:
    """Return the name of a spec's most derived class among those that this module knows, or "" if there is none."""
    known = (*_KINDS, *_REFUSED, _STATE)
    return next((c.__name__ for c in type(spec).__mro__ if c.__name__ in known), "")


def _require_known(group: Any) -> None:
    """Raise ConfigError if a layer of the group is not supported, even if the group does not take part."""
    for spec in compat.layer_specs(group.kv_cache_spec):
        reason = _REFUSED.get(_named(spec))
        if reason is None and getattr(group, "host_resident", False):
            reason = _REFUSED["HiSparseHotSpec"]
        if reason is not None:
            layers = tuple(group.layer_names)
            raise ConfigError(f"TierStoreConnector does not support layers {_some(layers)}: {reason}")


def _kind(spec: Any, layers: tuple[str, ...]) -> Kind:
    """Return the kind of a layer's spec. Raises ConfigError if it is not supported."""
    name = _named(spec)
    if name == _STATE:
        return _state(spec, layers)
    if name not in _KINDS:
        raise _not_served(spec, layers)
    return _KINDS[name](spec)


def _state(spec: Any, layers: tuple[str, ...]) -> State:
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise ConfigError(
            f"mamba_cache_mode must be 'align' for recurrent states to be stored, got {mode!r} for layers "
            f"{_some(layers)}; enable prefix caching (--enable-prefix-caching), which sets it, or remove the connector"
        )
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    return State(tuple(zip(map(tuple, spec.shapes), dtypes, strict=True)))


def _not_served(spec: Any, layers: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"TierStoreConnector does not support layers {_some(layers)} with a {type(spec).__name__}: it supports full "
        "attention, sliding windows, local chunks and recurrent states, each in separate groups. Try "
        "--disable-hybrid-kv-cache-manager, with which vLLM may put all layers into one group of full attention"
    )


def _some(layers: tuple[str, ...]) -> str:
    return ", ".join(layers[:3]) + (", ..." if len(layers) > 3 else "")
