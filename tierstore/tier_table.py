"""The slots and copies of one tier, and the queues of those that may leave. Changed by residency alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from tierstore.policy import VictimQueue

if TYPE_CHECKING:
    from tierstore.policy import Fifo
    from tierstore.types import Copy, PageKey


@dataclass(slots=True)
class Dead:
    """A quarantined slot: ``holders`` are the pins and the writer that can still touch it."""

    key: PageKey | None
    nbytes: int
    holders: int


class TierTable:
    """Slots of one tier. ``num_slots`` None: the tier keeps bytes by key, bounded by ``budget_nbytes`` alone.

    ``lossy``: what is read back from there differs from what was put.
    """

    def __init__(
        self,
        policy: Fifo,
        *,
        num_slots: int | None = None,
        budget_nbytes: int | None = None,
        lossy: bool = False,
    ) -> None:
        self.policy = policy
        self.lossy = lossy
        self.num_slots = num_slots
        self.budget_nbytes = budget_nbytes
        self.used_nbytes = 0
        self.free: list[int] = list(range(num_slots - 1, -1, -1)) if num_slots is not None else []
        self.copies: dict[PageKey, Copy] = {}
        self.new_slots = count()
        """Slots of a tier that keeps bytes by key: a new number for each record."""
        self.arriving = 0
        """Copies that are not readable yet."""
        self.pinned = 0
        """Copies with a pin, readable or not."""
        self.idle = 0
        """Readable copies without a pin."""
        self.owned: set[int] = set()
        self.quarantine: dict[int, Dead] = {}
        self.droppable = VictimQueue()
        self.dirty = VictimQueue()
        self.mirrors = VictimQueue()
        self.leaves = VictimQueue()
        """Those of ``dirty`` that can be dropped without cutting off other pages."""
        self.fleeting = VictimQueue()
        """Those of ``leaves`` that are memory-only."""

    def has_space(self, nbytes: int) -> bool:
        """Whether a slot for ``nbytes`` can be taken without an eviction."""
        if self.num_slots is not None:
            return bool(self.free)
        return self.budget_nbytes is None or self.used_nbytes + nbytes <= self.budget_nbytes

    def ready(self, key: PageKey) -> bool:
        """Whether this tier holds a readable copy."""
        copy = self.copies.get(key)
        return copy is not None and copy.ready

    def take(self, nbytes: int) -> int:
        """A slot that is free; there must be space."""
        self.used_nbytes += nbytes
        return self.free.pop() if self.num_slots is not None else next(self.new_slots)

    def put_back(self, slot: int, nbytes: int) -> None:
        """The slot is free again."""
        self.used_nbytes -= nbytes
        if self.num_slots is not None:
            self.free.append(slot)

    def count(self, copy: Copy, number: int) -> None:
        """Counts a copy as it is now: -1 before it changes or goes, 1 after it came or changed."""
        self.arriving += 0 if copy.ready else number
        self.pinned += number if copy.pins else 0
        self.idle += number if copy.ready and not copy.pins else 0

    @property
    def inner(self) -> int:
        """Copies that may leave only after pages that follow theirs."""
        return self.idle - len(self.droppable) - len(self.dirty) - len(self.mirrors)

    def wait(self, copy: Copy, key: PageKey, queue: VictimQueue) -> None:
        """The copy may leave: it waits in this queue from now on and in none of the others."""
        if copy.queue is not queue:
            self.withdraw(copy)
            copy.queue = queue
            queue.offer(copy.rank, key)

    def withdraw(self, copy: Copy) -> None:
        """The copy may not leave any more. Before its rank changes."""
        queue, rank = copy.queue, copy.rank
        if queue is None:
            return
        copy.queue = None
        if queue is self.droppable:
            self.droppable.withdraw(rank)
        elif queue is self.mirrors:
            self.mirrors.withdraw(rank)
        else:
            self.dirty.withdraw(rank)
            if self.leaves.withdraw(rank):
                self.fleeting.withdraw(rank)
