"""The lock of a sub-directory, which one process holds while it has the sub-directory open.

The lock is an flock, and the lock file contains the holder's PID. A killed process leaves no stale lock.
Tiers that were opened read-only share the lock. ``lock_holder`` finds the holder without waiting for the lock.
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
    """Rename whatever is at the lock file's path if it is not a regular file, and log a warning.

    Nobody can hold a lock on such a file. Raises OSError if it cannot be renamed.
    """
    path = lock_path(directory)
    if odd_kind(path) is None:
        return
    with alone(path.parent):
        kind = odd_kind(path)
        if kind is not None:
            _log.warning("%s was %s and is now %s", path, kind, move_aside(path).name)


_NO_LOCK = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)
"""errno values of an attempt to open or lock something that is not a regular file."""

_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, *FULL)

_GLANCE_S = 0.5  # a process that only looks at a lock releases it within this time

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive or shared lock, held until ``release`` or process exit.

    The lock also excludes other holders within the same process.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def share(cls, path: Path) -> FileLock | int | None:
        """Acquire a shared lock on ``path``, for a reader.

        A missing lock file is created; nothing else is written. If the file cannot be created (read-only file
        system, missing permission, full disk), the returned lock excludes nobody.

        Returns:
            The lock, or the PID of a process that holds it exclusively (None if the PID is unknown).

        Raises:
            OSError: An existing lock file cannot be opened.
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
        if not _same_file(fd, path):  # unlinked between open and flock: locking it would exclude nobody
            os.close(fd)
            return cls.share(path)
        lock = cls(path, fd)
        _held.add(lock)
        return lock

    @classmethod
    def acquire(cls, path: Path) -> FileLock | int | None:
        """Acquire an exclusive lock on ``path``, creating the file if needed.

        If the lock is held, wait up to 0.5 s for it, because the holder may be a process that only checks the lock.

        Returns:
            The lock, or the PID of the current holder (None if the PID is unknown or if all holders are readers).

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

    @property
    def path(self) -> Path:
        """Path of the lock file."""
        return self._path

    def remove(self) -> None:
        """Unlink the lock file. The caller must hold the lock."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock. Calling it again has no effect."""
        _held.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def lock_holder(path: Path) -> Iterator[int | None]:
    """Find the process that holds a lock exclusively.

    Yield its PID, 0 if the PID is unknown, or None if no process holds the lock exclusively. After None, nobody
    can acquire the lock exclusively until the context exits, unless the lock file is missing. The lock file is
    neither changed nor created.
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
    """Hold a lock exclusively, so that the data it protects can be read.

    Yield None if the data can be read, or the PID of the process that holds the lock (0 if it is unknown).

    If other readers hold the lock, or if the lock file cannot be written (read-only file system, missing permission,
    full disk), the lock is only checked, as in ``lock_holder``.
    """
    try:
        lock = FileLock.acquire(path)
    except OSError as error:
        if error.errno not in (*_CANNOT_WRITE, *_NO_LOCK):
            raise
        lock = None
    if lock is None:  # other readers are allowed
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
    """Raise OSError unless ``fd`` is a regular file. Only regular files are locked."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def _is_shared(fd: int) -> bool:
    """Return whether all holders of the lock on this file are readers. If so, ``fd`` then shares the lock."""
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
    # A forked child inherits the lock. Closing its descriptor keeps the child from holding the lock after the
    # parent has died.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
