"""How pages get between device memory and page-locked slots: straight, piece by piece, or through a slab in HBM.

Straight is right for few and large pieces. Small ones cross the link as whole pages, into a slab of consecutive pages,
and are spread from there at the speed of HBM (the idea of LMCache's and vLLM's staging buffers), on a stream of its own
while the next slab fills. Everything is queued; nothing waits.
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
    from tierstore.gpu.layer_groups import LayerGroups
    from tierstore.gpu.segments import Segments
    from tierstore.layout import PageLayout

_SLAB_NBYTES = 32 << 20
_SLABS = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PieceMover(Protocol):
    """What moves the pieces of slots to and from pages at given addresses of the device, as ``kernels.Pieces``."""

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """From the pages into the slots."""
        ...

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """From the slots to the pages."""
        ...


class Route(Protocol):
    """Queues copies of pages. ``slots``: in device memory; ``host``: addresses of the pages' slots in memory.

    What is given back is an entry a page, not 0 once the copies have ended where the page did not arrive as its form is
    wrong; None: none can fail so. ``pieces``: copies that the driver is asked for, for each page. ``layers``: how
    ``load_group`` cuts pages, ``group_pieces`` pieces at most for each; None: loads go whole. ``loads_end_on``: the
    stream of a load's last work; None: the one that it is given. ``streams``: those that it uses besides.
    """

    name: str
    pieces: int
    layers: LayerGroups | None
    group_pieces: int
    loads_end_on: torch.cuda.Stream | None
    streams: Sequence[torch.cuda.Stream]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Host to device."""
        ...

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """One group of ``layers``, host to device."""
        ...

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Device to host."""
        ...


class WholePages:
    """What routes have in common that load pages whole, on the stream they are given."""

    pieces = 1
    layers: LayerGroups | None = None
    group_pieces = 1
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Never called where ``layers`` is None."""
        raise NotImplementedError


class Straight:
    """One copy a piece. ``groups``: the pieces of each of ``layers``, as ``segments`` has them of all."""

    name = "straight"
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def __init__(
        self,
        segments: Segments,
        driver: Driver,
        layers: LayerGroups | None = None,
        groups: Sequence[Segments] = (),
    ) -> None:
        self.layers = layers
        self.pieces = len(segments)
        self.group_pieces = max((len(group) for group in groups), default=self.pieces)
        self._segments = segments
        self._groups = groups
        self._driver = driver

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """One group of ``layers``, host to device."""
        there, here, nbytes = _pieces(self._groups[group], slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(here, there, nbytes, stream)


def _pieces(
    segments: Segments, slots: NDArray[np.int64], host: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    there = segments.addresses(slots).ravel()
    here = (host[:, None] + segments.offset).ravel()
    return there, here, np.tile(segments.nbytes, len(slots))


class Spreading(Protocol):
    """Moves slots of device memory from and to consecutive pages of a slab. Queues, each direction on one stream."""

    def scatter(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """The first ``len(slots)`` pages of the slab go into these slots."""
        ...

    def gather(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """The slots become the first pages of the slab."""
        ...


class ByPieces:
    """One launch for all pieces of all slots. ``inward``, ``outward``: movers of the same pieces, one a direction."""

    def __init__(self, inward: PieceMover, outward: PieceMover, layout: PageLayout) -> None:
        self._inward, self._outward = inward, outward
        self._stride = layout.slot_nbytes

    def scatter(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Spreading``."""
        self._inward.scatter(slots, _addresses(slab, len(slots), self._stride), stream)

    def gather(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Spreading``."""
        self._outward.gather(slots, _addresses(slab, len(slots), self._stride), stream)


class ByLayers:
    """A launch a layer, with torch's own kernels: any strides, and no other library.

    ``layers``: an engine's layers ``[slots, planes, tokens, heads, dim]``, one sequence a KV group.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout) -> None:
        self._engine = [[_as_integers(layer) for layer in group] for group in layers]
        self._layout = layout

    def scatter(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Spreading``."""
        with torch.cuda.stream(stream), torch.inference_mode():
            index = _uploaded(slots, slab.device)
            for staged, layers in zip(self._views(slab), self._engine, strict=True):
                for i, layer in enumerate(layers):
                    layer.index_copy_(0, index, staged[: len(slots), i])

    def gather(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Spreading``."""
        with torch.cuda.stream(stream), torch.inference_mode():
            index = _uploaded(slots, slab.device)
            for staged, layers in zip(self._views(slab), self._engine, strict=True):
                for i, layer in enumerate(layers):
                    staged[: len(slots), i].copy_(layer.index_select(0, index))

    def _views(self, slab: torch.Tensor) -> Iterator[torch.Tensor]:
        layout = self._layout
        pages = len(slab) // layout.slot_nbytes
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            view = slots_view(slab, spec, offset, pages, layout.slot_nbytes)
            yield view.view(_INTEGERS[DTYPE_NBYTES[spec.dtype]])


class _Slabs:
    """The slabs of one direction, used in turn. An event each: when it may be written again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_SLABS)]
        self.free = [torch.cuda.Event() for _ in range(_SLABS)]  # type: ignore[no-untyped-call]
        self.moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._next = 0

    def turn(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The next slab and its event: not recorded before its first use, and then no wait."""
        at = self._next
        self._next = (at + 1) % _SLABS
        return self.memory[at], self.free[at]


class Slab(WholePages):
    """Whole pages to and from slabs in HBM, spread and gathered there beside the link's next copies.

    ``side``: streams for the spreading of loads and of saves. A load ends on the first of them, a save where it began.
    """

    name = "slab"

    def __init__(
        self,
        spreading: Spreading,
        layout: PageLayout,
        driver: Driver,
        device: torch.device,
        side: tuple[torch.cuda.Stream, torch.cuda.Stream],
    ) -> None:
        self.one_launch = isinstance(spreading, ByPieces)
        """A slab is spread by one, or by one a layer."""
        self._spreading = spreading
        self._driver = driver
        self._length = layout.blob_nbytes
        self._stride = layout.slot_nbytes
        self._pages = max(1, _SLAB_NBYTES // layout.slot_nbytes)
        self._up, self._down = (_Slabs(self._pages * self._stride, device) for _ in "ud")
        self.side = self.streams = side
        self.loads_end_on = self._spreads_on = side[0]
        self._gathers_on = side[1]

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device; ends on the first of ``side``."""
        for part, at in self._parts(slots, host):
            slab, free = self._up.turn()
            stream.wait_event(free)
            self._driver.copy(_addresses(slab, len(part), self._stride), at, self._lengths(len(part)), stream)
            self._up.moved.record(stream)
            self._spreads_on.wait_event(self._up.moved)
            self._spreading.scatter(part, slab, self._spreads_on)
            free.record(self._spreads_on)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        for part, at in self._parts(slots, host):
            slab, free = self._down.turn()
            self._gathers_on.wait_event(free)
            self._spreading.gather(part, slab, self._gathers_on)
            self._down.moved.record(self._gathers_on)
            stream.wait_event(self._down.moved)
            self._driver.copy(at, _addresses(slab, len(part), self._stride), self._lengths(len(part)), stream)
            free.record(stream)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The slabs."""
        return self._up.memory + self._down.memory

    def _parts(
        self, slots: NDArray[np.int64], host: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for start in range(0, len(slots), self._pages):
            yield slots[start : start + self._pages], host[start : start + self._pages]

    def _lengths(self, pages: int) -> NDArray[np.int64]:
        return np.full(pages, self._length, dtype=np.int64)


def _addresses(slab: torch.Tensor, pages: int, stride: int) -> NDArray[np.int64]:
    return slab.data_ptr() + np.arange(pages, dtype=np.int64) * stride


def _uploaded(slots: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    # Pinned by torch, which gives the memory to nobody else before this stream has read it.
    return torch.from_numpy(slots).pin_memory().to(device, non_blocking=True)


def _as_integers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that every kernel knows."""
    return layer.view(_INTEGERS[layer.element_size()])
