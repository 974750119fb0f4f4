"""A model of the hardware: the contents of slots and disks, and the copies in flight between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.types import PageKey, Tier


@dataclass(eq=False)
class Flight:
    """A copy in flight. If ``src`` is None, an engine writes the page."""

    key: PageKey
    src: Tier | None
    src_slot: int
    dst: Tier
    dst_slot: int
    nbytes: int
    parent: PageKey | None
    live: bool = True
    """Whether the copy was neither aborted nor replaced."""
    ran: bool = False
    arrived: bool = False


class Disk:
    """The records of one tier, and the queue of its writer."""

    def __init__(self, budget: int) -> None:
        self.records: dict[PageKey, int] = {}
        self.queue: deque[Flight | PageKey] = deque()
        self.budget = budget

    def after_queue(self) -> set[PageKey]:
        """Return the keys of the records that will exist once all queued commands have been executed."""
        records = set(self.records)
        for command in self.queue:
            if isinstance(command, Flight):
                records.add(command.key)
            else:
                records.discard(command)
        return records


class Hardware:
    """The contents of all slots and disks. The key of a page stands for its bytes, and None for garbage.

    Each disk has one writer, which executes writes and erases in the order in which they were queued.
    """

    def __init__(self, budgets: Mapping[Tier, int]) -> None:
        self.memory: dict[tuple[Tier, int], PageKey | None] = {}
        self.disks = {tier: Disk(budget) for tier, budget in budgets.items()}

    def enqueue(self, tier: Tier, command: Flight | PageKey) -> None:
        """Queue a write, or the erase of a key, for the writer of a disk."""
        self.disks[tier].queue.append(command)

    @property
    def at_work(self) -> list[Tier]:
        """Return the disks whose queue is not empty."""
        return [tier for tier, disk in self.disks.items() if disk.queue]

    def run(self, flight: Flight, *, well: bool) -> bool:
        """Execute the copy unless it has been executed. Commands before it in a disk's queue are executed first.

        Args:
            flight: The copy.
            well: Whether the copy succeeds.

        Returns:
            Whether the page arrived.
        """
        if flight.dst in self.disks:
            while not flight.ran:
                self.turn(flight.dst, well=well or self.disks[flight.dst].queue[0] is not flight)
        elif not flight.ran:
            flight.ran = True
            flight.arrived = well and self._source_intact(flight)
            self.memory[flight.dst, flight.dst_slot] = flight.key if flight.arrived else None
        return flight.arrived

    def turn(self, tier: Tier, *, well: bool = True) -> None:
        """Execute the next command of a disk's writer. If the command is a write, it succeeds only if ``well``."""
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
