"""Slabs: staging buffers in HBM for pages that cross the link in a form other than that in device memory.

A slab consists of rows. A row holds a page, or some layers of one, as it crosses the link: the scattered
pieces of an engine's page packed together, or the payload of a codec. Whole rows cross the link at its full
speed. Kernels turn them into pages at the speed of HBM, on a stream of their own, while the next slab fills
(the idea of LMCache's and vLLM's staging buffers). All forms of rows use the same mechanism:

- ``Ring``: the slabs of one direction, used in turn, and the events between the link and the kernels.
- ``RowCoder``: turns rows into pages and pages into rows. ``ByPieces`` moves bytes unchanged with the copy
  kernel, ``ByLayers`` with torch's kernels. ``quant.coder.Coder`` encodes and decodes.
- ``SlabCopies``: copies pages, or some layers of them, through a ring with a coder.
- ``SlabRoute``: the route made of these. Its loads may bypass the slabs, see ``Loads``.

Copies are only queued; no call waits for them.
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
"""Number of slabs in a ring: kernels work on one while the other crosses the link."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Card(Protocol):
    """The functions of torch that a ring and its coders need besides streams and kernels."""

    def event(self) -> Any:
        """Return a new ``torch.cuda.Event``, or an object with its ``record`` that streams can wait for."""
        ...

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed device memory, uint8 ``[nbytes]``."""
        ...

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Queue a copy of ``slots`` to the device on the current stream, and return the tensor it fills."""
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
        # Torch pins this memory and does not reuse it before the stream has read it.
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)

    def flags(self, pages: int) -> torch.Tensor:
        """Return zeros in page-locked memory.

        Kernels write there directly, but rarely, so no copy back is needed.
        """
        return torch.zeros(pages, dtype=torch.int32, pin_memory=True)

    @contextmanager
    def using(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See ``Card``."""
        with torch.cuda.stream(stream), torch.inference_mode():
            yield


class Batch(NamedTuple):
    """The pages of one load or save.

    ``slots`` is int64 ``[pages]`` on the host. ``on_device`` has the same values on the device; None if the
    coder does not read them there. ``flags`` is int32 ``[pages]``, initially 0; the coder sets the entry of a
    page that it cannot encode or decode. None if that cannot happen.
    """

    slots: NDArray[np.int64]
    on_device: torch.Tensor | None = None
    flags: torch.Tensor | None = None


class Share(NamedTuple):
    """The part of a batch that one slab holds: pages ``[first, first + pages)``, in that many first rows.

    ``rows`` is the slab, flat uint8. Work on the share is queued on ``stream``, which is also the current
    stream.
    """

    batch: Batch
    rows: torch.Tensor
    first: int
    pages: int
    stream: torch.cuda.Stream


class RowCoder(Protocol):
    """Turns the rows of a slab into pages in device memory, and pages into rows.

    It queues work and never waits.
    """

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return the batch of these slots. Copy them to the device if the coder reads them there."""
        ...

    def decode(self, share: Share) -> None:
        """Queue the work that turns the rows into pages."""
        ...

    def encode(self, share: Share) -> None:
        """Queue the work that turns the pages into rows."""
        ...


class PieceMover(Protocol):
    """Moves the pieces of slots to and from pages at given device addresses.

    ``copy_kernel.Pieces`` is one.
    """

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies of the pages at the addresses ``pages`` into the slots."""
        ...

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies of the slots to the pages at the addresses ``pages``."""
        ...


class ByPieces:
    """A ``RowCoder`` that moves bytes unchanged, all pieces of all slots in one launch."""

    def __init__(
        self, inward: PieceMover, outward: PieceMover | None, stride: int, *, offset: int = 0
    ) -> None:
        """Set a mover per direction, and the position of the pages in a slab.

        Args:
            inward: Moves pieces into slots.
            outward: Moves the same pieces out of slots. None for a coder that only loads.
            stride: Bytes from row to row.
            offset: Offset in the page of the first byte of a row. May be above 0 if rows hold only some
                layers.
        """
        self._inward, self._outward = inward, outward
        self._stride, self._offset = stride, offset

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return a batch with only the slots: the movers put them into page-locked memory themselves."""
        return Batch(slots)

    def decode(self, share: Share) -> None:
        """Queue copies of the rows into the slots."""
        self._inward.scatter(_slots(share), self._pages(share), share.stream)

    def encode(self, share: Share) -> None:
        """Queue copies of the slots into the rows."""
        assert self._outward is not None
        self._outward.gather(_slots(share), self._pages(share), share.stream)

    def _pages(self, share: Share) -> NDArray[np.int64]:
        """Return the addresses at which whole pages would begin.

        A mover adds the offset of each piece in its page.
        """
        begin = share.rows.data_ptr() - self._offset
        return begin + np.arange(share.pages, dtype=np.int64) * self._stride


class ByLayers:
    """A ``RowCoder`` that moves bytes unchanged with torch's own kernels, in one or two launches per layer.

    It works with any strides and needs no library but torch.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout) -> None:
        """Set the engine's layers ``[slots, planes, tokens, heads, dim]``, one sequence per KV group."""
        self._engine = [[_as_integers(layer) for layer in group] for group in layers]
        self._layout = layout

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return a batch with the slots and a copy of them on the device."""
        return Batch(slots, card.uploaded(slots))

    def decode(self, share: Share) -> None:
        """Queue copies of the rows into the layers."""
        index = self._index(share)
        for staged, layers in zip(self._views(share.rows), self._engine, strict=True):
            for i, layer in enumerate(layers):
                layer.index_copy_(0, index, staged[: share.pages, i])

    def encode(self, share: Share) -> None:
        """Queue copies of the layers into the rows."""
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
    """One slab of a ring: its number, its bytes, and the event after its last use, unrecorded at first."""

    number: int
    rows: torch.Tensor
    free: Any


class Ring:
    """The slabs of one direction, used in turn, and the stream of the kernels that work on their rows.

    Not thread-safe: copies must be queued one after another.
    """

    def __init__(self, nbytes: int, stream: torch.cuda.Stream, card: Card) -> None:
        """Allocate the slabs, ``nbytes`` each. ``stream`` is the stream of the kernels."""
        self.nbytes = nbytes
        self.stream = stream
        self.card = card
        # Zeroed, because bytes after a payload in its row cross the link too and must not be old data.
        self.memory = card.zeros(SLABS * nbytes)
        self.ready = card.event()
        """Recorded when the rows of a slab are complete. The stream that reads the rows waits for it."""
        self._slabs = [
            Slab(i, self.memory[i * nbytes : (i + 1) * nbytes], card.event()) for i in range(SLABS)
        ]
        self._next = 0

    @classmethod
    def open(cls, nbytes: int, driver: Driver, device: torch.device) -> Ring:
        """Return a ring in device memory, with a new stream. Blocks until the slabs are zeroed."""
        ring = cls(nbytes, driver.stream(device.index), TorchCard(device))
        ring.memory.record_stream(ring.stream)  # in case the store is dropped with copies in flight
        torch.cuda.current_stream(device).synchronize()  # zero the slabs before another stream uses them
        return ring

    @property
    def addresses(self) -> list[int]:
        """Return the device address of each slab."""
        return [self.memory.data_ptr() + i * self.nbytes for i in range(SLABS)]

    def turn(self) -> Slab:
        """Return the next slab.

        Wait for its ``free`` before you write to it; record ``free`` after its last use.
        """
        at = self._next
        self._next = (at + 1) % SLABS
        return self._slabs[at]


class Carrier(Protocol):
    """A route between rows of a slab, given by number, and pages in host memory, given by address."""

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

    With ``SlabCopies``, DMA fills rows, which kernels spread or decode. With
    ``quant.encoded_routes.MappedLoads``, a kernel reads payloads in host memory. Measurements show that each
    is faster for some pages.
    """

    pieces: int
    """Number of copies that each page asks the driver for."""
    ends_on: torch.cuda.Stream | None
    """The stream on which loads end. None if it is the stream that ``load`` is given."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue the copies; see ``copy_routes.Route.load``."""
        ...


class SlabCopies:
    """Copies of pages, or of some layers of them, through the slabs of a ring."""

    def __init__(self, ring: Ring, coder: RowCoder, stride: int, carriers: Sequence[Carrier]) -> None:
        """Set the form of the rows, and how they cross the link.

        Args:
            ring: The slabs. Other copies of the same direction may use them too.
            coder: Turns rows into pages and pages into rows.
            stride: Bytes from row to row.
            carriers: For each slab, in order, the route between its rows and host memory.
        """
        self.ring, self.coder = ring, coder
        self.pieces = carriers[0].pieces
        self.ends_on: torch.cuda.Stream | None = ring.stream
        self._carriers = carriers
        self._numbers = np.arange(ring.nbytes // stride, dtype=np.int64)

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from host memory to the slots. They cross on ``stream`` and end on the ring's stream.

        Returns:
            int32 ``[len(slots)]``, not 0 for pages that the coder cannot decode, valid once the copies have
            ended; None where it can decode every page.
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
        """Queue copies from the slots to host memory. They end on ``stream``.

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
    """A route (see ``copy_routes.Route``) to and from slots through slabs, for unchanged or encoded pages."""

    pieces = 1

    def __init__(
        self,
        name: str,
        loads: Loads,
        saves: SlabCopies,
        layers: LayerGroups | None = None,
        groups: Sequence[Sequence[Loads]] = (),
    ) -> None:
        """Set the copies that the route consists of.

        Args:
            name: The name of the route in ``stats()``.
            loads: Loads of whole pages.
            saves: Saves of whole pages.
            layers: The layer groups that pages are cut into. None if pages are only loaded whole.
            groups: For each of ``layers``, its loads.
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
        """Queue copies of one group of ``layers``, host to device.

        Keep the returned array as for ``load``.
        """
        flags = None  # a group of encoded pages has one part; other pages have no flags
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
    """Return a view of the same bytes in an integer dtype, which every kernel supports."""
    return layer.view(_INTEGERS[layer.element_size()])
