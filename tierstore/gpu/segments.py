"""Where the bytes of a page lie in device memory: one description for pages of our own and for an engine's tensors.

Addresses only; nothing is read or copied here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from tierstore.gpu.layer_groups import LayerGroups, Part
    from tierstore.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Segments:
    """The pieces of a page. Piece j of slot s lies at ``base[j] + s * stride[j]``, is ``nbytes[j]`` long and belongs at
    ``offset[j]`` of the page's blob. All int64, one entry a piece, in the order of the blob.
    """

    base: NDArray[np.int64]
    stride: NDArray[np.int64]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.base)

    @property
    def smallest(self) -> int:
        """Bytes of the smallest piece."""
        return int(self.nbytes.min())

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Device addresses of the pieces of these slots, ``[len(slots), pieces]``."""
        return self.base + slots[:, None] * self.stride


def of_pool(address: int, layout: PageLayout) -> Segments:
    """Slots of our own at ``address``: the whole blob is one piece."""
    return _segments([(address, layout.slot_nbytes, 0, layout.blob_nbytes)])


def groups_of_pool(address: int, layout: PageLayout, layers: LayerGroups) -> list[Segments]:
    """The same slots by layer groups: a piece for each of their parts."""
    return [
        _segments([(address + part.offset, layout.slot_nbytes, part.offset, part.nbytes) for part in parts])
        for parts in layers.parts
    ]


def of_tensors(
    groups: Sequence[Sequence[torch.Tensor]], layout: PageLayout, limit: int, parts: Sequence[Part] = ()
) -> Segments | None:
    """An engine's layers ``[slots, planes, tokens, heads, dim]``, one sequence a KV group; any strides.

    ``parts``: only these, all of the page if empty. None if that would be more than ``limit`` pieces. Neighbours that
    are neighbours in the blob too are one piece.
    """
    pieces: list[tuple[int, int, int, int]] = []
    wanted = [(part.spec, part.first, part.end) for part in parts] or [
        (spec, 0, len(layers)) for spec, layers in enumerate(groups)
    ]
    for spec, first, end in wanted:
        for i, layer in enumerate(groups[spec][first:end], first):
            found = _pieces(layer, layout.offsets[spec] + i * layer[0].nbytes, limit)
            if found is None:
                return None
            for piece in found:
                _append(pieces, piece)
            if len(pieces) > limit:
                return None
    return _segments(pieces)


def groups_of_tensors(
    groups: Sequence[Sequence[torch.Tensor]], layout: PageLayout, layers: LayerGroups, limit: int
) -> list[Segments]:
    """The same by layer groups. ``limit``: such that the whole page was found within it."""
    found = [of_tensors(groups, layout, limit, parts) for parts in layers.parts]
    return [segments for segments in found if segments is not None]


def _pieces(layer: torch.Tensor, offset: int, limit: int) -> list[tuple[int, int, int, int]] | None:
    itemsize = layer.element_size()
    shape, strides = layer.shape[1:], [stride * itemsize for stride in layer.stride()]
    run, split = itemsize, len(shape)
    while split and (shape[split - 1] == 1 or strides[split] == run):
        run *= shape[split - 1]
        split -= 1
    outer = shape[:split]
    if int(np.prod(outer, dtype=np.int64)) > limit:
        return None
    return [
        (
            layer.data_ptr() + sum(i * s for i, s in zip(index, strides[1:], strict=False)),
            strides[0],
            offset + number * run,
            run,
        )
        for number, index in enumerate(np.ndindex(*outer))
    ]


def _append(pieces: list[tuple[int, int, int, int]], piece: tuple[int, int, int, int]) -> None:
    if pieces:
        base, stride, offset, nbytes = pieces[-1]
        if (base + nbytes, stride, offset + nbytes) == piece[:3]:
            pieces[-1] = (base, stride, offset, nbytes + piece[3])
            return
    pieces.append(piece)


def _segments(pieces: list[tuple[int, int, int, int]]) -> Segments:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    return Segments(*(np.ascontiguousarray(column) for column in columns))


_SMALLEST_EQUAL = 64
_MOST_EQUAL = 1 << 16


def in_equal_pieces(segments: Segments) -> Segments | None:
    """The same bytes in pieces of one length; None if these would be too small or too many for a kernel."""
    length = int(np.gcd.reduce(segments.nbytes))
    counts = segments.nbytes // length
    if length < min(_SMALLEST_EQUAL, int(segments.nbytes.sum())) or counts.sum() > _MOST_EQUAL:
        return None
    within = np.concatenate([np.arange(count, dtype=np.int64) for count in counts.tolist()]) * length
    base, stride, offset = (
        np.repeat(column, counts) for column in (segments.base, segments.stride, segments.offset)
    )
    return Segments(base + within, stride, offset + within, np.full(len(base), length, dtype=np.int64))


def alignment(segments: Segments) -> int:
    """The largest of 16, 8, 4, 2, 1 that divides every address, stride, offset and length."""
    columns = (segments.base, segments.stride, segments.offset, segments.nbytes)
    common = int(np.gcd.reduce([np.gcd.reduce(column) for column in columns]))
    return int(np.gcd(common, 16))
