"""An LMDB environment that can be closed and reopened while other threads read it.

After a failed write of a meta page, LMDB refuses all later transactions of the process (MDB_PANIC), even if
the disk recovers. Only reopening the environment clears this state. Closing the environment during a transaction is
undefined behaviour. Transactions therefore pass through a gate: ``reopen`` blocks new transactions and waits for
those in progress, which are short.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, overload

import lmdb

from tierstore.nvme.catalogue_entry import CATALOGUE_DB, META_DB, PAGES_DB
from tierstore.nvme.directory_layout import DATA_FILE
from tierstore.types import exact_size

_AnyBytes = TypeVar("_AnyBytes", bytes, memoryview)

_LOOK_S = 0.0005
"""Interval, in seconds, at which ``reopen`` checks whether transactions have finished."""

STALE = (
    lmdb.BadDbiError,
    lmdb.BadRslotError,
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.MapResizedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
)
"""LMDB errors that reopening the environment may clear."""


class Environment:
    """The environment and its trees.

    Thread-safe, except that only the writer's thread may call ``reopen``, and no call may overlap ``close``.
    """

    catalogue: lmdb._Database
    pages: lmdb._Database
    meta: lmdb._Database
    """Handles of the three trees. Read these attributes within a transaction, because ``reopen`` replaces them."""

    def __init__(self, open_env: Callable[[], lmdb.Environment], *, create: bool = False) -> None:
        """Open the environment and its trees. Raises lmdb.Error or OSError.

        Args:
            open_env: Function that opens the environment.
            create: Whether to create missing trees.
        """
        self._open = open_env
        self._inside: list[None] = []
        """One item per transaction inside the gate. ``append`` and ``pop`` are atomic and cheaper than a lock."""
        self._open_gate = threading.Event()
        self._open_gate.set()
        self._shut = False
        self._last_txn = 0
        self._env: lmdb.Environment | None = None
        env = open_env()
        self.path = Path(env.path())
        found = (self.path / DATA_FILE).stat()
        self._file, self._length = _identity(found), found.st_size
        self._take(env, create=create)

    @overload
    def begin(self, *, write: bool = ..., buffers: Literal[False] = ...) -> Use[bytes]: ...
    @overload
    def begin(self, *, write: bool = ..., buffers: Literal[True]) -> Use[memoryview]: ...
    def begin(self, *, write: bool = False, buffers: bool = False) -> Use[Any]:
        """Return a transaction as a context manager. No memoryview may outlive it.

        Entering the context raises lmdb.Error if LMDB cannot begin the transaction.
        """
        return Use(self, write, buffers)

    def entry(self, key: bytes) -> bytes | None:
        """Return the current catalogue entry of a key, or None.

        For speed, this creates no ``Use`` object: every page read calls it.
        """
        env = self.enter()
        try:
            with env.begin() as txn:
                return txn.get(key, db=self.catalogue)
        finally:
            self._inside.pop()

    def entries(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the current catalogue entries of several keys, from one transaction."""
        env = self.enter()
        try:
            with env.begin() as txn:
                return [txn.get(key, db=self.catalogue) for key in keys]
        finally:
            self._inside.pop()

    def reader_check(self) -> int:
        """Release the reader slots that killed processes left occupied. Return the number of released slots."""
        env = self.enter()
        try:
            return env.reader_check()
        finally:
            self.leave()

    def readers(self) -> str:
        """Return LMDB's reader table as text."""
        env = self.enter()
        try:
            return env.readers()
        finally:
            self.leave()

    def sync(self, force: bool) -> None:
        """Flush the last commits to disk, so that they survive a power failure."""
        env = self.enter()
        try:
            env.sync(force)
        finally:
            self.leave()

    def reopen(self, timeout_s: float) -> None:
        """Close and reopen the environment. Transactions that begin meanwhile wait.

        Raises:
            TimeoutError: A transaction in progress did not finish within ``timeout_s`` seconds. The environment
                stays open.
            lmdb.Error: The environment cannot be opened now. Until a later call succeeds, the environment stays
                closed and transactions fail with lmdb.PanicError.
            OSError: As for lmdb.Error.
        """
        deadline = time.monotonic() + timeout_s
        self._open_gate.clear()
        self._shut = True
        try:
            while self._inside:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, f"a lookup in {self.path} is still running after {timeout_s:g} s"
                    )
                time.sleep(_LOOK_S)
            env, self._env = self._env, None
            if env is not None:
                env.close()
            self._require_same_file()
            self._take(self._open())
        finally:
            self._shut = False
            self._open_gate.set()

    def note_commit(self) -> None:
        """Record the ID of the last committed transaction. Call this inside the gate, after a commit.

        ``reopen`` fails if the file no longer contains this transaction.
        """
        if self._env is not None:
            self._last_txn = int(self._env.info()["last_txnid"])
            with suppress(OSError):  # the directory was moved or deleted: ``reopen`` will notice
                self._length = max(self._length, (self.path / DATA_FILE).stat().st_size)

    def close(self) -> None:
        """Close the environment. No transaction may be open, and none may begin afterwards."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def enter(self) -> lmdb.Environment:
        """Return the environment, which stays open until ``leave``."""
        # Enter first, then check the gate. ``reopen`` shuts the gate first, then checks for threads inside.
        self._inside.append(None)
        while self._shut:
            self._inside.pop()
            self._open_gate.wait()
            self._inside.append(None)
        env = self._env
        if env is None:
            self._inside.pop()
            raise lmdb.PanicError("the catalogue is closed, because it could not be reopened after an error")
        return env

    def leave(self) -> None:
        """Undo ``enter``, so that ``reopen`` no longer waits for this caller."""
        self._inside.pop()

    def _take(self, env: lmdb.Environment, *, create: bool = False) -> None:
        """Use ``env`` from now on. If ``env`` has lost commits or lacks a tree, close it and raise an exception."""
        try:
            env.reader_check()
            found = int(env.info()["last_txnid"])
            if found < self._last_txn:
                raise OSError(
                    errno.EIO,
                    f"{self.path} has lost commits: it is at transaction {found}, not {self._last_txn}; the tier "
                    "accepts writes again once the store is closed and reopened",
                )
            names = (CATALOGUE_DB, PAGES_DB, META_DB)
            if env.flags()["readonly"]:
                trees = [env.open_db(name, create=False) for name in names]
            else:
                with env.begin(write=True) as txn:  # creates all trees or none, even if the process is killed
                    trees = [env.open_db(name, txn, create=create) for name in names]
            self.catalogue, self.pages, self.meta = trees
        except BaseException:
            env.close()
            raise
        self._env = env

    def _require_same_file(self) -> None:
        """Raise OSError if the path no longer refers to the file that was opened first, or if the file is truncated.

        LMDB never shortens its file. The process would be killed if it accessed mapped memory beyond the file's end.
        """
        data = self.path / DATA_FILE
        found = data.stat()
        if _identity(found) != self._file:
            raise FileNotFoundError(errno.ENOENT, f"{data} is not the file that this store opened")
        if found.st_size < self._length:
            raise OSError(
                errno.EIO,
                f"{data} is truncated: its length is {exact_size(found.st_size)}, but was {exact_size(self._length)}",
            )


class Use(Generic[_AnyBytes]):
    """Context manager that enters the environment's gate and runs a transaction.

    It is a class, not a generator, for speed: page reads create many of them.
    """

    __slots__ = ("_buffers", "_environment", "_txn", "_write")

    def __init__(self, environment: Environment, write: bool, buffers: bool) -> None:
        self._environment = environment
        self._write, self._buffers = write, buffers
        self._txn: lmdb.Transaction[_AnyBytes]

    def __enter__(self) -> lmdb.Transaction[_AnyBytes]:
        env = self._environment.enter()
        try:
            begin: Callable[..., lmdb.Transaction[_AnyBytes]] = env.begin
            txn = begin(write=self._write, buffers=self._buffers)
        except BaseException:
            self._environment.leave()
            raise
        self._txn = txn
        return txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._txn.__exit__(kind, error, trace)
            if self._write and kind is None:
                self._environment.note_commit()
        finally:
            self._environment.leave()


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
