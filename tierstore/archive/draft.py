"""A file on its way: written under a name of its own beside its place, moved there whole or removed.

``NAME.part`` is locked while somebody writes it. A process that is killed leaves it behind without the lock; the next
writer of NAME takes it over, so at most one is ever there.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tierstore.archive.output import Output
from tierstore.errors import ArchiveError

SUFFIX = ".part"


class Draft:
    """``with Draft(path) as draft``: what was written to ``draft.file`` is at ``path`` after ``commit``, else nowhere.

    What was at ``path`` before stays there until then. Opening and ending do no I/O but on names, and never await, so
    that no cancellation comes between. ArchiveError if another writes there, or if anything but a file is there: its
    name would be taken from a device or a pipe; OSError as it comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + SUFFIX)
        self._committed = False
        _require_free(path)
        self.file = Output(_locked(self._part))

    def commit(self) -> None:
        """Everything is written and synced: give it its name, durably."""
        self._part.replace(self.path)
        self._committed = True
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            self._part.unlink(missing_ok=True)
        with suppress(OSError):  # what a network says only at the end; the file is synced, or nobody wants it
            self.file.close()  # waits for a write that a thread is still at


def _require_free(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        found = (
            "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "device, pipe or socket"
        )
        raise ArchiveError(f"{path} is a {found}; allowed: the name of a file")


def _locked(part: Path) -> int:
    """The file, empty and locked by us."""
    while True:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(fd, part):
                os.ftruncate(fd, 0)
                return fd
        except BlockingIOError:
            os.close(fd)
            raise ArchiveError(f"{part} is being written by another; allowed: one writer of a file") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it has got its name, or was removed, between open and flock


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
