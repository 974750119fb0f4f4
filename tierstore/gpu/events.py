"""Events that end the copies of a layer: how far the loads of some pages are, and several events as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
