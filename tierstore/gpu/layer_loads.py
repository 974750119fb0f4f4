"""Loads on a thread, layer group by layer group: what the link does, for memory that no DMA can reach."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from tierstore.gpu.layer_events import HERE, NOT_YET, Arriving
from tierstore.gpu.schedule import Waves
from tierstore.types import Ack, Failure, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.gpu.geometry import LayerGroups, Part

_log = logging.getLogger(__name__)


class LayerBytes(Protocol):
    """Page slots that can be filled by layers."""

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copies these layers of ``page``, flat uint8 ``[blob_nbytes]``, into the slot."""
        ...


class Pages(Protocol):
    """Page slots in host memory."""

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The slot's page in place, flat uint8 ``[blob_nbytes]``."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    transfer: Transfer
    copied: int = 0
    """Layer groups."""
    seconds: float = 0.0


class LayerLoads:
    """One thread. ``moved``: called on it after each group; with the ack when that was the transfer's end."""

    def __init__(
        self,
        hbm: LayerBytes,
        host: Pages,
        page_nbytes: int,
        layers: LayerGroups,
        moved: Callable[[Ack | None], None],
    ) -> None:
        self._hbm = hbm
        self._host = host
        self._page_nbytes = page_nbytes
        self._layers = layers
        self._moved = moved
        self._waves: Waves[_Load] = Waves(len(layers))
        self._loading: dict[int, _Load] = {}
        self._closing = False
        self._turn = Condition()
        self._thread = Thread(target=self._run, name="tierstore-copy-to-HBM", daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer to HBM; never blocks."""
        load = _Load(transfer)
        with self._turn:
            self._loading.update(dict.fromkeys(transfer.dst_slots, load))
            self._waves.add(load, 1)
            self._turn.notify()

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """How far the loads of this layer into these HBM slots are. Any thread."""
        group = self._layers.holding(layer)
        with self._turn:
            loads = map(self._loading.get, slots)
            return HERE if all(x is not None and x.copied > group for x in loads) else NOT_YET

    def close(self, timeout_s: float) -> bool:
        """Fails what has groups to come; whether the thread ended in time."""
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
        except Exception:  # noqa: BLE001 - a thread's top: the transfer fails, the thread goes on
            _log.exception("copy %s -> %s failed", transfer.src.name, transfer.dst.name)
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
