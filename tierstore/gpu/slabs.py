"""Slabs: staging buffers in HBM for pages whose transferred form differs from their form in the slots.
A slab consists of rows. A row contains one page, or some of its layers, in the form that is transferred: the
scattered pieces of an engine's page packed together, or a codec payload. Whole rows are transferred at the
full speed of the link. Kernels convert them to pages at the speed of HBM, on a separate stream, while the
next slab is filled. LMCache and vLLM use staging buffers in a similar way. All kinds of rows share the
same mechanism:

- ``Ring``: the slabs of one direction, used in rotation, and the events that synchronize link and kernels.
- ``RowCoder``: converts rows to pages and pages to rows. ``ByPieces`` moves bytes unchanged with the copy
  kernel, ``ByLayers`` with torch's kernels. ``quant.coder.Coder`` encodes and decodes.
- ``SlabCopies``: copies pages, or some of their layers, through a ring with a coder.
- ``SlabRoute``: a route built from these parts. Its loads may bypass the slabs; see ``Loads``.

All calls queue copies and return without waiting for them.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tierstore.gpu import addresses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.layer_groups import LayerGroups
    from tierstore.page import PageLayout

SLABS = 2
"""Default number of slabs in a ring. Kernels work on one slab while the other is transferred."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Card(Protocol):
    """The device operations that rings and coders need in addition to streams and kernels."""

    def event(self) -> Any:
        """Return a new ``torch.cuda.Event``, or an object with ``record`` that streams can wait for."""
        ...

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed device memory, uint8 ``[nbytes]``."""
        ...

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Queue a copy of ``slots`` to the device on the current stream. Return the device tensor."""
        ...

    def flags(self, pages: int) -> torch.Tensor:
        """Return int32 zeros ``[pages]`` that kernels can write and the host can read."""
        ...

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Return a context in which kernels and ``uploaded`` copies are queued on ``stream``."""
        ...


class CpuCard:
    """The operations of ``Card`` in ordinary memory, without ``event``, which depends on the kind of stream."""

    def zeros(self, nbytes: int) -> torch.Tensor:
        """See ``Card``."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """See ``Card``. Nothing is copied."""
        return torch.from_numpy(slots)

    def flags(self, pages: int) -> torch.Tensor:
        """See ``Card``."""
        return torch.zeros(pages, dtype=torch.int32)

    def using(self, stream: object) -> AbstractContextManager[object]:
        """See ``Card``. The context does nothing."""
        return nullcontext()


class TorchCard:
    """The torch implementation of ``Card`` for a CUDA device."""

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
        # Torch's pinned-memory allocator does not reuse this memory before the stream has read it.
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)

    def flags(self, pages: int) -> torch.Tensor:
        """Return zeros in pinned memory.

        Kernels write the few flags directly to this memory, so nothing has to be copied to the host.
        """
        return torch.zeros(pages, dtype=torch.int32, pin_memory=True)

    @contextmanager
    def using(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See ``Card``."""
        with torch.cuda.stream(stream), torch.inference_mode():
            yield


class Batch(NamedTuple):
    """The pages of one load or save.

    Attributes:
        slots: The pages' slots in device memory, as an int64 array ``[pages]`` on the host.
        on_device: A copy of ``slots`` on the device. None if the coder does not read it there.
        flags: int32 ``[pages]``, initially 0. The coder sets the flag of each page that it cannot encode or
            decode. None for a coder that moves bytes unchanged.
    """

    slots: NDArray[np.int64]
    on_device: torch.Tensor | None = None
    flags: torch.Tensor | None = None


class Share(NamedTuple):
    """The part of a batch that is processed with one slab.

    Attributes:
        batch: The batch.
        rows: The slab, flat uint8. Only its first ``pages`` rows are used.
        first: Index of the first page within the batch.
        pages: Number of pages.
        stream: The stream to queue work on. It is also the current stream.
    """

    batch: Batch
    rows: torch.Tensor
    first: int
    pages: int
    stream: torch.cuda.Stream


class RowCoder(Protocol):
    """Converts the rows of a slab to pages in device memory, and pages to rows.

    Methods queue work and never wait for it.
    """

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return a batch for these slots. Copies the slot numbers to the device if the coder reads them there."""
        ...

    def decode(self, share: Share) -> None:
        """Queue the work that converts rows to pages."""
        ...

    def encode(self, share: Share) -> None:
        """Queue the work that converts pages to rows."""
        ...


class PieceMover(Protocol):
    """Copies pages between slots, in which pages consist of pieces, and device buffers, in which they are contiguous.

    ``copy_kernel.Pieces`` implements it.
    """

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies from the pages at the addresses ``pages`` into the slots."""
        ...

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies from the slots to the pages at the addresses ``pages``."""
        ...


class ByPieces:
    """A ``RowCoder`` that moves bytes unchanged, with one kernel launch for all pages of a slab."""

    def __init__(
        self, inward: PieceMover, outward: PieceMover | None, stride: int, *, offset: int = 0
    ) -> None:
        """Set one mover per direction, and the position of pages in a slab.

        Args:
            inward: Moves pieces into slots.
            outward: Moves the same pieces out of slots. None for a coder that only loads.
            stride: Distance between rows, in bytes.
            offset: Position in the page of a row's first byte. 0 unless rows contain only some layers.
        """
        self._inward, self._outward = inward, outward
        self._stride, self._offset = stride, offset

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return a batch with only the slot numbers. The movers copy them to pinned memory themselves."""
        return Batch(slots)

    def decode(self, share: Share) -> None:
        """Queue copies from the rows into the slots."""
        self._inward.scatter(_slots(share), self._pages(share), share.stream)

    def encode(self, share: Share) -> None:
        """Queue copies from the slots into the rows."""
        assert self._outward is not None
        self._outward.gather(_slots(share), self._pages(share), share.stream)

    def _pages(self, share: Share) -> NDArray[np.int64]:
        """Return, for each page, the address to which the movers add the offsets of the page's pieces.

        A row contains only some pieces of a page, so this address may be outside the row.
        """
        begin = share.rows.data_ptr() - self._offset
        return begin + np.arange(share.pages, dtype=np.int64) * self._stride


class ByLayers:
    """A ``RowCoder`` that moves bytes unchanged with torch's kernels, in one or two launches per layer.

    It supports any strides and needs only torch.
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], layout: PageLayout) -> None:
        """Set the engine's layers: one sequence of ``[slots, planes, tokens, heads, dim]`` per KV group."""
        self._engine = [[_as_integers(layer) for layer in group] for group in layers]
        self._layout = layout

    def begin(self, slots: NDArray[np.int64], card: Card) -> Batch:
        """Return a batch with the slot numbers, in host memory and on the device."""
        return Batch(slots, card.uploaded(slots))

    def decode(self, share: Share) -> None:
        """Queue copies from the rows into the layers."""
        index = self._index(share)
        for rows, layer in self._parts(share):
            layer.index_copy_(0, index, rows)

    def encode(self, share: Share) -> None:
        """Queue copies from the layers into the rows."""
        index = self._index(share)
        for rows, layer in self._parts(share):
            rows.copy_(layer.index_select(0, index))

    def _index(self, share: Share) -> torch.Tensor:
        assert share.batch.on_device is not None
        return share.batch.on_device[share.first : share.first + share.pages]

    def _parts(self, share: Share) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each layer, its part of the rows and the engine's tensor, both with one integer per element."""
        stride, offsets = self._layout.slot_nbytes, self._layout.offsets
        rows = share.rows[: share.pages * stride].view(share.pages, stride)
        for start, layers in zip(offsets, self._engine, strict=True):
            for offset, layer in addresses.placed(layers, start):
                part = rows[:, offset : offset + layer[0].nbytes].view(layer.dtype)
                yield part.view(share.pages, *layer.shape[1:]), layer


class Slab(NamedTuple):
    """One slab of a ring.

    Attributes:
        number: Its index in the ring.
        rows: Its bytes.
        full: Recorded when its rows are complete. The stream that reads the rows waits for it.
        free: Recorded after its last use. Unrecorded until the first use.
    """

    number: int
    rows: torch.Tensor
    full: Any
    free: Any


class Ring:
    """The slabs of one direction, used in rotation, and the stream for the kernels that process their rows.

    Not thread-safe: queue one copy at a time.
    """

    def __init__(self, nbytes: int, stream: torch.cuda.Stream, card: Card, count: int = SLABS) -> None:
        """Allocate ``count`` slabs with ``nbytes`` bytes each. Kernels run on ``stream``."""
        self.nbytes = nbytes
        self.stream = stream
        self.card = card
        # Zeroed, because the bytes after the payload in a row are transferred too, and must not leak old
        # data.
        self.memory = card.zeros(count * nbytes)
        self.slabs = [
            Slab(i, self.memory[i * nbytes : (i + 1) * nbytes], card.event(), card.event())
            for i in range(count)
        ]
        self._next = 0

    @classmethod
    def open(cls, nbytes: int, driver: Driver, device: torch.device, count: int = SLABS) -> Ring:
        """Return a ring in device memory, with a new stream. Blocks until the slabs are zeroed."""
        ring = cls(nbytes, driver.stream(device.index), TorchCard(device), count)
        ring.memory.record_stream(ring.stream)  # in case the store is garbage-collected with copies in flight
        torch.cuda.current_stream(device).synchronize()  # slabs must be zeroed before other streams use them
        return ring

    @property
    def addresses(self) -> list[int]:
        """Return the device address of each slab."""
        return [self.memory.data_ptr() + slab.number * self.nbytes for slab in self.slabs]

    def turn(self) -> Slab:
        """Return the next slab.

        Do not write to the slab before its ``free`` event has completed, and record ``free`` after its last use.
        """
        at = self._next
        self._next = (at + 1) % len(self.slabs)
        return self.slabs[at]


class Carrier(Protocol):
    """An object that queues copies between the rows of a slab and host memory.

    In its methods, ``slots`` contains the numbers of the rows, and ``host`` the addresses in host memory.
    """

    pieces: int
    """Number of driver copies per row."""

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
    """Loads whole pages, or some of their layers. There are two implementations, each faster for some pages.

    ``SlabCopies`` fills rows by DMA, then scatters or decodes them with kernels.
    ``quant.encoded_routes.MappedLoads`` reads payloads in host memory with a kernel.
    """

    pieces: int
    """Number of driver copies per page."""
    ends_on: torch.cuda.Stream | None
    """The stream on which loads complete. None if they complete on the stream passed to ``load``."""

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue the copies. See ``copy_routes.Route.load``."""
        ...


class SlabCopies:
    """Copies whole pages, or some of their layers, through the slabs of a ring."""

    def __init__(self, ring: Ring, coder: RowCoder, stride: int, carriers: Sequence[Carrier]) -> None:
        """Set the slabs, the format of their rows, and how rows are transferred.

        Args:
            ring: The slabs. Other copies in the same direction may share them.
            coder: Converts rows to pages and pages to rows.
            stride: Distance between rows, in bytes.
            carriers: For each slab, in slab order, the route between its rows and host memory.
        """
        self.ring, self.coder = ring, coder
        self.pieces = carriers[0].pieces
        self.ends_on: torch.cuda.Stream | None = ring.stream
        self._carriers = carriers
        self._numbers = np.arange(ring.nbytes // stride, dtype=np.int64)

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from host memory to the slots.

        Transfers run on ``stream``. The kernels, and with them the loads, complete on the ring's stream.

        Returns:
            int32 ``[len(slots)]``, nonzero for pages that the coder could not decode. Valid once the copies
            are complete. None for a coder that moves bytes unchanged.
        """
        ring, kernels, most = self.ring, self.ring.stream, len(self._numbers)
        with ring.card.using(kernels):
            batch = self.coder.begin(slots, ring.card)
            for first in range(0, len(slots), most):
                at = host[first : first + most]
                slab = ring.turn()
                stream.wait_event(slab.free)
                self._carriers[slab.number].load(self._numbers[: len(at)], at, stream)
                slab.full.record(stream)
                kernels.wait_event(slab.full)
                self.coder.decode(Share(batch, slab.rows, first, len(at), kernels))
                slab.free.record(kernels)
        return None if batch.flags is None else batch.flags.numpy()

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue copies from the slots to host memory. They complete on ``stream``.

        Returns:
            int32 ``[len(slots)]``, nonzero for pages that the coder could not encode. Valid once the copies
            are complete. None for a coder that moves bytes unchanged.
        """
        ring, kernels, most = self.ring, self.ring.stream, len(self._numbers)
        with ring.card.using(kernels):
            batch = self.coder.begin(slots, ring.card)
            for first in range(0, len(slots), most):
                at = host[first : first + most]
                slab = ring.turn()
                kernels.wait_event(slab.free)
                self.coder.encode(Share(batch, slab.rows, first, len(at), kernels))
                slab.full.record(kernels)
                stream.wait_event(slab.full)
                self._carriers[slab.number].save(self._numbers[: len(at)], at, stream)
                slab.free.record(stream)
        return None if batch.flags is None else batch.flags.numpy()


class SlabRoute:
    """A route through slabs, for unencoded or encoded pages. Implements ``copy_routes.Route``."""

    pieces = 1

    def __init__(
        self,
        name: str,
        loads: Loads,
        saves: SlabCopies,
        layers: LayerGroups | None = None,
        groups: Sequence[Sequence[Loads]] = (),
    ) -> None:
        """Set the copies that make up the route.

        Args:
            name: Name of the route in ``stats()``.
            loads: Loads whole pages.
            saves: Saves whole pages.
            layers: The layer groups that pages are divided into. None if pages can only be loaded whole.
            groups: For each layer group, the loads of its parts.
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
        """Queue host-to-device copies of whole pages, and return their flags (see ``copy_routes.Route``).

        Keep the flags until the copies complete, because kernels write to them.
        """
        return self.loads.load(slots, host, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue host-to-device copies of layer group ``group``, and return their flags (see ``copy_routes.Route``).

        Keep the flags until the copies complete, because kernels write to them.
        """
        flags = None  # a group of encoded pages has exactly one part; unencoded pages have no flags
        for part in self._groups[group]:
            flags = part.load(slots, host, stream)
        return flags

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Queue device-to-host copies of whole pages, and return their flags (see ``copy_routes.Route``)."""
        return self.saves.save(slots, host, stream)


def _slots(share: Share) -> NDArray[np.int64]:
    return share.batch.slots[share.first : share.first + share.pages]


def _as_integers(layer: torch.Tensor) -> torch.Tensor:
    """Return an integer view of the same bytes. Every kernel supports integer dtypes."""
    return layer.view(_INTEGERS[layer.element_size()])
