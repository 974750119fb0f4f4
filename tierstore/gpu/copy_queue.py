"""The copy queue: decides in which order copies are launched, and how many may be in flight.

``Waves`` orders the layer groups of many loads. ``Pace`` limits the size of launches and the number of bytes
in flight. A ``Lane`` is one direction of the link, with its waiting transfers (``Job``) and the copies in
flight (``Flight``). A lane launches on the thread that calls it, one flight at a time. ``Lane.launch`` may
block in the driver, and may be called without the engine's lock. All other methods return immediately, and
the caller must hold that lock.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
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
    """Jobs whose next layer group is the same, oldest first, and their total size."""

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
    """Orders the layer groups of many jobs.

    Jobs in a wave get their groups in turn: all jobs get a group before any of them gets the next one. A new
    job joins the current wave and starts with its first group. If a job in the wave already has more than half
    of its groups, the new job waits for the next wave instead, so that no job is overtaken indefinitely. Jobs
    get their last group in the order in which they were added. The cost of ``add`` and ``take`` does not
    depend on the number of waiting jobs. Not thread-safe.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._wave: list[_Row[Item]] = [_Row() for _ in range(groups)]
        """The jobs in the wave, by the index of the group that they get next.

        No job has received fewer groups than a job that was added later.
        """
        self._later: _Row[Item] = _Row()
        self._handed_out = 0
        """Number of groups that the most advanced job in the wave has received."""
        self._size = 0
        """Number of jobs in the wave."""

    def __len__(self) -> int:
        """Return the number of jobs that have not received all of their groups."""
        return self._size + len(self._later.entries)

    @property
    def open(self) -> bool:
        """Return whether a new job would join the current wave."""
        return not self._later.entries and self._handed_out * 2 <= self._groups

    def add(self, job: Item, size: int) -> None:
        """Add a job. ``size`` is the size of one of its groups, in a unit of the caller's choice."""
        if self.open:
            self._size += 1
            self._wave[0].add(_Entry(job, size))
        else:
            self._later.add(_Entry(job, size))

    def first(self) -> tuple[Item, int]:
        """Return the first job that ``take`` would return, and the index of the group that the job gets next.

        Raises:
            IndexError: No job is waiting.
        """
        row, group = self._at_hand()
        return row.entries[0].job, group

    def size_at_hand(self) -> int:
        """Return the total size of the jobs that ``take`` would choose from.

        Raises:
            IndexError: No job is waiting.
        """
        return self._at_hand()[0].size

    def take(self, most: int) -> tuple[list[Item], int]:
        """Give the next jobs one group each. Return these jobs and the index of the group.

        The total size of the jobs is at most ``most``, but at least one job is returned. Jobs that receive
        their last group are removed.

        Raises:
            IndexError: No job is waiting.
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
        """Give the only job all of its groups at once, remove the job, and return it.

        The job must not have received a group before.
        """
        _, group = self._at_hand()
        assert not group
        [job] = self.clear()
        return job

    def remove(self, job: Item) -> None:
        """Remove a job, so that it receives no more groups. Does nothing if the job is not waiting."""
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
        """Return the jobs from which ``take`` chooses, and the index of the layer group that they get next."""
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
    """Limits on the size of launches and on the amount of work in flight.

    All limits except ``pieces`` and ``at_once`` are in bytes, as transferred.
    """

    whole: int = 16 << 20
    """A transfer of up to this size is not divided into layer groups if no other transfer is waiting."""
    together: int = 128 << 20
    """Maximum size of one launch, which copies the same layer group for several transfers.

    A single transfer may exceed it.
    """
    pieces: int = 256
    """Maximum number of driver copies per launch, and per call to ``submit`` or ``poll`` in each direction.

    A transfer that needs more is launched by the lane's thread, because the driver needs a long time to queue it.
    """
    ahead: int = 512 << 20
    """Nothing is launched while at least this much is in flight. The link transfers it in several milliseconds.

    While new transfers are likely to arrive and to be launched before the next waiting one, the limit is a
    quarter of this value, because a new transfer has to wait for everything in flight.
    """
    enough: int = 64 << 20
    """While at least this much is in flight, a launch may wait for more transfers that need its layer group."""
    behind: int = 256 << 20
    """The lane's thread launches if less than this is in flight and the engine has not been called for 10 ms.

    If less than a quarter of this is in flight, callers do not keep the link busy. The thread then launches
    even if the engine was just called, but not within 5 ms after a transfer was added.
    """
    at_once: int = 4
    """Maximum number of launches per call to ``poll``.

    ``submit`` launches at most once, because its caller usually has more to submit.
    """


AS_THEY_ARE = Pace()
ENCODED = Pace(pieces=512)
"""Limits for encoded pages that the driver copies.

A layer group of an encoded page is copied as four pieces, where an unencoded page needs only one.
"""

MAPPED = Pace(together=512 << 20, ahead=2 << 30, enough=128 << 20, behind=1 << 30, at_once=8)
"""Limits for encoded pages that a kernel copies. A launch then costs the same for any number of pages.

Launches are therefore few and large. Up to 40 ms of transfer time may be in flight, because the launching
thread may have to wait that long for the GIL. The drawback is that a new transfer has to wait for everything
in flight.
"""


WHOLE = Pace(ahead=2 << 30, enough=512 << 20, at_once=16)
"""Limits for unencoded pages that are not divided into layer groups.

No later transfer can get ahead of a launched one, so a deep queue on the link delays nothing. Callers launch
everything that they submit, and the lane's thread, which would compete with them for the GIL, stays asleep. A launch
waits for more transfers only while the link has work for longer than ``_JUST_NOW_S``. Otherwise the link would be idle
after the last transfers of a step, until the next call.
"""


def pace_of(held: HostFormat, pieces: int, groups: int) -> Pace:
    """Return the limits for a host memory format.

    ``pieces`` is the number of driver copies per page and layer group, or 0 if a kernel does the copying.
    ``groups`` is the number of layer groups into which pages are divided.
    """
    if not held.encoded:
        return AS_THEY_ARE if groups > 1 else WHOLE
    return ENCODED if pieces else MAPPED


@dataclass(eq=False)
class Job:
    """A transfer and its progress."""

    transfer: Transfer
    device_slots: NDArray[np.int64]
    host_slots: NDArray[np.int64]
    flights: list[Flight] = field(default_factory=list)
    """One entry per launched layer group: the flight that copies it."""
    airborne: int = 0
    """Number of flights of this job that are being launched or have not landed yet."""
    seconds: float = 0.0
    failure: Failure | None = None
    refused: set[int] = field(default_factory=set)
    """Positions, within the transfer, of pages that the codec could not encode or decode."""

    @classmethod
    def of(cls, transfer: Transfer) -> Job:
        """Create a job for a transfer in either direction."""
        src, dst = (np.fromiter(s, np.int64, len(s)) for s in (transfer.src_slots, transfer.dst_slots))
        return cls(transfer, dst, src) if transfer.dst == Tier.HBM else cls(transfer, src, dst)

    @cached_property
    def into(self) -> frozenset[int]:
        """Return the slots that the transfer writes to."""
        return frozenset(self.transfer.dst_slots)

    @property
    def pages(self) -> int:
        """Return the number of pages in the transfer."""
        return len(self.host_slots)


@dataclass(slots=True, eq=False)
class Flight:
    """Copies of one or more jobs that are launched together.

    They copy the same layer group of every page, or all layers if ``group`` is None.
    """

    number: int
    jobs: list[Job]
    group: int | None
    nbytes: int
    begun: TimedEvent
    ended: TimedEvent
    broken: bool = False
    landed: bool = False
    lent: bool = False
    """Whether ``ended`` was given to a caller, in which case the event must not be reused."""
    refused: NDArray[np.int32] | None = None
    """The flags returned by ``copy_routes.Route``. Valid once the flight has landed."""


def ack_of(job: Job, page_nbytes: int) -> Ack:
    """Return the ack for a finished job."""
    transfer = job.transfer
    if job.failure is not None:
        failures = tuple((i, job.failure) for i in range(len(transfer.keys)))
        return Ack(transfer.id, False, 0, 0, 0.0, failures)
    why = Failure.UNFIT if transfer.dst == Tier.HOST else Failure.INTEGRITY
    refused = tuple((i, why) for i in sorted(job.refused))
    pages = len(transfer.keys) - len(refused)
    return Ack(transfer.id, not refused, pages, pages * page_nbytes, job.seconds, refused)


def share_refused(flight: Flight) -> None:
    """For each page that a landed flight has flagged, add the page's position to its job's ``refused``."""
    if flight.refused is None or not flight.refused.any():
        return
    first = 0
    for job in flight.jobs:
        job.refused.update(np.flatnonzero(flight.refused[first : first + job.pages]).tolist())
        first += job.pages


_log = logging.getLogger("tierstore.gpu.lanes")

_JUST_NOW_S = 0.005


class Lane:
    """One direction of the link: the waiting jobs, and the copies in flight."""

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
        """Set up the lane.

        Args:
            copy: Queues copies. Takes a layer group (None for all layers), device slots, host slots and a
                stream, and returns flags as ``copy_routes.Route`` does.
            streams: The streams on which copies start and complete.
            page_nbytes: Size of a page as transferred, in bytes.
            layers: The layer groups that pages are divided into. None to copy whole pages.
            pieces: Number of driver copies per page and launch. 0 if a kernel does the copying.
            new_event: Creates the events that are recorded before and after the copies of a flight.
        """
        self.arrived: deque[Job] = deque()
        """Submitted jobs that the engine has not passed to ``add`` yet."""
        self.launching = False
        """Whether the lane's thread is launching a flight."""
        self.resting = False
        """Whether the lane's thread is waiting until it is woken."""
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
        """Unfinished jobs that load into HBM, by transfer ID."""
        self._spare: list[TimedEvent] = []
        self._number = 0
        self._added = 0.0
        self._rate = inf
        """Throughput of the latest completed flight in bytes/s. Infinite before the first one."""

    @property
    def waiting(self) -> int:
        """Return the number of jobs passed to ``add`` that are not fully launched."""
        return len(self._waves)

    @property
    def busy(self) -> bool:
        """Return whether any job is waiting or in flight."""
        return bool(self.arrived or self._waves or self._flying or self.launching)

    def add(self, job: Job) -> None:
        """Add a job to the queue. Its host slots must be in pinned memory."""
        self._waves.add(job, job.pages)
        self._added = monotonic()
        if job.transfer.dst == Tier.HBM:
            self._loading[job.transfer.id] = job

    def drained_s(self, nbytes: int) -> float:
        """Return the estimated number of seconds until fewer than ``nbytes`` bytes are in flight."""
        return max(0.0, self.nbytes - nbytes) / self._rate

    @property
    def growing(self) -> bool:
        """Return whether a job was added within the last 5 ms, which makes more jobs likely."""
        return monotonic() - self._added < _JUST_NOW_S

    @property
    def may_be_overtaken(self) -> bool:
        """Return whether new jobs are likely to arrive and would be launched before the next waiting one."""
        return self._waves.open and self._waves.first()[1] > 0 and self.growing

    def fills(self, most_nbytes: int, most_pieces: int) -> bool:
        """Return whether the jobs that ``take`` would choose from are enough to fill a launch with these limits."""
        return self._waves.size_at_hand() >= self._most_pages(most_nbytes, most_pieces)

    @property
    def next_pieces(self) -> int:
        """Return the minimum number of driver copies in the next launch."""
        return self._waves.first()[0].pages * self._pieces

    def pieces_of(self, flight: Flight) -> int:
        """Return the maximum number of driver copies in the flight."""
        return sum(job.pages for job in flight.jobs) * self._pieces

    def take(self, most_nbytes: int, most_pieces: int) -> Flight:
        """Take the next jobs and return their flight.

        The flight respects both limits, except that a single transfer may exceed them.
        """
        jobs, group = self._waves.take(self._most_pages(most_nbytes, most_pieces))
        return self._flight(jobs, group if self._groups > 1 else None)

    def _most_pages(self, nbytes: int, pieces: int) -> int:
        pages = nbytes // max(1, self._sizes[self._waves.first()[1]])
        return min(pages, pieces // self._pieces) if self._pieces else pages

    @property
    def alone(self) -> Job | None:
        """Return the waiting job if it is the only one and none of its layer groups has been launched, else None."""
        job, _ = self._waves.first()
        return None if len(self._waves) > 1 or job.flights or job.airborne else job

    def take_whole(self) -> Flight:
        """Take the only waiting job (see ``alone``) and return a flight for all of its layers."""
        return self._flight([self._waves.take_whole()], None)

    def launch(self, flight: Flight) -> None:
        """Queue the copies of a flight, and record an event before and after them. May block in the driver.

        If the driver fails, log the error and mark the flight as broken.
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
                # Record the event even after an error: pieces that were queued before the error may still
                # write.
                flight.ended.record(self._last)
        except RuntimeError:
            flight.broken = True
            transfer = first.transfer
            _log.exception("copy %s -> %s was not queued", transfer.src.name, transfer.dst.name)

    def launched(self, flight: Flight) -> None:
        """Add a flight to those in flight, after ``launch``. If the flight is broken, fail its jobs."""
        self._flying.append(flight)
        self.nbytes += flight.nbytes
        for job in flight.jobs:
            job.flights += [flight] * (self._groups if flight.group is None else 1)
            if flight.broken:
                self._fail(job, Failure.IO_ERROR)

    def land(self) -> list[Job]:
        """Remove the completed flights. Return the jobs that have completed or failed with them."""
        ended: list[Job] = []
        while self._flying and self._has_ended(self._flying[0]):
            flight = self._flying.popleft()
            flight.landed = True
            self.nbytes -= flight.nbytes
            seconds = _seconds(flight)
            if seconds:
                self._rate = flight.nbytes / seconds
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
        """Fail all jobs that are not fully launched, and return those that have no copies in flight.

        ``land`` returns the other failed jobs once their copies are complete.
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
        """Return whether all launched copies are complete. Does not remove the flights; ``land`` does."""
        return not self.launching and all(_happened(flight.ended) for flight in self._flying)

    def arriving(self, slots: set[int], layer: int) -> tuple[Arriving, set[int]]:
        """Return the progress of loading this layer, and the set of ``slots`` that this lane is not loading.

        The progress covers only those of ``slots`` that this lane is loading.
        """
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
    """Return the duration of a flight in seconds.

    If the device cannot report it, mark the flight as broken and return 0.
    """
    if not flight.broken:
        try:
            return flight.begun.elapsed_time(flight.ended) / 1e3
        except RuntimeError:
            flight.broken = True
            _log.exception("the device cannot report how long a copy took, so the copy counts as failed")
    return 0.0


def _happened(event: TimedEvent) -> bool:
    try:
        return has_happened(event)
    except RuntimeError:  # the device has failed, so no copy is running on it
        return True
