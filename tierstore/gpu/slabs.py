"""Small pieces through slabs in HBM: whole pages, or layers of them, cross the link and are spread from there.

Each page, or each part of one, is one piece of the link, put into a slab of consecutive ones, which is spread at the
speed of HBM (the idea of LMCache's and vLLM's staging buffers), on a stream of its own while the next slab fills.
Everything is queued; nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierstore.gpu.pool import slots_view
from tierstore.page import DTYPE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.layer_groups import LayerGroups, Part
    from tierstore.page import PageLayout

SLAB_NBYTES = 32 << 20
_SLABS = 2
_PART_ALIGNMENT = 512
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PieceMover(Protocol):
    """What moves the pieces of slots to and from pages at given addresses of the device, as ``copy_kernel.Pieces``."""

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """From the pages into the slots."""
        ...

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """From the slots to the pages."""
        ...


class Scattering(Protocol):
    """Moves what lies in a slab, page after page, into slots of device memory. Queues, on one stream."""

    def scatter(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """The first ``len(slots)`` pages of the slab, or parts of pages, go into these slots."""
        ...


class Spreading(Scattering, Protocol):
    """And whole pages from slots to a slab, on another stream."""

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


class PartByPieces:
    """The same for a part of the pages, which lie ``stride`` bytes apart. ``mover``: of the pieces of that part."""

    def __init__(self, mover: PieceMover, part: Part) -> None:
        self.part = part
        self.stride = -(-part.nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self._mover = mover

    def scatter(self, slots: NDArray[np.int64], slab: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Scattering``."""
        # Where whole pages would begin: the mover adds to it where in the page a piece lies.
        pages = _addresses(slab, len(slots), self.stride) - self.part.offset
        self._mover.scatter(slots, pages, stream)


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


class SlabRoute:
    """Pages to and from slabs in HBM, spread and gathered there beside the link's next copies.

    ``side``: streams for the spreading of loads and of saves. A load ends on the first of them, a save where it began.
    ``layers`` and ``groups``: loads by layers, with what spreads the parts of each; None: whole pages only.
    """

    name = "slab"
    pieces = 1

    def __init__(
        self,
        spreading: Spreading,
        layout: PageLayout,
        driver: Driver,
        device: torch.device,
        side: tuple[torch.cuda.Stream, torch.cuda.Stream],
        layers: LayerGroups | None = None,
        groups: Sequence[Sequence[PartByPieces]] = (),
    ) -> None:
        self.one_launch = isinstance(spreading, ByPieces)
        """A slab is spread by one, or by one a layer."""
        self.layers = layers
        self.group_pieces = max(map(len, groups), default=1)
        self._spreading = spreading
        self._groups = groups
        self._driver = driver
        self._length = layout.blob_nbytes
        self._stride = layout.slot_nbytes
        self._slab_nbytes = max(1, SLAB_NBYTES // self._stride) * self._stride
        self._up, self._down = (_Slabs(self._slab_nbytes, device) for _ in "ud")
        self.side = side
        self.streams: Sequence[torch.cuda.Stream] = side
        self.loads_end_on: torch.cuda.Stream | None = side[0]
        self._spreads_on, self._gathers_on = side

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device; ends on the first of ``side``."""
        self._bring(self._spreading, self._length, self._stride, slots, host, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """One group of ``layers``, host to device; ends on the first of ``side``."""
        for found in self._groups[group]:
            part = found.part
            self._bring(found, part.nbytes, found.stride, slots, host + part.offset, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        for some, at in self._rounds(slots, host, self._stride):
            slab, free = self._down.turn()
            self._gathers_on.wait_event(free)
            self._spreading.gather(some, slab, self._gathers_on)
            self._down.moved.record(self._gathers_on)
            stream.wait_event(self._down.moved)
            lengths = np.full(len(some), self._length, dtype=np.int64)
            self._driver.copy(at, _addresses(slab, len(some), self._stride), lengths, stream)
            free.record(stream)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The slabs."""
        return self._up.memory + self._down.memory

    def _bring(
        self,
        spreading: Scattering,
        nbytes: int,
        stride: int,
        slots: NDArray[np.int64],
        host: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> None:
        for some, at in self._rounds(slots, host, stride):
            slab, free = self._up.turn()
            stream.wait_event(free)
            lengths = np.full(len(some), nbytes, dtype=np.int64)
            self._driver.copy(_addresses(slab, len(some), stride), at, lengths, stream)
            self._up.moved.record(stream)
            self._spreads_on.wait_event(self._up.moved)
            spreading.scatter(some, slab, self._spreads_on)
            free.record(self._spreads_on)

    def _rounds(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stride: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        step = self._slab_nbytes // stride
        for start in range(0, len(slots), step):
            yield slots[start : start + step], host[start : start + step]


def _addresses(slab: torch.Tensor, pages: int, stride: int) -> NDArray[np.int64]:
    return slab.data_ptr() + np.arange(pages, dtype=np.int64) * stride


def _uploaded(slots: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    # Pinned by torch, which gives the memory to nobody else before this stream has read it.
    return torch.from_numpy(slots).pin_memory().to(device, non_blocking=True)


def _as_integers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that every kernel knows."""
    return layer.view(_INTEGERS[layer.element_size()])
