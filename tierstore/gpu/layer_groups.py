"""How a page is cut into layer groups: which layers of it cross the link together.

Loads go group by group, all pages of a batch for each, so that an engine can compute the first layers while the
others are still in flight (the idea of LayerKV and of LMCache's layer-wise transfers).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.page import PageLayout


MOST_GROUPS = 16
"""More gain little: what cannot overlap is one group's share of the time."""


SMALLEST_NBYTES = 512 << 10
"""Smaller pieces of pages take longer to launch, a microsecond or two each, than a slow processor has for them beside
taking pages."""


@dataclass(frozen=True, slots=True)
class Cut:
    """``shares``: of the layers, each group's, in proportion. It fits pages of which each group gets a layer and has
    parts of ``smallest_nbytes`` or more on average."""

    shares: tuple[int, ...]
    smallest_nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Layers ``[first, end)`` of KV group ``spec``: ``nbytes`` from ``offset`` of the page's blob on.

    The last part of a KV group takes in what lies between it and the next one.
    """

    spec: int
    first: int
    end: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """``parts[g]``: what group g consists of; ``starts[g]``: its first layer."""

    parts: tuple[tuple[Part, ...], ...]
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls, layout: PageLayout, most: int = MOST_GROUPS, smallest_nbytes: int = SMALLEST_NBYTES
    ) -> LayerGroups:
        """As many groups as there may be with parts of ``smallest_nbytes`` or more on average in each; at least one."""
        layers = max(spec.num_layers for spec in layout.specs)
        for number in range(min(most, layers), 1, -1):
            groups = _cut(layout, [layers * i // number for i in range(number + 1)])
            if groups._has_parts_of(smallest_nbytes):
                return groups
        return _cut(layout, [0, layers])

    @classmethod
    def by_shares(cls, layout: PageLayout, cuts: Sequence[Cut]) -> LayerGroups:
        """By the first of ``cuts`` that fits; one group where none does."""
        layers = max(spec.num_layers for spec in layout.specs)
        for cut in cuts:
            bounds = [layers * end // sum(cut.shares) for end in accumulate(cut.shares, initial=0)]
            if all(first < end for first, end in pairwise(bounds)):
                groups = _cut(layout, bounds)
                if groups._has_parts_of(cut.smallest_nbytes):
                    return groups
        return _cut(layout, [0, layers])

    def __len__(self) -> int:
        return len(self.parts)

    def holding(self, layer: int) -> int:
        """The group that layer ``layer`` of every KV group that has it is in."""
        return bisect_right(self.starts, layer) - 1

    def divide(self, nbytes: int) -> list[int]:
        """What of a page that is ``nbytes`` long as it crosses the link falls to each group."""
        sizes = [sum(part.nbytes for part in parts) for parts in self.parts]
        return [nbytes * size // sum(sizes) for size in sizes]

    def _has_parts_of(self, smallest_nbytes: int) -> bool:
        return all(sum(p.nbytes for p in parts) >= smallest_nbytes * len(parts) for parts in self.parts)


def _cut(layout: PageLayout, bounds: Sequence[int]) -> LayerGroups:
    found = []
    for first, end in pairwise(bounds):
        parts = [_part(layout, spec, first, end) for spec in range(len(layout.specs))]
        found.append(tuple(part for part in parts if part.first < part.end))
    return LayerGroups(tuple(found), tuple(bounds[:-1]))


def _part(layout: PageLayout, index: int, first: int, end: int) -> Part:
    spec = layout.specs[index]
    first, end = min(first, spec.num_layers), min(end, spec.num_layers)
    begin = layout.offsets[index] + first * spec.layer_nbytes
    after = (*layout.offsets[1:], layout.blob_nbytes)[index]
    stop = after if end == spec.num_layers else layout.offsets[index] + end * spec.layer_nbytes
    return Part(index, first, end, begin, stop - begin)
