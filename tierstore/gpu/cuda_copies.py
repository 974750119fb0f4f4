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
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

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


class TimedEvent(Protocol):
    """An event of a stream that knows when it happened, such as ``torch.cuda.Event``."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """Happens when the stream gets there."""
        ...

    def query(self) -> bool:
        """Whether it has happened. RuntimeError when the device has failed."""
        ...

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds from this one to ``end``; both have happened."""
        ...


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    device_slots: NDArray[np.int64]
    host_slots: NDArray[np.int64]


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    begun: TimedEvent
    ended: TimedEvent
    broken: bool = False


@dataclass(slots=True)
class _Lane:
    stream: torch.cuda.Stream
    last: torch.cuda.Stream
    """Where a copy ends."""
    waiting: deque[_Job] = field(default_factory=deque)
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
        new_event: Callable[[], TimedEvent] | None = None,
        loads_end_on: torch.cuda.Stream | None = None,
    ) -> None:
        """``streams``: to the device, to the host. ``new_event``: torch's where none is given.

        ``loads_end_on``: the stream of the last work of a load where it is not the one that it begins on.
        """
        self._new_event = new_event or _cuda_event
        self._route = route
        self._host = host
        self._page_nbytes = page_nbytes
        self._unpinned = unpinned
        up, down = streams
        self._lanes = {Tier.HBM: _Lane(up, loads_end_on or up), Tier.HOST: _Lane(down, down)}
        self._events: list[TimedEvent] = []
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
            lane.waiting.append(_job(transfer))
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
                self._failed += [_failure(job.transfer, Failure.CLOSED) for job in lane.waiting]
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
            # In this order: pinning may end in between.
            pinning, pinned = self._host.pinning, self._host.pinned_slots
            if lane.waiting[0].host_slots.max(initial=0) < pinned:
                lane.flying.append(self._launch(lane.waiting.popleft(), lane))
            elif not pinning:
                self._unpinned.submit(lane.waiting.popleft().transfer)
            else:
                return

    def _launch(self, job: _Job, lane: _Lane) -> _Flight:
        transfer = job.transfer
        flight = _Flight(transfer, self._event(), self._event())
        try:
            flight.begun.record(lane.stream)
            try:
                self._copy(job, lane.stream)
            finally:
                flight.ended.record(lane.last)  # also after an error: pieces queued before it may still write
        except RuntimeError:
            flight.broken = True
            _log.exception("copy %s -> %s was not queued", transfer.src.name, transfer.dst.name)
        return flight

    def _copy(self, job: _Job, stream: torch.cuda.Stream) -> None:
        copy = self._route.load if job.transfer.dst == Tier.HBM else self._route.save
        copy(job.device_slots, self._host.addresses(job.host_slots), stream)

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

    def _event(self) -> TimedEvent:
        return self._events.pop() if self._events else self._new_event()


def _cuda_event() -> TimedEvent:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return cast("TimedEvent", event)  # its methods are those, under other names of arguments


def _job(transfer: Transfer) -> _Job:
    src, dst = (np.fromiter(s, np.int64, len(s)) for s in (transfer.src_slots, transfer.dst_slots))
    return _Job(transfer, dst, src) if transfer.dst == Tier.HBM else _Job(transfer, src, dst)


def _happened(event: TimedEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device is gone: nothing runs there any more
        return True


def _failure(transfer: Transfer, failure: Failure) -> Ack:
    failures = tuple((i, failure) for i in range(len(transfer.keys)))
    return Ack(transfer.id, False, 0, 0, 0.0, failures)
