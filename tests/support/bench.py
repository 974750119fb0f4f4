"""Opens a store whose transfers a test can hold or fail: gates are in front of its copy engine and its lower tiers.

The store's directory and its mover only exchange pickled messages, as if they were in different processes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.kept_bytes import DESCRIPTION, KeptBytes
from tests.support.stalls import GatedCopies, GatedRecords
from tierstore.build import Parts, assemble
from tierstore.config import StoreConfig
from tierstore.directory.directory import Directory
from tierstore.gpu.cpu_copy_engine import CopyEngine
from tierstore.mover import LocalMover
from tierstore.page import PageLayout, PageSpec
from tierstore.pump import Wakeup
from tierstore.store import TierStore
from tierstore.types import Ack, Erase, Tier, Transfer


class WiredMover(LocalMover):
    """A mover that pickles all commands and acks, as if the directory were in another process."""

    copies: GatedCopies | None = None

    @classmethod
    def around(cls, parts: Parts) -> WiredMover:
        mover = parts.mover
        assert isinstance(mover, LocalMover)
        gated = {tier: GatedRecords(records) for tier, records in mover._records.items()}
        wired = cls(mover._memory, None, gated)
        wired.records = gated.get(Tier.NVME)
        wired.kept = gated.get(Tier.REMOTE)
        if mover._copies is not None:
            wired.attach(mover._copies)
        return wired

    records: GatedRecords | None = None
    kept: GatedRecords | None = None

    def attach(self, copies: CopyEngine) -> None:
        self.copies = GatedCopies(copies, self._memory)
        super().attach(self.copies)

    def submit(self, command: Transfer | Erase) -> None:
        sent = pickle.loads(pickle.dumps(command))
        assert sent == command
        super().submit(sent)

    def poll(self) -> list[Ack]:
        acks: list[Ack] = pickle.loads(pickle.dumps(super().poll()))
        return acks


@dataclass
class Bench:
    """An open store, with access to its internal parts."""

    store: TierStore
    parts: Parts
    mover: WiredMover

    @property
    def copies(self) -> GatedCopies:
        assert self.mover.copies is not None
        return self.mover.copies

    @property
    def records(self) -> GatedRecords:
        assert self.mover.records is not None
        return self.mover.records

    @property
    def kept(self) -> GatedRecords:
        assert self.mover.kept is not None
        return self.mover.kept

    @property
    def dictionary(self) -> KeptBytes:
        assert isinstance(self.kept.inner, KeptBytes)
        return self.kept.inner

    @property
    def directory(self) -> Directory:
        return self.parts.directory

    def open_gates(self) -> None:
        """Open all gates. From now on, no transfer is held."""
        for gate in (self.mover.copies, self.mover.records, self.mover.kept):
            if gate is not None:
                gate.open()

    def settle(self) -> None:
        """Wait until all transfers that have passed the gates have ended, and let the store process their acks."""
        for gate in (self.mover.copies, self.mover.records, self.mover.kept):
            if gate is not None:
                gate.settle()
        self.store.poll()

    def close(self) -> None:
        self.open_gates()
        self.store.close()


def open_bench(
    config: StoreConfig,
    spec: PageSpec | Sequence[PageSpec],
    *,
    pump: bool = False,
    spill: bool = False,
    kept_pages: int | None = None,
) -> Bench:
    """Open a store with gates. The gates are open until a test holds a lane.

    Args:
        config: The configuration.
        spec: The page specification, or one per KV group.
        pump: Whether the store starts a thread that advances it.
        spill: Whether timers are active. If False, pages go to disk only on request, and a failed tier is not
            retried automatically.
        kept_pages: Capacity in pages of an additional tier (a dictionary) below all others. None leaves it out.
    """
    wakeup, layout = Wakeup(), PageLayout.of(spec)
    lower = {}
    if kept_pages is not None:
        lower[Tier.REMOTE] = DESCRIPTION, KeptBytes(kept_pages, layout.blob_nbytes, wakeup.bump)
    parts = assemble(config, layout, wakeup.bump, lower)
    mover = WiredMover.around(parts)
    parts.mover = mover
    if not spill:
        parts.directory.writeback._next_spill = math.inf
        parts.directory.writeback._next_try = math.inf
    return Bench(TierStore(config, parts, wakeup, pump=pump), parts, mover)
