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
    """What ``after`` takes: has happened once ``happen`` was called."""

    def __init__(self) -> None:
        self._happened = Event()

    def happen(self) -> None:
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        assert self._happened.wait(60.0)
