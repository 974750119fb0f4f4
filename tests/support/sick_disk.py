"""Reads of a disk that hangs or fails: what stands in for ``os.preadv`` where pages are read."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

import pytest

from tests.nvme.watch import Calls
from tierstore.nvme import extents, reading

PATIENCE_S = 60.0


class Hanging:
    """In the place of ``preadv``: the first ``count`` reads stand still until they are let go."""

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
    """In the place of ``preadv``: every read stands still until the test lets one more go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._let = threading.Semaphore(0)

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.begun.release()
        assert self._let.acquire(timeout=PATIENCE_S)
        return os.preadv(fd, buffers, offset)

    def let_one_go(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S), "no read has begun"
        self._let.release()


class Failing:
    """In the place of ``preadv``: an error each time, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        raise OSError(errno.EIO, "Input/output error")


def replace_preadv(monkeypatch: pytest.MonkeyPatch, preadv: Hanging | Slow | Failing | None) -> None:
    """The tier's page reads go through ``preadv`` from now on; None: through the system's again."""
    for module in (extents, reading):
        monkeypatch.setattr(module, "os", os if preadv is None else Calls(preadv=preadv))
