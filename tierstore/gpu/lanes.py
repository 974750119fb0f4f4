"""One direction of the link: what waits, what is on its way, and in which order it is launched.

A lane launches on whatever thread asks, one at a time. Nothing waits here; whoever calls holds the engine's lock, but
for ``Lane.launch``, which may take as long as the driver likes.
"""

from __future__ import annotations

import logging
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from tierstore.gpu.driver import has_happened
from tierstore.gpu.jobs import Flight, Job, share_refused
from tierstore.gpu.layer_events import HERE, NOT_YET, Arriving
from tierstore.gpu.waves import Waves
from tierstore.types import Failure, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from tierstore.gpu.geometry import LayerGroups
    from tierstore.gpu.jobs import TimedEvent

_log = logging.getLogger(__name__)

_JUST_NOW_S = 0.005


class Lane:
    """Jobs of one direction. ``layers``: None: pages go whole. ``pieces``: asked of the driver for a page, at once."""

    def __init__(
        self,
        copy: Callable[
            [int | None, NDArray[np.int64], NDArray[np.int64], torch.cuda.Stream], NDArray[np.int32] | None
        ],
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        page_nbytes: int,
        layers: LayerGroups | None,
        pieces: int,
        new_event: Callable[[], TimedEvent],
    ) -> None:
        """``streams``: on which copies begin and end. ``page_nbytes``: as it crosses the link."""
        self.arrived: deque[Job] = deque()
        """Jobs that nobody has looked at."""
        self.launching = False
        self.resting = False
        """Its thread waits to be woken."""
        self.nbytes = 0
        """On their way over the link."""
        self._copy = copy
        self.stream, self._last = streams
        self._page_nbytes = page_nbytes
        self._layers = layers
        self._groups = 1 if layers is None else len(layers)
        self._sizes = [page_nbytes] if layers is None else layers.divide(page_nbytes)
        self._pieces = pieces
        self._new_event = new_event
        self._waves: Waves[Job] = Waves(self._groups)
        self._flying: deque[Flight] = deque()
        self._loading: dict[int, Job] = {}
        """Jobs to HBM that have not come to their end, by transfer."""
        self._spare: list[TimedEvent] = []
        self._number = 0
        self._added = 0.0

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
        self._waves.add(job, job.pages)
        self._added = monotonic()
        if job.transfer.dst == Tier.HBM:
            self._loading[job.transfer.id] = job

    @property
    def growing(self) -> bool:
        """Whether jobs came just now, so that more are likely to come."""
        return monotonic() - self._added < _JUST_NOW_S

    @property
    def may_be_overtaken(self) -> bool:
        """Whether more of what came just now would go before what is to be launched next."""
        return self._waves.open and self._waves.first()[1] > 0 and self.growing

    def fills(self, most_nbytes: int, most_pieces: int) -> bool:
        """Whether what waits is enough for a launch of that size."""
        return self._waves.size_at_hand() >= self._most_pages(most_nbytes, most_pieces)

    @property
    def next_pieces(self) -> int:
        """What the driver is asked for, at least, by what is to be launched next."""
        return self._waves.first()[0].pages * self._pieces

    def pieces_of(self, flight: Flight) -> int:
        """What the driver is asked for by it, at most."""
        return sum(job.pages for job in flight.jobs) * self._pieces

    def take(self, most_nbytes: int, most_pieces: int) -> Flight:
        """What is to be launched next: so much at most, but one transfer at least."""
        jobs, group = self._waves.take(self._most_pages(most_nbytes, most_pieces))
        return self._flight(jobs, group if self._groups > 1 else None)

    def _most_pages(self, nbytes: int, pieces: int) -> int:
        pages = nbytes // max(1, self._sizes[self._waves.first()[1]])
        return min(pages, pieces // self._pieces) if self._pieces else pages

    @property
    def alone(self) -> Job | None:
        """The job that waits, if there is only one and nothing of it was launched."""
        job, _ = self._waves.first()
        return None if len(self._waves) > 1 or job.flights or job.airborne else job

    def take_whole(self) -> Flight:
        """``alone``, all of its layers."""
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
                # Also after an error: pieces queued before it may still write.
                flight.ended.record(self._last)
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
            seconds = _seconds(flight)
            pages = sum(job.pages for job in flight.jobs)
            if not flight.broken:
                share_refused(flight)
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
        """Nothing more is launched: jobs of which nothing is on its way. The others fail once that has ended."""
        left = self._waves.clear()
        for job in left:
            job.failure = Failure.CLOSED
        over = [job for job in left if not job.airborne] + list(self.arrived)
        self.arrived.clear()
        for job in over:
            job.failure = Failure.CLOSED
            self._forget(job)
        return over

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
        nbytes = sum(job.pages for job in jobs) * (self._page_nbytes if group is None else self._sizes[group])
        self._number += 1
        for job in jobs:
            job.airborne += 1
        return Flight(self._number, jobs, group, nbytes, self._event(), self._event())

    def _event(self) -> TimedEvent:
        return self._spare.pop() if self._spare else self._new_event()

    def _has_ended(self, flight: Flight) -> bool:
        try:
            return has_happened(flight.ended)
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


def _seconds(flight: Flight) -> float:
    """How long it took; a device that cannot tell has failed it."""
    if not flight.broken:
        try:
            return flight.begun.elapsed_time(flight.ended) / 1e3
        except RuntimeError:
            flight.broken = True
            _log.exception("the device does not tell how long a copy took")
    return 0.0


def _happened(event: TimedEvent) -> bool:
    try:
        return has_happened(event)
    except RuntimeError:  # the device is gone: nothing runs there any more
        return True
