"""Layer groups: consecutive layers of a page that are transferred together.

A batch of pages is loaded group by group: each group is loaded for all pages before the next group is loaded for
any of them. An engine can then compute the first layers while later ones are still in flight. LayerKV and
LMCache's layer-wise transfers use the same idea.
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
"""Maximum number of layer groups per page.

More groups would gain little, because the loads of all groups but one can already overlap with computation.
"""


SMALLEST_NBYTES = 512 << 10
"""Minimum average size in bytes of the parts of a layer group.

The driver needs 1 to 2 us to launch each piece. With smaller pieces, a slow CPU that also acquires leases could
not launch them fast enough.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """One possible division of pages into layer groups, by proportions.

    Attributes:
        shares: The relative number of layers in each group. With (5, 3), the first group has 5/8 of the layers.
        smallest_nbytes: Minimum average size in bytes of a group's parts. The division applies to pages for
            which every group has at least one layer and reaches this size.
    """

    shares: tuple[int, ...]
    smallest_nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Layers ``[first, end)`` of the KV group with index ``spec``.

    They are the ``nbytes`` bytes at ``offset`` in the page's blob. The last part of a KV group includes the
    alignment padding before the next KV group.
    """

    spec: int
    first: int
    end: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layer groups that a page is divided into.

    Attributes:
        parts: The parts of each layer group: one for each KV group that has layers in the layer group.
        starts: The first layer of each layer group.
    """

    parts: tuple[tuple[Part, ...], ...]
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls, layout: PageLayout, most: int = MOST_GROUPS, smallest_nbytes: int = SMALLEST_NBYTES
    ) -> LayerGroups:
        """Divide pages into as many groups as the limits allow, but at least one. Their sizes are nearly equal.

        Args:
            layout: The layout of a page.
            most: Maximum number of groups.
            smallest_nbytes: Minimum average size in bytes of a group's parts. A single group may be smaller.
        """
        layers = max(spec.num_layers for spec in layout.specs)
        for number in range(min(most, layers), 1, -1):
            groups = _cut(layout, [layers * i // number for i in range(number + 1)])
            if groups._has_parts_of(smallest_nbytes):
                return groups
        return _cut(layout, [0, layers])

    @classmethod
    def by_shares(cls, layout: PageLayout, cuts: Sequence[Cut]) -> LayerGroups:
        """Divide pages by the first of ``cuts`` that applies, or into a single group if none does."""
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
        """Return the index of the layer group that contains ``layer``. It is the same for every KV group."""
        return bisect_right(self.starts, layer) - 1

    def divide(self, nbytes: int) -> list[int]:
        """Return each group's share, in bytes, of a page that is transferred as ``nbytes`` bytes."""
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
