"""Find how many tokens of a prompt the connector offers to vLLM, and the pages that hold them.

``HitLookup.tokens`` returns the number, and reuses the result of a lookup while vLLM asks again.
``longest_hit`` finds the hit. A group with full attention needs all blocks up to the hit's end, a sliding
window only those that the next token sees. So the hit is the longest one whose blocks full attention has and
at whose end all windows are complete. ``costs`` may shorten it. ``pages_to_load`` returns the pages and
blocks of a hit that vLLM has accepted, ``local_tokens`` the number of tokens that vLLM itself holds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from tierstore.adapters.vllm.costs import worth_loading
from tierstore.adapters.vllm.kv_groups import NULL_BLOCK
from tierstore.adapters.vllm.requests import Lookup
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.adapters.vllm.costs import Costs
    from tierstore.adapters.vllm.keys import KeyChain
    from tierstore.adapters.vllm.kv_groups import Group, Groups
    from tierstore.adapters.vllm.loads import DiskPrefetch
    from tierstore.adapters.vllm.requests import RequestState
    from tierstore.store import TierStore
    from tierstore.types import Match, PageKey

    Find = Callable[[Sequence[PageKey]], Match]


@dataclass(frozen=True, slots=True)
class Span:
    """Pages of one group: consecutive blocks from number ``first`` on, with key and tier of each."""

    group: Group
    first: int
    keys: Sequence[PageKey]
    tiers: Sequence[Tier]


@dataclass(frozen=True, slots=True)
class Hit:
    """A hit from token ``start`` to ``end``, and its pages in each group."""

    start: int
    end: int
    spans: tuple[Span, ...] = ()

    @property
    def tokens(self) -> int:
        """Length of the hit in tokens."""
        return self.end - self.start

    @property
    def pages(self) -> int:
        """Number of pages in all groups."""
        return sum(len(span.keys) for span in self.spans)

    def up_to(self, tokens: int) -> Hit:
        """Return the hit cut off after ``tokens`` tokens."""
        if tokens >= self.tokens:
            return self
        end = self.start + tokens
        return Hit(self.start, end, tuple(_cut(span, end) for span in self.spans))

    @property
    def sources(self) -> dict[Tier, int]:
        """Number of tokens by the tier of their page with full attention.

        Without such a group, all tokens count for the slowest tier of the hit.
        """
        whole = next((span for span in self.spans if not span.group.partial), None)
        if whole is not None:
            size = whole.group.block_size
            return {tier: pages * size for tier, pages in Counter(whole.tiers).items()}
        slowest = max((tier for span in self.spans for tier in span.tiers), default=Tier.HOST)
        return {slowest: self.tokens} if self.tokens else {}

    @property
    def keys(self) -> list[tuple[int, PageKey]]:
        """The token at which each page ends, and its key, in the order of the tokens."""
        found = [
            ((number + 1) * span.group.block_size, key)
            for span in self.spans
            for number, key in enumerate(span.keys, span.first)
        ]
        return found if len(self.spans) == 1 else sorted(found, key=lambda page: page[0])


def longest_hit(groups: Groups, chains: Sequence[KeyChain], start: int, limit: int, find: Find) -> Hit:
    """Return the longest hit from ``start`` that ends at a multiple of ``groups.unit`` up to ``limit``."""
    unit = groups.unit
    end = max(start, limit // unit * unit)
    whole: list[tuple[int, Span]] = []
    for group, chain in zip(groups.all, chains, strict=True):
        if group.partial:
            continue
        first = start // group.block_size
        keys = chain.first(end // group.block_size)[first:]
        found = find(keys)
        whole.append((group.number, Span(group, first, keys, found.tiers)))
        end = max(start, (first + found.num_pages) * group.block_size // unit * unit)
    windows: list[tuple[int, Span]] = []
    while end > start:
        spans = _windows(groups, chains, start, end, find)
        missing = next((at for at in spans if isinstance(at, int)), None)
        if missing is None:
            windows = [(span.group.number, span) for span in spans if isinstance(span, Span)]
            break
        end = max(start, missing // unit * unit)
    spans_by_number = dict([*((n, _cut(span, end)) for n, span in whole), *windows])
    return Hit(start, end, tuple(spans_by_number[n] for n in sorted(spans_by_number)) if end > start else ())


def pages_to_load(
    groups: Groups, chains: Sequence[KeyChain], tables: Sequence[Sequence[int]], start: int, end: int
) -> list[tuple[int, PageKey, int]]:
    """Return first token, key and block of each page to load for the tokens from ``start`` to ``end``.

    Includes every block that the tables have there, because vLLM counts all of them as computed from then on.
    Pages are sorted by the token at which they end, because the first ones to arrive are usable without the
    rest.
    """
    found: list[tuple[int, int, PageKey, int]] = []
    for group, chain, table in zip(groups.all, chains, tables, strict=True):
        size = group.block_size
        first, last = start // size, end // size
        begins = range(first * size, last * size, size)
        ends = range(begins.start + size, begins.stop + size, size)
        pages = zip(ends, begins, chain.first(last)[first:], table[first:last], strict=True)
        found += (page for page in pages if page[3] != NULL_BLOCK) if group.partial else pages
    if len(groups.all) > 1:
        found.sort(key=lambda page: page[0])
    return [(begin, key, block) for _, begin, key, block in found]


def _windows(
    groups: Groups, chains: Sequence[KeyChain], start: int, end: int, find: Find
) -> list[Span | int]:
    """Return the pages of each window for a hit that ends at ``end``, or the token where the first missing page begins.

    A hit that ends between that token and ``end`` cannot be complete either, because it needs the same page.
    """
    spans: list[Span | int] = []
    for group, chain in zip(groups.all, chains, strict=True):
        if not group.partial:
            continue
        size = group.block_size
        first = max(start // size, group.first_needed(end))
        keys = chain.first(end // size)[first:]
        found = find(keys)
        if found.num_pages < end // size - first:
            return [(first + found.num_pages) * size]
        spans.append(Span(group, first, keys, found.tiers))
    return spans


def _cut(span: Span, end: int) -> Span:
    pages = max(0, end // span.group.block_size - span.first)
    return Span(span.group, span.first, span.keys[:pages], span.tiers[:pages])


_LOOKUP_ASKS = 64
"""How often the result of a lookup is reused before pages are looked up again.

vLLM asks in every step for a request that waits for space.
"""


class HitLookup:
    """Looks up the hits of requests in a store.

    Args:
        store: The store.
        groups: The KV groups of the model.
        disk_prefetch: The reads from disk for queued requests, if there is a disk.
        put_off_s: Longest time that a request waits for pages that ``disk_prefetch`` reads from disk.
        costs: With it, pages are not loaded if computing them is faster and no other request wants the
            engine. None: always load.
    """

    def __init__(
        self,
        store: TierStore,
        groups: Groups,
        disk_prefetch: DiskPrefetch | None,
        put_off_s: float,
        costs: Costs | None = None,
    ) -> None:
        self.left = 0
        """Number of pages that were not loaded because computing them is faster."""
        self._store = store
        self._groups = groups
        self._disk_prefetch = disk_prefetch
        self._put_off_s = put_off_s
        self._costs = costs

    def tokens(self, known: RequestState, computed: int, others: int = 0) -> int | None:
        """Return the number of tokens to offer beyond ``computed``; None means that vLLM should ask again.

        ``others`` is the number of other requests that want the engine.
        """
        return None if self._put_off(known) else self._lookup(known, computed, others).hit.tokens

    def wanted(self, known: RequestState, local: int) -> tuple[list[PageKey], int]:
        """Return the pages of the longest hit, and how many of them lie within the first ``local`` tokens."""
        if self._groups.whole:
            size = self._groups.unit
            return known.chains[0].first((known.request.num_tokens - 1) // size), local // size
        pages = self._longest(known, 0).keys
        return [key for _, key in pages], sum(1 for end, _ in pages if end <= local)

    def _lookup(self, known: RequestState, computed: int, others: int) -> Lookup:
        lookup, tokens = known.lookup, known.request.num_tokens
        if (
            lookup is None
            or (lookup.tokens, lookup.computed) != (tokens, computed)
            or lookup.asked >= _LOOKUP_ASKS
            or lookup.stale
        ):
            hit = self._longest(known, computed)
            if self._costs is not None and not others:
                hit = self._worth(known, hit, self._costs)
            lookup = known.lookup = Lookup(tokens, computed, hit)
        lookup.asked += 1
        return lookup

    def _put_off(self, known: RequestState) -> bool:
        """Return whether the request should wait in vLLM's queue. After it, its pages are looked up again."""
        if not self._put_off_s or self._disk_prefetch is None or known.put_off == math.inf:
            return False
        now = monotonic()
        since = known.put_off = now if known.put_off is None else known.put_off
        if now - since < self._put_off_s and self._disk_prefetch.coming(known.request.request_id):
            return True
        known.put_off, known.lookup = math.inf, None
        return False

    def _worth(self, known: RequestState, hit: Hit, costs: Costs) -> Hit:
        """Return the part of the hit that is worth loading. The rest is left to ``disk_prefetch``."""
        loaded = hit.up_to(worth_loading(hit, known.request.num_tokens, costs))
        if loaded.tokens < hit.tokens:
            if not known.left:
                self.left += hit.pages - loaded.pages
            known.left = True
            if self._disk_prefetch is not None:
                self._disk_prefetch.behind(known.request.request_id)
        return loaded

    def _longest(self, known: RequestState, computed: int) -> Hit:
        """Return the longest hit that leaves at least one token to compute."""
        limit = known.request.num_tokens - 1
        if known.limit is not None:
            limit = min(limit, known.limit)
        return longest_hit(self._groups, known.chains, computed, limit, self._store.match)


class Pool(Protocol):
    """The part of vLLM's block pool that is used here."""

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> object | None:
        """Return the blocks with this hash, one per group; None unless all groups have one."""
        ...


def local_tokens(pool: Pool, groups: Groups, block_hashes: Sequence[bytes]) -> int:
    """Return how many of the first tokens the engine holds now, in the first group with full attention.

    vLLM evicts a prompt's last blocks first, so bisection finds the end. If a block before it is missing all
    the same, pages behind that block are prefetched only when they are requested. Without such a group,
    returns 0.
    """
    group = groups.spine
    if group is None:
        return 0
    hashes = block_hashes[group.stride - 1 :: group.stride]

    def gone(block_hash: bytes) -> bool:
        return not pool.get_cached_block(block_hash, [group.number])

    return bisect_left(hashes, True, key=gone) * group.block_size
