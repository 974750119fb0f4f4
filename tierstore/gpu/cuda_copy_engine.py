"""The copy engine of a card: copies between HBM and page-locked host memory, on one stream for each direction.

Ordering: the store submits a copy when the page's bytes are written, and reuses a slot when its last use has
ended. So a copy waits only for the copies before it. A transfer keeps its slots until its ack, which comes
when the event recorded after its last piece has happened.

A small transfer is launched whole if no other one waits. All others are launched layer group by layer group,
a little ahead of the link. Pages submitted later still get a layer group before earlier pages get the next
one. The threads that submit and poll do the launching. A lane's own thread launches only copies that take the
driver long, and copies that must not wait while no other thread calls. In general it would be slower, because
Python gives it a turn only every 5 ms while other threads compute.
"""

from __future__ import annotations

import logging
from threading import Condition, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol, cast

import torch

from tierstore.gpu.copy_queue import Job, Lane, ack_of, pace_of
from tierstore.gpu.events import HERE, NOT_YET, Arriving, TimedEvent
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


class PinnedHost(Protocol):
    """Page slots in host memory; slots below ``pinned_slots`` are page-locked."""

    held: HostFormat
    """The format of pages in host memory, in which they also cross the link."""

    @property
    def pinned_slots(self) -> int:
        """Return the number of slots that are page-locked now, counted from slot 0."""
        ...

    @property
    def pinning(self) -> bool:
        """Return whether more slots are being page-locked."""
        ...

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of these slots, int64."""
        ...


class CudaCopyEngine:
    """A ``CopyEngine`` over streams and events of a card.

    Transfers of a direction end in order. The end of a copy wakes no thread: call ``poll`` as long as
    ``polled`` is true. Any thread may call any method.
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
        """Set the route and the host slots. A launching thread starts only when it has something to launch.

        Args:
            route: Queues the copies.
            host: The slots of host memory.
            streams: The streams for copies to the device and to the host.
            unpinned: The engine for transfers that touch host slots which will not be page-locked.
            new_event: Makes the events around copies. None for torch's events.
            pace: The limits on launches. None for those that fit the format of the pages.
            wake: Called by a launching thread after each launch, for callers that wait for a layer.
        """
        self._route = route
        self._host = host
        self._page_nbytes = host.held.layout.page_nbytes
        self._crossing_nbytes = host.held.payload_nbytes
        self._unpinned = unpinned
        each = route.pieces if route.layers is None else route.group_pieces
        self._pace = pace or pace_of(host.held, each)
        self._wake = wake
        self._ended: list[Job] = []
        self._closing = False
        self._called = 0.0
        """Time of the last ``submit`` or ``poll``."""
        self._turn = Condition()
        self._threads: dict[Tier, Thread] = {}
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
        """Return whether ``poll`` must be called: copies wait or are in flight, or acks were not polled."""
        return bool(self._ended) or self._unpinned.polled or any(lane.busy for lane in self._lanes.values())

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer.

        It is launched now, or when its host slots are page-locked and the pace allows it.

        Never blocks.
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
        """Launch copies that may start, and return the acks of transfers that ended since the last call."""
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
        """Return the progress of this layer's loads into these HBM slots."""
        with self._turn:
            here, others = self._lanes[Tier.HBM].arriving(set(slots), layer)
        there = self._unpinned.arriving(others, layer) if others else HERE
        if not (here.submitted and there.submitted):
            return NOT_YET
        return here if there.event is None else there

    def close(self, timeout_s: float) -> bool:
        """Fail copies that are not launched, and wait for the others.

        Return whether they ended in ``timeout_s``.
        """
        deadline = monotonic() + timeout_s
        with self._turn:
            self._closing = True
            for lane in self._lanes.values():
                self._ended += lane.give_up()
            self._turn.notify_all()
        ended = self._unpinned.close(timeout_s)
        while not self._idle():
            if monotonic() > deadline:
                return False
            sleep(_POLL_S)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - monotonic()))
        return ended and not any(thread.is_alive() for thread in self._threads.values())

    def _idle(self) -> bool:
        """Return whether every launched copy has ended. Acks stay for ``poll``."""
        with self._turn:
            return all(lane.idle() for lane in self._lanes.values())

    # -- launching ----------------------------------------------------------------------------------------------

    def _advance(self, dst: Tier, launches: int) -> None:
        """Process ended flights and new jobs, and launch some copies. The caller holds the lock.

        The rest is left for later calls or for the lane's thread.
        """
        lane = self._lanes[dst]
        self._ended += lane.land()
        while lane.arrived:
            # ``pinning`` is read first, because page-locking may end between the two reads.
            pinning, pinned = self._host.pinning, self._host.pinned_slots
            job = lane.arrived[0]
            if job.host_slots.max(initial=0) < pinned:
                lane.add(lane.arrived.popleft())
            elif not pinning:
                self._unpinned.submit(lane.arrived.popleft().transfer)
            else:
                break
        self._launch(lane, launches)
        if lane.waiting and not lane.launching:
            self._wake_thread(dst)

    def _launch(self, lane: Lane, launches: int) -> None:
        """Launch copies that may start now and do not take the driver long. The caller holds the lock."""
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
        """Return whether to launch a transfer whole: it is small, not begun, and the only one waiting."""
        alone = lane.alone
        return alone is not None and alone.pages * self._crossing_nbytes <= self._pace.whole

    def _better_later(self, lane: Lane) -> bool:
        """Return whether to wait for more transfers that need the same layer group.

        Waiting saves launches, and so the caller's time, while the link has enough to do.
        """
        fed = lane.nbytes >= self._pace.enough and lane.growing
        return fed and not lane.fills(self._pace.together, self._pace.pieces)

    def _wake_thread(self, dst: Tier) -> None:
        if dst not in self._threads:
            name = f"tierstore-launch-to-{dst.name}"
            self._threads[dst] = Thread(target=self._run, args=(self._lanes[dst],), name=name, daemon=True)
            self._threads[dst].start()
        elif self._lanes[
            dst
        ].resting:  # else it looks by itself, and waking it would take the GIL from threads that take pages
            self._turn.notify_all()

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
        """Wait for a flight that this thread should launch, and return it. None when the engine closes."""
        with self._turn:
            while not self._closing:
                self._ended += lane.land()
                if lane.waiting and self._is_mine(lane):
                    lane.launching = True
                    return lane.take(self._pace.together, self._pace.pieces)
                lane.resting = not lane.waiting
                self._turn.wait(self._pause(lane))
                lane.resting = False
            return None

    def _pause(self, lane: Lane) -> float | None:
        """Return the seconds until the lane's thread looks again, or None if it waits to be woken."""
        if not lane.waiting:
            return None
        return _GROWING_S if lane.growing and lane.next_pieces <= self._pace.pieces else _POLL_S

    def _is_mine(self, lane: Lane) -> bool:
        ahead, behind = self._pace.ahead, self._pace.behind
        if lane.next_pieces > self._pace.pieces:
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


def _depth(lane: Lane, nbytes: int) -> int:
    return -(-nbytes // 4) if lane.may_be_overtaken else nbytes


def _cuda_event() -> TimedEvent:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return cast("TimedEvent", event)  # its methods differ only in the names of arguments
