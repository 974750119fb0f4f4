"""How a step's attention is divided among programs: pure arithmetic, so that it can be tested anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore.gpu.attention.paging import Paging

FIELDS = 9
"""Of an item, int32: its sequence's first place in ``indices`` and length; first token and end; the sequence's first
query and number of queries; its own first row; its first part, and how many parts each of its queries has."""

_START_TILES = 2
"""What a program costs before its first tile, and after its last, in tiles."""
_PARTS_NBYTES = 64 << 20
_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Room:
    """``programs``: how many run at once. ``items``, ``parts``: the most there may be; None: no limit."""

    programs: int
    items: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """``items``: int32 ``[items, FIELDS]``; ``queries``: int32 ``[queries, 2]``, of each its first part and how many.

    A query with one part has no place among the parts: its program writes the result. ``merges``: whether any query has
    another number than one.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    num_parts: int
    merges: bool


def divide(paging: Paging, block_m: int, block_n: int, room: Room) -> Work:
    """Items for every sequence that has queries and tokens in sight, and the merge of their results."""
    blocks = -(-paging.widths * paging.shape.group // block_m)
    start = paging.first_seen // block_n * block_n
    tiles = np.where(blocks > 0, -(-(paging.kv_lens - start) // block_n), 0)
    step = _tiles_each(paging, blocks, tiles, room)
    splits = -(-tiles // step)
    parts = np.where(splits > 1, splits * paging.widths, 0)
    first_part = np.cumsum(parts) - parts
    items = _items(paging, blocks, splits, block_m, start, step * block_n)
    items[:, 7] += first_part[np.repeat(np.arange(paging.batch), blocks * splits)]
    return Work(
        items.astype(np.int32),
        _queries(paging, splits, first_part),
        int(parts.sum()),
        bool((splits[paging.widths > 0] != 1).any()),
    )


def most_items(batch: int, blocks: int, kv_heads: int, programs: int) -> int:
    """Items that any division of so many sequences may need room for, of ``blocks`` blocks of rows each."""
    return blocks * (batch + 2 * -(-programs // kv_heads))


def _tiles_each(paging: Paging, blocks: NDArray[np.int64], tiles: NDArray[np.int64], room: Room) -> int:
    """Tiles of a split: what makes the waves of programs shortest together."""
    most = int(tiles.max(initial=1))
    steps = (
        np.unique(np.geomspace(1, most, _CANDIDATES).astype(np.int64)) if most > 1 else np.ones(1, np.int64)
    )
    exact = -(-most // np.arange(1, min(most, 256) + 1))  # equal splits of the longest
    steps = np.unique(np.concatenate([steps, exact]))
    splits = -(-tiles[None] // steps[:, None])
    items = (splits * blocks[None]).sum(1)
    shape = paging.shape
    waves = -(-items * shape.num_kv_heads // room.programs)
    cost = (waves * (steps + _START_TILES)).astype(np.float64)
    parts = (np.where(splits > 1, splits, 0) * paging.widths[None]).sum(1)
    fits = parts * shape.num_qo_heads * shape.head_dim_vo * 4 <= _PARTS_NBYTES
    if room.items is not None:
        fits &= items <= room.items
    fits[-1] = True
    return int(steps[np.argmin(np.where(fits, cost, np.inf))])


def _items(
    paging: Paging,
    blocks: NDArray[np.int64],
    splits: NDArray[np.int64],
    block_m: int,
    start: NDArray[np.int64],
    step: int,
) -> NDArray[np.int64]:
    """Of all sequences; the splits of a block of rows are neighbours."""
    number = blocks * splits
    of = np.repeat(np.arange(paging.batch), number)
    local = np.arange(len(of)) - np.repeat(np.cumsum(number) - number, number)
    block, split = local // splits[of], local % splits[of]
    group = paging.shape.group
    length, width = paging.kv_lens[of], paging.widths[of]
    end = np.minimum(start[of] + (split + 1) * step, length)
    if paging.shape.causal:
        last_row = np.minimum((block + 1) * block_m, width * group) - 1
        end = np.minimum(end, length - width + last_row // group + 1)
    first = np.maximum(start[of] + split * step, paging.first_seen[of])
    fields = (
        paging.indptr[of], length, first, end, paging.qo_indptr[of], width, block * block_m, split, splits[of]
    )  # fmt: skip
    return np.stack(fields, 1)


def _queries(paging: Paging, splits: NDArray[np.int64], first_part: NDArray[np.int64]) -> NDArray[np.int32]:
    owner = np.repeat(np.arange(paging.batch), paging.widths)
    number = np.arange(len(owner)) - paging.qo_indptr[owner]
    return np.stack([first_part[owner] + number * splits[owner], splits[owner]], 1).astype(np.int32)
