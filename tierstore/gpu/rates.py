"""What a copy takes by each way, from a few measurements: fixed costs, and costs of a piece by its size. No device."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Way = Literal["dma", "kernel"]
Direction = Literal["up", "down"]
"""To the device, to the host."""

SIZES = (4 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Bytes of the pieces that are measured."""

FEW = 8
"""Pieces of the smaller batch; the larger is of ``MANY_NBYTES``, but of no more than ``MOST`` pieces."""

MANY_NBYTES = 16 << 20
MOST = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """Pieces of ``nbytes``: a batch of n takes ``fixed_s + n * piece_s``."""

    nbytes: int
    fixed_s: float
    piece_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """``points``: by way and direction, by rising size of a piece; what is missing cannot be done."""

    points: Mapping[tuple[Way, Direction], Sequence[Point]]

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """What ``pieces`` pieces of ``nbytes`` take; infinity for a way that was not measured.

        Between two sizes that were measured the costs go evenly with the logarithm of the size, beyond them with the
        size itself, but for the costs of the smallest, which no smaller piece goes below.
        """
        points = self.points.get((way, direction))
        if not points:
            return inf
        at = bisect_left([point.nbytes for point in points], nbytes)
        if at == 0:
            return points[0].fixed_s + pieces * points[0].piece_s
        if at == len(points):
            return points[-1].fixed_s + pieces * points[-1].piece_s * nbytes / points[-1].nbytes
        low, high = points[at - 1], points[at]
        share = log(nbytes / low.nbytes) / log(high.nbytes / low.nbytes)
        fixed = low.fixed_s + share * (high.fixed_s - low.fixed_s)
        piece: float = low.piece_s * (high.piece_s / low.piece_s) ** share
        return fixed + pieces * piece

    def plain(self) -> dict[str, dict[int, float]]:
        """10^9 bytes a second of large batches, by way and size: for stats."""
        return {
            f"{way} {direction}": {p.nbytes: round(p.nbytes / p.piece_s / 1e9, 2) for p in points}
            for (way, direction), points in self.points.items()
        }


def measured(ways: Sequence[Way], measure: Callable[[Way, Direction, int, int], float]) -> Rates:
    """``measure``: the seconds of a batch of so many pieces of so many bytes, by a way, in a direction."""
    directions: tuple[Direction, ...] = ("up", "down")
    return Rates(
        {
            (way, direction): [_point(way, direction, nbytes, measure) for nbytes in SIZES]
            for way in ways
            for direction in directions
        }
    )


def _point(
    way: Way, direction: Direction, nbytes: int, measure: Callable[[Way, Direction, int, int], float]
) -> Point:
    many = max(2 * FEW, min(MOST, MANY_NBYTES // nbytes))
    short, long = measure(way, direction, nbytes, FEW), measure(way, direction, nbytes, many)
    piece = max((long - short) / (many - FEW), long / many / 10)  # whatever the clock says: more takes longer
    return Point(nbytes, max(0.0, long - many * piece), piece)
