"""An event of a caller that happens when the test says so."""

from __future__ import annotations

from threading import Event


class ManualEvent:
    """What ``after`` takes: has happened once ``happen`` was called."""

    def __init__(self) -> None:
        self._happened = Event()

    def happen(self) -> None:
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        assert self._happened.wait(60.0)
