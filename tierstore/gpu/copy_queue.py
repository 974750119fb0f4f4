"""The order in which copies are launched, and how far ahead of the link.

``Waves`` orders the layer groups of many loads. ``Pace`` limits how much is launched at once. A ``Lane`` is one
direction of the link: the transfers (``Job``) that wait, and the launches (``Flight``) that are in flight. A lane
launches on whatever thread asks, one at a time. Nothing waits here, and the caller holds the engine's lock, except
during ``Lane.launch``, which may take as long as the driver likes.
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
    """Jobs that get the same group next, in the order in which they came, and their size together."""

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
    """Jobs of ``groups`` layer groups each: all jobs of a wave get a group before any of them gets the next.

    A new job joins the wave under way, from its first group on, until half of the groups have been handed out of a job
    in it; then it waits for the next wave, so that nothing is overtaken for ever. Jobs get their last group in the
    order in which they came. What it costs does not depend on how many wait. Not thread-safe.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._wave: list[_Row[Item]] = [_Row() for _ in range(groups)]
        """By the group that comes next: jobs that came sooner are never behind."""
        self._later: _Row[Item] = _Row()
        self._handed_out = 0
        """Groups, of the job of the wave that was furthest."""
        self._size = 0
        """Jobs of the wave."""

    def __len__(self) -> int:
        """Jobs that have groups to come."""
        return self._size + len(self._later.entries)

    @property
    def open(self) -> bool:
        """Whether a new job would join the wave under way."""
        return not self._later.entries and self._handed_out * 2 <= self._groups

    def add(self, job: Item, size: int) -> None:
        """``size``: of one group of the job, in the caller's unit."""
        if self.open:
            self._size += 1
            self._wave[0].add(_Entry(job, size))
        else:
            self._later.add(_Entry(job, size))

    def first(self) -> tuple[Item, int]:
        """The first of those that ``take`` gives, and the group. IndexError if empty."""
        row, group = self._at_hand()
        return row.entries[0].job, group

    def size_at_hand(self) -> int:
        """Of all jobs together that could get the group that ``first`` gets. IndexError if empty."""
        return self._at_hand()[0].size

    def take(self, most: int) -> tuple[list[Item], int]:
        """The next jobs, at least one, of ``most`` size together, and the group they get now. IndexError if empty."""
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
        """The only job, none of whose groups was handed out: all of its groups at once."""
        _, group = self._at_hand()
        assert not group
        [job] = self.clear()
        return job

    def remove(self, job: Item) -> None:
        """The job gets no more groups, if it was to get any."""
        self._leave(sum(row.remove(job) for row in self._wave))
        self._later.remove(job)

    def clear(self) -> list[Item]:
        """Removes all jobs: these, in the order in which they came."""
        rows = [*reversed(self._wave), self._later]
        jobs = [entry.job for row in rows for entry in row.entries]
        self._wave, self._later = [_Row() for _ in self._wave], _Row()
        self._leave(self._size)
        return jobs

    def _at_hand(self) -> tuple[_Row[Item], int]:
        """Whose turn it is, and for which group. IndexError if empty."""
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
    """How much is launched at once. In bytes over the link but for ``pieces`` and ``at_once``."""

    whole: int = 16 << 20
    """Transfers up to this are not cut into layer groups on an idle link."""
    together: int = 128 << 20
    """What several transfers have of a layer group is launched together up to this."""
    pieces: int = 256
    """And up to so many pieces, in one call too; more of one transfer are launched by the thread: they take the driver
    too long."""
    ahead: int = 512 << 20
    """Nothing more is launched while the link has so much to do: some milliseconds. A quarter of it where pages are
    coming that would go first: they wait for what is launched."""
    enough: int = 64 << 20
    """With so much to do the link can wait until there is more of a group to be launched together."""
    behind: int = 256 << 20
    """With less the thread launches what nobody launches: no call came for 10 ms. With less than a quarter of it in any
    case, but where pages are coming: calls do not keep the link busy."""
    at_once: int = 4
    """Launches in one call, at most. Whoever submits makes one: it is to bring what comes next."""


AS_THEY_ARE = Pace()
ENCODED = Pace(pieces=512)
"""Of a group these pages have four pieces where others have one: with as few, a call would launch a quarter."""

MAPPED = Pace(together=512 << 20, ahead=2 << 30, enough=128 << 20, behind=1 << 30, at_once=8)
"""Of encoded pages that need no pieces: a launch is the same work for any number of them. So there are few, and 40 ms
of the link ahead, as whoever launches may have to wait so long for its turn. What comes later waits for them."""


def pace_of(held: HostFormat, pieces: int) -> Pace:
    """For pages that host memory holds so, of which a layer group has so many pieces; 0: their copies need none."""
    if not held.encoded:
        return AS_THEY_ARE
    return ENCODED if pieces else MAPPED


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


def share_refused(flight: Flight) -> None:
    """Tells each job of a flight that has landed which of its pages did not arrive."""
    if flight.refused is None or not flight.refused.any():
        return
    first = 0
    for job in flight.jobs:
        job.refused.update(np.flatnonzero(flight.refused[first : first + job.pages]).tolist())
        first += job.pages


_log = logging.getLogger("tierstore.gpu.lanes")

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
