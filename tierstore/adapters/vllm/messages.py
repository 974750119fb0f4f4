"""Messages between the two halves of the connector: plain data that is pickled between processes."""

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
    """The content of a rank's disk, packed. A million pages are about 80 MB and take one or two seconds to unpack."""

    record_nbytes: int
    budget_nbytes: int
    keys: bytes
    parents: bytes
    sizes: bytes

    @classmethod
    def of(cls, record_nbytes: int, budget_nbytes: int, records: Iterable[Record]) -> Catalogue:
        """Pack records. A page without a known parent has zeros instead."""
        found = list(records)
        return cls(
            record_nbytes,
            budget_nbytes,
            b"".join(key for key, _, _ in found),
            b"".join(parent or _NO_PARENT for _, parent, _ in found),
            array("q", (nbytes for _, _, nbytes in found)).tobytes(),
        )

    def unpacked(self) -> Disk:
        """Return the content in the form that a directory takes."""
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
    """The first message of a worker, before the first step: the geometry of its pages and its tiers."""

    rank: int
    spec: PageSpec
    num_slots: int
    host_slots: int
    catalogue: Catalogue | None
    read_rate: float | None = None
    """Bytes/s that the disk gave when it was measured; None if it was not."""
    health: RankHealth = field(default_factory=RankHealth)
    """Memory, routes and disk that the worker got, compared with its configuration."""

    @property
    def opened(self) -> Opened:
        """Return the opened tiers in the form that a directory takes."""
        disk = None if self.catalogue is None else self.catalogue.unpacked()
        return Opened(self.num_slots, self.host_slots, disk, self.health)


@dataclass(frozen=True)
class Orders:
    """What all workers must do in one step.

    Attributes:
        fence: Blocks that this step overwrites. Copies out of them must end before it begins.
        before: Commands that may start with the step.
        after: Commands that copy blocks written by the forward pass. They start once it was launched.
        failed: Requests whose load has failed, with their blocks that were not loaded.
        number: The number of this step.
        answer: Whether the scheduler waits for a report of this step.
        idle: Whether this step computes nothing and only serves transfers in flight. The worker may then wait
            a moment for one to end.
    """

    fence: tuple[int, ...] = ()
    before: tuple[Transfer | Erase, ...] = ()
    after: tuple[Transfer | Erase, ...] = ()
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    answer: bool = False
    idle: bool = False
    number: int = 0


@dataclass(frozen=True)
class Report:
    """Acks and health of workers, by rank.

    Attributes:
        number: The step that has ended; 0 if unknown.
        health: Health of the ranks for which it has changed since their last report.
    """

    acks: dict[int, tuple[Ack, ...]]
    number: int = 0
    health: dict[int, RankHealth] = field(default_factory=dict)

    def merged(self, other: Report) -> Report:
        """Return both reports as one."""
        acks = dict(self.acks)
        for rank, more in other.acks.items():
            acks[rank] = acks.get(rank, ()) + more
        return Report(acks, max(self.number, other.number), {**self.health, **other.health})


def _cut(keys: bytes) -> list[PageKey]:
    return [PageKey(keys[i : i + KEY_NBYTES]) for i in range(0, len(keys), KEY_NBYTES)]
