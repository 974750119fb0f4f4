"""What a lossy codec promises of every number it gives back, as data."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Half a unit in the last place, as a share of the number: what rounding to the page's dtype may add."""

TINY = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126}
"""Errors up to this are outside every promise: steps below a dtype's own last place."""

LARGEST = {"bfloat16": 2.0**126, "float16": 65504.0, "float32": 2.0**126}
"""A page with a number beyond this, an infinity or a NaN is not encoded."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest error of numbers that share a scale.

    For each number x that comes back as y, with ``extent`` the largest magnitude among those that share its scale
    (``signed``) or the distance of the largest from the smallest (else):

        |y - x| <= of_extent * extent + of_value * |x| + HALF_ULP * max(|x|, |y|) + TINY
    """

    of_extent: float
    signed: bool
    of_value: float = 0.0

    def frobenius(self, members: int, dtype: str) -> float:
        """The largest norm of the errors by the norm of the numbers, where ``members`` share a scale. No clock, no I/O.

        Of all numbers that share one the largest makes up for its extent in the norm, or the smallest and the largest
        do: half the extent each, at worst.
        """
        spread = sqrt(members if self.signed else 2 * members) * self.of_extent
        lossy = spread + self.of_value
        return lossy + HALF_ULP[dtype] * (1 + lossy)
