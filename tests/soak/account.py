"""The counters that a client reports, and the errors that end it if something is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from threading import Lock

PATIENCE_S = 60.0
"""Seconds after which an operation counts as hung."""


class WrongBytes(AssertionError):
    """Raised when a page does not have the bytes of its key, or an answer is not the model's."""


class Overdue(AssertionError):
    """Raised when an operation has not ended in time."""


class Account:
    """Counters by subject and name. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._lock = Lock()

    def count(self, subject: str, name: str, number: int = 1) -> None:
        """Add ``number`` to one counter."""
        if number:
            with self._lock:
                self._counts.setdefault(subject, Counter())[name] += number

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return the values of all counters, by subject and name."""
        with self._lock:
            return {subject: dict(names) for subject, names in self._counts.items()}


def say(**fields: object) -> None:
    """Write one line of JSON to the standard output, which the parent reads."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def rss_nbytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
