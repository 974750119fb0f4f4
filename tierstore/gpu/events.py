"""Events of a device: the protocols that stand for them, several as one, and how far the loads of a layer are.

``Event`` is what the store needs of any event, ``StreamEvent`` can be waited for by a stream, ``TimedEvent`` is
recorded by a copy engine and knows when it happened. ``Arriving`` says how far the copies of a layer are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """Something that will have happened."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...


@runtime_checkable
class StreamEvent(Protocol):
    """An event that a stream can wait for."""

    def wait(self, stream: object = None) -> None:
        """Work put on the stream, None: the current one, from now on waits for it; does not block."""
        ...


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


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several events as one."""

    events: tuple[Event, ...]

    def query(self) -> bool:
        """Whether all have happened."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Blocks until all have happened."""
        for event in self.events:
            event.synchronize()

    def wait(self, stream: object = None) -> None:
        """What ``stream.wait_event`` calls: work put on the stream from now on waits for all CUDA events among them;
        blocks until the others have happened."""
        for event in self.events:
            if isinstance(event, StreamEvent):
                event.wait(stream)
            else:
                event.synchronize()


def as_one(events: Sequence[Event]) -> Event | None:
    """Return an event that has happened once all of ``events`` have: a single one as it is, None for none."""
    if len(events) > 1:
        return AllOf(tuple(events))
    return events[0] if events else None


@dataclass(frozen=True, slots=True)
class Arriving:
    """``submitted``: the layer's copies of all these pages are queued, and ``event`` ends the last of them; no event:
    they have ended. Not submitted: nothing can be said yet.
    """

    submitted: bool
    event: Event | None = None


NOT_YET = Arriving(submitted=False)
HERE = Arriving(submitted=True)
