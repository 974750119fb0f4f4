"""One direction of the link: what waits, what is on its way, and in which order it is launched.

A lane launches on whatever thread asks, one at a time. Nothing waits here; whoever calls holds the engine's lock, but
for ``Lane.launch``, which may take as long as the driver likes.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.gpu.arriving import HERE, NOT_YET, Arriving
from tierstore.gpu.waves import Waves
from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from tierstore.gpu.layer_groups import LayerGroups

_log = logging.getLogger(__name__)


class TimedEvent(Protocol):
    """An event of a stream that knows when it happened, such as ``torch.cuda.Event``."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """Happens when the stream gets there."""
        ...

    def query(self) -> bool:
        """Whether it has happened. RuntimeError when the device has failed."""
        ...

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds from this one to ``end``; both have happened."""
        ...


@dataclass(eq=False)
class Job:
    """A transfer and how far it is. ``flights``: what carries each layer group launched so far."""

    transfer: Transfer
    device_slots: NDArray[np.int64]
    host_slots: NDArray[np.int64]
    flights: list[Flight] = field(default_factory=list)
    airborne: int = 0
    """Flights of it that are being launched or have not landed."""
    seconds: float = 0.0
    failure: Failure | None = None
    refused: set[int] = field(default_factory=set)
    """Positions of pages that did not arrive as their form is wrong."""

    @classmethod
    def of(cls, transfer: Transfer) -> Job:
        """Nothing of it launched."""
        src, dst = (np.fromiter(s, np.int64, len(s)) for s in (transfer.src_slots, transfer.dst_slots))
        return cls(transfer, dst, src) if transfer.dst == Tier.HBM else cls(transfer, src, dst)

    @cached_property
    def into(self) -> frozenset[int]:
        """The slots it writes."""
        return frozenset(self.transfer.dst_slots)

    @property
    def pages(self) -> int:
        """How many it moves."""
        return len(self.host_slots)


@dataclass(slots=True, eq=False)
class Flight:
    """Copies launched together. ``group`` None: all layers."""

    number: int
    jobs: list[Job]
    group: int | None
    nbytes: int
    begun: TimedEvent
    ended: TimedEvent
    broken: bool = False
    landed: bool = False
    lent: bool = False
    """A caller holds the event that ends it."""
    refused: NDArray[np.int32] | None = None
    """See ``routes.Route``; to be looked at when it has landed."""


class Lane:
    """Jobs of one direction. ``layers``: None: pages go whole."""

    def __init__(
        self,
        copy: Callable[
            [int | None, NDArray[np.int64], NDArray[np.int64], torch.cuda.Stream], NDArray[np.int32] | None
        ],
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        page_nbytes: int,
        layers: LayerGroups | None,
        new_event: Callable[[], TimedEvent],
    ) -> None:
        """``streams``: on which copies begin and end."""
        self.arrived: deque[Job] = deque()
        """Jobs that nobody has looked at."""
        self.launching = False
        self.nbytes = 0
        """On their way."""
        self._copy = copy
        self.stream, self._last = streams
        self._page_nbytes = page_nbytes
        self._layers = layers
        self._groups = 1 if layers is None else len(layers)
        self._new_event = new_event
        self._waves: Waves[Job] = Waves(self._groups)
        self._flying: deque[Flight] = deque()
        self._loading: dict[int, Job] = {}
        """Jobs to HBM that have not come to their end, by transfer."""
        self._spare: list[TimedEvent] = []
        self._number = 0

    @property
    def waiting(self) -> int:
        """Jobs of which something is still to be launched."""
        return len(self._waves)

    @property
    def busy(self) -> bool:
        """Whether anything waits or is on its way."""
        return bool(self.arrived or self._waves or self._flying or self.launching)

    def add(self, job: Job) -> None:
        """Its memory is page-locked: it may be launched in its turn."""
        self._waves.add(job, job.pages * self._page_nbytes // self._groups)
        if job.transfer.dst == Tier.HBM:
            self._loading[job.transfer.id] = job

    def take(self, most_nbytes: int) -> Flight:
        """What is to be launched next, about so many bytes."""
        jobs, group = self._waves.take(most_nbytes)
        return self._flight(jobs, group if self._groups > 1 else None)

    def take_whole(self) -> Flight:
        """The only job that waits, untouched so far, all of its layers."""
        return self._flight([self._waves.take_whole()], None)

    def launch(self, flight: Flight) -> None:
        """Queues its copies and the event after them."""
        first = flight.jobs[0]
        slots, host = first.device_slots, first.host_slots
        if len(flight.jobs) > 1:
            slots = np.concatenate([job.device_slots for job in flight.jobs])
            host = np.concatenate([job.host_slots for job in flight.jobs])
        try:
            flight.begun.record(self.stream)
            try:
                flight.refused = self._copy(flight.group, slots, host, self.stream)
            finally:
                flight.ended.record(
                    self._last
                )  # also after an error: pieces queued before it may still write
        except RuntimeError:
            flight.broken = True
            transfer = first.transfer
            _log.exception("copy %s -> %s was not queued", transfer.src.name, transfer.dst.name)

    def launched(self, flight: Flight) -> None:
        """It is on its way, and its events are recorded."""
        self._flying.append(flight)
        self.nbytes += flight.nbytes
        for job in flight.jobs:
            job.flights += [flight] * (self._groups if flight.group is None else 1)
            if flight.broken:
                self._fail(job, Failure.IO_ERROR)

    def land(self) -> list[Job]:
        """Takes in what has ended; jobs that have come to their end."""
        ended: list[Job] = []
        while self._flying and self._has_ended(self._flying[0]):
            flight = self._flying.popleft()
            flight.landed = True
            self.nbytes -= flight.nbytes
            seconds = 0.0 if flight.broken else flight.begun.elapsed_time(flight.ended) / 1e3
            pages = sum(job.pages for job in flight.jobs)
            if not flight.broken:
                _share_refused(flight)
            for job in flight.jobs:
                job.airborne -= 1
                job.seconds += seconds * job.pages / max(1, pages)
                if flight.broken:
                    self._fail(job, Failure.IO_ERROR)
                if not job.airborne and (job.failure is not None or len(job.flights) == self._groups):
                    ended.append(job)
            if not flight.broken and not flight.lent:
                self._spare += (flight.begun, flight.ended)
        for job in ended:
            self._forget(job)
        return ended

    def give_up(self) -> list[Job]:
        """Nothing more is launched: jobs of which nothing was. The others fail once what was launched has ended."""
        left = self._waves.clear()
        for job in left:
            job.failure = Failure.CLOSED
        untouched = [job for job in left if not (job.flights or job.airborne)] + list(self.arrived)
        self.arrived.clear()
        for job in untouched:
            job.failure = Failure.CLOSED
            self._forget(job)
        return untouched

    def idle(self) -> bool:
        """Whether nothing launched is still running; it stays for ``land``."""
        return not self.launching and all(_happened(flight.ended) for flight in self._flying)

    def arriving(self, slots: set[int], layer: int) -> tuple[Arriving, set[int]]:
        """How far this layer of those of the slots is that are loaded from here; and the other slots."""
        group = 0 if self._layers is None else self._layers.holding(layer)
        last: Flight | None = None
        left = set(slots)
        for job in self._loading.values():
            if left.isdisjoint(job.into):
                continue
            left -= job.into
            if job.failure is not None or len(job.flights) <= group:
                return NOT_YET, left
            flight = job.flights[group]
            if not flight.landed and (last is None or flight.number > last.number):
                last = flight
        if last is None:
            return HERE, left
        last.lent = True
        return Arriving(True, last.ended), left

    def _flight(self, jobs: list[Job], group: int | None) -> Flight:
        nbytes = sum(job.pages for job in jobs) * self._page_nbytes
        if group is not None:
            nbytes //= self._groups
        self._number += 1
        for job in jobs:
            job.airborne += 1
        return Flight(self._number, jobs, group, nbytes, self._event(), self._event())

    def _event(self) -> TimedEvent:
        return self._spare.pop() if self._spare else self._new_event()

    def _has_ended(self, flight: Flight) -> bool:
        try:
            return flight.ended.query()
        except RuntimeError:
            flight.broken = True
            transfer = flight.jobs[0].transfer
            _log.exception("copy %s -> %s failed on the device", transfer.src.name, transfer.dst.name)
            return True

    def _fail(self, job: Job, failure: Failure) -> None:
        job.failure = job.failure or failure
        self._waves.remove(job)

    def _forget(self, job: Job) -> None:
        self._loading.pop(job.transfer.id, None)


def ack_of(job: Job, page_nbytes: int) -> Ack:
    """What became of a job that has come to its end."""
    transfer = job.transfer
    if job.failure is not None:
        failures = tuple((i, job.failure) for i in range(len(transfer.keys)))
        return Ack(transfer.id, False, 0, 0, 0.0, failures)
    why = Failure.UNFIT if transfer.dst == Tier.HOST else Failure.INTEGRITY
    refused = tuple((i, why) for i in sorted(job.refused))
    pages = len(transfer.keys) - len(refused)
    return Ack(transfer.id, not refused, pages, pages * page_nbytes, job.seconds, refused)


def _share_refused(flight: Flight) -> None:
    """Tells each job of a flight that has landed which of its pages did not arrive."""
    if flight.refused is None or not flight.refused.any():
        return
    first = 0
    for job in flight.jobs:
        job.refused.update(np.flatnonzero(flight.refused[first : first + job.pages]).tolist())
        first += job.pages


def _happened(event: TimedEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device is gone: nothing runs there any more
        return True
