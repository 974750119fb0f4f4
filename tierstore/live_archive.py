"""The archive source and sink of a running store: they export pages from it and import pages into it."""

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
"""Longest time to wait for a page to be loaded, or for a free slot, in seconds."""


class LiveSource:
    """Archive source that reads pages of a running store.

    A page on NVMe is read as a record, in its stored form. Any other page is loaded into HBM under a lease
    and read there in unencoded form.
    """

    def __init__(
        self,
        pump: Pump,
        description: Description,
        pool: OwnPool | None,
        disk: NvmeTier | None,
        acquire: Callable[[Sequence[PageKey]], Lease],
    ) -> None:
        """Create a source for the store that ``pump`` drives.

        Args:
            pump: The store's pump.
            description: Describes the store's pages.
            pool: The store's HBM, or None if an engine owns HBM.
            disk: The store's NVMe tier, or None.
            acquire: ``TierStore.acquire`` of the same store.
        """
        self.description = description
        self._pump = pump
        self._pool = pool
        self._disk = disk
        self._acquire = acquire
        self._memory = RecordBuffers(description.layout.blob_nbytes)

    def record(self, key: PageKey) -> Record | str:
        """See ``Source.record``.

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.advance()
        tier = self._disk
        on_disk = False
        with self._pump.lock, self._pump.guard:
            residency = self._pump.directory.residency
            if key in residency.memory_only and key not in residency.memory_only.refused:
                return "it was put with memory_only"
            if tier is not None:
                on_disk = residency.tables[tier.tier].ready(key) and tier.state != "absent"
        lent = tier.lender.record(key, self._memory) if tier is not None and on_disk else "not found"
        return lent if isinstance(lent, Record) else self._from_memory(key, lent)

    def release(self, record: Record) -> None:
        """See ``Source.release``."""
        self._memory.give_back(record)

    def _from_memory(self, key: PageKey, reason: str) -> Record | str:
        """Load the page into HBM and return it as a record, or return why that failed.

        ``reason`` says why the page could not be read from disk.
        """
        if self._pool is None:
            return f"{reason} on disk; with hbm.owner: engine, only pages that `flush` wrote there can be exported"
        for lease in self._leases(key):
            with lease:
                if lease.wait(_PATIENCE_S) is LeaseState.READY and lease.num_pages:
                    return self._leased(key, lease, self._pool)
                because = lease.missing_because or "it did not arrive in time"
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
    """Archive sink that puts pages into a running store, which then copies them to its lowest tier."""

    def __init__(
        self, pump: Pump, description: Description, pool: OwnPool, slots: OwnSlots | EngineSlots
    ) -> None:
        """Create a sink for the store that ``pump`` drives and whose HBM is ``pool``.

        Raises:
            ArchiveError: The store uses a lossy codec, so an imported page would not stay exact.
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
        """See ``Sink.take``.

        Raises:
            StoreClosed: The store is closed.
        """
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
                raise CapacityError("its parent page was evicted to make space")
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
