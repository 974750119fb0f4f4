"""Reads pages of a sub-directory that another process has open for writing.

Engines whose ranks all have the same pages use it: one rank writes the pages, and the others follow. A follower changes
nothing on disk. It may read a slot while the writer puts another record into it. The checksum, the key and the
generation reveal this, and the key is then looked up again, as in the writer's own process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme import direct_io, directory_layout, record_format
from tierstore.nvme.catalogue_entry import MAX_DBS
from tierstore.nvme.completion_queue import Outbox, failed
from tierstore.nvme.directory_opener import DEFAULT_READERS
from tierstore.nvme.extent_allocator import Slots
from tierstore.nvme.extents import ExtentBytes, ExtentFiles
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.lmdb_pages import InlineBytes
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.reader import Readers, RecordReader
from tierstore.nvme.record_storage import RecordBytes
from tierstore.nvme.tier import Watchdog
from tierstore.types import Ack, Failure, PageKey, Tier, Transfer

_MAP_NBYTES = 1 << 40


class Follower:
    """The reading half of ``NvmeTier``, for a sub-directory that another process writes. Thread-safe.

    A page does not count as read until ``poll`` has returned the Ack of its transfer.
    """

    tier: ClassVar[Tier] = Tier.NVME
    """The tier of the store that this class implements."""

    record_nbytes = budget_nbytes = 0
    """Always 0, because a follower stores nothing."""

    read_only = True
    """Always True."""

    def __init__(
        self,
        directory: Path,
        marker: directory_layout.ShardMarker,
        wake: Callable[[], None],
        *,
        readers: int | None,
        timeout_s: float,
    ) -> None:
        self._directory = directory
        self._outbox = Outbox(wake)
        self._num_readers = readers or marker.readers or DEFAULT_READERS
        self._closed = False
        self._files = _identity(directory)
        with ExitStack() as undone:
            # Larger than the map of any writer. With a smaller map, reads would fail once the writer's file grows. The
            # map only takes address space.
            self._env = Environment(
                partial(
                    lmdb.open,
                    str(directory),
                    map_size=max(_MAP_NBYTES, marker.capacity),
                    readonly=True,
                    create=False,
                    max_dbs=MAX_DBS,
                )
            )
            undone.callback(self._env.close)
            payload: RecordBytes = InlineBytes(self._env)
            if marker.payload == "extents":
                direct = direct_io.reads_directly(directory / directory_layout.DATA_FILE)
                files = _GrowingFiles(directory, direct=direct, writable=False)
                payload = ExtentBytes(self._env, files, Slots(1))
            undone.callback(payload.close)
            digest = record_format.fingerprint_digest(marker.fingerprint)
            self._reader = RecordReader(self._env, payload, fingerprint=digest)
            self._readers = Readers(
                self._reader,
                self._outbox,
                count=self._num_readers,
                page_nbytes=marker.page_nbytes,
                timeout_s=timeout_s,
                coding=Coding(),
            )
            undone.callback(self._readers.close)
            self._watchdog = Watchdog([self._readers.look], timeout_s)
            undone.pop_all()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        fingerprint: str,
        shard: int,
        page_nbytes: int,
        wake: Callable[[], None],
        readers: int | None = None,
        timeout_s: float = 10.0,
    ) -> Follower | None:
        """Open a sub-directory of ``path``. See ``NvmeTier.open`` for the arguments.

        Return None if the writer has not created the sub-directory yet, or if it cannot be read.
        """
        directory = path.expanduser().resolve() / directory_layout.shard_name(fingerprint, shard)
        marker = directory_layout.read_marker(directory)
        if marker is None or (marker.fingerprint, marker.page_nbytes) != (fingerprint, page_nbytes):
            return None
        try:
            return cls(directory, marker, wake, readers=readers, timeout_s=timeout_s)
        except (OSError, lmdb.Error):
            return None

    def records(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Yield nothing, because the writer's pages change all the time."""
        return iter(())

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Queue a read. See ``NvmeTier.submit_read``."""
        self._readers.submit(transfer, out)

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Ack every page as UNAVAILABLE."""
        self._outbox.add_quietly(failed(transfer, Failure.UNAVAILABLE))

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Do nothing: only the writer removes pages."""

    def poll(self) -> list[Ack]:
        """Remove and return the Acks of transfers that have completed, oldest first."""
        return self._outbox.take()

    @property
    def state(self) -> Literal["ok", "absent"]:
        """State of the disk: "absent" if reads hang or fail, else "ok"."""
        return "absent" if self._readers.absent else "ok"

    def is_stale(self) -> bool:
        """Return whether the writer has replaced the files, so that the follower must be opened again.

        Accesses the disk, which may hang.
        """
        return _identity(self._directory) != self._files

    def counters(self) -> dict[str, int]:
        """Return the counters of reads, with the names of ``NvmeTier.counters``."""
        counts = self._outbox.counts()
        return {name: counts.get(name, 0) for name in _COUNTERS}

    def stats(self) -> dict[str, object]:
        """Return counters and the state, with the names of ``NvmeTier.stats``."""
        return {
            "path": str(self._directory),
            "state": self.state,
            "read_only": True,
            "budget_nbytes": 0,
            "hung_reads": self._readers.num_late,
            "readers": self._num_readers,
            **self.counters(),
        }

    def close(self, timeout_s: float) -> bool:
        """Fail queued reads as CLOSED and stop the threads.

        Returns:
            False if a thread did not stop within ``timeout_s`` seconds. Call ``close`` again to retry.
        """
        if self._closed:
            return True
        self._watchdog.close()
        self._readers.close()
        if not self._readers.join_until(time.monotonic() + timeout_s):
            return False
        self._reader.close()
        self._env.close()
        self._closed = True
        return True


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return what identifies the catalogue's file, or None if there is none."""
    try:
        found = (directory / directory_layout.DATA_FILE).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


_COUNTERS = (
    "bytes_read",
    "read_integrity",
    "read_io_error",
    "read_late",
    "read_not_found",
    "read_unavailable",
)


class _GrowingFiles(ExtentFiles):
    """Extent files of a writer that may add files at any time."""

    def descriptor(self, number: int) -> int:
        """Return the descriptor of a file, which is opened when it is first read."""
        try:
            return super().descriptor(number)
        except IntegrityError:
            pass
        try:
            self._open(number, os.O_RDONLY)
        except OSError as error:
            raise IntegrityError(f"extent file {number} cannot be opened: {error}") from error
        return super().descriptor(number)
