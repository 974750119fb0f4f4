"""Streams of pages from host memory to the GPU, layer by layer, ahead of the attention that reads them.

A page stream has a ring of slabs in HBM. A slab holds one layer of some pages (a chunk), in the form in which
attention reads them. While attention reads one slab, the copies into the other slabs run on a CUDA stream of their own,
so that the link never waits. The stream is cyclic: after the last layer of a step come the first layers of the next
step. Events order copies and attention in both directions. The host waits for neither.

- ``PageStream`` decides which chunk of which layer goes into which slab, and when a slab may be filled again.
- ``Filler`` queues the copies of a chunk. Unencoded pages are copied by DMA or the copy kernel, and encoded pages by
  the kernel that decodes them. On the CPU, a thread copies and decodes.
- ``ThreadStream`` and ``ThreadEvent`` have the semantics of CUDA streams and events, on a thread.

HeadInfer and FlexGen stream K and V through buffers in a similar way.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event as Flag
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tierstore.codecs import LOSSY
from tierstore.codecs.host_format import HostFormat, Unpacker
from tierstore.errors import ConfigError, IntegrityError
from tierstore.gpu import addresses
from tierstore.gpu.addresses import GroupStrides
from tierstore.gpu.copy_routes import KERNEL_HANDICAP, SIZES, DmaRoute, KernelRoute, rates_of
from tierstore.gpu.driver import Driver, DriverError, has_happened
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.pool import torch_dtype
from tierstore.gpu.quant.coder import FETCH_GRID, Coder, can_fetch
from tierstore.gpu.quant.encoded_routes import fetch_table, parts_of
from tierstore.gpu.slabs import CpuCard, Ring
from tierstore.page import DTYPE_NBYTES
from tierstore.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.device import Host
    from tierstore.gpu.events import Event
    from tierstore.gpu.slabs import Carrier, Slab
    from tierstore.page import PageSpec

_log = logging.getLogger("tierstore.gpu.page_stream")

RING_NBYTES = 256 << 20
"""Default size of a ring. At 54 GB/s, the link takes 5 ms to fill it, so it does not idle in a gap of up to 5 ms."""

SLAB_NBYTES = 64 << 20
"""Maximum size of a slab: one layer of 256 pages of 64 tokens of an 8B model."""

SMALLEST_RING = 2
"""Minimum number of slabs in a ring: one is filled while another is read."""


class ThreadEvent:
    """An event with the semantics of ``torch.cuda.Event``, for a ``ThreadStream`` or the calling thread."""

    def __init__(self) -> None:
        self._recorded: tuple[Flag, ThreadStream | None] | None = None

    def record(self, stream: ThreadStream | CallingThread) -> None:
        """Complete after the work queued on ``stream`` so far. Waits that were queued before are not affected."""
        done = Flag()
        self._recorded = (done, stream if isinstance(stream, ThreadStream) else None)
        stream.queue(done.set)

    def query(self) -> bool:
        """Return whether the work before the last ``record`` has ended. True if nothing was recorded."""
        return self._recorded is None or self._recorded[0].is_set()

    def synchronize(self) -> None:
        """Wait for the work before the last ``record``. Raises RuntimeError if any work on the stream has failed."""
        self.waiter()()

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits for the work before the last ``record`` up to now."""
        return partial(_wait, *self._recorded) if self._recorded is not None else _nothing


def _wait(done: Flag, stream: ThreadStream | None) -> None:
    done.wait()
    if stream is not None and stream.failure is not None:
        raise RuntimeError("a copy of pages to the device failed") from stream.failure


def _nothing() -> None:
    pass


class CallingThread:
    """The calling thread as a stream: work that is queued runs at once."""

    def queue(self, act: Callable[[], None]) -> None:
        """Call ``act``."""
        act()

    def wait_event(self, event: ThreadEvent) -> None:
        """Wait for the event."""
        event.synchronize()


class ThreadStream:
    """A stream whose work runs on a thread, in the order in which it was queued."""

    def __init__(self) -> None:
        """Start the thread. It ends when the stream is garbage-collected."""
        self.failure: Exception | None = None
        """The first exception that work on this stream has raised."""
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Worker(_run, self._work, weakref.ref(self), name="tierstore-page-stream")
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    def queue(self, act: Callable[[], None]) -> None:
        """Run ``act`` on the thread, after all work queued before."""
        self._work.put(act)

    def wait_event(self, event: ThreadEvent) -> None:
        """Make work that is queued from now on wait for the event."""
        self._work.put(event.waiter())

    def synchronize(self) -> None:
        """Wait for all work queued so far."""
        done = Flag()
        self._work.put(done.set)
        done.wait()


def _run(work: SimpleQueue[Callable[[], None] | None], stream: weakref.ref[ThreadStream]) -> None:
    while (act := work.get()) is not None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  the top of a thread; events of the stream report the failure
            alive = stream()
            if alive is not None and alive.failure is None:
                _log.exception("a copy of pages to the device failed")
                alive.failure = error


class ThreadCard(CpuCard):
    """The ``Card`` of a ring in ordinary memory."""

    def event(self) -> ThreadEvent:
        """See ``Card``."""
        return ThreadEvent()


class Filler(Protocol):
    """Fills slabs with one layer of pages in host memory. Its methods queue work and never wait for it."""

    def fill(self, slab: Slab, layer: int, slots: NDArray[np.int64]) -> None:
        """Queue the copies of ``layer`` of the pages in the host slots ``slots``, into the first rows of the slab.

        The work is queued on the ring's stream.
        """
        ...

    def refused(self) -> set[int]:
        """Return the host slots of the pages that the codec refused, in fills that have ended since the last call."""
        ...


class CopiedRows:
    """Fills slabs with unencoded pages."""

    def __init__(
        self, host: Host, ring: Ring, spec: PageSpec, offset: int, carriers: Sequence[Carrier]
    ) -> None:
        """Set how rows are copied.

        Args:
            host: The slots in host memory.
            ring: The slabs.
            spec: The pages of the KV group.
            offset: Offset of the KV group in a page, in bytes.
            carriers: For each slab, in slab order, the route between its rows and host memory.
        """
        self._host, self._ring, self._carriers = host, ring, carriers
        self._offset, self._layer_nbytes = offset, spec.layer_nbytes
        self._numbers = np.arange(ring.nbytes // spec.layer_nbytes, dtype=np.int64)

    def fill(self, slab: Slab, layer: int, slots: NDArray[np.int64]) -> None:
        """See ``Filler``."""
        at = self._host.addresses(slots) + (self._offset + layer * self._layer_nbytes)
        self._carriers[slab.number].load(self._numbers[: len(at)], at, self._ring.stream)

    def refused(self) -> set[int]:
        """Return no slots, because every page can be copied."""
        return set()


class DecodedRows:
    """Fills slabs with encoded pages, by a kernel that reads payloads in pinned host memory."""

    def __init__(self, host: Host, ring: Ring, coder: Coder, rows: int) -> None:
        """Set the coder, whose pages are the rows of all slabs, and the number of rows of a slab."""
        self._host, self._ring, self._coder, self._rows = host, ring, coder, rows
        self._queued: deque[tuple[Any, torch.Tensor, NDArray[np.int64]]] = deque()
        """For each fill, the event recorded after it, the flags of its pages, and their host slots. The kernel's table
        is in the memory of the flags."""
        self._refused: set[int] = set()

    def fill(self, slab: Slab, layer: int, slots: NDArray[np.int64]) -> None:
        """See ``Filler``."""
        self._collect()
        card, count = self._ring.card, len(slots)
        with card.using(self._ring.stream):
            table, flags = fetch_table(card, count)
            filled = table.numpy()
            filled[:count] = slab.number * self._rows + np.arange(count)
            filled[count:] = self._host.addresses(slots)
            self._coder.fetch(table, flags, (layer, layer + 1))
            event = card.event()
            event.record(self._ring.stream)
        self._queued.append((event, flags, slots))

    def refused(self) -> set[int]:
        """See ``Filler``."""
        self._collect()
        found, self._refused = self._refused, set()
        return found

    def _collect(self) -> None:
        """Read the flags of the fills that have ended, and drop the flags."""
        while self._queued and has_happened(self._queued[0][0]):
            _, flags, slots = self._queued.popleft()
            self._refused.update(slots[flags.numpy() != 0].tolist())


class ThreadRows:
    """Fills slabs in ordinary memory, on the thread of a ``ThreadStream``, with unencoded or encoded pages."""

    def __init__(self, host: Host, stream: ThreadStream, spec: PageSpec, offset: int) -> None:
        """Set the slots in host memory, the stream, and the KV group with its offset in a page, in bytes."""
        self._host, self._stream, self._spec, self._offset = host, stream, spec, offset
        self._refused: deque[int] = deque()
        self._parts: list[tuple[tuple[int, int, int], ...]] = []
        held = host.held
        if held.encoded:
            layers = LayerGroups.of(held.layout, spec.num_layers, 1)
            parts = parts_of(held, layers)
            self._parts = [part.pieces for part in parts] or [((0, 0, held.payload_nbytes),)]
            one = HostFormat.of(held.codec, parts[0].layout if parts else held.layout)
            self._payload, self._unpacker = np.zeros(one.slot_nbytes, dtype=np.uint8), Unpacker(one)

    def fill(self, slab: Slab, layer: int, slots: NDArray[np.int64]) -> None:
        """See ``Filler``."""
        nbytes = self._spec.layer_nbytes
        rows = slab.rows.numpy()
        for row, slot in enumerate(slots.tolist()):
            copy = self._decode if self._parts else self._copy
            self._stream.queue(partial(copy, slot, layer, rows[row * nbytes : (row + 1) * nbytes]))

    def refused(self) -> set[int]:
        """See ``Filler``."""
        return {self._refused.popleft() for _ in range(len(self._refused))}  # the thread may append meanwhile

    def _copy(self, slot: int, layer: int, row: NDArray[np.uint8]) -> None:
        start = self._offset + layer * len(row)
        np.copyto(row, self._host.view(slot)[start : start + len(row)])

    def _decode(self, slot: int, layer: int, row: NDArray[np.uint8]) -> None:
        page = self._host.view(slot)
        for at, there, nbytes in self._parts[layer]:
            self._payload[at : at + nbytes] = page[there : there + nbytes]
        try:
            self._unpacker.unpack(self._payload, self._unpacker.page)
        except IntegrityError:
            self._refused.append(slot)
            row.fill(0xFF)  # NaN, because the scratch memory may contain another page
        else:
            np.copyto(row, self._unpacker.page[: len(row)])


class _Filled(NamedTuple):
    """A slab that is full or being filled with a layer of the pages in these host slots."""

    slab: Slab
    layer: int
    slots: NDArray[np.int64]


class PageStream:
    """Streams layers of host pages through a ring of slabs. Not thread-safe.

    Between a call of ``follow`` and the completion of the event that ``release`` returns, the pages in the host slots
    that were passed to ``follow`` must not change, because their copies are queued ahead.
    """

    def __init__(
        self,
        ring: Ring,
        filler: Filler,
        spec: PageSpec,
        current: Callable[[], Any],
        usable: Callable[[NDArray[np.int64]], None],
    ) -> None:
        """Set the parts of the stream. Most callers use ``open``.

        Args:
            ring: The slabs, and the stream on which they are filled.
            filler: Fills the slabs.
            spec: The pages of the KV group.
            current: Returns the stream on which the caller computes.
            usable: Raises ValueError if pages in these host slots cannot be streamed.
        """
        self.spec = spec
        self.rows = ring.nbytes // spec.layer_nbytes
        """Maximum number of pages in a chunk."""
        self._ring, self._filler, self._current, self._usable = ring, filler, current, usable
        shape = (self.rows, *spec.shape[1:])
        used = self.rows * spec.layer_nbytes
        self._pages = [slab.rows[:used].view(torch_dtype(spec)).view(shape) for slab in ring.slabs]
        self._idle = deque(ring.slabs)
        self._ahead: deque[_Filled] = deque()
        self.chunks: Sequence[NDArray[np.int64]] = ()
        """The chunks that are followed now."""
        self._layers: tuple[int, ...] = ()
        self._next = 0
        """Position of the next fill in the step: the index of its layer, times the number of chunks, plus its chunk."""
        self.restarts = 0
        """Number of times that copies which were queued ahead have been discarded."""
        self.released = 0
        """Number of calls of ``release``."""

    @classmethod
    def open(
        cls,
        host: Host,
        device: torch.device | str,
        *,
        ring_nbytes: int = RING_NBYTES,
        slab_nbytes: int = SLAB_NBYTES,
        group: int = 0,
    ) -> PageStream:
        """Open a stream of the pages in ``host``. Allocates the ring.

        Close the stream before you drop it, because copies may be in flight at any time after ``follow``.

        Args:
            host: The slots in host memory, such as a ``HostArena``. On a GPU, streamed slots must be pinned.
            device: The device on which attention is computed.
            ring_nbytes: Size of the ring in device memory. It holds at least two slabs of one page each.
            slab_nbytes: Maximum size of a slab. It is reduced if the ring would have fewer than four slabs.
            group: Index of the KV group in the layout of the pages.

        Raises:
            ConfigError: cuda-bindings or triton is missing, or the GPU cannot decode pages of this codec.
        """
        spec, offset = host.held.layout.specs[group], host.held.layout.offsets[group]
        rows, count = ring_shape(spec, ring_nbytes, slab_nbytes)
        device = torch.device(device)
        require_streamable(host.held, device.type)
        if device.type == "cpu":
            thread: Any = ThreadStream()
            ring, here = Ring(rows * spec.layer_nbytes, thread, ThreadCard(), count), CallingThread()
            return cls(
                ring,
                ThreadRows(host, thread, spec, offset),
                spec,
                lambda: here,
                partial(_require_slots, host),
            )
        device = torch.device("cuda", device.index or 0)
        ring, filler = _on_card(host, device, spec, offset, rows, count)
        current = partial(torch.cuda.current_stream, device)
        return cls(ring, filler, spec, current, partial(_require_pinned, host))

    @property
    def device(self) -> torch.device:
        """Return the device of the ring."""
        return self._ring.memory.device

    @property
    def nbytes(self) -> int:
        """Return the size of the ring in bytes."""
        return self._ring.memory.nbytes

    def follow(self, chunks: Sequence[NDArray[np.int64]], layers: Sequence[int]) -> None:
        """Set what is streamed in each step, and start to copy the first chunks.

        Copies that are already queued for the next step are kept as far as they agree with the new step. The pages in
        the host slots of ``chunks`` must not have changed since the last call, except after ``release``.

        Args:
            chunks: For each chunk, the host slots of its pages, at most ``rows``.
            layers: The layers of a step, in the order in which ``layer`` will be called for them.

        Raises:
            ValueError: A host slot cannot be used.
        """
        for chunk in chunks:
            self._usable(chunk)
        self.chunks, self._layers = chunks, tuple(layers)
        kept, expected = 0, self._positions(0)
        for filled in self._ahead:
            position = next(expected, None)
            if position is None or not self._is_at(filled, *position):
                break
            kept += 1
        self._discard(kept)
        self._next = kept
        self._top_up()

    def layer(self, layer: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the chunks of a layer, one after the other.

        Work that the caller queues on its current stream while it has a chunk runs after the chunk has arrived. The
        slab is refilled only after this work. If this is not the layer that comes next, copies that are queued ahead
        are discarded, and the stream continues from this layer.

        Yields:
            The index of the chunk, and a tensor ``[rows, planes, page_size, num_kv_heads, head_dim]``, in which page i
            of the chunk is row i. Other rows are undefined.

        Raises:
            ValueError: ``follow`` was not called with this layer.
        """
        if not self.chunks:
            return
        if layer not in self._layers:
            raise ValueError(f"layer must be one of {self._layers}, which were planned, got {layer}")
        for index, slots in enumerate(self.chunks):
            if not self._ahead or not self._is_at(self._ahead[0], layer, slots):
                self._discard(0)
                self._next = self._layers.index(layer) * len(self.chunks) + index
                self._top_up()
            slab = self._ahead.popleft().slab
            current = self._current()
            current.wait_event(slab.full)
            try:
                yield index, self._pages[slab.number]
            finally:
                slab.free.record(current)
                self._idle.append(slab)
            self._top_up()

    def release(self) -> Event:
        """Discard all copies that are queued ahead. Call ``follow`` before the next step.

        Returns:
            An event that completes when no copy reads host memory any more.
        """
        self._discard(0)
        self.chunks, self._layers = (), ()
        self.released += 1
        event: Event = self._ring.card.event()
        event.record(self._ring.stream)  # type: ignore[attr-defined]
        return event

    def check(self) -> None:
        """Raise IntegrityError if a page that was streamed since the last call could not be decoded.

        Call it after waiting for a step, before using its results: attention over such a page is wrong. Pages that
        are not encoded always pass. An error also releases the stream and waits for the copies in flight, so that
        no later step reads such a page that was copied ahead.
        """
        refused = self._filler.refused()
        if not refused:
            return
        self.release().synchronize()
        refused |= self._filler.refused()
        raise IntegrityError(
            f"pages in host memory are not valid payloads of their codec, in the host slots {sorted(refused)}: "
            "discard the results of this step, compute these pages again, and call plan() before the next run()"
        )

    def close(self) -> None:
        """Discard all copies that are queued ahead, and wait for those in flight. Idempotent."""
        self.release().synchronize()

    def _positions(self, first: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the layer and the host slots to fill slabs with, from the position ``first`` on, endlessly."""
        position = first
        while self.chunks and self._layers:
            layer, chunk = divmod(position, len(self.chunks))
            yield self._layers[layer % len(self._layers)], self.chunks[chunk]
            position += 1

    @staticmethod
    def _is_at(filled: _Filled, layer: int, slots: NDArray[np.int64]) -> bool:
        same = filled.slots is slots or np.array_equal(filled.slots, slots)
        return same and filled.layer == layer

    def _discard(self, kept: int) -> None:
        """Give back all slabs that are full or being filled, except the first ``kept``.

        They can be refilled immediately, because all fills are queued on one stream.
        """
        self.restarts += len(self._ahead) > kept
        while len(self._ahead) > kept:
            self._idle.append(self._ahead.pop().slab)

    def _top_up(self) -> None:
        """Queue fills for all slabs that are not full or being filled."""
        positions = self._positions(self._next)
        while self._idle and (position := next(positions, None)) is not None:
            slab = self._idle[0]
            self._ring.stream.wait_event(slab.free)
            self._filler.fill(slab, *position)
            slab.full.record(self._ring.stream)
            self._ahead.append(_Filled(self._idle.popleft(), *position))
            self._next += 1
        if self.chunks and self._layers:
            self._next %= len(self.chunks) * len(self._layers)


def ring_shape(
    spec: PageSpec, ring_nbytes: int = RING_NBYTES, slab_nbytes: int = SLAB_NBYTES
) -> tuple[int, int]:
    """Return how many pages a slab of a ring has, each with one layer, and how many slabs the ring has.

    See ``PageStream.open`` for the arguments.
    """
    rows = max(1, min(slab_nbytes, ring_nbytes // 4) // spec.layer_nbytes)
    return rows, max(SMALLEST_RING, ring_nbytes // (rows * spec.layer_nbytes))


def require_streamable(held: HostFormat, kind: str) -> None:
    """Raise ConfigError if pages in this format cannot be streamed to a device of this type ("cpu" or "cuda")."""
    if not held.encoded:
        return
    if len(held.layout.specs) > 1:
        raise ConfigError(
            f"encoded pages with several KV groups cannot be streamed, got {len(held.layout.specs)} groups: "
            "use host.codec none"
        )
    [spec] = held.layout.specs
    if kind != "cpu" and (not can_fetch(LOSSY[held.codec], held.layout) or spec.layer_nbytes % 16):
        raise ConfigError(
            f"pages of this shape that are encoded with {held.codec} cannot be streamed: use host.codec none"
        )


def _on_card(
    host: Host, device: torch.device, spec: PageSpec, offset: int, rows: int, count: int
) -> tuple[Ring, Filler]:
    try:
        driver = Driver(device.index)
    except (ImportError, DriverError) as error:
        raise ConfigError(
            f"pages can only be streamed with cuda-bindings (pip install 'tierstore[gpu]'): {error}"
        ) from error
    ring = Ring.open(rows * spec.layer_nbytes, driver, device, count)
    if host.held.encoded:
        return ring, DecodedRows(host, ring, _coder(host.held, ring, device), rows)
    carriers = [_carrier(at, spec.layer_nbytes, rows, driver, device) for at in ring.addresses]
    return ring, CopiedRows(host, ring, spec, offset, carriers)


def _carrier(address: int, nbytes: int, rows: int, driver: Driver, device: torch.device) -> Carrier:
    """Return the route from host memory to the slab at ``address`` that is expected to be faster for a full slab."""
    row = addresses.row_segments(address, nbytes, [(0, 0, nbytes)])
    if nbytes < SIZES[-1] and KernelRoute.suits(row):
        with suppress(ImportError):  # cupy is part of the extra "gpu"
            rates = rates_of(driver, device)
            by_dma, by_kernel = (rates.seconds(way, "up", nbytes, rows) for way in ("dma", "kernel"))
            if by_kernel * KERNEL_HANDICAP < by_dma:
                return KernelRoute(row, device)
    return DmaRoute(row, driver)


def _coder(held: HostFormat, ring: Ring, device: torch.device) -> Coder:
    """Return a coder that decodes any layer of a payload into a row of the ring's slabs."""
    [spec], codec = held.layout.specs, LOSSY[held.codec]
    itemsize, (layers, planes, tokens, heads, dim) = DTYPE_NBYTES[spec.dtype], spec.shape
    try:
        from tierstore.gpu.quant import codec_kernels
    except ImportError as error:
        raise ConfigError("streaming encoded pages needs triton") from error
    plane = tokens * heads * dim
    lot = GroupStrides(
        ring.memory, itemsize, (planes, tokens, heads, dim), (0,) * layers, planes * plane,
        (plane, heads * dim, dim, 1),
    )  # fmt: skip
    coder = Coder(codec, held.layout, (lot,), None, held.slot_nbytes, codec_kernels, FETCH_GRID)
    try:
        with torch.cuda.device(device):
            coder.compile_fetching(*fetch_table(ring.card, 1))
    except codec_kernels.REFUSALS as error:
        raise ConfigError(f"pages encoded with {held.codec} cannot be streamed: {error}") from error
    return coder


def _require_pinned(host: Host, slots: NDArray[np.int64]) -> None:
    first, last, pinned = int(slots.min(initial=0)), int(slots.max(initial=-1)), host.pinned_slots
    if first < 0:
        raise ValueError(f"host slots must be 0 or more, got {first}")
    if last >= pinned:
        raise ValueError(
            f"host slots must be pinned to be streamed, got slot {last}, but only {pinned} slots are pinned so far"
        )


def _require_slots(host: Host, slots: NDArray[np.int64]) -> None:
    if not len(slots):
        return
    try:
        for slot in (slots.min(), slots.max()):
            host.view(int(slot))
    except IndexError as error:
        raise ValueError(f"pages cannot be streamed: {error}") from error
