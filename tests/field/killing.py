"""Runs a victim until it has said what it has, and kills it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


@contextmanager
def victim(home: Path, nvme_pages: int, name: str, count: int) -> Iterator[int]:
    """A process with a filled, flushed, open store; killed by SIGKILL on leaving. The bytes it accounted for."""
    arguments = [str(home), str(nvme_pages), name, str(count)]
    command = [sys.executable, "-m", "tests.field.victim", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGKILL)
