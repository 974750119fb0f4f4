"""How fast pages move between HBM and page-locked host memory, beside one contiguous copy of the same process.

Pages lie at random on both sides. Every figure is the median of pairs: a contiguous copy and the scattered one after
it, by the clock on the wall, from the first call to the last byte; the bytes are compared before and after.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.bench.link import Rig
from tierstore.types import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.bench.link import Ceiling, Direction, Path
    from tierstore.types import Transfer

_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h", "both")
_COMPARED_NBYTES = 256 << 20
"""Of a piece of what is compared."""


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One figure. Rates in 10^9 bytes a second; ``ratio``: of the pairs, not of the medians."""

    direction: Direction
    piece_bytes: int
    num_pieces: int
    gbps: float
    ceiling_gbps: float
    ratio: float
    path: str
    submit_ms: float
    """Until the last call returned; the copies go on."""

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Page i of ``host`` and of ``there`` belong together; the first ``split`` go up, the others down."""

    host: NDArray[np.int64]
    there: NDArray[np.int64]
    split: int

    @classmethod
    def of(cls, direction: Direction, pages: int) -> _Plan:
        chance = np.random.default_rng(0)
        split = {"h2d": pages, "d2h": 0, "both": pages // 2}[direction]
        return cls(chance.permutation(pages), chance.permutation(pages), split)

    def transfers(self, rig: Rig) -> list[Transfer]:
        up = rig.transfers(Tier.HBM, self.host[: self.split], self.there[: self.split])
        down = rig.transfers(Tier.HOST, self.host[self.split :], self.there[self.split :])
        return [one for two in zip(up, down, strict=False) for one in two] if up and down else up + down


def host_nbytes(device: str, batch_nbytes: int, contiguous_nbytes: int) -> int:
    """Memory that ``copy_rows`` and its ceiling take, where the device is the CPU for both ends and the checks."""
    if device != "cpu":
        return batch_nbytes + 2 * contiguous_nbytes
    return 4 * (batch_nbytes + contiguous_nbytes) + 3 * min(batch_nbytes, _COMPARED_NBYTES)


def copy_rows(
    device: str, piece_nbytes: int, batch_nbytes: int, pairs: int, path: Path, ceiling: Ceiling
) -> list[CopyRow]:
    """H2D, D2H and both at once, pages at random. ConfigError as from ``Rig``, RuntimeError if bytes differ."""
    rig = Rig(device, piece_nbytes, batch_nbytes, path)
    try:
        return [_measured(rig, direction, pairs, ceiling) for direction in _DIRECTIONS]
    finally:
        rig.close()


def _measured(rig: Rig, direction: Direction, pairs: int, ceiling: Ceiling) -> CopyRow:
    plan = _Plan.of(direction, rig.num_pages)
    _fill(rig)
    before = rig.pages.clone()
    transfers = plan.transfers(rig)
    rig.run(transfers)
    _require_right(rig, before, plan)
    rates, ceilings, submits = [], [], []
    for _ in range(pairs):
        ceilings.append(ceiling.gbps(direction))
        seconds, submitted = rig.run(transfers)
        rates.append(rig.page_nbytes * rig.num_pages / seconds / 1e9)
        submits.append(submitted * 1e3)
    _require_right(rig, before, plan)
    return CopyRow(
        direction,
        rig.page_nbytes // rig.pieces,
        rig.num_pages * rig.pieces,
        median(rates),
        median(ceilings),
        median(rate / most for rate, most in zip(rates, ceilings, strict=True)),
        rig.path,
        median(submits),
    )


def _fill(rig: Rig) -> None:
    """Random bytes on both sides, other ones on each."""
    rig.storage.view(torch.int64).random_()
    for part in rig.parts():
        rig.host_rows[part].copy_(rig.pages[part].flatten(1))
    rig.storage.view(torch.int64).random_()


def _require_right(rig: Rig, before: torch.Tensor, plan: _Plan) -> None:
    """Pages on both sides are equal; those that went down are as the device had them before."""
    here = torch.cat([rig.host_rows[part].to(rig.device) for part in rig.parts()])
    there, host = (torch.from_numpy(side).to(rig.device) for side in (plan.there, plan.host))
    step = max(1, _COMPARED_NBYTES // rig.page_nbytes)
    for start in range(0, rig.num_pages, step):
        part = slice(start, start + step)
        expected = here[host[part]]
        right = torch.equal(rig.pages[there[part]].flatten(1), expected)
        if start >= plan.split:
            right = right and torch.equal(before[there[part]].flatten(1), expected)
        if not right:
            raise RuntimeError(f"bytes differ after copies of {rig.page_nbytes} bytes")
