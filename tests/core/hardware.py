"""What the slots and the disk of a model machine really hold, and who may touch them now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tierstore.types import PageKey, Tier


@dataclass(eq=False)
class Flight:
    """A copy under way: ``src`` None stands for an engine that writes the page."""

    key: PageKey
    src: Tier | None
    src_slot: int
    dst: Tier
    dst_slot: int
    nbytes: int
    parent: PageKey | None
    live: bool = True
    """The copy was neither aborted nor replaced."""
    ran: bool = False
    arrived: bool = False


class Hardware:
    """Bytes are stood for by the key of the page they belong to; None is garbage.

    The disk has one writer that takes writes and erases in the order in which they were given.
    """

    def __init__(self, budget: int) -> None:
        self.memory: dict[tuple[Tier, int], PageKey | None] = {}
        self.disk: dict[PageKey, int] = {}
        self.queue: deque[Flight | PageKey] = deque()
        self._budget = budget

    def enqueue(self, command: Flight | PageKey) -> None:
        """A write, or the erase of a key."""
        self.queue.append(command)

    def run(self, flight: Flight, *, well: bool) -> bool:
        """Carries the flight out, if that has not happened; whether the right bytes are in its slot."""
        if flight.dst is Tier.NVME:
            while not flight.ran:
                self.turn(well=well or self.queue[0] is not flight)
        elif not flight.ran:
            flight.ran = True
            flight.arrived = well and self._source_intact(flight)
            self.memory[flight.dst, flight.dst_slot] = flight.key if flight.arrived else None
        return flight.arrived

    def turn(self, *, well: bool = True) -> None:
        """The disk's writer does its next command."""
        command = self.queue.popleft()
        if not isinstance(command, Flight):
            self.disk.pop(command, None)
            return
        command.ran = True
        command.arrived = well and self._source_intact(command)
        if command.arrived:
            self.disk[command.key] = command.nbytes
            assert sum(self.disk.values()) <= self._budget, "the disk holds more than its budget"

    def after_queue(self) -> set[PageKey]:
        """The records there will be once all commands given so far are done."""
        records = set(self.disk)
        for command in self.queue:
            if isinstance(command, Flight):
                records.add(command.key)
            else:
                records.discard(command)
        return records

    def _source_intact(self, flight: Flight) -> bool:
        if flight.src is None:
            return True
        if flight.src is Tier.NVME:
            return flight.key in self.disk
        held = self.memory[flight.src, flight.src_slot]
        assert held == flight.key, f"a copy from {flight.src.name} slot {flight.src_slot} read another page"
        return True
