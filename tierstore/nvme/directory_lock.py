"""The lock of a sub-directory: which process has it open, and how to look without taking it.

The lock is an flock held by one open tier, with the PID in the file. A killed process leaves no stale lock. Tiers that
were opened read-only share it.
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
    """Return the path of a sub-directory's lock file."""
    return directory.with_name(directory.name + ".lock")


def clear_odd_lock(directory: Path) -> None:
    """Rename whatever stands in the place of a lock file and is not a regular file, with one warning. Raises OSError.

    Nobody can hold such a thing as a lock.
    """
    path = lock_path(directory)
    if odd_kind(path) is None:
        return
    with alone(path.parent):
        kind = odd_kind(path)
        if kind is not None:
            _log.warning("%s was %s and is now %s", path, kind, move_aside(path).name)


_NO_LOCK = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)
"""Errors of an open call which show that something other than a file is in the lock's place."""

_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, *FULL)

_GLANCE_S = 0.5  # somebody who only looks is soon gone, and must not be taken for a user

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive lock, held until ``release`` or the end of the process. It also excludes within one process."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def share(cls, path: Path) -> FileLock | int | None:
        """The lock on ``path`` for one who reads, beside others who do, or the holder as ``acquire`` returns it.

        Nothing is written but a lock file that is missing. Where that cannot be made (a read-only medium or user, a
        full disk) the lock excludes nobody. OSError if a file that is there cannot be opened.
        """
        flags = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, os.O_RDONLY | flags)
        except FileNotFoundError:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
            except OSError as error:
                if error.errno not in _CANNOT_WRITE:
                    raise
                return cls(path, -1)
        try:
            _require_file(fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_pid(fd)
            os.close(fd)
            return holder
        except BaseException:
            os.close(fd)
            raise
        if not _same_file(fd, path):  # unlinked between open and flock: that lock would exclude nobody
            os.close(fd)
            return cls.share(path)
        lock = cls(path, fd)
        _held.add(lock)
        return lock

    @classmethod
    def acquire(cls, path: Path) -> FileLock | int | None:
        """Lock ``path``, creating the file if needed.

        Returns the PID of the holder when it is taken, or None if that is unknown or the holders only read.

        Waits up to half a second for a process that only looks.

        Raises:
            OSError: The file cannot be opened.
        """
        deadline = time.monotonic() + _GLANCE_S
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _require_file(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = None if _is_shared(fd) else _read_pid(fd)
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
            os.close(fd)  # unlinked between open and flock: locking it would exclude nobody
        text = f"{os.getpid()}\n".encode()
        with suppress(OSError):  # a full disk may have no space for the PID; the lock is held anyway
            os.pwrite(fd, text, 0)
            os.ftruncate(fd, len(text))
        lock = cls(path, fd)
        _held.add(lock)
        return lock

    def remove(self) -> None:
        """Unlink the file while holding the lock."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock. Calling it again has no effect."""
        _held.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def lock_holder(path: Path) -> Iterator[int | None]:
    """Look at a lock without taking it. Gives the holder's PID, 0 if it is unknown, or None if the lock is free.

    A free lock stays free until the context ends. The file is neither changed nor created.
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
    """Hold a lock while reading what it guards. Gives None, or the PID of the present holder (0 if it is unknown).

    If the file cannot be written (read-only medium or user, full disk), or others hold the lock to read, it is only
    watched, as in ``lock_holder``.
    """
    try:
        lock = FileLock.acquire(path)
    except OSError as error:
        if error.errno not in (*_CANNOT_WRITE, *_NO_LOCK):
            raise
        lock = None
    if lock is None:  # others may read, too
        with lock_holder(path) as holder:
            yield holder
        return
    if not isinstance(lock, FileLock):
        yield lock
        return
    try:
        yield None
    finally:
        lock.release()


def _require_file(fd: int) -> None:
    """Raise OSError unless it is a regular file; nobody locks anything else."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def _is_shared(fd: int) -> bool:
    """Whether those who hold the lock of this descriptor's file only read."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
    # A forked child shares the lock. Closing its descriptor keeps it from holding the lock after the parent has died.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
