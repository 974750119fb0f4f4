"""Applies what became of transfers: copies that arrived, copies that failed, and who waited for them. Metadata only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Ack, Failure, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.admitting import Admitting
    from tierstore.directory.eviction import Drops
    from tierstore.directory.residency import Residency
    from tierstore.loads import Loads
    from tierstore.outgoing import Outgoing
    from tierstore.placement import Placement
    from tierstore.traffic import Traffic
    from tierstore.types import Counters


_UNTRIED = frozenset({Failure.CLOSED, Failure.UNAVAILABLE})
"""Reads that say nothing of their record."""


class Arrivals:
    """The end of every transfer. ``page_nbytes``: payload of a page, for the counters."""

    def __init__(
        self,
        residency: Residency,
        traffic: Traffic,
        loads: Loads,
        placement: Placement,
        outgoing: Outgoing,
        drops: Drops,
        admitting: Admitting,
        metrics: Counters,
        page_nbytes: int,
    ) -> None:
        self._residency = residency
        self._traffic = traffic
        self._loads = loads
        self._placement = placement
        self._outgoing = outgoing
        self._drops = drops
        self._admitting = admitting
        self._metrics = metrics
        self._page_nbytes = page_nbytes
        self.came: Callable[[PageKey, Tier], None] | None = None
        """Told of every copy below HBM that became readable."""

    def apply(self, ack: Ack, now: float) -> None:
        """Every page of the transfer is settled: its source let go, its destination readable or free again.

        But for late ones: nobody waits for them any more, and source and slot stay as they are until their own ack.
        """
        transfer = self._traffic.settle(ack, now)
        self._metrics.moved(transfer, ack, self._page_nbytes)
        whole = ack.ok and not (ack.failures or ack.late)
        if whole and transfer.dst == Tier.HBM and self._loads.owned:
            keys, src = transfer.keys, transfer.src
            self._loads.all_arrived(keys, src, transfer.src_slots, transfer.dst_slots)
            self._placement.sinks.all_unpinned(keys, src)
            return
        failures = dict(ack.failures)
        if not ack.ok and not failures:
            failures = dict.fromkeys(range(len(transfer.keys)), Failure.IO_ERROR)
        share = ack.nbytes // ack.num_ready if ack.num_ready else 0
        sizes = iter(ack.sizes)
        for i, src_slot in enumerate(transfer.src_slots):
            if i in ack.late:
                self._late(transfer.keys[i], transfer.dst, transfer.dst_slots[i])
                continue
            if transfer.src in self._residency.tables:
                self._unpin(transfer.keys[i], transfer.src, src_slot)
            else:
                self._outgoing.ended(src_slot)
            if i in failures:
                self._failed(transfer, i, failures[i])
            else:
                self._arrived(transfer, i, next(sizes, share), now)

    def _arrived(self, transfer: Transfer, i: int, nbytes: int, now: float) -> None:
        key, slot, dst = transfer.keys[i], transfer.dst_slots[i], transfer.dst
        if dst == Tier.HBM:
            self._loads.arrived(key, slot)
            return
        if dst == Tier.NVME:
            self._admitting.written(key, nbytes, now)
        sized = self._residency.tables[dst].budget_nbytes is not None
        readable = self._residency.commit(key, dst, slot, nbytes if sized else 0, transfer.parents[i])
        if readable and self.came is not None:
            self.came(key, dst)
        if readable and transfer.src < dst:
            self._placement.saved(key, dst)
        self._settled(key, dst, readable=readable)

    def _failed(self, transfer: Transfer, i: int, failure: Failure) -> None:
        key, slot, dst = transfer.keys[i], transfer.dst_slots[i], transfer.dst
        if _tells_of_source(transfer.src, failure):
            self._drop_broken(key, transfer.src, transfer.src_slots[i], failure)
        if dst == Tier.HBM:
            self._loads.failed(key, slot)
            return
        self._residency.fail(key, dst, slot)
        if failure is Failure.UNFIT and transfer.src < dst:
            self._drop_unfit(key, transfer.src)
        elif transfer.src < dst:
            self._placement.not_saved(key, transfer.src, dst)
        self._settled(key, dst, readable=False)

    def _late(self, key: PageKey, dst: Tier, slot: int) -> None:
        """The page does not come in its time: whoever waits goes on without it."""
        copy = self._residency.tables[dst].copies.get(key)
        if copy is None or copy.slot != slot or copy.ready:
            return
        if dst == Tier.HBM:
            self._loads.late(key, slot)
        else:
            self._residency.abort(key, dst)
            self._settled(key, dst, readable=False)

    def _settled(self, key: PageKey, dst: Tier, *, readable: bool) -> None:
        """A copy came to its end in a tier below HBM: tells all who wait for the page there, whoever sent it."""
        if dst == Tier.HOST and key not in self._residency.tables[dst].copies:
            self._loads.lost(key)
        elif dst == Tier.HOST and readable:
            self._loads.promoted(key)
        self._placement.sinks.wake(key)

    def _drop_broken(self, key: PageKey, tier: Tier, slot: int, failure: Failure) -> None:
        table = self._residency.tables.get(tier)
        copy = None if table is None else table.copies.get(key)
        if copy is not None and copy.ready and copy.slot == slot:
            self._residency.dropped.append(self._residency.evict(key, tier))
            self._drops.note(failure.value)

    def _drop_unfit(self, key: PageKey, src: Tier) -> None:
        """The tier below takes any page but this one: without a way down it goes, like a page that a codec broke.

        To keep it would ask for a place of its own in every order: it could neither be saved nor, with pages after it
        below, be dropped. Numbers that no codec can state come from a model that has gone wrong.
        """
        self._placement.sinks.settle(key, failed=True)
        if src not in self._residency.tables:
            self._metrics.dropped(src, Failure.UNFIT.value, 1)
            return
        self._drops.note()
        if self._residency.tables[src].ready(key):
            self._residency.dropped.append(self._residency.evict(key, src))
            self._drops.note(Failure.UNFIT.value)
        if self._residency.where(key) is None:
            self._placement.forgotten(key)

    def _unpin(self, key: PageKey, tier: Tier, slot: int) -> None:
        self._residency.unpin(key, tier, slot)
        self._placement.sinks.unpinned(key, tier)


def _tells_of_source(src: Tier, failure: Failure) -> bool:
    """Whether the failure says that the copy there is worth nothing: a record that cannot be read, memory that holds no
    payload of its codec."""
    return failure not in _UNTRIED if src == Tier.NVME else failure is Failure.INTEGRITY
