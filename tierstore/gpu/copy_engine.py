"""Copies between HBM and HOST. This one has a thread for each direction and serves all memory that DMA cannot reach.

A transfer's slots belong to it until its ack is polled. It knows nothing of residency.
"""

from __future__ import annotations

import logging
from collections import deque
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.gpu.pool import HbmBytes

_log = logging.getLogger(__name__)


class HostBytes(Protocol):
    """Page slots in host memory."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The slot's page in place, flat uint8 ``[blob_nbytes]``, writable."""
        ...


class CopyEngine(Protocol):
    """What the mover needs of a copy engine."""

    @property
    def polled(self) -> bool:
        """Whether transfers are on their way whose end wakes nobody, so that someone must ask."""
        ...

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer between HBM and HOST; never blocks. Transfers of one direction end in order."""
        ...

    def poll(self) -> list[Ack]:
        """Transfers that ended since the last call."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Fails what has not started, waits for what has; whether its threads ended in time."""
        ...


class CpuCopyEngine:
    """One thread a direction, first in first out. ``wake`` is called after each ack, from that thread."""

    def __init__(self, hbm: HbmBytes, host: HostBytes, page_nbytes: int, wake: Callable[[], None]) -> None:
        self._hbm = hbm
        self._host = host
        self._page_nbytes = page_nbytes
        self._wake = wake
        self._acks: deque[Ack] = deque()
        self._closing = False
        self._queues: dict[Tier, SimpleQueue[Transfer | None]] = {
            Tier.HOST: SimpleQueue(),
            Tier.HBM: SimpleQueue(),
        }
        self._threads = [
            Thread(target=self._run, args=(queue,), name=f"tierstore-copy-to-{dst.name}", daemon=True)
            for dst, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def polled(self) -> bool:
        """Never: each ack wakes."""
        return False

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer; never blocks."""
        self._queues[transfer.dst].put(transfer)

    def poll(self) -> list[Ack]:
        """Transfers that ended since the last call. Any thread."""
        acks: list[Ack] = []
        while self._acks:
            acks.append(self._acks.popleft())
        return acks

    def close(self, timeout_s: float) -> bool:
        """Fails what has not started, waits for what has; whether both threads ended in time."""
        self._closing = True
        for queue in self._queues.values():
            queue.put(None)
        deadline = perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, queue: SimpleQueue[Transfer | None]) -> None:
        while (transfer := queue.get()) is not None:
            try:
                ack = self._failed(transfer, Failure.CLOSED) if self._closing else self._copy(transfer)
            except Exception:  # noqa: BLE001 - a thread's top: the transfer fails, the thread goes on
                _log.exception("copy %s -> %s failed", transfer.src.name, transfer.dst.name)
                ack = self._failed(transfer, Failure.IO_ERROR)
            self._acks.append(ack)
            self._wake()

    def _copy(self, transfer: Transfer) -> Ack:
        start = perf_counter()
        for src_slot, dst_slot in zip(transfer.src_slots, transfer.dst_slots, strict=True):
            if transfer.dst == Tier.HOST:
                self._hbm.read(src_slot, self._host.view(dst_slot))
            else:
                self._hbm.write(dst_slot, self._host.view(src_slot))
        pages = len(transfer.keys)
        return Ack(transfer.id, True, pages, pages * self._page_nbytes, perf_counter() - start)

    def _failed(self, transfer: Transfer, failure: Failure) -> Ack:
        failures = tuple((i, failure) for i in range(len(transfer.keys)))
        return Ack(transfer.id, False, 0, 0, 0.0, failures)
