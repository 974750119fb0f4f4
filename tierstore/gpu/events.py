"""Device events: protocols, a combination of several events, and the load progress of a layer.

``Event`` has the methods that the store needs from every event. Streams can wait for a ``StreamEvent``. Copy
engines record a ``TimedEvent``, from which they learn how long copies took. ``Arriving`` is the progress of
loading a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """An event that completes at some point, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the event has completed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until the event has completed."""
        ...


@runtime_checkable
class StreamEvent(Protocol):
    """An event that a stream can wait for."""

    def wait(self, stream: object = None) -> None:
        """Make work queued on ``stream`` from now on wait for the event. Does not block.

        None stands for the current stream.
        """
        ...


class TimedEvent(Protocol):
    """An event that stores the time of its completion, such as ``torch.cuda.Event(enable_timing=True)``."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record the event: it completes after the work queued on ``stream`` so far."""
        ...

    def query(self) -> bool:
        """Return whether the event has completed. Raises RuntimeError if the device has failed."""
        ...

    def synchronize(self) -> None:
        """Block until the event has completed."""
        ...

    def elapsed_time(self, end: TimedEvent) -> float:
        """Return the time from this event to ``end`` in milliseconds. Both must have completed."""
        ...


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several events combined into one, which completes once all of them have completed."""

    events: tuple[Event, ...]

    def query(self) -> bool:
        """Return whether all events have completed."""
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        """Block until all events have completed."""
        for event in self.events:
            event.synchronize()

    def wait(self, stream: object = None) -> None:
        """Make work queued on ``stream`` from now on wait for all events. ``stream.wait_event`` calls this.

        If streams cannot wait for some of the events, block until these have completed.
        """
        for event in self.events:
            if isinstance(event, StreamEvent):
                event.wait(stream)
            else:
                event.synchronize()


def as_one(events: Sequence[Event]) -> Event | None:
    """Return an event that completes once all of ``events`` have completed, or None if ``events`` is empty."""
    if len(events) > 1:
        return AllOf(tuple(events))
    return events[0] if events else None


@dataclass(frozen=True, slots=True)
class Arriving:
    """The progress of loading one layer of some pages.

    Attributes:
        submitted: Whether all copies are queued. If not, ``event`` is meaningless.
        event: The event that completes with the last copy. None if all copies are complete.
    """

    submitted: bool
    event: Event | None = None


NOT_YET = Arriving(submitted=False)
HERE = Arriving(submitted=True)
