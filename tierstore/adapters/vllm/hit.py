"""Finds how many tokens of a prompt to offer to vLLM, and the pages that contain them.

``HitLookup.tokens`` returns the number of tokens. vLLM asks repeatedly, so results are reused.

``longest_hit`` finds the longest hit at whose end each group has what the next token needs. A group with full
attention needs all blocks up to the end of the hit. A sliding window only needs the blocks that the next token
sees, and a recurrent state only the block that ends there. With ``Groups.tail_unit``, a hit may also end inside a
block, if the block was stored when exactly the tokens up to that end had been computed. ``costs`` may shorten the
hit.

``pages_to_load`` returns the pages and blocks of a hit that vLLM has accepted. ``local_tokens`` returns the number
of tokens that are cached in vLLM itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from tierstore.adapters.vllm.costs import Others, below_memory, worth_loading
from tierstore.adapters.vllm.kv_groups import NULL_BLOCK
from tierstore.adapters.vllm.requests import Lookup
from tierstore.types import Match, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierstore.adapters.vllm.costs import Costs
    from tierstore.adapters.vllm.kv_groups import Chains, Group, Groups
    from tierstore.adapters.vllm.loads import DiskPrefetch
    from tierstore.adapters.vllm.requests import RequestState
    from tierstore.store import TierStore
    from tierstore.types import PageKey


class Stored(Protocol):
    """The lookup methods of a store that this module uses."""

    def match(self, keys: Sequence[PageKey]) -> Match:
        """Return the longest readable prefix of ``keys``."""
        ...

    def locate(self, keys: Sequence[PageKey]) -> Sequence[Tier | None]:
        """Return the tier of each page, or None if it is not readable."""
        ...


class _InMemory:
    """A view of a store without the pages that are only on disk."""

    def __init__(self, store: Stored) -> None:
        self._store = store

    def match(self, keys: Sequence[PageKey]) -> Match:
        """See ``Stored``."""
        found = self._store.match(keys)
        pages = next((i for i, tier in enumerate(found.tiers) if tier > Tier.HOST), found.num_pages)
        return Match(pages, found.tiers[:pages], found.exact)

    def locate(self, keys: Sequence[PageKey]) -> Sequence[Tier | None]:
        """See ``Stored``."""
        return [None if tier is None or tier > Tier.HOST else tier for tier in self._store.locate(keys)]


@dataclass(frozen=True, slots=True)
class Span:
    """Pages of consecutive blocks of one group, with their keys and tiers.

    ``first`` is the number of the first block.
    """

    group: Group
    first: int
    keys: Sequence[PageKey]
    tiers: Sequence[Tier]


@dataclass(frozen=True, slots=True)
class Hit:
    """A hit from token ``start`` to token ``end``, with its pages in each group.

    Groups with full attention have all pages up to token ``shared``. This token is after ``end`` if the hit is
    shorter because a window or a state is missing.
    """

    start: int
    end: int
    spans: tuple[Span, ...] = ()
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Return the length of the hit in tokens."""
        return self.end - self.start

    @property
    def pages(self) -> int:
        """Return the number of pages in all groups."""
        return sum(len(span.keys) for span in self.spans)

    def up_to(self, tokens: int) -> Hit:
        """Return the hit truncated to ``tokens`` tokens."""
        if tokens >= self.tokens:
            return self
        end = self.start + tokens
        return Hit(self.start, end, tuple(_cut(span, end) for span in self.spans), self.shared)

    @property
    def sources(self) -> dict[Tier, int]:
        """Return the number of tokens by tier, according to the pages of the first group with full attention.

        Without such a group, all tokens are counted for the slowest tier in the hit.
        """
        whole = next((span for span in self.spans if not span.group.partial), None)
        if whole is not None:
            size = whole.group.block_size
            tokens = Counter({tier: pages * size for tier, pages in Counter(whole.tiers).items()})
            for tier in whole.tiers[-1:]:  # the hit may end inside the last block
                tokens[tier] -= (whole.first + len(whole.keys)) * size - self.end
            return dict(tokens)
        slowest = max((tier for span in self.spans for tier in span.tiers), default=Tier.HOST)
        return {slowest: self.tokens} if self.tokens else {}

    @property
    def keys(self) -> list[tuple[int, PageKey]]:
        """Return, for each page in token order, the number of tokens up to its end, and its key."""
        found = [
            (min((number + 1) * span.group.block_size, self.end), key)
            for span in self.spans
            for number, key in enumerate(span.keys, span.first)
        ]
        return found if len(self.spans) == 1 else sorted(found, key=lambda page: page[0])


def longest_hit(groups: Groups, chains: Chains, start: int, limit: int, stored: Stored) -> Hit:
    """Return the longest hit from token ``start`` to a multiple of ``groups.unit``, at most token ``limit``.

    With ``groups.tail_unit``, the hit may end at a multiple of ``tail_unit`` instead. The hit is empty if nothing is
    found.
    """
    unit = groups.unit
    end = max(start, limit // unit * unit)
    whole: list[tuple[int, Span]] = []
    for group in groups.all:
        if group.partial:
            continue
        first = start // group.block_size
        keys = chains[group.number].between(first, (end + group.proof) // group.block_size)
        found = stored.match(keys)
        whole.append((group.number, Span(group, first, keys, found.tiers)))
        matched = (first + found.num_pages) * group.block_size
        end = max(start, min(end, matched - group.proof) // unit * unit)
    shared = end
    states = _StatesFound(groups, chains, start, end, stored)
    windows: list[tuple[int, Span]] = []
    while (end := states.last_end(start, end)) > start:
        spans = _windows(groups, chains, start, end, stored)
        missing = next((at for at in spans if isinstance(at, int)), None)
        if missing is None:
            windows = [(span.group.number, span) for span in spans if isinstance(span, Span)]
            break
        end = max(start, missing // unit * unit)
    spans_by_number = dict([*((n, _cut(span, end)) for n, span in whole), *windows, *states.spans(end)])
    all_spans = tuple(spans_by_number[n] for n in sorted(spans_by_number)) if end > start else ()
    hit = Hit(start, end, all_spans, shared)
    return _with_tail(groups, chains, dict(whole), hit, limit, stored) if groups.tail_unit else hit


def _with_tail(
    groups: Groups, chains: Chains, whole: Mapping[int, Span], hit: Hit, limit: int, stored: Stored
) -> Hit:
    """Return the longest hit that ends inside a block and is longer than ``hit``, else ``hit``.

    ``whole`` contains the pages of whole blocks in the groups with full attention, by group number.
    """
    unit, step = groups.unit, groups.tail_unit
    hashes = min(chain.hashes for chain in chains.values())
    last = min(min(limit, hit.shared + unit - 1) // step, hashes)
    ends = [number * step for number in range(last, hit.end // step, -1) if number * step % unit]
    pages: dict[int, dict[int, tuple[PageKey, Tier]]] = {}
    for group in sorted(groups.all, key=lambda group: group.partial, reverse=True):
        keys = chains[group.number].ending(end // step for end in ends)
        found = zip(ends, keys, stored.locate(keys), strict=True)
        pages[group.number] = {end: (key, tier) for end, key, tier in found if tier is not None}
        ends = list(pages[group.number])
    if not ends:
        return hit
    end = ends[0]
    spans = []
    for group in groups.all:
        key, tier = pages[group.number][end]
        before = whole.get(group.number, Span(group, end // unit, [], []))
        before = before if group.partial else _cut(before, end)
        spans.append(Span(group, before.first, [*before.keys, key], [*before.tiers, tier]))
    return Hit(hit.start, end, tuple(spans), hit.shared)


def pages_to_load(
    groups: Groups, chains: Chains, tables: Sequence[Sequence[int]], start: int, end: int
) -> tuple[Sequence[int], Sequence[PageKey], Sequence[int]]:
    """Return the first tokens, the keys and the blocks of the pages to load for tokens ``start`` to ``end``.

    The result is empty if the hit ends where a local chunk ends.

    ``tables`` are the request's block tables, by group number. The result includes all blocks in this range that the
    request has, because vLLM then counts all their tokens as computed. Pages are sorted by their last token, because
    the first pages are usable without the later ones.

    Raises:
        ValueError: A block table is shorter than the range.
    """
    found: list[tuple[int, int, PageKey, int]] = []
    for group in groups.all:
        chain, table, size = chains[group.number], tables[group.number], group.block_size
        first, last = start // size, end // size
        begins, keys, blocks = (
            range(first * size, last * size, size),
            chain.between(first, last),
            table[first:last],
        )
        if not len(begins) == len(keys) == len(blocks):
            raise ValueError(
                f"group {group.number} needs blocks {first} to {last - 1}, but its block table or its hashes are "
                f"shorter: it has {len(table)} blocks, and {len(keys)} of the needed ones have hashes"
            )
        if groups.whole:  # a tuple per page of a long prompt would take milliseconds
            return begins, keys, blocks
        ends = range(begins.start + size, begins.stop + size, size)
        pages = zip(ends, begins, keys, blocks, strict=True)
        found += (page for page in pages if page[3] != NULL_BLOCK) if group.partial else pages
        if end % size and groups.tail_unit:
            [key] = chain.ending([end // groups.tail_unit])
            found.append((end, last * size, key, table[last]))
    found.sort(key=lambda page: page[0])
    return [page[1] for page in found], [page[2] for page in found], [page[3] for page in found]


class _StatesFound:
    """The recurrent states that are stored for the possible ends of a hit.

    These ends are the multiples of ``groups.unit`` after ``start``, up to ``end``. All states of a group are looked
    up at once, because most ends have no stored state.
    """

    def __init__(self, groups: Groups, chains: Chains, start: int, end: int, stored: Stored) -> None:
        self._found: dict[Group, dict[int, tuple[PageKey, Tier]]] = {}
        ends = range(start + groups.unit, end + 1, groups.unit)
        for group in groups.states:
            size = group.block_size
            keys = chains[group.number].first(end // size)
            pages = [(at, keys[at // size - 1]) for at in ends if at // size <= len(keys)]
            tiers = stored.locate([key for _, key in pages])
            self._found[group] = {
                at: (key, tier) for (at, key), tier in zip(pages, tiers, strict=True) if tier is not None
            }

    def last_end(self, start: int, end: int) -> int:
        """Return the last position up to ``end`` at which every group's state is stored, else ``start``."""
        if not self._found:
            return end
        first, *others = self._found.values()
        return max((at for at in first if at <= end and all(at in found for found in others)), default=start)

    def spans(self, end: int) -> list[tuple[int, Span]]:
        """Return the page of each group's state at ``end``, with the number of the group."""
        return [
            (group.number, Span(group, end // group.block_size - 1, [key], [tier]))
            for group, found in self._found.items()
            for key, tier in [found.get(end, (None, None))]
            if key is not None and tier is not None
        ]


def _windows(groups: Groups, chains: Chains, start: int, end: int, stored: Stored) -> list[Span | int]:
    """Return the pages that each window needs for a hit that ends at ``end``.

    If a page is missing, return a list with one number instead: the last token at which a shorter hit may end. A
    hit that ends between that token and ``end`` needs the missing page too.
    """
    spans: list[Span | int] = []
    for group in groups.all:
        if not group.partial or group.kind.handed_over:
            continue
        size = group.block_size
        first = max(start // size, group.first_needed(end))
        keys = chains[group.number].between(first, (end + group.proof) // size)
        found = stored.match(keys)
        if found.num_pages < (end + group.proof) // size - first:
            return [(first + found.num_pages) * size - group.proof]
        spans.append(_cut(Span(group, first, keys, found.tiers), end))
    return spans


def _cut(span: Span, end: int) -> Span:
    pages = max(0, end // span.group.block_size - span.first)
    return Span(span.group, span.first, span.keys[:pages], span.tiers[:pages])


_LOOKUP_ASKS = 64
"""How many queries one lookup result answers before pages are looked up again.

vLLM asks in every step for a request that waits for free blocks.
"""


_NOBODY = Others()
_MOST_PROBES = 8
"""Maximum number of requests that compute stored pages to measure the compute rate.

Two are enough, unless the engine decodes many other requests in the same steps.
"""


class HitLookup:
    """Looks up the hits of requests in a store.

    Args:
        store: The store.
        groups: The KV groups of the model.
        disk_prefetch: Reads pages of queued requests from disk. None without a disk.
        put_off_s: Maximum time in seconds that a request waits for pages that ``disk_prefetch`` reads.
        costs: Estimates that decide which pages are computed instead of loaded. None to load all pages found.
        clock: Returns the current time in seconds.
    """

    def __init__(
        self,
        store: TierStore,
        groups: Groups,
        disk_prefetch: DiskPrefetch | None,
        put_off_s: float,
        costs: Costs | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self.left = 0
        """Number of pages that were not loaded because computing them is faster."""
        self._store = store
        self._groups = groups
        self._disk_prefetch = disk_prefetch
        self._put_off_s = put_off_s
        self._costs = costs
        self._probes = 0
        """Number of requests that have computed stored pages to measure the compute rate."""

    def tokens(self, known: RequestState, computed: int, others: Others = _NOBODY) -> int | None:
        """Return the number of tokens to offer beyond ``computed``, or None if vLLM should ask again later."""
        return None if self._put_off(known) else self._lookup(known, computed, others).hit.tokens

    def wanted(self, known: RequestState, local: int) -> tuple[list[PageKey], int]:
        """Return the keys of the pages to prefetch, and how many of them are within the first ``local`` tokens.

        If the only group has full attention, these are the pages of all full blocks of the request, stored or
        not. Otherwise, they are the pages of the longest hit.
        """
        if self._groups.whole:
            size = self._groups.unit
            chain = known.chains[self._groups.all[0].number]
            return chain.first((known.request.num_tokens - 1) // size), local // size
        pages = self._longest(known, 0).keys
        return [key for _, key in pages], sum(1 for end, _ in pages if end <= local)

    def _lookup(self, known: RequestState, computed: int, others: Others) -> Lookup:
        lookup, tokens = known.lookup, known.request.num_tokens
        if (
            lookup is None
            or (lookup.tokens, lookup.computed) != (tokens, computed)
            or lookup.asked >= _LOOKUP_ASKS
            or lookup.stale
        ):
            hit = self._longest(known, computed)
            known.shared = hit.shared
            if self._costs is not None:
                hit = self._worth(known, hit, others, self._costs)
            lookup = known.lookup = Lookup(tokens, computed, hit)
        lookup.asked += 1
        return lookup

    def _put_off(self, known: RequestState) -> bool:
        """Return whether the request should keep waiting in vLLM's queue.

        When the wait ends, the request's pages are looked up again.
        """
        if not self._put_off_s or self._disk_prefetch is None or known.put_off == math.inf:
            return False
        now = self._clock()
        since = known.put_off = now if known.put_off is None else known.put_off
        if now - since < self._put_off_s and self._disk_prefetch.coming(known.request.request_id):
            return True
        known.put_off, known.lookup = math.inf, None
        return False

    def _worth(self, known: RequestState, hit: Hit, others: Others, costs: Costs) -> Hit:
        """Return the part of the hit that is worth loading.

        If this is not the whole hit, ``disk_prefetch`` reads the other pages from disk for later requests.
        """
        in_memory = None
        worth, total, start, on_disk = hit, known.request.num_tokens, hit.start, below_memory(hit)
        spare = self._to_compute(known, total - start, costs) if on_disk else 1
        if hit.end > total - spare:
            worth = self._longest(known, start, spare=spare)
        if not self._groups.whole and on_disk:
            in_memory = self._longest(known, start, _InMemory(self._store), spare)
        tokens = worth_loading(worth, total, costs, others, in_memory)
        loaded = in_memory if in_memory and in_memory.tokens == tokens else worth.up_to(tokens)
        if loaded.end <= self._groups.replayed:
            loaded = hit.up_to(0)
        if loaded.tokens < hit.tokens:
            if not known.left:
                self.left += hit.pages - loaded.pages
            known.left = True
            if self._disk_prefetch is not None:
                self._disk_prefetch.behind(known.request.request_id)
        return loaded

    def _to_compute(self, known: RequestState, tokens: int, costs: Costs) -> int:
        """Return how many of the last tokens of a request with ``tokens`` tokens must be computed.

        The result is 1, unless the request helps to measure the compute rate. Without such requests, an engine that
        finds all prompts on disk after a restart would never know the rate.
        """
        spare = costs.to_measure
        if 2 * spare > tokens or (not known.probe and self._probes >= _MOST_PROBES):
            return 1
        if spare and not known.probe:
            known.probe = True
            self._probes += 1
        return max(1, spare)

    def _longest(
        self, known: RequestState, computed: int, stored: Stored | None = None, spare: int = 1
    ) -> Hit:
        """Return the longest hit that leaves at least ``spare`` tokens to compute.

        If vLLM would compute every token of a hit again, the hit is empty.
        """
        limit = known.request.num_tokens - spare
        if self._groups.prompts_only:
            limit = min(limit, known.request.num_prompt_tokens)
        if known.limit is not None:
            limit = min(limit, known.limit)
        hit = longest_hit(self._groups, known.chains, computed, limit, stored or self._store)
        return hit if hit.end > self._groups.replayed else Hit(computed, computed, shared=hit.shared)


class Pool(Protocol):
    """The methods of vLLM's block pool that this module uses."""

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> object | None:
        """Return the blocks with this hash, one per group. Return None if any of the groups has no such block."""
        ...


def local_tokens(pool: Pool, groups: Groups, block_hashes: Sequence[bytes]) -> int:
    """Return the number of leading tokens that vLLM has cached, in the first group with full attention.

    vLLM evicts the last blocks of a prompt first, so the end is found by bisection. If an earlier block is missing
    nevertheless, the result may be too large; the missing pages are then loaded without being prefetched. Without a
    group with full attention, the result is 0. With recurrent states, the result ends at the last block boundary at
    which all states are cached too.
    """
    group = groups.spine
    if group is None:
        return 0
    hashes = block_hashes[group.stride - 1 :: group.stride]

    def gone(block_hash: bytes) -> bool:
        return not pool.get_cached_block(block_hash, [group.number])

    tokens = bisect_left(hashes, True, key=gone) * group.block_size
    states = [state.number for state in groups.states]
    if not states:
        return tokens
    unit, per_hash = groups.unit, group.block_size // group.stride
    ends = range(tokens // unit * unit, 0, -unit)
    return next((at for at in ends if pool.get_cached_block(block_hashes[at // per_hash - 1], states)), 0)
