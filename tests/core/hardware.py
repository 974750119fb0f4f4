"""What the slots and the disk of a model machine really hold, and who may touch them now."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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


class Disk:
    """The records of one tier, and what its writer has still to do."""

    def __init__(self, budget: int) -> None:
        self.records: dict[PageKey, int] = {}
        self.queue: deque[Flight | PageKey] = deque()
        self.budget = budget

    def after_queue(self) -> set[PageKey]:
        """The records there will be once all commands given so far are done."""
        records = set(self.records)
        for command in self.queue:
            if isinstance(command, Flight):
                records.add(command.key)
            else:
                records.discard(command)
        return records


class Hardware:
    """Bytes are stood for by the key of the page they belong to; None is garbage.

    A disk has one writer that takes writes and erases in the order in which they were given.
    """

    def __init__(self, budgets: Mapping[Tier, int]) -> None:
        self.memory: dict[tuple[Tier, int], PageKey | None] = {}
        self.disks = {tier: Disk(budget) for tier, budget in budgets.items()}

    def enqueue(self, tier: Tier, command: Flight | PageKey) -> None:
        """A write, or the erase of a key."""
        self.disks[tier].queue.append(command)

    @property
    def at_work(self) -> list[Tier]:
        """The disks that have something to do."""
        return [tier for tier, disk in self.disks.items() if disk.queue]

    def run(self, flight: Flight, *, well: bool) -> bool:
        """Carries the flight out, if that has not happened; whether the right bytes are in its slot."""
        if flight.dst in self.disks:
            while not flight.ran:
                self.turn(flight.dst, well=well or self.disks[flight.dst].queue[0] is not flight)
        elif not flight.ran:
            flight.ran = True
            flight.arrived = well and self._source_intact(flight)
            self.memory[flight.dst, flight.dst_slot] = flight.key if flight.arrived else None
        return flight.arrived

    def turn(self, tier: Tier, *, well: bool = True) -> None:
        """The writer of a disk does its next command."""
        disk = self.disks[tier]
        command = disk.queue.popleft()
        if not isinstance(command, Flight):
            disk.records.pop(command, None)
            return
        command.ran = True
        command.arrived = well and self._source_intact(command)
        if command.arrived:
            disk.records[command.key] = command.nbytes
            assert sum(disk.records.values()) <= disk.budget, "the disk holds more than its budget"

    def _source_intact(self, flight: Flight) -> bool:
        if flight.src is None:
            return True
        if flight.src in self.disks:
            return flight.key in self.disks[flight.src].records
        held = self.memory[flight.src, flight.src_slot]
        assert held == flight.key, f"a copy from {flight.src.name} slot {flight.src_slot} read another page"
        return True
