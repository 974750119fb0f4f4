"""The NVMe tier: pages by key, catalogued in one LMDB environment, behind queues that never block the caller."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar, Literal

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import keys
from tierstore.errors import StoreClosed
from tierstore.keys import KEY_NBYTES
from tierstore.nvme import directory_layout
from tierstore.nvme.completion_queue import Outbox
from tierstore.nvme.directory_opener import OpenShard, open_shard
from tierstore.nvme.page_codecs import Coding
from tierstore.nvme.reader import Lender, Readers
from tierstore.nvme.writer import SyncWork, Writer
from tierstore.page import PageLayout
from tierstore.types import Ack, PageKey, Tier, Transfer

_watchdog_log = logging.getLogger("tierstore.nvme.patience")

_LOOKS = 4
"""Looks in the time after which a read or a write is late."""


_CLOSE_S = 5.0


class Watchdog:
    """A daemon thread that calls each of ``looks`` with time.monotonic(), often enough for ``timeout_s``."""

    def __init__(self, looks: Sequence[Callable[[float], None]], timeout_s: float) -> None:
        self._looks = looks
        self._every_s = timeout_s / _LOOKS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstore-nvme-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No look begins from now on. Waits a moment for one that is under way, which never does I/O."""
        self._over.set()
        self._thread.join(_CLOSE_S)  # not for ever: a signal's handler may have left locked what it looks at

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            for look in self._looks:
                try:
                    look(time.monotonic())
                except Exception:  # noqa: BLE001  the thread's top: it goes on looking
                    _watchdog_log.exception("looking after the disk's threads failed")


_log = logging.getLogger("tierstore.nvme.tier")


class NvmeTier:
    """One (fingerprint, shard) of a home directory, held exclusively by this process.

    All methods may be called from any thread; ``submit_*`` never block. A page counts as read or written only once
    its transfer's Ack is out. After a fork the child's copy raises StoreClosed.
    """

    tier: ClassVar[Tier] = Tier.NVME
    """Its place among the tiers."""

    record_nbytes: int
    """What the record of one page costs at most on disk, its share of the catalogue included."""

    budget_nbytes: int
    """Sum of record bytes the tier may hold so that everything on disk stays within the capacity."""

    def __init__(
        self,
        shard: OpenShard,
        outbox: Outbox,
        *,
        page_nbytes: int,
        timeout_s: float,
        coding: Coding,
    ) -> None:
        sizing = shard.sizing
        self.record_nbytes = sizing.record_nbytes
        self.budget_nbytes = sizing.budget_nbytes
        self._form = coding.form
        self._view_nbytes = page_nbytes if self._form is None else self._form.view_nbytes
        self._directory = shard.directory
        self._lock = shard.lock
        self._catalogue = shard.catalogue
        self._sizing = sizing
        self._num_readers = shard.readers
        self._payload, self._direct, self._codec = shard.payload, shard.direct, coding.on_disk
        self._outbox = outbox
        # A thread may not be had: then the directory is free again, and those that began end.
        with ExitStack() as undone:
            undone.callback(shard.lock.release)
            undone.callback(shard.catalogue.close)
            self._readers = Readers(
                shard.catalogue.reader,
                outbox,
                count=shard.readers,
                page_nbytes=page_nbytes,
                timeout_s=timeout_s,
                coding=coding,
            )
            undone.callback(self._readers.close)
            self._writer = Writer(shard.catalogue, outbox, sizing, timeout_s, shortage=shard.shortage)
            undone.callback(self._writer.join, timeout_s)
            undone.callback(self._writer.close)
            self.lender = Lender(shard.catalogue.reader, page_nbytes)
            self._watchdog = Watchdog([self._readers.look, self._writer.look], timeout_s)
            undone.pop_all()
        self._disk_nbytes = 0
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity: int,
        fingerprint: str,
        shard: int,
        page_nbytes: int,
        wake: Callable[[], None],
        readers: int | None = None,
        timeout_s: float = 10.0,
        description: Mapping[str, object] | None = None,
        payload: str = "auto",
        codec: str = "none",
        layout: PageLayout | None = None,
        held: str = "none",
    ) -> NvmeTier:
        """Open the tier's sub-directory of ``path``, made if missing; ``capacity`` is for everything in it on disk.

        A sub-directory that an earlier process left damaged is renamed, with one warning, and the tier starts empty.
        ``wake`` is called from an I/O thread, with no lock held, for each Ack. ``description`` is kept for people.
        ``payload``: page bytes in "lmdb" or in "extents"; what is there in the other kind is removed with one warning.
        "auto" keeps the kind that is there, and where nothing is writes 32 MiB to see how fast the disk is.
        ``codec``: how pages are written from now on, a name of ``tierstore.codecs``; records of any codec are read,
        encoded ones with ``layout``, which every codec but "none" needs. ``held``: the codec that the pages given and
        asked for are encoded with (``codecs.host_format``); they are written as they are, or with compressed codes.
        ``readers``: threads that read; None: as many as the disk needs for 0.95 of its rate, asked when a directory of
        1 GiB or more is made and remembered there, else 2.
        ``timeout_s``: a read or a batch of writes that takes longer is not waited for: ``submit_*``, ``state``.
        ConfigError if the directory is not ours, in use, or the capacity cannot be had; nothing is changed then.
        """
        coding = Coding(codec, layout, held)
        marker = directory_layout.ShardMarker(
            fingerprint=fingerprint,
            shard=shard,
            page_nbytes=page_nbytes,
            capacity=capacity,
            key_scheme=keys.SCHEME,
            codec=coding.on_disk,
            description=dict(description or {}),
        )
        shard_home = open_shard(path, marker, payload, readers=readers, coding=coding)
        return cls(
            shard_home,
            Outbox(wake),
            page_nbytes=page_nbytes,
            timeout_s=timeout_s,
            coding=coding,
        )

    def records(self) -> Iterator[tuple[PageKey, PageKey | None, int]]:
        """Key, parent and bytes on disk of every record that was there at open. Once, before any ``submit_*``.

        They sum to at most ``budget_nbytes``: what a lowered capacity has no room for is erased.
        """
        self._guard()
        room = self.budget_nbytes
        surplus: list[PageKey] = []
        erased = set(self._catalogue.undeleted)
        try:
            for record in self._catalogue.reader.summaries():
                if record[0] in erased:
                    continue
                room -= record[2]
                if room < 0:
                    surplus.append(record[0])
                else:
                    yield record
        except lmdb.Error as error:
            _log.warning("the NVMe tier at %s cannot list all of its records: %s", self._directory, error)
        self._writer.submit_erase(surplus)

    def submit_write(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        """Store ``pages[i]`` (flat uint8 of page_nbytes, or of the held form's view) under ``transfer.keys[i]``.

        It replaces what was there. The pages must not change before the Ack, whose ``nbytes`` are record bytes on disk.
        A page that failed left no record. While a batch hangs, what is behind it fails as UNAVAILABLE.
        """
        self._guard()
        self._check(transfer, pages)
        form = self._form
        self._writer.submit_write(
            transfer, pages if form is None else [page[: form.payload_nbytes] for page in pages]
        )

    def submit_read(self, transfer: Transfer, out: Sequence[NDArray[np.uint8]]) -> None:
        """Fill ``out[i]`` (flat writable uint8, as for ``submit_write``) with the page of ``transfer.keys[i]``.

        Until the Ack, and after it for a page that failed, ``out[i]`` holds anything. ``nbytes`` are page bytes. A read
        that hangs is ``late`` in a first Ack, and a second one says when nothing writes ``out[i]`` any more. While the
        disk hangs or fails, pages are UNAVAILABLE at once, but for one now and then.
        """
        self._guard()
        self._check(transfer, out)
        self._readers.submit(transfer, out)

    def submit_erase(self, keys: Sequence[PageKey]) -> None:
        """Remove records, ordered with the writes of the same keys around it. Missing ones are no error; no Ack."""
        self._guard()
        self._writer.submit_erase(keys)

    def poll(self) -> list[Ack]:
        """Transfers finished since the last call, oldest first. Works after ``close`` too."""
        self._guard()
        return self._outbox.take()

    def sync(self, timeout_s: float) -> bool:
        """True once every write submitted before is durable or acked as failed and every erase is durable; False if
        that did not come about in time or the disk refuses it.

        An erase is durable when a restart does not bring the page back: the record is deleted, or a tombstone names it.
        """
        self._guard()
        return self._writer.sync(timeout_s)

    def begin_sync(self) -> SyncWork:
        """A mark behind everything submitted so far, for whoever waits for it in steps."""
        self._guard()
        return self._writer.begin_sync()

    def give_up_waiting(self) -> None:
        """Somebody stops waiting for the batch of writes under way: until it ends ``state`` is not "ok"."""
        self._writer.give_up_waiting()

    @property
    def pending_erases(self) -> int:
        """Erased pages that a restart now could bring back."""
        return self._writer.pending_erases

    @property
    def progress(self) -> tuple[int, int]:
        """Differs from an earlier value if the disk has taken a write in between."""
        return self._writer.progress

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, fail queued reads with CLOSED, end the threads, close the environment, let go the lock.

        False if a thread did not end in time: what it has not begun is failed, the environment and the lock stay with
        it, and another ``close`` tries again. A second call after True does nothing.
        """
        if os.getpid() != self._pid or self._closed:
            return True
        deadline = time.monotonic() + timeout_s
        self._watchdog.close()
        self._readers.close()
        self._writer.close()
        ended = self._writer.join(max(0.0, deadline - time.monotonic()))
        if not ended:
            self._writer.abandon()
        ended = self.lender.close(max(0.0, deadline - time.monotonic())) and ended
        if not (self._readers.join_until(deadline) and ended):
            _log.warning(
                "the NVMe tier at %s has a thread that does not end; it is left behind", self._directory
            )
            return False
        self._closed = True
        self._catalogue.close()
        self._lock.release()
        return True

    @property
    def state(self) -> Literal["ok", "read_only", "absent"]:
        """ "absent" while reads are not tried, since the disk hangs or fails them; "read_only" while writes fail, or
        one takes longer than ``flush`` waits for it.
        """
        if self._readers.absent:
            return "absent"
        return "read_only" if self._writer.read_only else "ok"

    def stats(self) -> dict[str, object]:
        """Sizes, counters and state, for people and metrics. Reads a few directory entries, unless the disk hangs.

        A directory that was moved or deleted under the open tier takes no bytes and has no others.
        """
        self._guard()
        counts = self._outbox.counts()
        hangs = self._readers.num_late > 0 or self._writer.stalled
        if not hangs:
            with suppress(OSError):  # no descriptor is left to look with: what it was
                self._disk_nbytes = directory_layout.disk_nbytes(self._directory)
        return {
            "path": str(self._directory),
            "state": self.state,
            "disk_nbytes": self._disk_nbytes,
            "map_nbytes": self._sizing.map_size,
            "budget_nbytes": self.budget_nbytes,
            "record_nbytes": self.record_nbytes,
            "records": self._catalogue.num_records,
            "read_only": self._writer.read_only,
            "hung_reads": self._readers.num_late,
            "pending_erases": self.pending_erases,
            "payload": self._payload,
            "codec": self._codec,
            "live_nbytes": self._catalogue.live_nbytes,
            "o_direct": self._direct,
            "readers": self._num_readers,
            "others": [] if hangs else directory_layout.others(self._directory),
            **{name: counts.get(name, 0) for name in _COUNTERS},
        }

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(f"this NVMe tier belongs to process {self._pid}; open another after a fork")

    def _check(self, transfer: Transfer, pages: Sequence[NDArray[np.uint8]]) -> None:
        if len(pages) != len(transfer.keys) or len(transfer.parents) != len(transfer.keys):
            raise ValueError(
                f"{len(transfer.keys)} keys, {len(transfer.parents)} parents, {len(pages)} pages"
            )
        if any(len(key) != KEY_NBYTES for key in transfer.keys):
            raise ValueError(f"a key has {KEY_NBYTES} bytes")
        if any(page.shape != (self._view_nbytes,) or page.dtype != np.uint8 for page in pages):
            raise ValueError(f"a page is a flat uint8 array of {self._view_nbytes} bytes")


_COUNTERS = (
    "batches",
    "bytes_read",
    "bytes_stored",
    "bytes_written",
    "read_integrity",
    "read_io_error",
    "read_late",
    "read_not_found",
    "read_unfit",
    "read_unavailable",
    "reopened",
    "write_io_error",
    "write_no_space",
    "write_unavailable",
)
