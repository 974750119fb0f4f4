"""Slabs: staging buffers in HBM for pages that cross the link in another form than device memory has them.

A slab consists of rows. A row holds a page, or some layers of one, as it crosses the link: an engine's scattered
pieces side by side, or the payload of a codec. Whole rows cross the link at its full speed, and kernels turn them into
pages at the speed of HBM, on a stream of their own, while the next slab fills (the idea of LMCache's and vLLM's staging
buffers). There is one mechanism for all of them:

- ``Ring``: the slabs of one direction, used in turn, and the events between the link and the kernels.
- ``RowCoder``: turns rows into pages and back. ``ByPieces`` and ``ByLayers`` move bytes as they are, the former by the
  copy kernel, the latter by torch's kernels; ``quant.coder.Coder`` encodes and decodes.
- ``SlabCopies``: copies pages, or some layers of them, through a ring with a coder.
- ``SlabRoute``: the route made of these. Its loads may do without slabs, see ``Loads``.

Everything is queued; nothing waits.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tierstore.gpu.pool import slots_view
from tierstore.page import DTYPE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.layer_groups import LayerGroups
    from tierstore.page import PageLayout

SLABS = 2
"""Slabs of a ring: one is coded while the other crosses the link."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Card(Protocol):
    """What a ring and its coders need of torch besides streams and kernels."""

    def event(self) -> Any:
        """Return a new event: ``torch.cuda.Event``, or what has its ``record`` and can be waited for by the streams."""
        ...

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed device memory, uint8 ``[nbytes]``."""
        ...

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Return a copy on the device, which is there once the current stream gets there."""
        ...

    def flags(self, pages: int) -> torch.Tensor:
        """Return int32 zeros ``[pages]`` that kernels can write and the host can read."""
        ...

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Return a context in which kernels and ``uploaded`` are queued on this stream."""
        ...


class TorchCard:
    """The ``Card`` of a CUDA device, by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self) -> Any:
        """See ``Card``."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def zeros(self, nbytes: int) -> torch.Tensor:
        """See ``Card``."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """See ``Card``."""
        # Pinned by torch, which gives the memory to nobody else before this stream has read it.
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)

    def flags(self, pages: int) -> torch.Tensor:
        """Return zeros in page-locked memory: a kernel writes them itself, hardly ever, and nothing is copied back."""
        return torch.zeros(pages, dtype=torch.int32, pin_memory=True)

    @contextmanager
    def using(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See ``Card``."""
        with torch.cuda.stream(stream), torch.inference_mode():
            yield


class Batch(NamedTuple):
    """The pages of one load or save.

    ``slots``: int64 ``[pages]`` on the host. ``on_device``: the same on the device; None where the coder does not read
    it. ``flags``: int32 zeros ``[pages]``; None where no page can fail because of its form.
    """

    slots: NDArray[np.int64]
    on_device: torch.Tensor | None = None
    flags: torch.Tensor | None = None


class Share(NamedTuple):
    """What one slab holds of a batch: pages ``[first, first + pages)`` are its first rows, flat uint8 ``rows``.

    Work on it is queued on ``stream``, which is the current one too.
    """

    batch: Batch
    rows: torch.Tensor
    first: int
    pages: int
    stream: torch.cuda.Stream


class RowCoder(Protocol):
    """Turns the rows of a slab into pages in device memory, and pages into rows. Queues; never waits."""

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return the batch of these slots, with what the coder needs of it on the device."""
        ...

    def decode(self, share: Share) -> None:
        """Turn the rows into pages."""
        ...

    def encode(self, share: Share) -> None:
        """Turn the pages into rows."""
        ...


class PieceMover(Protocol):
    """Moves the pieces of slots to and from pages at given addresses of the device, as ``copy_kernel.Pieces`` does."""

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Move the pages into the slots."""
        ...

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Move the slots to the pages."""
        ...


class ByPieces:
    """A ``RowCoder`` that moves bytes as they are, all pieces of all slots in one launch."""

    def __init__(
        self, inward: PieceMover, outward: PieceMover | None, stride: int, *, offset: int = 0
    ) -> None:
        """Set the movers, one a direction, and where in a slab the pages are.

        Args:
            inward: moves pieces into slots.
            outward: moves the same pieces out of slots; None: for loads only.
            stride: bytes from row to row.
            offset: byte of the page that a row begins with; not 0 for rows that hold some layers.
        """
        self._inward, self._outward = inward, outward
        self._stride, self._offset = stride, offset

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return the slots alone: the movers read them in page-locked memory of their own."""
        return Batch(slots)

    def decode(self, share: Share) -> None:
        """Move the rows into the slots."""
        self._inward.scatter(_slots(share), self._pages(share), share.stream)

    def encode(self, share: Share) -> None:
        """Move the slots into the rows."""
        assert self._outward is not None
        self._outward.gather(_slots(share), self._pages(share), share.stream)

    def _pages(self, share: Share) -> NDArray[np.int64]:
        """Where whole pages would begin: a mover adds to it where in the page a piece lies."""
        begin = share.rows.data_ptr() - self._offset
        return begin + np.arange(share.pages, dtype=np.int64) * self._stride


class ByLayers:
    """A ``RowCoder`` that moves bytes as they are by torch's own kernels, one or two launches a layer.

    It takes any strides, and needs no other library.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout) -> None:
        """``layers``: an engine's layers ``[slots, planes, tokens, heads, dim]``, one sequence a KV group."""
        self._engine = [[_as_integers(layer) for layer in group] for group in layers]
        self._layout = layout

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return the slots with a copy on the device."""
        return Batch(slots, card.uploaded(slots))

    def decode(self, share: Share) -> None:
        """Copy the rows into the layers."""
        index = self._index(share)
        for staged, layers in zip(self._views(share.rows), self._engine, strict=True):
            for i, layer in enumerate(layers):
                layer.index_copy_(0, index, staged[: share.pages, i])

    def encode(self, share: Share) -> None:
        """Copy the layers into the rows."""
        index = self._index(share)
        for staged, layers in zip(self._views(share.rows), self._engine, strict=True):
            for i, layer in enumerate(layers):
                staged[: share.pages, i].copy_(layer.index_select(0, index))

    def _index(self, share: Share) -> torch.Tensor:
        assert share.batch.on_device is not None
        return share.batch.on_device[share.first : share.first + share.pages]

    def _views(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        layout = self._layout
        pages = len(rows) // layout.slot_nbytes
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            view = slots_view(rows, spec, offset, pages, layout.slot_nbytes)
            yield view.view(_INTEGERS[DTYPE_NBYTES[spec.dtype]])


class Slab(NamedTuple):
    """One slab of a ring: its number, its bytes, and the event of its last use (not recorded before the first)."""

    number: int
    rows: torch.Tensor
    free: Any


class Ring:
    """The slabs of one direction, used in turn, and the stream of the kernels that code their rows.

    Copies of one direction at a time: whoever launches them does so in order.
    """

    def __init__(self, nbytes: int, stream: torch.cuda.Stream, card: Card) -> None:
        """``nbytes``: of a slab. ``stream``: of the kernels."""
        self.nbytes = nbytes
        self.stream = stream
        self.card = card
        # Zeros: what follows a payload in its row crosses the link, and nobody's bytes are to be in it.
        self.memory = card.zeros(SLABS * nbytes)
        self.ready = card.event()
        """Recorded where the rows of a slab are complete; waited for by who takes them on."""
        self._slabs = [
            Slab(i, self.memory[i * nbytes : (i + 1) * nbytes], card.event()) for i in range(SLABS)
        ]
        self._next = 0

    @classmethod
    def open(cls, nbytes: int, driver: Driver, device: torch.device) -> Ring:
        """Return a ring in memory of the device, with a new stream. Blocks until the slabs are zeroed."""
        ring = cls(nbytes, driver.stream(device.index), TorchCard(device))
        ring.memory.record_stream(ring.stream)  # should the store be dropped with copies on their way
        torch.cuda.current_stream(device).synchronize()  # zeros are there before another stream looks
        return ring

    @property
    def addresses(self) -> list[int]:
        """Where each slab begins in device memory."""
        return [self.memory.data_ptr() + i * self.nbytes for i in range(SLABS)]

    def turn(self) -> Slab:
        """Return the next slab. Wait for its ``free`` before writing it, and record that after its last use."""
        at = self._next
        self._next = (at + 1) % SLABS
        return self._slabs[at]


class Carrier(Protocol):
    """A route between rows of a slab, by their numbers, and host memory, by addresses of pages."""

    pieces: int

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from host memory to the rows."""
        ...

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from the rows to host memory."""
        ...


class Loads(Protocol):
    """Loads of pages, or of some layers of them.

    Two ways, as each wins somewhere by measurement: ``SlabCopies`` where DMA brings rows that kernels spread or decode,
    and ``quant.encoded_routes.MappedLoads`` where a kernel reads payloads in host memory.
    """

    pieces: int
    """Copies that the driver is asked for, for each page."""
    ends_on: torch.cuda.Stream | None
    """Stream of the last work; None: the stream that ``load`` is given."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue the copies; see ``copy_routes.Route.load``."""
        ...


class SlabCopies:
    """Copies of pages, or of some layers of them, through the slabs of a ring."""

    def __init__(self, ring: Ring, coder: RowCoder, stride: int, carriers: Sequence[Carrier]) -> None:
        """Set what the rows are, and how they cross the link.

        Args:
            ring: its slabs, which other copies of the same direction may use too.
            coder: between rows and pages.
            stride: bytes from row to row.
            carriers: between the rows of each slab and host memory, in the order of the slabs.
        """
        self.ring, self.coder = ring, coder
        self.pieces = carriers[0].pieces
        self.ends_on: torch.cuda.Stream | None = ring.stream
        self._carriers = carriers
        self._numbers = np.arange(ring.nbytes // stride, dtype=np.int64)

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from host memory to the slots; they cross on ``stream`` and end on the ring's.

        Returns:
            int32 ``[len(slots)]``, not 0 where memory held no page of the coder's form, once the copies have ended;
            None where every form is right.
        """
        ring, kernels, most = self.ring, self.ring.stream, len(self._numbers)
        with ring.card.using(kernels):
            batch = self.coder.begin(slots, ring.card)
            for first in range(0, len(slots), most):
                at = host[first : first + most]
                slab = ring.turn()
                stream.wait_event(slab.free)
                self._carriers[slab.number].load(self._numbers[: len(at)], at, stream)
                ring.ready.record(stream)
                kernels.wait_event(ring.ready)
                self.coder.decode(Share(batch, slab.rows, first, len(at), kernels))
                slab.free.record(kernels)
        return None if batch.flags is None else batch.flags.numpy()

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from the slots to host memory; they end on ``stream``.

        Returns:
            int32 ``[len(slots)]``, not 0 for pages that the coder cannot represent, valid once the copies
            have ended; None where it can represent every page.
        """
        ring, kernels, most = self.ring, self.ring.stream, len(self._numbers)
        with ring.card.using(kernels):
            batch = self.coder.begin(slots, ring.card)
            for first in range(0, len(slots), most):
                at = host[first : first + most]
                slab = ring.turn()
                kernels.wait_event(slab.free)
                self.coder.encode(Share(batch, slab.rows, first, len(at), kernels))
                ring.ready.record(kernels)
                stream.wait_event(ring.ready)
                self._carriers[slab.number].save(self._numbers[: len(at)], at, stream)
                slab.free.record(stream)
        return None if batch.flags is None else batch.flags.numpy()


class SlabRoute:
    """A route (see ``copy_routes.Route``) to and from slots through slabs, pages as they are or encoded."""

    pieces = 1

    def __init__(
        self,
        name: str,
        loads: Loads,
        saves: SlabCopies,
        layers: LayerGroups | None = None,
        groups: Sequence[Sequence[Loads]] = (),
    ) -> None:
        """Set how pages go.

        Args:
            name: for ``stats()``.
            loads: of whole pages.
            saves: of whole pages.
            layers: how pages are cut; None: they are loaded whole.
            groups: the loads that each of ``layers`` consists of.
        """
        self.name = name
        self.layers = layers
        self.group_pieces = max((sum(part.pieces for part in group) for group in groups), default=1)
        self.loads_end_on = loads.ends_on
        ends = (loads.ends_on, saves.ends_on)
        self.streams: Sequence[torch.cuda.Stream] = [stream for stream in ends if stream is not None]
        self.loads, self.saves = loads, saves
        self._groups = groups

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of whole pages, host to device.

        Keep the returned array until the copies have ended, because kernels write it.
        """
        return self.loads.load(slots, host, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of one group of ``layers``, host to device; as ``load``."""
        flags = None  # encoded pages have one part a group, others no flags
        for part in self._groups[group]:
            flags = part.load(slots, host, stream)
        return flags

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies of whole pages, device to host."""
        return self.saves.save(slots, host, stream)


def _slots(share: Share) -> NDArray[np.int64]:
    return share.batch.slots[share.first : share.first + share.pages]


def _as_integers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that every kernel knows."""
    return layer.view(_INTEGERS[layer.element_size()])
