"""Hands commands to a mover, some only once the engine has got there; keeps what is open and what has ended."""

from __future__ import annotations

import logging
from collections import deque
from threading import Condition, Thread
from typing import TYPE_CHECKING

from tierstore.types import Erase, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Set

    from tierstore.mover import Mover
    from tierstore.types import Ack, Event
    from tierstore.wakeup import Wakeup

_log = logging.getLogger(__name__)

_POLL_S = 0.001


class Feed:
    """One mover's intake and its acks. Any thread.

    Where the device tells of an end only when asked, a thread asks while something is on its way: steps of the engine
    may take long. Without such a device there is no thread.
    """

    def __init__(self, mover: Mover, wakeup: Wakeup) -> None:
        self._mover = mover
        self._wakeup = wakeup
        self._open: dict[int, Transfer] = {}
        self._queue: deque[tuple[Event, Transfer]] = deque()
        self._acks: list[Ack] = []
        self._turn = Condition()
        self._thread: Thread | None = None
        self._closing = False
        self.faults = 0
        """Unexpected errors of its thread; each was logged."""

    def submit(self, command: Transfer | Erase, after: Event | None = None) -> None:
        """Starts it once ``after`` has happened; those that wait start in their order. Never blocks."""
        with self._turn:
            if isinstance(command, Erase):
                self._mover.submit(command)
                return
            self._open[command.id] = command
            if after is None or (not self._queue and after.query()):
                self._mover.submit(command)
            else:
                self._queue.append((after, command))
            if self._queue or self._mover.polled:
                self._watch()

    def advance(self) -> None:
        """Starts what may start, takes in what has ended."""
        with self._turn:
            self._advance()

    def take(self) -> list[Ack]:
        """What has ended since the last call."""
        with self._turn:
            self._advance()
            acks, self._acks = self._acks, []
            return acks

    @property
    def busy(self) -> bool:
        """Whether something has not ended."""
        return bool(self._open)

    @property
    def at_engine(self) -> bool:
        """Whether a copy out of the engine's blocks, or into them, has not ended."""
        with self._turn:
            return any(Tier.HBM in (t.src, t.dst) for t in self._open.values())

    def reads(self, slots: Set[int]) -> bool:
        """Whether a copy out of one of these blocks of the engine's has not ended."""
        with self._turn:
            return any(t.src == Tier.HBM and not slots.isdisjoint(t.src_slots) for t in self._open.values())

    def pause(self, at_most_s: float) -> float:
        """How long to sleep before ``advance`` may find something that wakes nobody."""
        return _POLL_S if self._queue or self._mover.polled else at_most_s

    def check(self) -> None:
        """AssertionError unless everything that waits is open."""
        with self._turn:
            strange = [t.id for _, t in self._queue if t.id not in self._open]
        if strange:
            raise AssertionError(f"transfers {strange} wait to be started and are not open")

    def close(self, timeout_s: float) -> bool:
        """Starts nothing more, ends the mover; whether all its threads ended in time."""
        with self._turn:
            self._closing = True
            self._queue.clear()
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._mover.close(timeout_s)

    # -- inside -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._queue and self._queue[0][0].query():
            self._mover.submit(self._queue.popleft()[1])
        ended = self._mover.poll()
        for ack in ended:
            if not ack.late:
                self._open.pop(ack.transfer_id, None)
        self._acks += ended
        if ended:
            self._wakeup.bump()

    def _watch(self) -> None:
        if self._thread is None and not self._closing:
            self._thread = Thread(target=self._run, name="tierstore-vllm-feed", daemon=True)
            self._thread.start()
        self._turn.notify_all()

    def _run(self) -> None:
        with self._turn:
            while not self._closing:
                try:
                    self._advance()
                except Exception:  # noqa: BLE001 - a thread's top: log it, go on
                    self.faults += 1
                    _log.exception("commands could not be handed on")
                self._turn.wait(_POLL_S if self._queue or self._mover.polled else None)
