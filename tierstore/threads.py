"""Threads that can be waited for again after an interrupted wait, and files that several threads use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Event, Thread, current_thread


class Worker(Thread):
    """A daemon thread. ``join`` and ``is_alive`` are correct even after an interrupted ``join``.

    Before Python 3.13, if a signal handler raises an exception in ``Thread.join``, Python marks the running
    thread as ended. The next ``join`` then returns at once, and the caller would release memory, maps and
    files that the thread still uses.
    """

    def __init__(self, target: Callable[..., object], *args: object, name: str) -> None:
        """Create a thread that calls ``target(*args)``. See ``threading.Thread``."""
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._begun = False
        self._over = Event()
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system cannot create one."""
        self._begun = True  # set before the start, so that an interrupted start counts as started
        try:
            super().start()
        except RuntimeError:
            self._begun = False
            raise

    def run(self) -> None:
        """Call ``target`` on this thread. Called by ``start``."""
        try:
            super().run()
        finally:
            self._over.set()

    def is_alive(self) -> bool:
        """Return whether ``target`` was started and has not ended. False in a forked child."""
        return self._begun and not self._over.is_set() and os.getpid() == self._pid

    def join(self, timeout: float | None = None) -> None:
        """Wait until ``target`` has ended, but at most ``timeout`` seconds.

        Returns at once if the thread was never started.

        Raises:
            RuntimeError: The calling thread is this thread.
        """
        if current_thread() is self:
            raise RuntimeError("a thread cannot wait for itself")
        if self._begun and os.getpid() == self._pid and self._over.wait(timeout):
            # Wait for the interpreter's cleanup of the thread as well. It uses none of our resources.
            super().join(timeout)


class SharedFile:
    """An open file that is closed when the last reference to this object is gone.

    Once a file is closed, its descriptor number may refer to another file at any time. Code that runs
    on other threads must therefore keep a reference to this object, and not only the number ``fd``.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of the file descriptor ``fd``."""
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


def start_all(threads: Sequence[Thread], end: Callable[[], object]) -> None:
    """Start all threads. If one cannot be started, call ``end`` and raise RuntimeError.

    Args:
        threads: The threads to start.
        end: Makes the threads that were already started exit.

    Raises:
        RuntimeError: The system cannot start one of the threads.
    """
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        end()
        raise
