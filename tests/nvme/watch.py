"""Intercepts the system calls of extent files: checks their order, and copies what a kill at any moment would leave."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstore.nvme import extents
from tierstore.nvme.direct_io import BLOCK
from tierstore.nvme.extent_allocator import Place

Block = tuple[int, int]
"""The number of an extent file, and of a block in this file."""


class Calls:
    """Replaces ``os`` in a module under test. The test provides the given calls; all others are the system's."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(os, name)


class Watch:
    """Replaces ``os`` in the module ``extents``, and asserts that no write touches a slot in use.

    ``named`` returns every slot that the committed catalogue names.
    """

    def __init__(self, home: Path, named: Callable[[], set[Place]]) -> None:
        self.home = home
        self.named = named
        self.dirty: set[Block] = set()
        self.calls: list[tuple[int, int, int]] = []
        """For each write: the number of the extent file, the offset, and the number of bytes."""
        self._snapshot_in = 0
        self._snapshot: Path | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        number = _number(fd)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        written = {(number, block) for block in range(offset // BLOCK, (offset + nbytes) // BLOCK)}
        assert written.isdisjoint(self._named_blocks()), (
            "a write touches a slot that the committed catalogue names"
        )
        done = os.pwritev(fd, buffers, offset)
        self.dirty |= written
        self.calls.append((number, offset, nbytes))
        self._event()
        return done

    def fdatasync(self, fd: int) -> None:
        assert self.dirty.isdisjoint(self._named_blocks()), (
            "the committed catalogue names blocks that have not been synced"
        )
        os.fdatasync(fd)
        number = _number(fd)
        self.dirty = {block for block in self.dirty if block[0] != number}
        self._event()

    def snapshot_in(self, events: int, target: Path) -> None:
        """Skip ``events`` writes and syncs, then copy the directory to ``target`` after the next one."""
        self._snapshot_in, self._snapshot = events, target

    def no_snapshot(self) -> bool:
        """Cancel the snapshot. Returns True if it had not been taken yet."""
        waiting, self._snapshot = self._snapshot is not None, None
        return waiting

    def _event(self) -> None:
        if self._snapshot is None:
            return
        self._snapshot_in -= 1
        if self._snapshot_in < 0:
            shutil.copytree(self.home, self._snapshot, ignore=shutil.ignore_patterns("lock.mdb", "*.lock"))
            self._snapshot = None

    def _named_blocks(self) -> set[Block]:
        return {
            (place.extent, block)
            for place in self.named()
            for block in range(place.block, place.block + place.blocks)
        }


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Make extent files use ``watch`` for their system calls."""
    setattr(extents, "os", watch)  # noqa: B010  mypy rejects an assignment to an imported module
    try:
        yield
    finally:
        setattr(extents, "os", os)  # noqa: B010


def _number(fd: int) -> int:
    match = re.search(r"extent-(\d+)\.bin", os.readlink(f"/proc/self/fd/{fd}"))
    assert match
    return int(match[1])
