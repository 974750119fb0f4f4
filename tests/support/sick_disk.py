"""Simulates a disk that hangs or fails, by replacing ``os.preadv`` where extent files are read.

A test can also stop the disk's timers. Reads from LMDB cannot be replaced, because they are page faults.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Sequence
from time import monotonic

import pytest

from tests.nvme.rig import writer_of
from tests.nvme.watch import Calls
from tests.support.waiting import wait_for
from tierstore.nvme import extents
from tierstore.nvme.tier import NvmeTier
from tierstore.store import TierStore

PATIENCE_S = 60.0


class Hanging:
    """A replacement for ``preadv`` in which the first ``count`` reads hang until ``go_on`` is set."""

    def __init__(self, count: int) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self._left = count
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            hangs = self._left > 0
            self._left -= 1
        if hangs:
            self.begun.release()
            assert self.go_on.wait(PATIENCE_S)
        return os.preadv(fd, buffers, offset)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=PATIENCE_S)


class Slow:
    """A replacement for ``preadv`` in which each read hangs until the test calls ``let_one_go``."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._let = threading.Semaphore(0)

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.begun.release()
        assert self._let.acquire(timeout=PATIENCE_S)
        return os.preadv(fd, buffers, offset)

    def let_one_go(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S), "no read began in time"
        self._let.release()


class Failing:
    """A replacement for ``preadv`` in which each read fails. ``calls`` counts the reads."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        raise OSError(errno.EIO, "Input/output error")


def replace_preadv(monkeypatch: pytest.MonkeyPatch, preadv: Hanging | Slow | Failing | None) -> None:
    """Make reads of extent files call ``preadv`` from now on. None restores the system's function."""
    monkeypatch.setattr(extents, "os", os if preadv is None else Calls(preadv=preadv))


def disk_of(store: TierStore) -> NvmeTier:
    tier = store._parts.nvme
    assert isinstance(tier, NvmeTier)
    return tier


def hold_clock(tier: NvmeTier) -> None:
    """Stop the timers of this disk, so that tests do not depend on the speed of the machine.

    No read or write times out before ``time_is_up``. A disk that has failed is not tried again before ``ask_again``, or
    before a read that hung responds.
    """
    tier._watchdog.close()
    breaker = tier._readers._breaker
    breaker._pause_s = breaker._first_pause_s = breaker._longest_pause_s = math.inf


def time_is_up(tier: NvmeTier, *, reads: int = 0) -> None:
    """Make the operations that are hanging time out: ``reads`` reads, and a write if one is in progress.

    First wait until all other reads have ended.
    """
    readers, writer = tier._readers, writer_of(tier)

    def only_those_hang() -> bool:
        with readers._changed:
            begun = not readers._jobs or len(readers._reading) == readers._count
            return begun and len(readers._reading) == reads

    wait_for(only_those_hang)
    for read in readers._reading:
        read.since = -math.inf
    with writer._changed:
        if writer._since is not None:
            writer._since = -math.inf
    readers.look(monotonic())
    writer.look(monotonic())


def ask_again(tier: NvmeTier) -> None:
    """End the pause after which a failed disk is tried again."""
    tier._readers._breaker._again = -math.inf
