"""Threads that check and decode pages while the readers fetch the next ones.

A page's checksum takes a tenth of the time that a fast disk takes to send it. Were it made by the thread that waits for
the disk, the disk would have one read less to do meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierstore.nvme.reading import scratch_for
from tierstore.nvme.record import Coding, Decoders
from tierstore.threads import start_all

Task = Callable[[Decoders], None]


class Checkers:
    """``count`` daemon threads, each with room for one page; with 0 whoever fetches checks. Any thread."""

    def __init__(self, count: int, page_nbytes: int, coding: Coding) -> None:
        self._coding = coding
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Task, NDArray[np.uint8]]] = deque()
        self._spare = [scratch_for(page_nbytes) for _ in range(count)]
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tierstore-nvme-check-{number}", daemon=True)
            for number in range(count)
        ]
        start_all(self._threads, self.close)

    def offer(self, task: Task, scratch: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Another scratch, and ``task`` will be run by one of the threads, which uses ``scratch`` until then.

        None: every thread has one already, and the caller is to run it. A task raises nothing.
        """
        with self._changed:
            if self._closing or not self._spare:
                return None
            self._tasks.append((task, scratch))
            self._changed.notify()
            return self._spare.pop()

    def close(self) -> None:
        """Take no more, run what was taken, and let the threads end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """To be joined after ``close``."""
        return self._threads

    def _run(self) -> None:
        decoders = self._coding.decoders()
        while True:
            with self._changed:
                while not self._tasks and not self._closing:
                    self._changed.wait()
                if not self._tasks:
                    return
                task, scratch = self._tasks.popleft()
            task(decoders)
            with self._changed:
                self._spare.append(scratch)
