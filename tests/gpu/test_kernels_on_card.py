"""Test on a GPU that the copy kernel copies exactly the requested bytes, whatever the alignment of the addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierstore.gpu.addresses import Segments
from tierstore.gpu.copy_kernel import DOWN, NEAR, UP, Grid, Pieces

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
RUBBISH = 0xEE


class Ground:
    """Slots on the GPU, and pages to copy to and from them.

    Each slot consists of several pieces. The memory of the slots starts ``shift`` bytes after a multiple of 4096.
    ``pages`` is in pinned memory if ``pinned``, else on the GPU.
    """

    def __init__(self, piece: int, pieces: int, slots: int, shift: int, pinned: bool) -> None:
        self.piece, self.pieces, self.slots = piece, pieces, slots
        self.device = torch.randint(
            0, 256, (pieces * slots * piece + 4096,), dtype=torch.uint8, device=DEVICE
        )
        start = -self.device.data_ptr() % 4096 + shift
        base = self.device.data_ptr() + start
        number = np.arange(pieces, dtype=np.int64)
        self.segments = Segments(
            base + number * slots * piece,
            np.full(pieces, piece, dtype=np.int64),
            number * piece,
            np.full(pieces, piece, dtype=np.int64),
        )
        self._view = self.device[start : start + pieces * slots * piece].view(pieces, slots, piece)
        shape = (slots, pieces * piece)
        if pinned:
            self.pages = torch.full(shape, RUBBISH, dtype=torch.uint8).pin_memory()
        else:
            self.pages = torch.full(shape, RUBBISH, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()

    def slot_bytes(self) -> torch.Tensor:
        """Return the bytes of all slots as ``[slots, page]`` on the CPU."""
        return self._view.permute(1, 0, 2).reshape(self.slots, -1).cpu()

    def addresses(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.pages.data_ptr() + rows * (self.pieces * self.piece)


@pytest.mark.parametrize(("piece", "shift"), [(4096, 0), (4096, 8), (260, 4), (130, 2), (129, 1), (80, 16)])
@pytest.mark.parametrize("grid", [UP, DOWN, NEAR, Grid(1, 32, 1)])
@pytest.mark.parametrize("pinned", [True, False])
def test_pages_are_copied_out_and_in_and_nothing_else_changes(
    piece: int, shift: int, grid: Grid, pinned: bool
) -> None:
    ground = Ground(piece, 3, 40, shift, pinned)
    mover = Pieces(ground.segments, DEVICE, grid)
    chance = np.random.default_rng(piece + shift)
    slots, rows = (chance.permutation(40)[:25].astype(np.int64) for _ in "sr")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before = ground.slot_bytes()
    mover.gather(slots, ground.addresses(rows), stream)
    torch.cuda.synchronize()
    pages = ground.pages.cpu()
    want = torch.full_like(pages, RUBBISH)
    want[rows] = before[slots]
    assert torch.equal(pages, want)
    assert torch.equal(ground.slot_bytes(), before)

    others = np.setdiff1d(np.arange(40), slots)[: len(rows)].astype(np.int64)
    whole = ground.device.clone()
    mover.scatter(others, ground.addresses(rows[: len(others)]), stream)
    torch.cuda.synchronize()
    want = before.clone()
    want[others] = before[slots[: len(others)]]
    assert torch.equal(ground.slot_bytes(), want)
    assert int((ground.device != whole).sum()) == int((want != before).sum()), (
        "bytes beside the slots changed"
    )


def test_more_pages_than_one_argument_block_and_consecutive_launches() -> None:
    ground = Ground(64, 1, 5000, 0, pinned=True)
    mover = Pieces(ground.segments, DEVICE, Grid(2, 64, 1))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before = ground.slot_bytes()
    order = np.random.default_rng(1).permutation(5000).astype(np.int64)
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    for start in range(0, 5000, 1000):  # each launch has its own table, because the others have not begun
        mover.gather(order[start : start + 1000], ground.addresses(np.arange(start, start + 1000)), stream)
    torch.cuda.synchronize()
    assert torch.equal(ground.pages, before[order])
    ground.pages.fill_(RUBBISH)
    mover.gather(order, ground.addresses(np.arange(5000, dtype=np.int64)), stream)
    torch.cuda.synchronize()
    assert torch.equal(ground.pages, before[order])
