"""How pages get between device memory and page-locked slots: straight, piece by piece, or through a slab in HBM.

Straight is right for few and large pieces. Small ones cross the link as whole pages, into a slab of consecutive pages,
and are spread from there at the speed of HBM (the idea of LMCache's and vLLM's staging buffers). Everything is queued
on a stream; nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierstore.gpu.pool import slots_view
from tierstore.types import DTYPE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.segments import Segments
    from tierstore.layout import PageLayout

MOST_PIECES = 32
"""Pieces of a page that are still copied one by one."""

SMALLEST_PIECE = 128 << 10
"""Bytes below which a piece is not worth a copy of its own, unless the whole page is smaller."""

_SLAB_NBYTES = 64 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Route(Protocol):
    """Queues copies of whole pages. ``slots``: in device memory; ``host``: addresses of the pages' slots in memory."""

    name: str

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        ...

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        ...


class Straight:
    """One copy a piece."""

    name = "straight"

    def __init__(self, segments: Segments, driver: Driver) -> None:
        self._segments = segments
        self._driver = driver

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        there, here, nbytes = self._pieces(slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        there, here, nbytes = self._pieces(slots, host)
        self._driver.copy(here, there, nbytes, stream)

    def _pieces(
        self, slots: NDArray[np.int64], host: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        segments = self._segments
        there = segments.addresses(slots).ravel()
        here = (host[:, None] + segments.offset).ravel()
        return there, here, np.tile(segments.nbytes, len(slots))


class Slab:
    """Whole pages to and from a slab in HBM, spread and gathered there layer by layer.

    ``layers``: an engine's layers ``[slots, planes, tokens, heads, dim]``, one sequence a KV group. One slab a
    direction, each used on one stream only, so its reuse is in stream order.
    """

    name = "slab"

    def __init__(
        self,
        layers: Sequence[Sequence[torch.Tensor]],
        layout: PageLayout,
        driver: Driver,
        device: torch.device,
    ) -> None:
        self._driver = driver
        self._length = layout.blob_nbytes
        self._stride = layout.slot_nbytes
        self._pages = max(1, _SLAB_NBYTES // layout.slot_nbytes)
        self._engine = [[_as_integers(layer) for layer in group] for group in layers]
        self._device = device
        self._slabs = [
            torch.empty(self._pages * self._stride, dtype=torch.uint8, device=device) for _ in "ab"
        ]
        self._views = [
            [
                slots_view(slab, spec, offset, self._pages, self._stride).view(
                    _INTEGERS[DTYPE_NBYTES[spec.dtype]]
                )
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            ]
            for slab in self._slabs
        ]

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        with torch.cuda.stream(stream), torch.inference_mode():
            for part, at, index in self._parts(slots, host):
                self._driver.copy(self._addresses(0, len(part)), at, self._lengths(len(part)), stream)
                for staged, layers in zip(self._views[0], self._engine, strict=True):
                    for i, layer in enumerate(layers):
                        layer.index_copy_(0, index, staged[: len(part), i])

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        with torch.cuda.stream(stream), torch.inference_mode():
            for part, at, index in self._parts(slots, host):
                for staged, layers in zip(self._views[1], self._engine, strict=True):
                    for i, layer in enumerate(layers):
                        staged[: len(part), i].copy_(layer.index_select(0, index))
                self._driver.copy(at, self._addresses(1, len(part)), self._lengths(len(part)), stream)

    def _parts(
        self, slots: NDArray[np.int64], host: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]]:
        for start in range(0, len(slots), self._pages):
            part, at = slots[start : start + self._pages], host[start : start + self._pages]
            # Pinned by torch, which gives the memory to nobody else before this stream has read it.
            index = torch.from_numpy(part).pin_memory().to(self._device, non_blocking=True)
            yield part, at, index

    def _addresses(self, slab: int, pages: int) -> NDArray[np.int64]:
        return self._slabs[slab].data_ptr() + np.arange(pages, dtype=np.int64) * self._stride

    def _lengths(self, pages: int) -> NDArray[np.int64]:
        return np.full(pages, self._length, dtype=np.int64)


def worth_going_straight(segments: Segments | None, layout: PageLayout) -> bool:
    """Whether the pieces of a page are few and large enough to be copied one by one."""
    return segments is not None and (
        len(segments) == 1
        or (len(segments) <= MOST_PIECES and segments.smallest >= min(SMALLEST_PIECE, layout.blob_nbytes))
    )


def _as_integers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that every kernel knows."""
    return layer.view(_INTEGERS[layer.element_size()])
