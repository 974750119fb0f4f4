"""What of a payload some layers of its page need, and how it lies in a slab: as a payload of a page of so many layers.

A payload has scales, smallest numbers and codes of all layers, keys and values apart (``codecs.places``): a group of
layers is a piece of each. No device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tierstore.codecs import LOSSY
from tierstore.codecs.places import Places
from tierstore.gpu.geometry import Segments
from tierstore.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.codecs.held import Held
    from tierstore.gpu.geometry import LayerGroups

_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class CodedPart:
    """Layers ``[first, end)``. ``layout``: of a page that has these only; ``stride``: between such payloads in a slab.

    ``pieces``: of each its place in such a payload, its place in the whole one, and its length.
    """

    first: int
    end: int
    layout: PageLayout
    stride: int
    pieces: tuple[tuple[int, int, int], ...]

    def rows(self, address: int) -> Segments:
        """The pieces of the rows of a slab at ``address``."""
        columns = [(address + here, self.stride, there, nbytes) for here, there, nbytes in self.pieces]
        return Segments(*np.ascontiguousarray(np.array(columns, dtype=np.int64).T))


def parts_of(held: Held, layers: LayerGroups) -> list[CodedPart]:
    """Of each group; nothing for pages of several KV groups, and for bytes that are kept as they are."""
    codec, layout = LOSSY[held.codec], held.layout
    whole = Places.of(layout, codec)
    if len(layers) == 1 or len(layout.specs) > 1 or whole.kept_nbytes != _scales_nbytes(whole):
        return []
    found = []
    for [part] in layers.parts:
        some = PageLayout.of(replace(layout.specs[0], num_layers=part.end - part.first))
        places = Places.of(some, codec)
        if places.kept_nbytes != _scales_nbytes(places):
            return []
        pieces = zip(_parts(places), _parts(whole), strict=True)
        cut = tuple(
            (at, there + part.first * (nbytes // (part.end - part.first)), nbytes)
            for (at, nbytes), (there, _) in pieces
        )
        stride = -(-places.fixed_nbytes // _ALIGNMENT) * _ALIGNMENT
        found.append(CodedPart(part.first, part.end, some, stride, cut))
    return found


def _scales_nbytes(places: Places) -> int:
    return sum(plane.scale_nbytes + plane.floor_nbytes for plane in places.planes)


def _parts(places: Places) -> Iterator[tuple[int, int]]:
    """Where scales, smallest numbers and codes of each plane begin, and their lengths; no empty ones."""
    at = 0
    for plane in places.planes:
        for nbytes in (plane.scale_nbytes, plane.floor_nbytes):
            if nbytes:
                yield at, nbytes
            at += nbytes
    at = places.kept_nbytes
    for plane in places.planes:
        yield at, plane.code_nbytes
        at += plane.code_nbytes
