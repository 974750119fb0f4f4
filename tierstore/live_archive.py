"""A running store as the source or the sink of an archive."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from tierstore.archive.source_sink import Taken
from tierstore.errors import ArchiveError, CapacityError, IntegrityError
from tierstore.keys import EXACT
from tierstore.nvme import record_format
from tierstore.nvme.page_codecs import Decoders
from tierstore.nvme.reader import Record, RecordBuffers
from tierstore.types import LeaseState, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.archive.file_format import Description
    from tierstore.gpu.pool import OwnPool
    from tierstore.lease import Lease
    from tierstore.nvme.tier import NvmeTier
    from tierstore.pump import Pump
    from tierstore.store import EngineSlots, OwnSlots
    from tierstore.types import PageKey

_PATIENCE_S = 10.0
"""Longest wait for a page to be loaded, or for a free slot to load it into."""


class LiveSource:
    """Reads a page from NVMe as the record there, and any other page from HBM under a lease."""

    def __init__(
        self,
        pump: Pump,
        description: Description,
        pool: OwnPool | None,
        disk: NvmeTier | None,
        acquire: Callable[[Sequence[PageKey]], Lease],
    ) -> None:
        """Read from the store of ``pump``.

        Args:
            pump: The store's pump.
            description: What the store's pages are.
            pool: The store's HBM; None where an engine owns it.
            disk: The store's NVMe tier, if it has one.
            acquire: ``TierStore.acquire`` of the same store.
        """
        self.description = description
        self._pump = pump
        self._pool = pool
        self._disk = disk
        self._acquire = acquire
        self._memory = RecordBuffers(description.layout.blob_nbytes)

    def record(self, key: PageKey) -> Record | str:
        """See ``Source.record``. Raises StoreClosed if the store is closed."""
        self._pump.advance()
        tier = self._disk
        on_disk = False
        with self._pump.lock, self._pump.guard:
            residency = self._pump.directory.residency
            if key in residency.memory_only and key not in residency.memory_only.refused:
                return "it was put to stay in memory"
            if tier is not None:
                on_disk = residency.tables[tier.tier].ready(key) and tier.state != "absent"
        lent = tier.lender.record(key, self._memory) if tier is not None and on_disk else "not found"
        return lent if isinstance(lent, Record) else self._from_memory(key, lent)

    def release(self, record: Record) -> None:
        """See ``Source.release``."""
        self._memory.give_back(record)

    def _from_memory(self, key: PageKey, reason: str) -> Record | str:
        """Read the page from HBM. ``reason`` says why the disk did not have it."""
        if self._pool is None:
            return f"{reason} on disk; an engine's own store gives what `flush` has brought there"
        for lease in self._leases(key):
            with lease:
                if lease.wait(_PATIENCE_S) is LeaseState.READY and lease.num_pages:
                    return self._leased(key, lease, self._pool)
                because = lease.missing_because or "it did not come in time"
            if because != "no_room":
                break
        return reason if because == "not_found" else because

    def _leases(self, key: PageKey) -> Iterator[Lease]:
        for _ in self._pump.until(monotonic() + _PATIENCE_S):
            yield self._acquire([key])

    def _leased(self, key: PageKey, lease: Lease, pool: OwnPool) -> Record:
        lent = self._memory.take()
        page = lent.page
        pool.read(lease.slots[0], page)
        with self._pump.lock, self._pump.guard:
            parent = self._pump.directory.residency.lineage.parent(key)
        head = record_format.Head(
            fingerprint=self.description.fingerprint,
            key=key,
            parent=parent,
            codec=record_format.Codec.NONE,
            raw_nbytes=page.nbytes,
            stored_nbytes=page.nbytes,
        )
        return Record(head, record_format.seal(head, page), page, lent)


class LiveSink:
    """Stores pages as an engine would after computing them, and writes them to disk if the store has one."""

    def __init__(
        self, pump: Pump, description: Description, pool: OwnPool, slots: OwnSlots | EngineSlots
    ) -> None:
        """Write to the store of ``pump``, whose HBM is ``pool``.

        Raises:
            ArchiveError: The store's copies are lossy, so an imported page would not be exact.
        """
        if description.loss_class != EXACT:
            raise ArchiveError(
                f"import_pages needs a store of loss class {EXACT!r}, got {description.loss_class!r}; close the store "
                "and use `tierstore import`, which stores the pages as they are"
            )
        self.description = description
        self._pool = pool
        self._directory = pump.directory
        self._pump = pump
        self._slots = slots
        self._decoders = Decoders(description.layout)
        self._page = np.empty(description.layout.blob_nbytes, dtype=np.uint8)

    def has(self, key: PageKey) -> bool:
        """See ``Sink.has``."""
        with self._pump.lock, self._pump.guard:
            return self._directory.residency.where(key) is not None

    def reaches(self, key: PageKey) -> bool:
        """See ``Sink.reaches``."""
        with self._pump.lock, self._pump.guard:
            residency = self._directory.residency
            return residency.where(key) is not None and key not in residency.orphans

    def take(self, records: Sequence[Record]) -> Taken:
        """See ``Sink.take``. Raises StoreClosed if the store is closed."""
        for number, record in enumerate(records):
            try:
                record_format.decode(
                    record.head, record.payload, self._page, self._decoders.of(record.head.codec)
                )
                self._put(record.head, self._page)
            except IntegrityError as error:
                return Taken(number, str(error))
            except CapacityError:
                return Taken(number)
        return Taken(len(records))

    def _put(self, head: record_format.Head, page: NDArray[np.uint8]) -> None:
        self._pump.advance()
        slots = self._slots.allocate(1, _PATIENCE_S)
        try:
            if head.parent is not None and not self.reaches(head.parent):
                raise CapacityError("the page before it was evicted to make room")
            self._pool.write(slots[0], page)
        except BaseException:
            self._slots.free(slots, None)
            raise
        with self._pump.lock, self._pump.guard:
            self._pump.events.seal([head.key], slots, head.parent, None, None)
            lowest = max(self._directory.residency.tables)
            if lowest is not Tier.HBM:
                self._directory.demote([head.key], lowest)
            self._pump.step()
        self._pump.notify()
