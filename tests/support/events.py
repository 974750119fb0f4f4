"""An event whose occurrence or failure a test controls."""

from __future__ import annotations

from threading import Event
from typing import Any

import torch


def capturing() -> RuntimeError:
    """Return the error that CUDA raises if an event is recorded while a graph is being captured."""
    error: Any = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    error.error_code = 900
    assert isinstance(error, RuntimeError)
    return error


class ManualEvent:
    """An event for the argument ``after`` of the store's methods.

    It has occurred once ``happen`` has been called. After ``fail``, it reports a failed device.
    """

    def __init__(self) -> None:
        self._happened = Event()
        self._failed = False

    @property
    def pending(self) -> bool:
        """Return whether the event has not occurred yet, so that the work before it may still be running."""
        return not self._happened.is_set()

    def happen(self) -> None:
        self._happened.set()

    def fail(self) -> None:
        self._failed = True
        self._happened.set()

    def query(self) -> bool:
        happened = self._happened.is_set()
        self._raise_if_failed()
        return happened

    def synchronize(self) -> None:
        assert self._happened.wait(60.0)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._failed:
            raise RuntimeError("the device has failed")
