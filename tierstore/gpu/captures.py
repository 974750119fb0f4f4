"""What CUDA does not tell while a graph is being captured in the process, by whichever thread."""

from __future__ import annotations

from typing import Protocol

import torch

_REFUSED = range(900, 909)
"""cudaErrorStreamCapture...: of the question, not of what was asked about."""


class Asked(Protocol):
    """An event."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...


def has_happened(event: Asked) -> bool:
    """Whether it has, as far as can be told now: what it ends may go on while a graph is captured.

    RuntimeError when the device has failed.
    """
    try:
        return event.query()
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) in _REFUSED:
            return False
        raise
