"""The reader threads: they take pages of the oldest transfer together, and check each before it counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.exp import Decoder, Geometry
from tierstore.nvme.acks import Job, Outbox, Outcome, failed
from tierstore.nvme.reading import RecordReader, scratch_for
from tierstore.types import Failure, PageKey, Transfer

_log = logging.getLogger(__name__)


class Readers:
    """``count`` daemon threads. ``submit`` and ``close`` from any thread."""

    def __init__(
        self,
        reader: RecordReader,
        outbox: Outbox,
        *,
        count: int,
        page_nbytes: int,
        geometry: Geometry | None = None,
    ) -> None:
        """``geometry``: of the pages, without which encoded ones cannot be read."""
        self._reader = reader
        self._outbox = outbox
        self._page_nbytes = page_nbytes
        self._geometry = geometry
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._told = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tierstore-nvme-read-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a read. Never blocks. After ``close`` it is acked as CLOSED."""
        with self._changed:
            if not self._closing and out:
                self._jobs.append(Job(transfer, out))
                self._changed.notify_all()
                return
        self._outbox.add_quietly(failed(transfer, Failure.CLOSED))

    def close(self) -> None:
        """Fail what has not begun with CLOSED and let the threads end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join_until(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (time.monotonic); whether all have ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        scratch = scratch_for(self._page_nbytes)
        decoder = None if self._geometry is None else Decoder(self._geometry)  # this thread's own
        while (unit := self._take()) is not None:
            job, index = unit
            outcome = Failure.CLOSED if self._closing else self._read(job, index, scratch, decoder)
            with self._changed:
                finished = job.done(index, outcome)
            if finished:
                self._outbox.add(job.ack())

    def _take(self) -> tuple[Job, int] | None:
        with self._changed:
            while not self._jobs:
                if self._closing:
                    return None
                self._changed.wait()
            job = self._jobs[0]
            index = job.next
            job.next += 1
            if job.next == len(job.pages):
                self._jobs.popleft()
            return job, index

    def _read(self, job: Job, index: int, scratch: NDArray[np.uint8], decoder: Decoder | None) -> Outcome:
        key, out = job.transfer.keys[index], job.pages[index]
        try:
            self._reader.load(key, out, scratch, decoder)
        except KeyError:
            failure = Failure.NOT_FOUND
        except IntegrityError as error:
            failure = Failure.INTEGRITY
            self._tell("page %s on disk is not what was written: %s", key, error)
        except (OSError, lmdb.Error) as error:
            failure = Failure.IO_ERROR
            self._tell("page %s could not be read: %s", key, error)
        except Exception:  # noqa: BLE001  the thread's top: one page fails, the thread goes on
            failure = Failure.IO_ERROR
            _log.exception("reading page %s failed", key.hex())
        else:
            self._outbox.count("bytes_read", out.nbytes)
            return out.nbytes
        self._outbox.count(f"read_{failure.value}")
        return failure

    def _tell(self, message: str, key: PageKey, error: Exception) -> None:
        """Warn of the first bad page; a failing disk has thousands, and they are counted."""
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        _log.log(level, message, key.hex(), error)
