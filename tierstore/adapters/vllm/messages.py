"""What the two halves of the connector tell each other: plain data that is pickled between processes."""

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
    """What a rank's disk holds, packed: a million pages are some 80 MB and take a second or two to unpack."""

    record_nbytes: int
    budget_nbytes: int
    keys: bytes
    parents: bytes
    sizes: bytes

    @classmethod
    def of(cls, record_nbytes: int, budget_nbytes: int, records: Iterable[Record]) -> Catalogue:
        """Packs records; a page without a known parent has zeros for one."""
        found = list(records)
        return cls(
            record_nbytes,
            budget_nbytes,
            b"".join(key for key, _, _ in found),
            b"".join(parent or _NO_PARENT for _, parent, _ in found),
            array("q", (nbytes for _, _, nbytes in found)).tobytes(),
        )

    def unpacked(self) -> Disk:
        """The same as a directory takes it."""
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
    """What a worker says once, before the first step: what its pages are and what it has opened."""

    rank: int
    spec: PageSpec
    num_slots: int
    host_slots: int
    catalogue: Catalogue | None
    read_rate: float | None = None
    """Bytes a second that the disk was found to give; None: it was not asked."""
    health: RankHealth = field(default_factory=RankHealth)
    """What it got of the memory, routes and disk that it asked for."""

    @property
    def opened(self) -> Opened:
        """As a directory takes it."""
        disk = None if self.catalogue is None else self.catalogue.unpacked()
        return Opened(self.num_slots, self.host_slots, disk, self.health)


@dataclass(frozen=True)
class Orders:
    """What all workers are to do in one step.

    ``fence``: blocks that this step overwrites; copies out of them end before it begins. ``before`` may start with the
    step, ``after`` only when its forward pass has been launched: it copies what that writes. ``failed``: requests whose
    load has failed, and their blocks that hold nothing. ``number``: of this step; ``answer``: the scheduler waits for
    word of it. ``idle``: this step computes nothing, and is there for what is on its way, whether a request waits for
    it or not: the worker may wait a moment for something to end.
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
    """What workers have done, by rank. ``number``: of the step that has ended; 0: it is not known.

    ``health``: of the ranks whose health has changed since they reported it last.
    """

    acks: dict[int, tuple[Ack, ...]]
    number: int = 0
    health: dict[int, RankHealth] = field(default_factory=dict)

    def merged(self, other: Report) -> Report:
        """Of both."""
        acks = dict(self.acks)
        for rank, more in other.acks.items():
            acks[rank] = acks.get(rank, ()) + more
        return Report(acks, max(self.number, other.number), {**self.health, **other.health})


def _cut(keys: bytes) -> list[PageKey]:
    return [PageKey(keys[i : i + KEY_NBYTES]) for i in range(0, len(keys), KEY_NBYTES)]
