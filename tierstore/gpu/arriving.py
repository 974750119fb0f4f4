"""How far the loads of some pages are, a layer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Event(Protocol):
    """Something that will have happened."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...


@dataclass(frozen=True, slots=True)
class Arriving:
    """``submitted``: the layer's copies of all these pages are queued, and ``event`` ends the last of them; no event:
    they have ended. Not submitted: nothing can be said yet.
    """

    submitted: bool
    event: Event | None = None


NOT_YET = Arriving(submitted=False)
HERE = Arriving(submitted=True)
