"""The ways that a pool's pages can take between device and host memory, built where their libraries are there."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tierstore.gpu import geometry
from tierstore.gpu.calibration import rates_of
from tierstore.gpu.choosing import Choice, Option
from tierstore.gpu.copy_kernel import NEAR, Pieces
from tierstore.gpu.geometry import MOST_GROUPS, LayerGroups
from tierstore.gpu.rates import SIZES
from tierstore.gpu.routes import Kernel, Straight
from tierstore.gpu.slabs import ByLayers, ByPieces, PartByPieces, Slab

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.geometry import Segments
    from tierstore.gpu.pool import CudaPool
    from tierstore.gpu.routes import Route
    from tierstore.layout import PageLayout

_MOST_LISTED = 1 << 16
"""Pieces of a page that are still written down one by one."""

_MOST_PIECES = 128
"""Pieces of a page that the driver may be asked to copy one by one."""

_SPREAD_S = 50e-6
"""Spreading the last slab, which nothing hides."""

_LAUNCH_S = 10e-6
"""A launch of torch's, where it takes one or two a layer."""


def of_own(
    pool: CudaPool,
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """For slots of our own: by DMA, or by the kernel where pages are so small that it may be faster."""
    layers = LayerGroups.of(layout, most_groups)
    straight = Straight(pool.segments, driver, layers, pool.groups(layers))
    if layout.blob_nbytes > SIZES[-1] or not Kernel.suits(pool.segments):
        return straight
    options = [Option(straight, "dma", 1, layout.blob_nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"; DMA does without it
        options.append(Option(Kernel(pool.segments, device), "kernel", 1, layout.blob_nbytes))
    return Choice(options, rates_of(driver, device)) if len(options) > 1 else straight


def of_engine(
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route:
    """For an engine's tensors: piece by piece, by DMA or by the kernel, or as whole pages through slabs."""
    groups = LayerGroups.of(layout, most_groups)
    found = geometry.tensor_segments(layers, layout, _MOST_LISTED)
    options = [] if found is None else _piece_by_piece(layers, found, layout, driver, device, groups)
    if found is not None and len(found) == 1 and layout.blob_nbytes > SIZES[-1]:
        return options[0].route
    slab = through_slabs(layers, layout, driver, device, groups)
    last = _SPREAD_S if slab.one_launch else 2 * _LAUNCH_S * sum(len(group) for group in layers)
    options.append(Option(slab, "dma", 1, layout.blob_nbytes, last))
    return Choice(options, rates_of(driver, device), slab.side[0])


def misses_kernel(route: Route, layout: PageLayout) -> bool:
    """Return whether the copy kernel would be one of the route's ways if cupy were installed."""
    small = isinstance(route, Choice) or layout.blob_nbytes <= SIZES[-1]
    return small and find_spec("cupy") is None


def through_slabs(
    layers: Sequence[Sequence[torch.Tensor]],
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    by_layers: LayerGroups | None = None,
) -> Slab:
    """Pages to and from an engine's layers; by one kernel, or by torch's where it cannot or cupy is missing.

    ``by_layers``: how loads are cut, where the kernel can.
    """
    side = (driver.stream(device.index), driver.stream(device.index))
    spreading = _by_pieces(layers, layout, device) or ByLayers(layers, layout)
    groups = (
        [] if by_layers is None or len(by_layers) == 1 else _part_by_part(layers, layout, device, by_layers)
    )
    slab = Slab(spreading, layout, driver, device, side, by_layers if groups else None, groups)
    for tensor in slab.memory:
        for stream in side:
            tensor.record_stream(stream)  # should the store be dropped with copies on their way
    return slab


def _piece_by_piece(
    layers: Sequence[Sequence[torch.Tensor]],
    found: Segments,
    layout: PageLayout,
    driver: Driver,
    device: torch.device,
    by_layers: LayerGroups,
) -> list[Option]:
    number, nbytes = len(found), layout.blob_nbytes // len(found)
    options = []
    if number <= _MOST_PIECES:
        groups = geometry.tensor_group_segments(layers, layout, by_layers, _MOST_PIECES)
        options.append(Option(Straight(found, driver, by_layers, groups), "dma", number, nbytes))
    if Kernel.suits(found):
        with suppress(ImportError):
            options.append(Option(Kernel(found, device), "kernel", number, nbytes))
    return options


def _by_pieces(
    layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout, device: torch.device
) -> ByPieces | None:
    found = geometry.tensor_segments(layers, layout, _MOST_LISTED)
    if found is not None and Pieces.suits(found):
        with suppress(ImportError):
            inward, outward = (Pieces(found, device, NEAR) for _ in "io")
            return ByPieces(inward, outward, layout)
    return None


def _part_by_part(
    layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout, device: torch.device, by_layers: LayerGroups
) -> list[list[PartByPieces]]:
    """Nothing where one of the parts cannot go by the kernel."""
    groups = []
    for parts in by_layers.parts:
        found = [(part, geometry.tensor_segments(layers, layout, _MOST_LISTED, (part,))) for part in parts]
        try:
            group = [
                PartByPieces(Pieces(pieces, device, NEAR), part)
                for part, pieces in found
                if pieces is not None and Pieces.suits(pieces)
            ]
        except ImportError:
            return []
        if len(group) < len(parts):
            return []
        groups.append(group)
    return groups
