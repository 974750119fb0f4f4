"""Runs a process with a filled store, and kills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import forked


@contextmanager
def victim(home: Path, nvme_pages: int, name: str, count: int) -> Iterator[int]:
    """Run a process with a filled, flushed and open store, and kill it with SIGKILL when the context ends.

    Yields:
        The number of bytes that the store counts as used on disk.
    """
    program = "from tests.field.victim import main; main()"
    with forked.running(program, home, str(nvme_pages), name, str(count)) as process:
        yield int(process.stdout.readline())
