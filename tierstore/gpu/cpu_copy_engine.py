"""A copy engine that runs on CPU threads, and the ``CopyEngine`` protocol that every copy engine implements.

``CpuCopyEngine`` has one thread per direction. The CUDA engine passes it the transfers whose host memory is
not pinned. ``LayerLoads`` loads pages one layer group at a time, on a separate thread. A transfer's slots
belong to the engine from ``submit`` until ``poll`` returns the transfer's ack. Copy engines do not track
which pages are resident in which tier.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Condition
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from tierstore.codecs.host_format import Packer, Unpacker
from tierstore.errors import IntegrityError
from tierstore.gpu.copy_queue import Waves
from tierstore.gpu.events import HERE, NOT_YET, Arriving
from tierstore.threads import Worker, start_all
from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.codecs.host_format import HostFormat
    from tierstore.gpu.layer_groups import LayerGroups
    from tierstore.gpu.pool import HbmBytes

_layer_loads_log = logging.getLogger("tierstore.gpu.layer_loads")


@dataclass(slots=True, eq=False)
class _Load:
    transfer: Transfer
    copied: int = 0
    """Number of layer groups copied so far."""
    seconds: float = 0.0


class LayerLoads:
    """Copies pages to HBM on a separate thread, one layer group at a time."""

    def __init__(
        self,
        hbm: HbmBytes,
        host: HostBytes,
        page_nbytes: int,
        layers: LayerGroups,
        moved: Callable[[Ack | None], None],
    ) -> None:
        """Start the thread.

        Args:
            hbm: The slots to copy into.
            host: The slots to copy from. They contain unencoded pages.
            page_nbytes: Size of a page in bytes, reported in acks.
            layers: The layer groups that pages are divided into.
            moved: Called on the thread with the ack once a transfer has completed or failed, and with None
                after each earlier layer group.
        """
        self._hbm = hbm
        self._host = host
        self._page_nbytes = page_nbytes
        self._layers = layers
        self._moved = moved
        self._waves: Waves[_Load] = Waves(len(layers))
        self._loading: dict[int, _Load] = {}
        self._closing = False
        self._turn = Condition()
        self._thread = Worker(self._run, name="tierstore-copy-to-HBM")
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer to HBM. Never blocks."""
        load = _Load(transfer)
        with self._turn:
            self._loading.update(dict.fromkeys(transfer.dst_slots, load))
            self._waves.add(load, 1)
            self._turn.notify()

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return ``HERE`` if unfinished loads have already copied this layer into all of these HBM slots.

        Otherwise return ``NOT_YET``. Thread-safe.
        """
        group = self._layers.holding(layer)
        with self._turn:
            loads = map(self._loading.get, slots)
            return HERE if all(x is not None and x.copied > group for x in loads) else NOT_YET

    def close(self, timeout_s: float) -> bool:
        """Fail all unfinished loads and wait for the thread to exit.

        Return whether it exited within ``timeout_s`` seconds.
        """
        with self._turn:
            self._closing = True
            self._turn.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            load, group = step
            failure = self._copy(load, group)
            if failure is not None or load.copied == len(self._layers):
                self._end(load, failure)
            else:
                self._moved(None)

    def _next(self) -> tuple[_Load, int] | None:
        with self._turn:
            while not self._waves and not self._closing:
                self._turn.wait()
            if not self._closing:
                [load], group = self._waves.take(1)
                return load, group
        self._give_up()
        return None

    def _give_up(self) -> None:
        while True:
            with self._turn:
                left = self._waves.clear()
            if not left:
                return
            for load in left:
                self._end(load, Failure.CLOSED)

    def _copy(self, load: _Load, group: int) -> Failure | None:
        transfer, start = load.transfer, perf_counter()
        try:
            for src_slot, dst_slot in zip(transfer.src_slots, transfer.dst_slots, strict=True):
                page = self._host.view(src_slot)
                for part in self._layers.parts[group]:
                    self._hbm.write_part(dst_slot, page, part)
        except Exception:  # noqa: BLE001 - the top of a thread: fail the transfer and continue
            _layer_loads_log.exception("copy %s -> %s failed", transfer.src.name, transfer.dst.name)
            return Failure.IO_ERROR
        with self._turn:
            load.copied += 1
            load.seconds += perf_counter() - start
        return None

    def _end(self, load: _Load, failure: Failure | None) -> None:
        transfer, pages = load.transfer, len(load.transfer.keys)
        with self._turn:
            self._waves.remove(load)
            for slot in transfer.dst_slots:
                if self._loading.get(slot) is load:
                    del self._loading[slot]
        if failure is not None:
            failures = tuple((i, failure) for i in range(pages))
            self._moved(Ack(transfer.id, False, 0, 0, 0.0, failures))
        else:
            self._moved(Ack(transfer.id, True, pages, pages * self._page_nbytes, load.seconds))


_log = logging.getLogger("tierstore.gpu.copy_engine")

_GRACE_S = 5.0


class HostBytes(Protocol):
    """The slots of the host tier, whose bytes CPU threads can read and write."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return a writable view of the slot's page or payload, flat uint8 ``[HostFormat.view_nbytes]``."""
        ...


class CopyEngine(Protocol):
    """The interface between the mover and a copy engine. All methods are thread-safe."""

    @property
    def polled(self) -> bool:
        """Return whether the caller must keep calling ``poll`` now.

        An engine that calls ``wake`` for every ack returns False. Any other engine returns True as long as a
        transfer is unfinished or ``poll`` has not returned its ack.
        """
        ...

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer between HBM and host memory. Never blocks.

        Transfers in the same direction complete in the order of submission.
        """
        ...

    def poll(self) -> list[Ack]:
        """Return the acks of all transfers that completed or failed since the last call."""
        ...

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return the progress of loading this layer into these HBM slots.

        Only loads in progress are known. The engine forgets a load as soon as it has completed or failed, and
        returns ``NOT_YET`` for its slots from then on.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """Fail transfers that have not started, and wait for those in progress.

        Return whether all of these completed within ``timeout_s`` seconds.
        """
        ...


class CpuCopyEngine:
    """A ``CopyEngine`` with one thread per direction, which also encodes and decodes pages.

    A thread copies one transfer after the other, in the order of submission. If pages are loaded by layer
    group, a third thread loads them (``LayerLoads``).
    """

    def __init__(
        self,
        hbm: HbmBytes,
        host: HostBytes,
        page_nbytes: int,
        wake: Callable[[], None],
        held: HostFormat | None = None,
        layers: LayerGroups | None = None,
    ) -> None:
        """Start the threads.

        Args:
            hbm: The slots in HBM.
            host: The slots in host memory.
            page_nbytes: Size of a page in bytes, reported in acks.
            wake: Called by a thread when ``poll`` has a new ack, and after each layer group.
            held: The format of pages in host memory. None if they are not encoded.
            layers: The layer groups for loads of unencoded pages. None to load whole pages.
        """
        encoded = held is not None and held.encoded
        self._packer = Packer(held) if held is not None and encoded else None
        self._unpacker = Unpacker(held) if held is not None and encoded else None
        self._hbm = hbm
        self._host = host
        self._page_nbytes = page_nbytes
        self._wake = wake
        self._acks: deque[Ack] = deque()
        self._closing = False
        self._by_layers = (
            None if encoded or layers is None else LayerLoads(hbm, host, page_nbytes, layers, self._moved)
        )
        self._queues: dict[Tier, SimpleQueue[Transfer | None]] = {
            Tier.HOST: SimpleQueue(),
            Tier.HBM: SimpleQueue(),
        }
        self._threads = [
            Worker(self._run, queue, name=f"tierstore-copy-to-{dst.name}")
            for dst, queue in self._queues.items()
        ]
        start_all(self._threads, partial(self._end, _GRACE_S))

    @property
    def polled(self) -> bool:
        """Return False, because the engine calls ``wake`` whenever ``poll`` has a new ack."""
        return False

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer. Never blocks."""
        if self._by_layers is not None and transfer.dst == Tier.HBM:
            self._by_layers.submit(transfer)
        else:
            self._queues[transfer.dst].put(transfer)

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return the progress of loading this layer into these HBM slots. See ``CopyEngine``."""
        return NOT_YET if self._by_layers is None else self._by_layers.arriving(slots, layer)

    def poll(self) -> list[Ack]:
        """Return the acks of all transfers that completed or failed since the last call."""
        acks: list[Ack] = []
        while self._acks:
            acks.append(self._acks.popleft())
        return acks

    def close(self, timeout_s: float) -> bool:
        """Fail transfers that have not started, and wait for the threads to finish those in progress.

        Return whether all threads exited within ``timeout_s`` seconds.
        """
        self._closing = True
        deadline = perf_counter() + timeout_s
        ended = self._end(timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline - perf_counter()))
        return ended and not any(thread.is_alive() for thread in self._threads)

    def _end(self, timeout_s: float) -> bool:
        """Ask all threads to exit, and wait up to ``timeout_s`` seconds for the thread of ``LayerLoads``.

        Return False if that thread is still running.
        """
        for queue in self._queues.values():
            queue.put(None)
        return self._by_layers is None or self._by_layers.close(timeout_s)

    def _run(self, queue: SimpleQueue[Transfer | None]) -> None:
        while (transfer := queue.get()) is not None:
            try:
                ack = self._failed(transfer, Failure.CLOSED) if self._closing else self._copy(transfer)
            except Exception:  # noqa: BLE001 - the top of a thread: fail the transfer and continue
                _log.exception("copy %s -> %s failed", transfer.src.name, transfer.dst.name)
                ack = self._failed(transfer, Failure.IO_ERROR)
            self._moved(ack)

    def _moved(self, ack: Ack | None) -> None:
        if ack is not None:
            self._acks.append(ack)
        self._wake()

    def _copy(self, transfer: Transfer) -> Ack:
        start = perf_counter()
        copy = self._save if transfer.dst == Tier.HOST else self._load
        slots = zip(transfer.src_slots, transfer.dst_slots, strict=True)
        why = Failure.UNFIT if transfer.dst == Tier.HOST else Failure.INTEGRITY
        refused = tuple((i, why) for i, (src, dst) in enumerate(slots) if not copy(src, dst))
        pages = len(transfer.keys) - len(refused)
        return Ack(
            transfer.id, not refused, pages, pages * self._page_nbytes, perf_counter() - start, refused
        )

    def _save(self, src_slot: int, dst_slot: int) -> bool:
        """Copy a page to host memory. Return False if the codec cannot represent the page."""
        slot = self._host.view(dst_slot)
        if self._packer is None:
            self._hbm.read(src_slot, slot)
            return True
        self._hbm.read(src_slot, self._packer.page)
        return self._packer.pack(self._packer.page, slot)

    def _load(self, src_slot: int, dst_slot: int) -> bool:
        """Copy a page to HBM. Return False if the host slot does not contain a valid payload of the codec."""
        page = slot = self._host.view(src_slot)
        if self._unpacker is not None:
            page = self._unpacker.page
            try:
                self._unpacker.unpack(slot, page)
            except IntegrityError as error:
                _log.warning("page not loaded: its host slot does not contain a valid payload: %s", error)
                return False
        self._hbm.write(dst_slot, page)
        return True

    def _failed(self, transfer: Transfer, failure: Failure) -> Ack:
        failures = tuple((i, failure) for i in range(len(transfer.keys)))
        return Ack(transfer.id, False, 0, 0, 0.0, failures)
