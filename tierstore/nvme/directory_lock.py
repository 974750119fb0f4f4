"""The lock of a tier's sub-directory: which process has it open, and how to look at it without taking it.

The lock is an flock that one open tier holds, with its PID in the file: a killed holder leaves nothing stale.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierstore.nvme.directory_layout import FULL, alone, move_aside, odd_kind

_log = logging.getLogger("tierstore.nvme.home")


def lock_path(directory: Path) -> Path:
    """The lock file of a sub-directory."""
    return directory.with_name(directory.name + ".lock")


def clear_odd_lock(directory: Path) -> None:
    """Rename what stands in the place of a sub-directory's lock file and is no regular file, with one warning. OSError.

    Nobody holds such a thing as a lock.
    """
    path = lock_path(directory)
    if odd_kind(path) is None:
        return
    with alone(path.parent):
        kind = odd_kind(path)
        if kind is not None:
            _log.warning("%s was %s and is now %s", path, kind, move_aside(path).name)


_NO_LOCK = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)
"""Errors of an open that say that something else than a file is in the place of the lock."""

_GLANCE_S = 0.5  # who only looks is soon gone; an open beside it must not take that for a user

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive lock until ``release`` or the end of the process; two in one process exclude each other."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path) -> FileLock | int | None:
        """The lock on ``path`` (made if missing), or the PID of who holds it, or None if it does not say.

        Waits half a second at most, for one who only looks. OSError if the file cannot be opened.
        """
        deadline = time.monotonic() + _GLANCE_S
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _require_file(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _read_pid(fd)
                os.close(fd)
                if time.monotonic() > deadline:
                    return holder
                time.sleep(_GLANCE_S / 20)
                continue
            except OSError:
                os.close(fd)
                raise
            if _same_file(fd, path):
                break
            os.close(fd)  # unlinked between open and flock: that lock would exclude nobody
        text = f"{os.getpid()}\n".encode()
        with suppress(OSError):  # a full disk has no room for the PID; the lock is held all the same
            os.pwrite(fd, text, 0)
            os.ftruncate(fd, len(text))
        lock = cls(path, fd)
        _held.add(lock)
        return lock

    def remove(self) -> None:
        """Unlink the file while it is held."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let it go; a second call does nothing."""
        _held.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def lock_holder(path: Path) -> Iterator[int | None]:
    """Look at a lock without taking it: give the holder's PID, 0 if the file does not say, or None if it is free.

    A free lock stays free until the ``with`` ends. The file is neither changed nor made.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *_NO_LOCK):
            raise
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield _read_pid(fd) or 0
        else:
            yield None
    finally:
        os.close(fd)


@contextmanager
def locked_to_read(path: Path) -> Iterator[int | None]:
    """Hold a lock in order to read what it guards: give None, or the PID of its holder, 0 if the file does not say.

    Where the file cannot be written (a read-only medium or user, a full disk) it is only watched: ``lock_holder``.
    """
    try:
        lock = FileLock.acquire(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, *FULL, *_NO_LOCK):
            raise
        with lock_holder(path) as holder:
            yield holder
        return
    if not isinstance(lock, FileLock):
        yield lock or 0
        return
    try:
        yield None
    finally:
        lock.release()


def _require_file(fd: int) -> None:
    """OSError unless it is a regular file: nobody locks anything else."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _let_go_in_child() -> None:
    # A forked child shares the lock; closing its descriptor keeps the child from holding it after the parent died.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
