"""The directory: makes all decisions about pages, issues transfers, and applies their acks.

It combines the residency, transfers, loads, write-back and hints of one store. It handles only plain data, and
uses no page bytes, clocks or threads. ``now``, in every call that needs it, is a monotonic time in seconds.
Not thread-safe: the store's lock protects it.
"""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

from tierstore.directory.admission import AdmissionControl
from tierstore.directory.eviction import STALL_S, Drops
from tierstore.directory.hints import HintTable
from tierstore.directory.leases import Leases
from tierstore.directory.loads import Loads, Promotions
from tierstore.directory.residency import Residency
from tierstore.directory.slots import OutgoingPages, OwnedSlots, SealedSlots
from tierstore.directory.transfers import BATCH_PAGES, Transfers
from tierstore.directory.writeback import Ticket, WriteBack
from tierstore.types import Ack, Erase, Failure, Hint, PageKey, Promoted, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tierstore.directory.leases import LeaseRecord
    from tierstore.directory.residency import TierTable
    from tierstore.policy import Admission, History, WriteBudget
    from tierstore.types import Counters


_UNTRIED = frozenset({Failure.CLOSED, Failure.UNAVAILABLE, Failure.NO_SPACE})
"""Failures that say nothing about a record: it was not read, or the destination did not accept it."""


class Directory:
    """Records where a store's pages are, and decides where they go. See the module docstring."""

    def __init__(
        self,
        tables: Mapping[Tier, TierTable],
        metrics: Counters,
        *,
        page_nbytes: int,
        flush_s: float,
        history: History | None,
        admission: Admission,
        budget: WriteBudget,
    ) -> None:
        self.residency = Residency(tables)
        self.hierarchy = self.residency.hierarchy
        self.transfers = Transfers(self.residency, page_nbytes)
        self.owns_hbm = Tier.HBM in tables
        self.drops = Drops(self.residency, metrics)
        self.loads = Loads(self.residency, self.transfers, owned=self.owns_hbm)
        self.writeback = WriteBack(self.residency, self.transfers, flush_s)
        self.space = self.writeback.space
        self.admission = AdmissionControl(self.residency, history, admission, budget)
        self.owned = OwnedSlots(self.residency, self.space, self.drops)
        self.hints = HintTable(self.residency)
        self.drops.left = self._left
        self.leases = Leases(self.residency, self.loads, self.writeback, self.drops, metrics, self._hit)
        self.promotions = Promotions(
            self.residency, self.transfers, self.loads, self.hints, metrics, self.leases.awaits
        )
        self.sealed = SealedSlots(self.residency, self.admission, self.leases, self.loads, self.writeback)
        self.outgoing = OutgoingPages(
            self.residency, self.space, self.loads, self.admission, self.writeback.sinks
        )
        self._metrics = metrics

    # -- HBM slots ----------------------------------------------------------------------------------------------

    def want_slots(self, n: int, now: float) -> bool:
        """Start making more HBM slots available, unless ``n`` or more are available now.

        Pages are saved to lower tiers, so that their slots can be taken later. If saving is stuck, some pages
        are dropped instead.

        Returns:
            Whether more slots are available than before the call.
        """
        before = self.space.room(Tier.HBM)
        self.space.make_room(Tier.HBM, n, now)
        self.space.relieve(Tier.HBM, n, now)
        self.space.make_room(Tier.HBM, n, now)
        self.loads.give_back(n - self.space.room(Tier.HBM))
        self._finish(now)
        return self.space.room(Tier.HBM) > before

    # -- engine slots and leases --------------------------------------------------------------------------------

    def copy_out(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        now: float,
        *,
        memory_only: bool = False,
        parent: PageKey | None = None,
        doubted: bool = False,
    ) -> None:
        """Start copying pages out of the engine's ``slots``, which ``outgoing`` has accepted.

        Pages for which the next tier has no space are queued.
        """
        self.outgoing.add(keys, slots, memory_only=memory_only, parent=parent, doubted=doubted)
        self._finish(now)

    def take_reusable(self) -> list[int]:
        """Return engine slots that no copy reads or writes any more. Each is returned only once."""
        slots = self.outgoing.reusable + self.loads.abandoned
        self.outgoing.reusable, self.loads.abandoned = [], []
        return slots

    def extend_lease(self, lease: LeaseRecord, limit: int, now: float) -> None:
        """Add up to ``limit`` pages to a lease, and start loading those that are not in HBM.

        If HBM is full of unsaved pages, no further page is added to the lease. The unsaved pages are then
        saved, or dropped if they cannot be saved, so that a later request finds space.
        """
        self.leases.extend(lease, limit, now)
        if lease.complete and lease.miss_reason == "no_room":
            # A later request is likely to want the pages that did not fit, so these must not be evicted from
            # the lower tier when other pages are saved.
            self.residency.touch(lease.keys[len(lease.slots) : len(lease.slots) + limit])
            short = len(lease.keys) - len(lease.slots)
            self.space.make_room(Tier.HBM, short, now)
            self.space.relieve(Tier.HBM, short, now)
            self.loads.give_back(short - self.space.room(Tier.HBM))
        self._finish(now)

    def room_is_coming(self, now: float) -> bool:
        """Return whether HBM slots are available, or will become available when work in flight has finished.

        Slots become available when unsaved pages have been saved, when loads that no lease needs have
        finished, and when copies of evicted pages have finished.
        """
        hbm = self.residency.tables.get(Tier.HBM)
        below = self.space.below(Tier.HBM)
        if hbm is None or below is None:
            return False
        if self.space.room(Tier.HBM) > 0:
            return True
        if self.transfers.carrying(Tier.HBM, below) and not self.space.stuck(Tier.HBM, below, now):
            return True
        if len(hbm.dirty) and not self.transfers.quiet(below, now, STALL_S):
            return True
        moving = not self.transfers.quiet(Tier.HBM, now, STALL_S)
        return moving and (bool(hbm.quarantine) or self.loads.any_unheld())

    def _hit(self, keys: Sequence[PageKey], source: Tier) -> None:
        """Report to promotions and admission that a lease covers these pages, found in ``source``."""
        self.promotions.used(keys, source)
        self.admission.hit(keys, source)

    def _left(self, key: PageKey, tier: Tier) -> None:
        """Report to promotions and write-back that a copy was dropped."""
        self.promotions.left(key, tier)
        self.writeback.left(key, tier)

    # -- requested moves ----------------------------------------------------------------------------------------

    def promote(
        self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint], now: float
    ) -> Promoted:
        """Start copying pages to ``tier`` for an active hint, until no slot is available for the next one."""
        found = self.promotions.start(hint, keys, tier, over)
        self._finish(now)
        return found

    def demote(self, keys: Sequence[PageKey], target: Tier, *, even_if_saved: bool = False) -> int:
        """Start moving readable pages down to ``target``. Their upper copies are dropped afterwards.

        With ``even_if_saved``, pages that a lower tier has already get a copy in ``target``, too.

        Returns:
            The number of pages that are readable in some tier and will therefore be moved.
        """
        accepted = [key for key in keys if self.residency.where(key) is not None]
        if target in self.hierarchy.records:
            self.admission.insist(accepted)
            self._lift(len(accepted))
        self.writeback.sinks.add(accepted, target, Ticket(), keep=False, even_if_saved=even_if_saved)
        return len(accepted)

    def begin_flush(self) -> tuple[list[PageKey], Ticket]:
        """Return the keys of pages that a flush may have to save, and an empty ticket to count them.

        The keys may contain duplicates. They include the keys of pages that an engine has put and that are
        still in the engine's slots.
        """
        durable = self.hierarchy.first_durable
        if durable is None:
            return [], Ticket()
        keys: list[PageKey] = []
        for tier, table in self.residency.tables.items():
            if tier < durable:
                keys += table.copies
        keys += self.writeback.sinks.coming
        return keys, Ticket()

    def save(self, keys: Sequence[PageKey], ticket: Ticket) -> None:
        """Start copying pages to the first durable tier. Upper copies are kept.

        Pages that are still in an engine's slots are included. Pages that a durable tier already has, or that
        must not be stored there, are skipped. ``ticket`` counts the pages to be copied. It also counts pages
        that a durable tier already has (``found``) and, if that tier is read-only, pages that cannot be saved
        (``failed``).
        """
        target, lowest_for = self.hierarchy.first_durable, self.residency.memory_only.lowest_for
        assert target is not None
        tables = [table for table in self.residency.tables.values() if table.durable]
        saved = {k for k in keys for table in tables if table.ready(k)}
        coming = self.writeback.sinks.coming
        unsaved = [
            k
            for k in keys
            if k not in saved
            and (k in coming or (self.residency.where(k) is not None and lowest_for(k) >= target))
        ]
        self.writeback.sinks.add(unsaved, target, ticket, keep=True)
        ticket.found += sum(k in saved for k in keys)
        if self.hierarchy.frozen:  # the disk is read-only, so these pages cannot be saved
            refused = self.residency.memory_only.refused
            ticket.failed += sum(k in refused and k not in saved for k in keys)

    def dying(self) -> set[tuple[Tier, int]]:
        """Return the tier and the slot of each record that was evicted while a copy was reading or writing it.

        The record is erased once that copy has finished.
        """
        tables = self.residency.tables
        return {(tier, slot) for tier in self.hierarchy.records for slot in tables[tier].quarantine}

    def evict(self, keys: Sequence[PageKey], tiers: Sequence[Tier]) -> int:
        """Drop the copies of these pages in ``tiers`` without saving them.

        Returns:
            The number of pages that lost at least one copy.
        """
        dropped = sum(self._evict_page(key, tiers) for key in reversed(list(dict.fromkeys(keys))))
        self.drops.note("evicted")
        return dropped

    def begin_clear(self) -> list[PageKey]:
        """Give up the pages that an engine has put and that have not reached a tier.

        Returns:
            The keys of all pages that are in some tier, possibly with duplicates. The caller evicts them.
        """
        for key in self.outgoing.forget():
            self.writeback.forgotten(key)
        return [key for table in self.residency.tables.values() for key in table.copies]

    def drop_unwritten(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Drop the HBM copies in these slots without saving them, because the slots were never written."""
        copies = self.residency.tables[Tier.HBM].copies
        spoilt = [k for k, slot in zip(keys, slots, strict=True) if k in copies and copies[k].slot == slot]
        self.evict(spoilt, [Tier.HBM])

    # -- progress -----------------------------------------------------------------------------------------------

    def advance(self, acks: Sequence[Ack], now: float) -> bool:
        """Apply finished transfers and make a bounded number of decisions.

        Returns:
            Whether there are further decisions that can be made now.
        """
        self.admission.tick(now)
        for ack in acks:
            self.apply(ack, now)
        self.leases.expire(now)
        self.hints.expire(now)
        more = self.promotions.end(BATCH_PAGES)
        more |= self.residency.orphans.advance(BATCH_PAGES)
        more |= self._save_revived(BATCH_PAGES)
        self._lift(BATCH_PAGES)
        more |= self.hints.pending
        more |= self.writeback.advance(now)
        self._finish(now)
        return more or self.residency.memory_only.lifting

    def take_commands(self) -> list[Transfer | Erase]:
        """Return the queued commands for the mover, in order, and clear the queue."""
        return self.transfers.take()

    def busy(self) -> bool:
        """Return whether any page is in flight, or is waiting to be loaded or to be copied to a lower tier."""
        placement = self.writeback
        return bool(
            not self.transfers.idle()
            or self.loads.by_slot
            or placement.sinks.open
            or placement.writing_behind
            or self.outgoing.waiting
            or self.residency.memory_only.lifting
        )

    # -- finished transfers -------------------------------------------------------------------------------------

    def apply(self, ack: Ack, now: float) -> None:
        """Apply the result of each page of a transfer.

        The source of each page is unpinned, and the page's copy in the destination becomes readable. If the
        page failed, its slot in the destination becomes free instead.

        Leases and copies stop waiting for late pages. The sources and slots of late pages do not change until
        another ack reports their result.
        """
        transfer = self.transfers.settle(ack, now)
        self._metrics.moved(transfer, ack, self.transfers.page_nbytes)
        failures = dict(ack.failures)
        if not ack.ok and not failures:
            failures = dict.fromkeys(range(len(transfer.keys)), Failure.IO_ERROR)
        share = ack.nbytes // ack.num_ready if ack.num_ready else 0
        sizes = chain(ack.sizes, repeat(share))
        if not failures and not ack.late:
            self._arrived(transfer, sizes, now)
            return
        start = 0
        for i in sorted({*failures, *ack.late}):
            self._arrived(transfer.part(range(start, i)), sizes, now)
            start = i + 1
            if i in ack.late:
                self._late(transfer.keys[i], transfer.dst, transfer.dst_slots[i])
            else:
                self._failed(transfer, i, failures[i])
        self._arrived(transfer.part(range(start, len(transfer.keys))), sizes, now)

    def _arrived(self, transfer: Transfer, sizes: Iterator[int], now: float) -> None:
        """Apply the arrival of all pages of ``transfer``. Their sizes in bytes are taken from ``sizes``."""
        keys, src, dst = transfer.keys, transfer.src, transfer.dst
        sinks = self.writeback.sinks
        if dst == Tier.HBM:
            self.loads.arrived(keys, transfer.dst_slots, src, transfer.src_slots)
            sinks.unpinned(keys, src)
            return
        sized = self.residency.tables[dst].budget_nbytes is not None
        nbytes = list(islice(sizes, len(keys)))
        if dst == self.admission.guarded:
            for key, size in zip(keys, nbytes, strict=True):
                self.admission.written(key, size, now)
        source = src if src in self.residency.tables else None
        if source is None:
            self.outgoing.ended(*transfer.src_slots)
        readable = self.residency.commit(
            keys,
            dst,
            transfer.dst_slots,
            source,
            transfer.src_slots,
            sizes=nbytes if sized else (),
            parents=transfer.parents,
        )
        if source is not None:
            sinks.unpinned(keys, source)
        if src < dst:
            arrived = [key for key, there in zip(keys, readable, strict=True) if there]
            if arrived:
                self.writeback.saved(arrived, dst)
        self._settled(keys, dst, readable)

    def _failed(self, transfer: Transfer, i: int, failure: Failure) -> None:
        key, slot, dst = transfer.keys[i], transfer.dst_slots[i], transfer.dst
        if transfer.src in self.residency.tables:
            self.residency.unpin((key,), transfer.src, (transfer.src_slots[i],))
            self.writeback.sinks.unpinned((key,), transfer.src)
        else:
            self.outgoing.ended(transfer.src_slots[i])
        if self._tells_of_source(transfer.src, failure):
            self._drop_broken(key, transfer.src, transfer.src_slots[i], failure)
        if dst == Tier.HBM:
            self.loads.failed(key, slot)
            return
        self.residency.fail(key, dst, slot)
        if failure is Failure.UNFIT and transfer.src < dst:
            self._drop_unfit(key, transfer.src)
        elif transfer.src < dst:
            self.writeback.not_saved(key, transfer.src, dst)
        self._settled((key,), dst, (False,))

    def _late(self, key: PageKey, dst: Tier, slot: int) -> None:
        """Let all leases and copies that wait for a late page continue without it."""
        copy = self.residency.tables[dst].copies.get(key)
        if copy is None or copy.slot != slot or copy.ready:
            return
        if dst == Tier.HBM:
            self.loads.late(key, slot)
        else:
            self.residency.abort(key, dst)
            self._settled((key,), dst, (False,))

    def _settled(self, keys: Sequence[PageKey], dst: Tier, readable: Sequence[bool]) -> None:
        """Inform waiting loads and sinks that copies of these pages to ``dst``, a tier below HBM, have ended.

        ``readable`` contains False for each copy that failed.
        """
        if dst == self.loads.gate and self.loads.promoting:
            copies = self.residency.tables[dst].copies
            for key, there in zip(keys, readable, strict=True):
                if key not in copies:
                    self.loads.lost(key)
                elif there:
                    self.loads.promoted(key)
        self.writeback.sinks.wake(keys)

    def _drop_broken(self, key: PageKey, tier: Tier, slot: int, failure: Failure) -> None:
        table = self.residency.tables.get(tier)
        copy = None if table is None else table.copies.get(key)
        if copy is not None and copy.ready and copy.slot == slot:
            self.residency.dropped.append(self.residency.evict(key, tier))
            self.drops.note(failure.value)

    def _drop_unfit(self, key: PageKey, src: Tier) -> None:
        """Drop a page whose values the codec of the lower tier cannot represent.

        Keeping the page would require a special case in every eviction policy: the page could never be saved,
        and could not be dropped while later pages are stored below. Such values come from a model that has
        failed, so the page is of no use.
        """
        self.writeback.sinks.settle(key, failed=True)
        if src not in self.residency.tables:
            self._metrics.dropped(src, Failure.UNFIT.value, 1)
            return
        self.drops.note()
        if self.residency.tables[src].ready(key):
            self.residency.dropped.append(self.residency.evict(key, src))
            self.drops.note(Failure.UNFIT.value)
        if self.residency.where(key) is None:
            self.writeback.forgotten(key)

    # -- internals ----------------------------------------------------------------------------------------------

    def _tells_of_source(self, src: Tier, failure: Failure) -> bool:
        """Return whether the failure means that the source is unusable.

        A record is unusable if it cannot be read, and a slot if its payload is invalid.
        """
        return failure not in _UNTRIED if src in self.hierarchy.records else failure is Failure.INTEGRITY

    def _lift(self, limit: int) -> None:
        for key in self.residency.lift(limit):
            self.writeback.permitted(key)

    def _save_revived(self, limit: int) -> bool:
        """Queue up to ``limit`` pages that became reachable again to be saved, as if they had just been put.

        Returns:
            Whether any of these pages remain.
        """
        revived = self.residency.orphans.revived
        for _ in range(min(limit, len(revived))):
            self.writeback.permitted(revived.popleft())
        return bool(revived)

    def _evict_page(self, key: PageKey, tiers: Sequence[Tier]) -> int:
        found = 0
        for tier in tiers:
            copy = self.residency.tables[tier].copies.get(key)
            if copy is None:
                continue
            found = 1
            if copy.ready:
                self.residency.dropped.append(self.residency.evict(key, tier))
            else:
                self._abort(key, tier, copy.slot)
        if found and self.residency.where(key) is None:
            self.writeback.forgotten(key)
        return found

    def _abort(self, key: PageKey, tier: Tier, slot: int) -> None:
        self.residency.abort(key, tier)
        if tier == Tier.HBM:
            self.leases.lost(self.loads.cancel(slot), "evicted")
        elif tier == self.loads.gate:
            self.loads.lost(key)

    def _finish(self, now: float) -> None:
        """Apply the consequences of the last decisions, and queue the resulting transfers."""
        self.outgoing.advance(now)
        if self.outgoing.given_up:
            self._metrics.dropped(Tier.HBM, "no_room", self.outgoing.given_up)
            self.drops.unsaved += self.outgoing.given_up
            self.outgoing.given_up = 0
        if self.outgoing.num_forgotten:
            self._metrics.dropped(Tier.HBM, "evicted", self.outgoing.num_forgotten)
            self.outgoing.num_forgotten = 0
        self.loads.promote_queued()
        if self.loads.queued:
            gate = self.loads.gate
            self.space.make_room(gate, self.loads.queued, now)
            self.space.relieve(gate, 1, now)
            self.loads.promote_queued()
            if self.loads.queued and self.space.blocked(gate, now):
                self.loads.give_up_queued()
        for load, arrived in self.loads.ended:
            if arrived:
                self.leases.arrived(load)
            else:
                self.leases.lost(load, "failed")
        self.loads.ended.clear()
        self.leases.cut_replaced()
        self.drops.note()
        self.drops.tell(refused=bool(self.space.failing))
        self.transfers.emit(now)
