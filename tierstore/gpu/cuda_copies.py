"""Copies between HBM and page-locked host memory by DMA: one stream a direction, launched by whoever submits.

Ordering: the store submits a copy once the page's bytes are written, and hands out a slot again once its last use has
ended, so a copy waits for nothing but the copies before it. A transfer keeps its slots until its ack, which comes when
the event recorded after its last piece has happened.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.gpu.copy_engine import CopyEngine
    from tierstore.gpu.routes import Route

_log = logging.getLogger(__name__)

_POLL_S = 0.0005


class PinnedHost(Protocol):
    """Page slots in host memory, page-locked from the first on."""

    @property
    def pinned_slots(self) -> int:
        """Slots ``[0, pinned_slots)`` are page-locked now."""
        ...

    @property
    def pinning(self) -> bool:
        """Whether more are about to be."""
        ...

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the pages of these slots start."""
        ...


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    broken: bool = False


@dataclass(slots=True)
class _Lane:
    stream: torch.cuda.Stream
    waiting: deque[Transfer] = field(default_factory=deque)
    flying: deque[_Flight] = field(default_factory=deque)


class CudaCopyEngine:
    """Whole pages, first in first out in each direction. Nobody is woken: ask ``poll`` while ``polled`` says so.

    ``unpinned`` takes the transfers that touch host slots which will not be page-locked.
    """

    def __init__(
        self,
        route: Route,
        host: PinnedHost,
        page_nbytes: int,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        unpinned: CopyEngine,
    ) -> None:
        """``streams``: to the device, to the host."""
        self._route = route
        self._host = host
        self._page_nbytes = page_nbytes
        self._unpinned = unpinned
        self._lanes = {Tier.HBM: _Lane(streams[0]), Tier.HOST: _Lane(streams[1])}
        self._events: list[torch.cuda.Event] = []
        self._failed: list[Ack] = []
        self._closing = False
        self._lock = Lock()

    @property
    def polled(self) -> bool:
        """Whether copies are on their way that end without waking anybody."""
        return self._unpinned.polled or any(lane.waiting or lane.flying for lane in self._lanes.values())

    def submit(self, transfer: Transfer) -> None:
        """Queues the copies and records their event, unless host slots are still being page-locked. Never blocks."""
        with self._lock:
            lane = self._lanes[transfer.dst]
            if self._closing:
                self._failed.append(_failure(transfer, Failure.CLOSED))
                return
            lane.waiting.append(transfer)
            self._launch_waiting(lane)

    def poll(self) -> list[Ack]:
        """Transfers that ended since the last call. Any thread."""
        acks = self._unpinned.poll()
        with self._lock:
            for lane in self._lanes.values():
                self._launch_waiting(lane)
                while lane.flying and (ack := self._landed(lane.flying[0])) is not None:
                    lane.flying.popleft()
                    acks.append(ack)
            acks += self._failed
            self._failed.clear()
        return acks

    def close(self, timeout_s: float) -> bool:
        """Fails what is not launched, waits for what is; whether all of it ended in time."""
        deadline = monotonic() + timeout_s
        with self._lock:
            self._closing = True
            for lane in self._lanes.values():
                self._failed += [_failure(transfer, Failure.CLOSED) for transfer in lane.waiting]
                lane.waiting.clear()
        ended = self._unpinned.close(timeout_s)
        while not self._idle():
            if monotonic() > deadline:
                return False
            sleep(_POLL_S)
        return ended

    def _idle(self) -> bool:
        """Whether every launched copy has ended; acks stay for ``poll``."""
        with self._lock:
            return all(_happened(flight.ended) for lane in self._lanes.values() for flight in lane.flying)

    def _launch_waiting(self, lane: _Lane) -> None:
        while lane.waiting:
            transfer = lane.waiting[0]
            host = transfer.src_slots if transfer.src == Tier.HOST else transfer.dst_slots
            if max(host, default=0) < self._host.pinned_slots:
                lane.flying.append(self._launch(lane.waiting.popleft(), lane.stream))
            elif not self._host.pinning:
                self._unpinned.submit(lane.waiting.popleft())
            else:
                return

    def _launch(self, transfer: Transfer, stream: torch.cuda.Stream) -> _Flight:
        flight = _Flight(transfer, self._event(), self._event())
        try:
            flight.begun.record(stream)
            try:
                self._copy(transfer, stream)
            finally:
                flight.ended.record(stream)  # also after an error: pieces queued before it may still write
        except RuntimeError:
            flight.broken = True
            _log.exception("copy %s -> %s was not queued", transfer.src.name, transfer.dst.name)
        return flight

    def _copy(self, transfer: Transfer, stream: torch.cuda.Stream) -> None:
        src, dst = (np.array(s, dtype=np.int64) for s in (transfer.src_slots, transfer.dst_slots))
        if transfer.dst == Tier.HBM:
            self._route.load(dst, self._host.addresses(src), stream)
        else:
            self._route.save(src, self._host.addresses(dst), stream)

    def _landed(self, flight: _Flight) -> Ack | None:
        transfer = flight.transfer
        try:
            if not flight.ended.query():
                return None
        except RuntimeError:
            flight.broken = True
            _log.exception("copy %s -> %s failed on the device", transfer.src.name, transfer.dst.name)
        if flight.broken:
            return _failure(transfer, Failure.IO_ERROR)
        seconds = flight.begun.elapsed_time(flight.ended) / 1e3
        self._events += (flight.begun, flight.ended)
        pages = len(transfer.keys)
        return Ack(transfer.id, True, pages, pages * self._page_nbytes, seconds)

    def _event(self) -> torch.cuda.Event:
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)


def _happened(event: torch.cuda.Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device is gone: nothing runs there any more
        return True


def _failure(transfer: Transfer, failure: Failure) -> Ack:
    failures = tuple((i, failure) for i in range(len(transfer.keys)))
    return Ack(transfer.id, False, 0, 0, 0.0, failures)
