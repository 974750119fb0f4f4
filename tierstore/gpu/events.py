"""Events of a device: their protocols, a combination of several events, and the progress of a layer's loads.

``Event`` has the methods that the store needs of any event. A stream can wait for a ``StreamEvent``. Copy
engines record a ``TimedEvent``, which knows when it happened. ``Arriving`` tells the progress of the copies
of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """Something that will have happened, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether it has happened; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until it has happened."""
        ...


@runtime_checkable
class StreamEvent(Protocol):
    """An event that a stream can wait for."""

    def wait(self, stream: object = None) -> None:
        """Make work queued on the stream from now on wait for it; None: on the current stream. Does not block."""
        ...


class TimedEvent(Protocol):
    """An event of a stream that knows when it happened, such as ``torch.cuda.Event(enable_timing=True)``."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """Let it happen when the stream gets there."""
        ...

    def query(self) -> bool:
        """Return whether it has happened. RuntimeError if the device has failed."""
        ...

    def synchronize(self) -> None:
        """Block until it has happened."""
        ...

    def elapsed_time(self, end: TimedEvent) -> float:
        """Return the milliseconds from this event to ``end``; both must have happened."""
        ...


@dataclass(frozen=True, slots=True)
class AllOf:
    """Combines several events into one, which has happened once all of them have."""

    events: tuple[Event, ...]

    def query(self) -> bool:
        """Return whether all have happened."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Block until all have happened."""
        for event in self.events:
            event.synchronize()

    def wait(self, stream: object = None) -> None:
        """Make work that is queued on ``stream`` from now on wait for those events that streams can wait for.

        ``stream.wait_event`` calls this. It blocks until all other events have happened.
        """
        for event in self.events:
            if isinstance(event, StreamEvent):
                event.wait(stream)
            else:
                event.synchronize()


def as_one(events: Sequence[Event]) -> Event | None:
    """Return an event that has happened once all of ``events`` have, or None if there are none."""
    if len(events) > 1:
        return AllOf(tuple(events))
    return events[0] if events else None


@dataclass(frozen=True, slots=True)
class Arriving:
    """The progress of the loads of a layer of some pages.

    Attributes:
        submitted: Whether all of its copies are queued. If not, ``event`` has no meaning.
        event: The event after the last of the copies. None if they have ended.
    """

    submitted: bool
    event: Event | None = None


NOT_YET = Arriving(submitted=False)
HERE = Arriving(submitted=True)
