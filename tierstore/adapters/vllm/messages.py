"""Messages between the two halves of the connector: plain data, pickled between processes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierstore.keys import KEY_NBYTES
from tierstore.metrics import RankHealth
from tierstore.ranks import Disk, Opened
from tierstore.types import PageKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.page import PageSpec
    from tierstore.ranks import Record
    from tierstore.types import Ack, Erase, Transfer

_NO_PARENT = bytes(KEY_NBYTES)


@dataclass(frozen=True)
class Catalogue:
    """The list of the pages on a rank's disk, packed into a few ``bytes`` objects.

    A list of one million pages takes about 80 MB of memory. Unpacking it takes one to two seconds.
    """

    record_nbytes: int
    budget_nbytes: int
    keys: bytes
    parents: bytes
    sizes: bytes

    @classmethod
    def of(cls, record_nbytes: int, budget_nbytes: int, records: Iterable[Record]) -> Catalogue:
        """Pack records. The parent of a page is packed as zeros if it is unknown."""
        found = list(records)
        return cls(
            record_nbytes,
            budget_nbytes,
            b"".join(key for key, _, _ in found),
            b"".join(parent or _NO_PARENT for _, parent, _ in found),
            array("q", (nbytes for _, _, nbytes in found)).tobytes(),
        )

    def unpacked(self) -> Disk:
        """Unpack the records into the form that ``ranks.assemble_apart`` needs."""
        keys, parents = _cut(self.keys), _cut(self.parents)
        sizes = array("q")
        sizes.frombytes(self.sizes)
        found = [
            (key, None if parent == _NO_PARENT else parent, nbytes)
            for key, parent, nbytes in zip(keys, parents, sizes, strict=True)
        ]
        return Disk(self.record_nbytes, self.budget_nbytes, found)


@dataclass(frozen=True)
class Hello:
    """A worker's first message, sent when the first step asks for it: the geometry of its pages, and its tiers."""

    rank: int
    spec: PageSpec
    num_slots: int
    host_slots: int
    catalogue: Catalogue | None
    read_rate: float | None = None
    """Measured disk throughput, in bytes of unencoded pages per second. None if it was not measured."""
    health: RankHealth = field(default_factory=RankHealth)
    """The memory, routes and disk that the worker obtained, compared with its configuration."""
    stage: int = 0
    """The worker's pipeline stage."""
    caching: bool = True
    """Whether vLLM's prefix caching is on in this worker, now that the model is loaded."""
    replicas: int = 1
    """Number of ranks, including this one, that share host memory and store each page once."""

    @property
    def opened(self) -> Opened:
        """Return the opened tiers in the form that ``ranks.assemble_apart`` needs."""
        disk = None if self.catalogue is None else self.catalogue.unpacked()
        return Opened(self.num_slots, self.host_slots, disk, self.health)


@dataclass(frozen=True)
class Orders:
    """The work for all workers in one step.

    Attributes:
        fence: Blocks that this step overwrites. Copies from these blocks must complete before the step.
        before: Commands that may start with the step.
        after: Commands that copy blocks which the forward pass writes. They are queued once the pass has been
            launched, and start when it has completed.
        failed: Requests whose load failed, and for each the blocks that were not loaded.
        answer: Whether the scheduler waits for a report on this step.
        idle: Whether this step computes nothing and only serves transfers in flight. The worker may then wait
            briefly for one to complete.
        number: The number of this step.
        hello: Whether each worker should send its first message.
    """

    fence: tuple[int, ...] = ()
    before: tuple[Transfer | Erase, ...] = ()
    after: tuple[Transfer | Erase, ...] = ()
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    answer: bool = False
    idle: bool = False
    number: int = 0
    hello: bool = False


@dataclass(frozen=True)
class Report:
    """Acks and health of workers, by rank.

    Attributes:
        acks: The acks of each rank.
        number: The step that has finished, or 0 if unknown.
        health: The health of each rank whose health has changed since its last report.
        hellos: The first messages of workers. Empty except in the reports on the step that asked for them.
    """

    acks: dict[int, tuple[Ack, ...]]
    number: int = 0
    health: dict[int, RankHealth] = field(default_factory=dict)
    hellos: tuple[Hello, ...] = ()

    def merged(self, other: Report) -> Report:
        """Combine two reports into one."""
        acks = dict(self.acks)
        for rank, more in other.acks.items():
            acks[rank] = acks.get(rank, ()) + more
        health = {**self.health, **other.health}
        return Report(acks, max(self.number, other.number), health, self.hellos + other.hellos)


def _cut(keys: bytes) -> list[PageKey]:
    return [PageKey(keys[i : i + KEY_NBYTES]) for i in range(0, len(keys), KEY_NBYTES)]
