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
"""Layer groups of a page, at most. More gain little: only one group's share of the time cannot overlap."""


SMALLEST_NBYTES = 512 << 10
"""Bytes of a group's part of a page, at least, on average.

Each piece takes a microsecond or two to launch: for more, smaller pieces a slow processor has no time while it also
takes pages into leases.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut pages into layer groups of given proportions.

    Attributes:
        shares: how many of the layers each group gets, in proportion.
        smallest_nbytes: the cut fits pages of which each group has a layer, and parts of so many bytes on average.
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
    """How a page is cut.

    Attributes:
        parts: of each group its parts, one for each KV group that has layers in it.
        starts: of each group its first layer.
    """

    parts: tuple[tuple[Part, ...], ...]
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls, layout: PageLayout, most: int = MOST_GROUPS, smallest_nbytes: int = SMALLEST_NBYTES
    ) -> LayerGroups:
        """Return the cut into as many equal groups as possible, at least one.

        Args:
            layout: of a page.
            most: number of groups, at most.
            smallest_nbytes: bytes of a group's parts, at least, on average.
        """
        layers = max(spec.num_layers for spec in layout.specs)
        for number in range(min(most, layers), 1, -1):
            groups = _cut(layout, [layers * i // number for i in range(number + 1)])
            if groups._has_parts_of(smallest_nbytes):
                return groups
        return _cut(layout, [0, layers])

    @classmethod
    def by_shares(cls, layout: PageLayout, cuts: Sequence[Cut]) -> LayerGroups:
        """Return the cut by the first of ``cuts`` that fits these pages; one group if none does."""
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
        """Return the group that layer ``layer`` is in, of every KV group that has such a layer."""
        return bisect_right(self.starts, layer) - 1

    def divide(self, nbytes: int) -> list[int]:
        """Return the bytes of each group, of a page that has ``nbytes`` as it crosses the link."""
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
