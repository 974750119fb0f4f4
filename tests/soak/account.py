"""What a client counts and says: actions, faults, pages, memory, and how it ends when something is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from threading import Lock

PATIENCE_S = 60.0
"""How long anything may take before it counts as a hang."""


class WrongBytes(AssertionError):
    """A page was served that is not the one of its key, or an answer that is not the model's."""


class Overdue(AssertionError):
    """Something that must end did not."""


class Account:
    """Counters by subject and name. Any thread."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._lock = Lock()

    def count(self, subject: str, name: str, number: int = 1) -> None:
        """Adds to one counter."""
        if number:
            with self._lock:
                self._counts.setdefault(subject, Counter())[name] += number

    def snapshot(self) -> dict[str, dict[str, int]]:
        """All counters now, by subject and name."""
        with self._lock:
            return {subject: dict(names) for subject, names in self._counts.items()}


def say(**fields: object) -> None:
    """One line of JSON for whoever reads us."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def rss_nbytes() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
