"""Holes between records joined, so that a long record fits where many short ones have left.

Records of one length never need it. Where lengths differ, and most of all where a codec came or went, the free blocks
may all lie in pieces that are too short: then records are moved out of the windows that hold the least, into holes
that fit them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from tierstore.nvme.slots import Place, Slots

Spans = Sequence[tuple[int, int]]
"""Records of one extent file: first block there and length, ascending."""


class Move(NamedTuple):
    """A record's slot, and the one that it is to have."""

    old: Place
    new: Place


class Window(NamedTuple):
    """Blocks in a row, and the records in them."""

    place: Place
    records: list[Place]


@contextmanager
def moves(
    slots: Slots, extents: Mapping[int, tuple[int, Spans]], need: int, count: int
) -> Iterator[list[Move]]:
    """Moves after which ``count`` pieces of ``need`` blocks are free, or as many of them as can be had.

    ``extents``: length in blocks and records, by number. The new slots are taken: the caller's, to be named by entries
    or freed. While this lasts nothing else is put into the windows.
    """
    held: list[Place] = []
    planned: list[Move] = []
    try:
        for window in _windows(extents, need, count):
            pieces = slots.reserve(window.place)
            held += pieces
            known = sum(each.blocks for each in (*pieces, *window.records))
            # Blocks that are neither free nor a record's: pinned, in doubt, or just taken for another window's.
            if known == window.place.blocks:
                planned += _targets(slots, window.records)
        yield planned
    finally:
        slots.free(held)


def _targets(slots: Slots, records: Sequence[Place]) -> list[Move]:
    """A new slot for each of these, or none for any."""
    planned: list[Move] = []
    for old in records:
        new = slots.take(old.blocks)
        if new is None:
            slots.free([move.new for move in planned])
            return []
        planned.append(Move(old, new))
    return planned


def _windows(extents: Mapping[int, tuple[int, Spans]], need: int, count: int) -> Iterator[Window]:
    """At most ``count`` windows of ``need`` blocks or a little more, apart, those that hold least first."""
    found: list[tuple[int, int, int, int]] = []
    for number, (blocks, spans) in extents.items():
        firsts = np.array([*(first for first, _ in spans), blocks])
        ends = np.array([0, *(first + length for first, length in spans)])
        held = np.cumsum([0, *(length for _, length in spans)])
        behind = np.searchsorted(firsts, ends + need)
        fits = np.flatnonzero(behind < len(firsts))
        costs = held[behind[fits]] - held[fits]
        cheapest = np.argsort(costs, kind="stable")[: 4 * count]
        found += [(int(costs[at]), number, int(fits[at]), int(behind[fits[at]])) for at in cheapest]
    taken: set[tuple[int, int]] = set()
    for _, number, start, end in sorted(found):
        # By the gaps in front of records: windows that share one overlap.
        gaps = {(number, gap) for gap in range(start, end + 1)}
        if len(taken & gaps) or not count:
            continue
        taken |= gaps
        count -= 1
        blocks, spans = extents[number]
        first = sum(spans[start - 1]) if start else 0
        behind_last = spans[end][0] if end < len(spans) else blocks
        records = [Place(number, *span) for span in spans[start:end]]
        yield Window(Place(number, first, behind_last - first), records)
