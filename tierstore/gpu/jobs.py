"""Transfers on their way over the link, and the launches that carry them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.types import Ack, Failure, Tier, Transfer

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class TimedEvent(Protocol):
    """An event of a stream that knows when it happened, such as ``torch.cuda.Event``."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """Happens when the stream gets there."""
        ...

    def query(self) -> bool:
        """Whether it has happened. RuntimeError when the device has failed."""
        ...

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds from this one to ``end``; both have happened."""
        ...


@dataclass(eq=False)
class Job:
    """A transfer and how far it is. ``flights``: what carries each layer group launched so far."""

    transfer: Transfer
    device_slots: NDArray[np.int64]
    host_slots: NDArray[np.int64]
    flights: list[Flight] = field(default_factory=list)
    airborne: int = 0
    """Flights of it that are being launched or have not landed."""
    seconds: float = 0.0
    failure: Failure | None = None
    refused: set[int] = field(default_factory=set)
    """Positions of pages that did not arrive as their form is wrong."""

    @classmethod
    def of(cls, transfer: Transfer) -> Job:
        """Nothing of it launched."""
        src, dst = (np.fromiter(s, np.int64, len(s)) for s in (transfer.src_slots, transfer.dst_slots))
        return cls(transfer, dst, src) if transfer.dst == Tier.HBM else cls(transfer, src, dst)

    @cached_property
    def into(self) -> frozenset[int]:
        """The slots it writes."""
        return frozenset(self.transfer.dst_slots)

    @property
    def pages(self) -> int:
        """How many it moves."""
        return len(self.host_slots)


@dataclass(slots=True, eq=False)
class Flight:
    """Copies launched together. ``group`` None: all layers."""

    number: int
    jobs: list[Job]
    group: int | None
    nbytes: int
    begun: TimedEvent
    ended: TimedEvent
    broken: bool = False
    landed: bool = False
    lent: bool = False
    """A caller holds the event that ends it."""
    refused: NDArray[np.int32] | None = None
    """See ``routes.Route``; to be looked at when it has landed."""


def ack_of(job: Job, page_nbytes: int) -> Ack:
    """What became of a job that has come to its end."""
    transfer = job.transfer
    if job.failure is not None:
        failures = tuple((i, job.failure) for i in range(len(transfer.keys)))
        return Ack(transfer.id, False, 0, 0, 0.0, failures)
    why = Failure.UNFIT if transfer.dst == Tier.HOST else Failure.INTEGRITY
    refused = tuple((i, why) for i in sorted(job.refused))
    pages = len(transfer.keys) - len(refused)
    return Ack(transfer.id, not refused, pages, pages * page_nbytes, job.seconds, refused)


def share_refused(flight: Flight) -> None:
    """Tells each job of a flight that has landed which of its pages did not arrive."""
    if flight.refused is None or not flight.refused.any():
        return
    first = 0
    for job in flight.jobs:
        job.refused.update(np.flatnonzero(flight.refused[first : first + job.pages]).tolist())
        first += job.pages
