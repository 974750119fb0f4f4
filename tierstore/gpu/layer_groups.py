"""Layer groups: the layers of a page that cross the link together.

A batch of pages is loaded group by group, each group of all pages before the next one. So an engine can
compute the first layers while the others are still in flight (the idea of LayerKV and of LMCache's layer-wise
transfers).
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
"""Most layer groups of a page. More would gain little: only the time of one group cannot overlap."""


SMALLEST_NBYTES = 512 << 10
"""Least average bytes of the parts of a layer group of a page.

Each piece takes 1 to 2 us to launch. A slow processor has no time for more and smaller pieces while it also
takes pages into leases.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut pages into layer groups of given proportions.

    Attributes:
        shares: The proportion of the layers that each group gets.
        smallest_nbytes: Least average bytes of a group's parts. The cut suits pages that reach it in every
            group and have a layer for every group.
    """

    shares: tuple[int, ...]
    smallest_nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Layers ``[first, end)`` of KV group ``spec``: ``nbytes`` bytes of the page's blob, from byte ``offset`` on.

    The last part of a KV group includes the alignment bytes before the next KV group.
    """

    spec: int
    first: int
    end: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layer groups that a page is cut into.

    Attributes:
        parts: For each layer group its parts, one for each KV group that has layers in it.
        starts: For each layer group its first layer.
    """

    parts: tuple[tuple[Part, ...], ...]
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls, layout: PageLayout, most: int = MOST_GROUPS, smallest_nbytes: int = SMALLEST_NBYTES
    ) -> LayerGroups:
        """Return the cut into as many equal groups as possible, at least one.

        Args:
            layout: The layout of a page.
            most: Most groups.
            smallest_nbytes: Least average bytes of a group's parts.
        """
        layers = max(spec.num_layers for spec in layout.specs)
        for number in range(min(most, layers), 1, -1):
            groups = _cut(layout, [layers * i // number for i in range(number + 1)])
            if groups._has_parts_of(smallest_nbytes):
                return groups
        return _cut(layout, [0, layers])

    @classmethod
    def by_shares(cls, layout: PageLayout, cuts: Sequence[Cut]) -> LayerGroups:
        """Return the cut by the first of ``cuts`` that suits these pages, or a single group if none does."""
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
        """Return the index of the layer group that has layer ``layer``, the same for every KV group."""
        return bisect_right(self.starts, layer) - 1

    def divide(self, nbytes: int) -> list[int]:
        """Return the bytes of each group if the whole page has ``nbytes`` as it crosses the link."""
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
