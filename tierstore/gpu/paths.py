"""The ways that a pool's pages can take between device and host memory, built where their libraries are there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tierstore.gpu import segments
from tierstore.gpu.kernels import NEAR, Pieces
from tierstore.gpu.routes import ByLayers, ByPieces, Slab

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.routes import Spreading
    from tierstore.layout import PageLayout

_MOST_LISTED = 1 << 16
"""Pieces of a page that are still written down one by one."""


def through_slabs(
    layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout, driver: Driver, device: torch.device
) -> Slab:
    """Whole pages to and from an engine's layers; by one kernel, or by torch's where it cannot or cupy is missing."""
    side = (driver.stream(device.index), driver.stream(device.index))
    slab = Slab(_spreading(layers, layout, device), layout, driver, device, side)
    for tensor in slab.memory:
        for stream in side:
            tensor.record_stream(stream)  # should the store be dropped with copies on their way
    return slab


def _spreading(
    layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout, device: torch.device
) -> Spreading:
    found = segments.of_tensors(layers, layout, _MOST_LISTED)
    if found is not None and Pieces.suits(found):
        with suppress(ImportError):  # cupy comes with the extra "gpu"
            inward, outward = (Pieces(found, device, NEAR) for _ in "io")
            return ByPieces(inward, outward, layout)
    return ByLayers(layers, layout)
