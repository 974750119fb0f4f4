"""The queue of copies: decides in which order copies are launched, and how far ahead of the link.

``Waves`` orders the layer groups of many loads. ``Pace`` limits how much is launched at once and ahead of the
link. A ``Lane`` is one direction of the link: the transfers (``Job``) that wait, and the launches
(``Flight``) that are in flight. A lane launches on the thread that calls it, one flight at a time.
``Lane.launch`` may block in the driver. Everything else returns at once, and the caller must hold the
engine's lock for it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from tierstore.gpu.driver import has_happened
from tierstore.gpu.events import HERE, NOT_YET, Arriving, TimedEvent
from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from tierstore.codecs.host_format import HostFormat
    from tierstore.gpu.layer_groups import LayerGroups

Item = TypeVar("Item")


@dataclass(slots=True)
class _Entry(Generic[Item]):
    job: Item
    size: int


class _Row(Generic[Item]):
    """Jobs that get the same layer group next, oldest first, and their total size."""

    def __init__(self) -> None:
        self.entries: deque[_Entry[Item]] = deque()
        self.size = 0

    def add(self, entry: _Entry[Item]) -> None:
        self.entries.append(entry)
        self.size += entry.size

    def pop(self) -> _Entry[Item]:
        entry = self.entries.popleft()
        self.size -= entry.size
        return entry

    def remove(self, job: Item) -> int:
        left = [entry for entry in self.entries if entry.job is not job]
        removed = len(self.entries) - len(left)
        self.entries, self.size = deque(left), sum(entry.size for entry in left)
        return removed


class Waves(Generic[Item]):
    """The order of the layer groups of many jobs: all jobs of a wave get a group before any of them gets the next.

    A new job joins the current wave, with its first group, as long as no job of the wave has more than half
    of its groups. Later jobs wait for the next wave, so that no job is overtaken forever. Jobs get their last
    group in the order in which they were added. The cost of ``add`` and ``take`` does not grow with the
    number of waiting jobs. Not thread-safe.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._wave: list[_Row[Item]] = [_Row() for _ in range(groups)]
        """Jobs of the wave by the group that they get next. No job is behind one that was added after it."""
        self._later: _Row[Item] = _Row()
        self._handed_out = 0
        """Number of groups that the most advanced job of the wave has got."""
        self._size = 0
        """Number of jobs in the wave."""

    def __len__(self) -> int:
        """Return the number of jobs that have not got all of their groups."""
        return self._size + len(self._later.entries)

    @property
    def open(self) -> bool:
        """Return whether a new job would join the current wave."""
        return not self._later.entries and self._handed_out * 2 <= self._groups

    def add(self, job: Item, size: int) -> None:
        """Add a job. ``size`` is the size of one of its groups, in the caller's unit."""
        if self.open:
            self._size += 1
            self._wave[0].add(_Entry(job, size))
        else:
            self._later.add(_Entry(job, size))

    def first(self) -> tuple[Item, int]:
        """Return the first job that ``take`` would return, and its next group. IndexError if empty."""
        row, group = self._at_hand()
        return row.entries[0].job, group

    def size_at_hand(self) -> int:
        """Return the total size of the jobs from which ``take`` takes. IndexError if empty."""
        return self._at_hand()[0].size

    def take(self, most: int) -> tuple[list[Item], int]:
        """Return the next jobs and the group that they get now.

        Their total size is at most ``most``, except that one job is always returned. IndexError if empty.
        """
        row, group = self._at_hand()
        if row is self._later:
            self._size = len(row.entries)
            self._wave[0], self._later = row, _Row()
        taken = [row.pop()]
        total = taken[0].size
        while row.entries and total + row.entries[0].size <= most:
            taken.append(row.pop())
            total += taken[-1].size
        self._handed_out = max(self._handed_out, group + 1)
        if group + 1 < self._groups:
            for entry in taken:
                self._wave[group + 1].add(entry)
        else:
            self._leave(len(taken))
        return [entry.job for entry in taken], group

    def take_whole(self) -> Item:
        """Remove and return the only job, which gets all of its groups at once.

        It must not have got any before.
        """
        _, group = self._at_hand()
        assert not group
        [job] = self.clear()
        return job

    def remove(self, job: Item) -> None:
        """Remove a job, so that it gets no more groups. No error if the job is not waiting."""
        self._leave(sum(row.remove(job) for row in self._wave))
        self._later.remove(job)

    def clear(self) -> list[Item]:
        """Remove and return all jobs, in the order in which they were added."""
        rows = [*reversed(self._wave), self._later]
        jobs = [entry.job for row in rows for entry in row.entries]
        self._wave, self._later = [_Row() for _ in self._wave], _Row()
        self._leave(self._size)
        return jobs

    def _at_hand(self) -> tuple[_Row[Item], int]:
        """Return the row of jobs from which to take next, and their group. IndexError if empty."""
        for group, row in enumerate(self._wave):
            if row.entries:
                return row, group
        if not self._later.entries:
            raise IndexError("no job is waiting")
        return self._later, 0

    def _leave(self, jobs: int) -> None:
        self._size -= jobs
        if not self._size:
            self._handed_out = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits on how much is launched at once and ahead of the link.

    All limits but ``pieces`` and ``at_once`` are in bytes that cross the link.
    """

    whole: int = 16 << 20
    """A transfer up to this size is not cut into layer groups if no other transfer waits."""
    together: int = 128 << 20
    """Most bytes of one launch, which takes the same layer group of several transfers.

    One transfer may exceed it.
    """
    pieces: int = 256
    """Most copies that one launch, or one call, asks the driver for.

    The lane's thread launches a transfer with more, because the driver takes long for it.
    """
    ahead: int = 512 << 20
    """While this much is in flight, some milliseconds of the link, nothing more is launched.

    A quarter of it is the limit if transfers are likely to come that would go before the next launch, because
    they must wait for everything in flight.
    """
    enough: int = 64 << 20
    """While this much is in flight, a launch may wait for more transfers that need the same layer group."""
    behind: int = 256 << 20
    """While less than this is in flight, the lane's thread launches if the engine was not called for 10 ms.

    Below a quarter of it the calls do not keep the link busy, and the thread launches in any case, unless
    transfers were added just now.
    """
    at_once: int = 4
    """Most launches in one call of ``poll``.

    A ``submit`` makes at most one, since its caller has more to submit.
    """


AS_THEY_ARE = Pace()
ENCODED = Pace(pieces=512)
"""For encoded pages, whose layer groups consist of four pieces where those of other pages consist of one."""

MAPPED = Pace(together=512 << 20, ahead=2 << 30, enough=128 << 20, behind=1 << 30, at_once=8)
"""For encoded pages that a kernel copies, where a launch costs the same for any number of pages.

So launches are few and large. Up to 40 ms of the link are launched ahead, because the launching thread may
have to wait that long for its turn. The price is that transfers submitted later wait for all of it.
"""


def pace_of(held: HostFormat, pieces: int) -> Pace:
    """Return the pace for the format in which host memory holds pages.

    ``pieces`` is the number of copies that one page of a layer group asks the driver for, 0 if a kernel
    copies.
    """
    if not held.encoded:
        return AS_THEY_ARE
    return ENCODED if pieces else MAPPED


@dataclass(eq=False)
class Job:
    """A transfer and its progress."""

    transfer: Transfer
    device_slots: NDArray[np.int64]
    host_slots: NDArray[np.int64]
    flights: list[Flight] = field(default_factory=list)
    """The flight of each layer group that was launched so far."""
    airborne: int = 0
    """Number of its flights that are being launched or have not landed."""
    seconds: float = 0.0
    failure: Failure | None = None
    refused: set[int] = field(default_factory=set)
    """Positions in the transfer of the pages that the codec could not encode or decode."""

    @classmethod
    def of(cls, transfer: Transfer) -> Job:
        """Return a job for a new transfer."""
        src, dst = (np.fromiter(s, np.int64, len(s)) for s in (transfer.src_slots, transfer.dst_slots))
        return cls(transfer, dst, src) if transfer.dst == Tier.HBM else cls(transfer, src, dst)

    @cached_property
    def into(self) -> frozenset[int]:
        """Return the slots that the transfer writes."""
        return frozenset(self.transfer.dst_slots)

    @property
    def pages(self) -> int:
        """Return the number of pages that the transfer copies."""
        return len(self.host_slots)


@dataclass(slots=True, eq=False)
class Flight:
    """Copies launched together: those of layer group ``group``, or of all layers if it is None."""

    number: int
    jobs: list[Job]
    group: int | None
    nbytes: int
    begun: TimedEvent
    ended: TimedEvent
    broken: bool = False
    landed: bool = False
    lent: bool = False
    """Whether a caller holds ``ended``, so that the event must not be reused."""
    refused: NDArray[np.int32] | None = None
    """The flags that ``copy_routes.Route`` returned. Valid once the flight has landed."""


def ack_of(job: Job, page_nbytes: int) -> Ack:
    """Return the ack of a job that has ended."""
    transfer = job.transfer
    if job.failure is not None:
        failures = tuple((i, job.failure) for i in range(len(transfer.keys)))
        return Ack(transfer.id, False, 0, 0, 0.0, failures)
    why = Failure.UNFIT if transfer.dst == Tier.HOST else Failure.INTEGRITY
    refused = tuple((i, why) for i in sorted(job.refused))
    pages = len(transfer.keys) - len(refused)
    return Ack(transfer.id, not refused, pages, pages * page_nbytes, job.seconds, refused)


def share_refused(flight: Flight) -> None:
    """Add to ``refused`` of each job of a landed flight the pages that were not copied."""
    if flight.refused is None or not flight.refused.any():
        return
    first = 0
    for job in flight.jobs:
        job.refused.update(np.flatnonzero(flight.refused[first : first + job.pages]).tolist())
        first += job.pages


_log = logging.getLogger("tierstore.gpu.lanes")

_JUST_NOW_S = 0.005


class Lane:
    """One direction of the link: the jobs that wait, and the copies that are in flight."""

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
        """Set how copies are queued.

        Args:
            copy: Queues copies. It is called with a layer group (None for all layers), device slots, host
                slots and a stream, and returns flags as ``copy_routes.Route`` does.
            streams: The streams on which copies begin and end.
            page_nbytes: Bytes of a page as it crosses the link.
            layers: The layer groups that pages are cut into. None if pages are copied whole.
            pieces: Number of copies that each page of a launch asks the driver for.
            new_event: Makes the events around a flight.
        """
        self.arrived: deque[Job] = deque()
        """Submitted jobs that the engine has not passed to ``add`` yet."""
        self.launching = False
        """Whether the lane's thread is launching."""
        self.resting = False
        """Whether the lane's thread waits to be woken."""
        self.nbytes = 0
        """Bytes in flight."""
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
        """Jobs to HBM that have not ended, by transfer ID."""
        self._spare: list[TimedEvent] = []
        self._number = 0
        self._added = 0.0

    @property
    def waiting(self) -> int:
        """Return the number of jobs that are not launched completely."""
        return len(self._waves)

    @property
    def busy(self) -> bool:
        """Return whether any job waits or is in flight."""
        return bool(self.arrived or self._waves or self._flying or self.launching)

    def add(self, job: Job) -> None:
        """Add a job whose host memory is page-locked, for a launch in its turn."""
        self._waves.add(job, job.pages)
        self._added = monotonic()
        if job.transfer.dst == Tier.HBM:
            self._loading[job.transfer.id] = job

    @property
    def growing(self) -> bool:
        """Return whether a job was added within the last 5 ms, so that more are likely to come."""
        return monotonic() - self._added < _JUST_NOW_S

    @property
    def may_be_overtaken(self) -> bool:
        """Return whether more jobs are likely to come now and would be launched before the next one."""
        return self._waves.open and self._waves.first()[1] > 0 and self.growing

    def fills(self, most_nbytes: int, most_pieces: int) -> bool:
        """Return whether the jobs that wait for the next layer group fill a launch of this size."""
        return self._waves.size_at_hand() >= self._most_pages(most_nbytes, most_pieces)

    @property
    def next_pieces(self) -> int:
        """Return the number of copies that the next launch asks the driver for at least."""
        return self._waves.first()[0].pages * self._pieces

    def pieces_of(self, flight: Flight) -> int:
        """Return the number of copies that the flight asks the driver for at most."""
        return sum(job.pages for job in flight.jobs) * self._pieces

    def take(self, most_nbytes: int, most_pieces: int) -> Flight:
        """Take the next jobs and return their flight, within both limits but of at least one transfer."""
        jobs, group = self._waves.take(self._most_pages(most_nbytes, most_pieces))
        return self._flight(jobs, group if self._groups > 1 else None)

    def _most_pages(self, nbytes: int, pieces: int) -> int:
        pages = nbytes // max(1, self._sizes[self._waves.first()[1]])
        return min(pages, pieces // self._pieces) if self._pieces else pages

    @property
    def alone(self) -> Job | None:
        """Return the waiting job if there is only one and no layer group of it was launched, else None."""
        job, _ = self._waves.first()
        return None if len(self._waves) > 1 or job.flights or job.airborne else job

    def take_whole(self) -> Flight:
        """Take the only waiting job (see ``alone``) and return a flight with all of its layers."""
        return self._flight([self._waves.take_whole()], None)

    def launch(self, flight: Flight) -> None:
        """Queue the copies of a flight and record its events before and after them.

        May block in the driver.
        """
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
                # Recorded after an error too: pieces that were queued before the error may still write.
                flight.ended.record(self._last)
        except RuntimeError:
            flight.broken = True
            transfer = first.transfer
            _log.exception("copy %s -> %s was not queued", transfer.src.name, transfer.dst.name)

    def launched(self, flight: Flight) -> None:
        """Note that ``launch`` has queued a flight."""
        self._flying.append(flight)
        self.nbytes += flight.nbytes
        for job in flight.jobs:
            job.flights += [flight] * (self._groups if flight.group is None else 1)
            if flight.broken:
                self._fail(job, Failure.IO_ERROR)

    def land(self) -> list[Job]:
        """Remove the flights that have ended, and return the jobs that ended with them."""
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
        """Fail all jobs that are not launched completely, and return those with no copies in flight.

        ``land`` returns the others when their copies have ended.
        """
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
        """Return whether all launched copies have ended. Their flights remain until ``land`` removes them."""
        return not self.launching and all(_happened(flight.ended) for flight in self._flying)

    def arriving(self, slots: set[int], layer: int) -> tuple[Arriving, set[int]]:
        """Return the progress of this layer in the slots that this lane loads, and the remaining slots."""
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
    """Return the seconds that a flight took.

    If the device cannot tell, mark the flight as broken and return 0.
    """
    if not flight.broken:
        try:
            return flight.begun.elapsed_time(flight.ended) / 1e3
        except RuntimeError:
            flight.broken = True
            _log.exception("the device cannot tell how long a copy took")
    return 0.0


def _happened(event: TimedEvent) -> bool:
    try:
        return has_happened(event)
    except RuntimeError:  # the device has failed, so no copy runs there any more
        return True
