"""How far a request can be loaded when every group must have what it needs, and which pages that takes.

A group of full attention needs all blocks up to the hit's end, a window only those that the next token sees. So the
hit is the longest at whose end all windows are there, within what full attention has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.kv_groups import NULL_BLOCK
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.adapters.vllm.keys import KeyChain
    from tierstore.adapters.vllm.kv_groups import Group, Groups
    from tierstore.types import Match, PageKey

    Find = Callable[[Sequence[PageKey]], Match]


@dataclass(frozen=True, slots=True)
class Span:
    """Pages of one group: blocks from number ``first`` on, and the tier that has each."""

    group: Group
    first: int
    keys: Sequence[PageKey]
    tiers: Sequence[Tier]


@dataclass(frozen=True, slots=True)
class Plan:
    """A hit from token ``start`` to ``end``, and what of each group it takes."""

    start: int
    end: int
    spans: tuple[Span, ...] = ()

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.start

    @property
    def pages(self) -> int:
        """Pages that it takes."""
        return sum(len(span.keys) for span in self.spans)

    def up_to(self, tokens: int) -> Plan:
        """Its beginning."""
        if tokens >= self.tokens:
            return self
        end = self.start + tokens
        return Plan(self.start, end, tuple(_cut(span, end) for span in self.spans))

    @property
    def sources(self) -> dict[Tier, int]:
        """Its tokens by the tier that full attention finds them in; without such a group, by the slowest of all."""
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


def longest(groups: Groups, chains: Sequence[KeyChain], start: int, limit: int, find: Find) -> Plan:
    """The longest hit from ``start`` on of at most ``limit`` tokens in all, a multiple of ``groups.unit``."""
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
    return Plan(start, end, tuple(spans_by_number[n] for n in sorted(spans_by_number)) if end > start else ())


def into(
    groups: Groups, chains: Sequence[KeyChain], tables: Sequence[Sequence[int]], start: int, end: int
) -> list[tuple[int, PageKey, int]]:
    """What to load for the tokens from ``start`` to ``end``: the token at which a page begins, its key and its block.

    Every block that the tables have there, for vLLM counts all of them as computed from then on. In the order of the
    tokens at which they end: what arrives first is of use without the rest.
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
    """Of each window its pages for a hit that ends there, or the token at which its first missing page begins.

    No hit that ends later than that, up to ``end``, has all pages either: it needs that one too.
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
