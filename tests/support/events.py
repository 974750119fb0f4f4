"""An event of a caller that happens when the test says so."""

from __future__ import annotations

from threading import Event
from typing import Any

import torch


def capturing() -> RuntimeError:
    """What CUDA answers whoever asks for an event while a graph is being captured."""
    error: Any = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    error.error_code = 900
    assert isinstance(error, RuntimeError)
    return error


class ManualEvent:
    """What ``after`` takes: has happened once ``happen`` was called. ``fail``: its device has failed before that."""

    def __init__(self) -> None:
        self._happened = Event()
        self._failed = False

    @property
    def pending(self) -> bool:
        """Whether what it ends may still be at work."""
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
