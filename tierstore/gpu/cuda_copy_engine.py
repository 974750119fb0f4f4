"""The copy engine for a GPU: copies between HBM and pinned host memory, on one stream per direction.

Ordering: the store submits a copy after the page's bytes have been written, and reuses a slot after its last
use has completed. A copy therefore waits only for earlier copies in its direction. A transfer occupies its
slots until its ack, which is available once the event recorded after its last piece has completed.

A small transfer is launched whole if no other transfer is waiting. All others are launched layer group by
layer group, slightly ahead of the link, so that pages submitted later can get a layer group before earlier
pages get their next one. The threads that call ``submit`` and ``poll`` do the launching. Each lane also
has a separate thread. It launches only copies that the driver needs a long time to queue, and copies for which
no other thread calls the engine in time. In general, that thread is slower, because it gets the GIL only every
5 ms while other threads compute.
"""

from __future__ import annotations

import logging
from threading import Condition
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol, cast

import torch

from tierstore.gpu.copy_queue import Job, Lane, ack_of, pace_of
from tierstore.gpu.events import HERE, NOT_YET, Arriving, TimedEvent
from tierstore.threads import Worker
from tierstore.types import Ack, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.codecs.host_format import HostFormat
    from tierstore.gpu.copy_queue import Flight, Pace
    from tierstore.gpu.copy_routes import Route
    from tierstore.gpu.cpu_copy_engine import CopyEngine

_log = logging.getLogger("tierstore.gpu.cuda_copies")

_POLL_S = 0.0005
_GROWING_S = 0.005
_ALONE_S = 0.01
_PINNING_S = 0.05
"""Interval, in seconds, at which a lane's thread checks whether the host slots of new jobs have been pinned."""


class PinnedHost(Protocol):
    """Page slots in host memory. Slots below ``pinned_slots`` are in pinned memory."""

    held: HostFormat
    """The format of pages in host memory. Pages are also transferred in this format."""

    @property
    def pinned_slots(self) -> int:
        """Return the number of slots that have been pinned so far, counted from slot 0."""
        ...

    @property
    def pinning(self) -> bool:
        """Return whether more slots are still being pinned."""
        ...

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of these slots as int64."""
        ...


class CudaCopyEngine:
    """A ``CopyEngine`` based on CUDA streams and events.

    Transfers in the same direction complete in the order of submission. Completed copies do not wake
    a thread, so call ``poll`` while ``polled`` is true. All methods are thread-safe.
    """

    def __init__(
        self,
        route: Route,
        host: PinnedHost,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        unpinned: CopyEngine,
        *,
        new_event: Callable[[], TimedEvent] | None = None,
        pace: Pace | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Set up the engine. Its threads start only when they have something to launch.

        Args:
            route: Queues the copies.
            host: The slots in host memory.
            streams: The streams for host-to-device and device-to-host copies.
            unpinned: The engine for transfers whose host slots will not be pinned.
            new_event: Creates the events that are recorded before and after copies. None for torch's events.
            pace: The limits on launches. None to choose them by the format of the pages.
            wake: Called by a lane's thread after each launch, to wake callers that wait for a layer.
        """
        self._route = route
        self._host = host
        self._page_nbytes = host.held.layout.page_nbytes
        self._crossing_nbytes = host.held.payload_nbytes
        self._unpinned = unpinned
        each = route.pieces if route.layers is None else route.group_pieces
        groups = 1 if route.layers is None else len(route.layers)
        self._pace = pace or pace_of(host.held, each, groups)
        self._wake = wake
        self._ended: list[Job] = []
        self._closing = False
        self._called = 0.0
        """Time of the last ``submit`` or ``poll``."""
        self._turn = Condition()
        self._threads: dict[Tier, Worker] = {}
        up, down = streams
        event = new_event or _cuda_event
        self._lanes = {
            Tier.HBM: Lane(
                self._load, (up, route.loads_end_on or up), self._crossing_nbytes, route.layers, each, event
            ),
            Tier.HOST: Lane(self._save, (down, down), self._crossing_nbytes, None, route.pieces, event),
        }

    @property
    def polled(self) -> bool:
        """Return whether ``poll`` must be called, because copies are waiting or in flight or acks are available."""
        return bool(self._ended) or self._unpinned.polled or any(lane.busy for lane in self._lanes.values())

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer.

        It is launched once its host slots are pinned and the limits of ``Pace`` allow it: in this call, in a
        later call, or by the lane's thread. If its host slots will not be pinned, it is passed to the
        ``unpinned`` engine. Does not wait for copies.
        """
        job = Job.of(transfer)
        with self._turn:
            lane = self._lanes[transfer.dst]
            lane.arrived.append(job)
            if self._closing:
                self._ended += lane.give_up()
            else:
                self._advance(transfer.dst, 1)
            self._called = monotonic()

    def poll(self) -> list[Ack]:
        """Launch copies that may start now.

        Return the acks of all transfers that completed or failed since the last call.
        """
        acks = self._unpinned.poll()
        with self._turn:
            for dst, lane in self._lanes.items():
                if lane.busy:
                    self._advance(dst, self._pace.at_once)
            acks += [ack_of(job, self._page_nbytes) for job in self._ended]
            self._ended.clear()
            self._called = monotonic()
        return acks

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return the progress of loading this layer into these HBM slots."""
        with self._turn:
            here, others = self._lanes[Tier.HBM].arriving(set(slots), layer)
        there = self._unpinned.arriving(others, layer) if others else HERE
        if not (here.submitted and there.submitted):
            return NOT_YET
        return here if there.event is None else there

    def close(self, timeout_s: float) -> bool:
        """Fail transfers that are not fully launched, and wait for copies in flight and for the threads.

        Return whether all copies completed and all threads exited within ``timeout_s`` seconds.
        """
        deadline = monotonic() + timeout_s
        with self._turn:
            self._closing = True
            for lane in self._lanes.values():
                self._ended += lane.give_up()
            self._turn.notify_all()
        _copying.add(self)
        ended = self._unpinned.close(timeout_s)
        while not self._idle():
            if monotonic() > deadline:
                return False
            sleep(_POLL_S)
        _copying.discard(self)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - monotonic()))
        return ended and not any(thread.is_alive() for thread in self._threads.values())

    def _idle(self) -> bool:
        """Return whether all launched copies are complete. Leaves the acks to ``poll``."""
        with self._turn:
            return all(lane.idle() for lane in self._lanes.values())

    # -- launching ----------------------------------------------------------------------------------------------

    def _advance(self, dst: Tier, launches: int) -> None:
        """Process completed flights and new jobs, and launch at most ``launches`` flights.

        All other launches are left to later calls or to the lane's thread. The caller must hold the lock.
        """
        lane = self._lanes[dst]
        self._ended += lane.land()
        self._admit(lane)
        self._launch(lane, launches)
        if (lane.waiting or lane.arrived) and not lane.launching:
            self._wake_thread(dst)

    def _admit(self, lane: Lane) -> None:
        """Queue the new jobs whose host slots are pinned. Pass those whose slots will not be to ``unpinned``.

        The caller must hold the lock.
        """
        while lane.arrived:
            # Read ``pinning`` first, because pinning may finish between the two reads.
            pinning, pinned = self._host.pinning, self._host.pinned_slots
            job = lane.arrived[0]
            if job.host_slots.max(initial=0) < pinned:
                lane.add(lane.arrived.popleft())
            elif not pinning:
                self._unpinned.submit(lane.arrived.popleft().transfer)
            else:
                break

    def _launch(self, lane: Lane, launches: int) -> None:
        """Launch at most ``launches`` flights that may start now and that the driver queues quickly.

        The caller must hold the lock.
        """
        asked = 0
        for _ in range(launches):
            if not lane.waiting or lane.launching or lane.nbytes >= _depth(lane, self._pace.ahead):
                return
            if asked + lane.next_pieces > self._pace.pieces:
                return
            if self._better_later(lane):
                return
            whole = self._whole(lane)
            flight = lane.take_whole() if whole else lane.take(self._pace.together, self._pace.pieces - asked)
            asked += lane.pieces_of(flight)
            lane.launch(flight)
            lane.launched(flight)

    def _whole(self, lane: Lane) -> bool:
        """Return whether to launch a transfer whole: it is small, has not started, and is the only one waiting."""
        alone = lane.alone
        return alone is not None and alone.pages * self._crossing_nbytes <= self._pace.whole

    def _better_later(self, lane: Lane) -> bool:
        """Return whether to wait for more transfers that need the same layer group.

        While the link has enough work, waiting saves launches, and thereby the caller's time.
        """
        fed = lane.nbytes >= self._pace.enough and lane.growing
        return fed and not lane.fills(self._pace.together, self._pace.pieces)

    def _wake_thread(self, dst: Tier) -> None:
        if dst not in self._threads:
            name = f"tierstore-launch-to-{dst.name}"
            self._threads[dst] = Worker(self._run, self._lanes[dst], name=name)
            self._threads[dst].start()
        elif self._lanes[dst].resting or self._large(self._lanes[dst]):
            self._turn.notify_all()  # otherwise it wakes by itself; waking it would take the GIL from callers

    def _run(self, lane: Lane) -> None:
        while (flight := self._next(lane)) is not None:
            try:
                lane.launch(flight)
            except Exception:  # noqa: BLE001 - the top of a thread: fail the transfers and continue
                flight.broken = True
                _log.exception("copies were not queued")
            with self._turn:
                lane.launched(flight)
                lane.launching = False
            if self._wake is not None:
                self._wake()

    def _next(self, lane: Lane) -> Flight | None:
        """Wait for a flight that this thread should launch, and return it. Return None when the engine closes."""
        with self._turn:
            while not self._closing:
                self._ended += lane.land()
                self._admit(lane)
                if lane.waiting and self._is_mine(lane):
                    lane.launching = True
                    return lane.take(self._pace.together, self._pace.pieces)
                pause = self._pause(lane)
                lane.resting = pause is None
                self._turn.wait(pause)
                lane.resting = False
            return None

    def _pause(self, lane: Lane) -> float | None:
        """Return the number of seconds until the lane's thread checks again, or None if it waits to be woken.

        The thread does not check before the link can need it, because each check takes the GIL from callers.
        """
        needed = self._pace.behind // 4
        if self._large(lane):
            needed = _depth(lane, self._pace.ahead)
        elif lane.growing:
            return _GROWING_S
        elif not lane.waiting:
            return _PINNING_S if lane.arrived else None
        return min(_GROWING_S, max(_POLL_S, lane.drained_s(needed)))

    def _large(self, lane: Lane) -> bool:
        """Return whether the next flight has so many pieces that only the lane's thread launches it."""
        return bool(lane.waiting) and lane.next_pieces > self._pace.pieces

    def _is_mine(self, lane: Lane) -> bool:
        ahead, behind = self._pace.ahead, self._pace.behind
        if self._large(lane):
            return lane.nbytes < _depth(lane, ahead)
        if monotonic() - self._called > _ALONE_S:
            return lane.nbytes < _depth(lane, behind)
        return not lane.growing and lane.nbytes < behind // 4

    def _load(
        self,
        group: int | None,
        slots: NDArray[np.int64],
        host: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> NDArray[np.int32] | None:
        at = self._host.addresses(host)
        if group is None:
            return self._route.load(slots, at, stream)
        return self._route.load_group(group, slots, at, stream)

    def _save(
        self,
        group: int | None,
        slots: NDArray[np.int64],
        host: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> NDArray[np.int32] | None:
        return self._route.save(slots, self._host.addresses(host), stream)


_copying: set[CudaCopyEngine] = set()
"""Engines whose ``close`` timed out or was interrupted, so that copies may still be in flight.

The copies access the engine's host memory, which must therefore not be unpinned or freed. No thread refers to
the engine any more; this set keeps it alive, and with it the memory.
"""


def _depth(lane: Lane, nbytes: int) -> int:
    return -(-nbytes // 4) if lane.may_be_overtaken else nbytes


def _cuda_event() -> TimedEvent:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return cast("TimedEvent", event)  # its methods differ only in parameter names
