"""The directory: decides what every page does, emits transfers, applies their acks. Plain data in, plain data out.

It holds residency, traffic, loads, placement and hints of one store, and knows no bytes, clock or thread: ``now`` is
passed to every call that needs it, and the store makes sure that there is one caller at a time.
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
"""Failures that say nothing of the record: it was not read, or the tier that was to take it refused it."""


class Directory:
    """Residency and every decision about it."""

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
        """Make room for ``n`` HBM slots: save victims to lower tiers, and drop some if saving is stuck.

        Returns whether there is more room at once.
        """
        before = self.space.room(Tier.HBM)
        self.space.make_room(Tier.HBM, n, now)
        self.space.relieve(Tier.HBM, n, now)
        self.space.make_room(Tier.HBM, n, now)
        self.loads.give_back(n - self.space.room(Tier.HBM))
        self._finish(now)
        return self.space.room(Tier.HBM) > before

    # -- out of an engine, and into a lease --------------------------------------------------------------------

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
        """Copy pages out of engine slots that ``outgoing`` accepted, as space in lower tiers becomes free."""
        self.outgoing.add(keys, slots, memory_only=memory_only, parent=parent, doubted=doubted)
        self._finish(now)

    def take_reusable(self) -> list[int]:
        """Return engine slots that no copy reads or writes any more, once each."""
        slots = self.outgoing.reusable + self.loads.abandoned
        self.outgoing.reusable, self.loads.abandoned = [], []
        return slots

    def extend_lease(self, lease: LeaseRecord, limit: int, now: float) -> None:
        """Add up to ``limit`` pages to a lease and start the loads they need.

        If HBM is full of unsaved pages the lease ends; those are saved, or dropped if that is impossible, for the next
        request.
        """
        self.leases.extend(lease, limit, now)
        if lease.complete and lease.miss_reason == "no_room":
            # Whoever asks next is likely to want the same: saving others must not push these out.
            self.residency.touch(lease.keys[len(lease.slots) : len(lease.slots) + limit])
            short = len(lease.keys) - len(lease.slots)
            self.space.make_room(Tier.HBM, short, now)
            self.space.relieve(Tier.HBM, short, now)
            self.loads.give_back(short - self.space.room(Tier.HBM))
        self._finish(now)

    def room_is_coming(self, now: float) -> bool:
        """Return whether HBM has space, or gets some from what is in flight.

        That is: pages that are being saved or can be soon, loads that nobody waits for, and copies whose page was
        evicted.
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
        """Note that a lease took in pages."""
        self.promotions.used(keys, source)
        self.admission.hit(keys, source)

    def _left(self, key: PageKey, tier: Tier) -> None:
        """Note that a copy was dropped."""
        self.promotions.left(key, tier)
        self.writeback.left(key, tier)

    # -- moves asked for ----------------------------------------------------------------------------------------

    def promote(
        self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint], now: float
    ) -> Promoted:
        """Start to bring pages to ``tier`` for a hint in force, as far as there is space."""
        found = self.promotions.start(hint, keys, tier, over)
        self._finish(now)
        return found

    def demote(self, keys: Sequence[PageKey], target: Tier) -> int:
        """Send readable pages down to ``target`` and drop their upper copies. Returns the number accepted."""
        accepted = [key for key in keys if self.residency.where(key) is not None]
        if target in self.hierarchy.records:
            self.admission.insist(accepted)
            self._lift(len(accepted))
        self.writeback.sinks.add(accepted, target, Ticket(), keep=False)
        return len(accepted)

    def begin_flush(self) -> tuple[list[PageKey], Ticket]:
        """Return the pages that may have to be saved, some of them twice, and a ticket that counts them.

        Includes pages that an engine has put and that are still in its slots.
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
        """Send readable pages of ``keys``, and those that come from an engine, to the first durable tier.

        Skips pages that it may not hold or that a durable tier has. Upper copies are kept.
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
        if self.hierarchy.frozen:  # nobody wants these to stay in memory: they cannot be saved
            refused = self.residency.memory_only.refused
            ticket.failed += sum(k in refused and k not in saved for k in keys)

    def dying(self) -> set[tuple[Tier, int]]:
        """Return slots of record tiers whose pages were evicted during a copy. They are erased when it has ended."""
        tables = self.residency.tables
        return {(tier, slot) for tier in self.hierarchy.records for slot in tables[tier].quarantine}

    def evict(self, keys: Sequence[PageKey], tiers: Sequence[Tier]) -> int:
        """Drop copies without saving them. Returns the number of pages that lost at least one."""
        dropped = sum(self._evict_page(key, tiers) for key in reversed(list(dict.fromkeys(keys))))
        self.drops.note("evicted")
        return dropped

    def begin_clear(self) -> list[PageKey]:
        """Give up the pages that an engine has put and that no tier has; return the keys of all others, to evict."""
        for key in self.outgoing.forget():
            self.writeback.forgotten(key)
        return [key for table in self.residency.tables.values() for key in table.copies]

    def drop_unwritten(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Drop the HBM copies in sealed slots whose writing failed, without saving them."""
        copies = self.residency.tables[Tier.HBM].copies
        spoilt = [k for k, slot in zip(keys, slots, strict=True) if k in copies and copies[k].slot == slot]
        self.evict(spoilt, [Tier.HBM])

    # -- progress -----------------------------------------------------------------------------------------------

    def advance(self, acks: Sequence[Ack], now: float) -> bool:
        """Apply finished transfers and make a bounded number of decisions. Returns whether there are more."""
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
        """Return the commands for the mover, in order."""
        return self.transfers.take()

    def busy(self) -> bool:
        """Whether something is in flight, queued, or on its way down."""
        placement = self.writeback
        return bool(
            not self.transfers.idle()
            or self.loads.by_slot
            or placement.sinks.open
            or placement.writing_behind
            or self.outgoing.waiting
            or self.residency.memory_only.lifting
        )

    # -- the end of transfers -----------------------------------------------------------------------------------

    def apply(self, ack: Ack, now: float) -> None:
        """Settle every page of the transfer: release its source, and make its destination readable or free.

        Late pages are not waited for any more; their source and slot stay as they are until their own ack.
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
        """All pages of ``transfer`` have arrived; their sizes are the next of ``sizes``."""
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
            for slot in transfer.src_slots:
                self.outgoing.ended(slot)
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
        for key, there in zip(keys, readable, strict=True):
            if there and src < dst:
                self.writeback.saved(key, dst)
            self._settled(key, dst, readable=there)

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
        self._settled(key, dst, readable=False)

    def _late(self, key: PageKey, dst: Tier, slot: int) -> None:
        """Let everybody who waits for a late page continue without it."""
        copy = self.residency.tables[dst].copies.get(key)
        if copy is None or copy.slot != slot or copy.ready:
            return
        if dst == Tier.HBM:
            self.loads.late(key, slot)
        else:
            self.residency.abort(key, dst)
            self._settled(key, dst, readable=False)

    def _settled(self, key: PageKey, dst: Tier, *, readable: bool) -> None:
        """Report the end of a copy in a tier below HBM to all who wait for the page there, whoever sent it."""
        if dst == self.loads.gate and key not in self.residency.tables[dst].copies:
            self.loads.lost(key)
        elif dst == self.loads.gate and readable:
            self.loads.promoted(key)
        self.writeback.sinks.wake(key)

    def _drop_broken(self, key: PageKey, tier: Tier, slot: int, failure: Failure) -> None:
        table = self.residency.tables.get(tier)
        copy = None if table is None else table.copies.get(key)
        if copy is not None and copy.ready and copy.slot == slot:
            self.residency.dropped.append(self.residency.evict(key, tier))
            self.drops.note(failure.value)

    def _drop_unfit(self, key: PageKey, src: Tier) -> None:
        """Drop a page that the lower tier cannot represent, like a page that a codec broke.

        Keeping it would need a special case in every order, because it could neither be saved nor, with later pages
        below, be dropped. Numbers that no codec can represent come from a model that has failed.
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

    # -- inside -------------------------------------------------------------------------------------------------

    def _tells_of_source(self, src: Tier, failure: Failure) -> bool:
        """Return whether the failure means that the source is worthless: an unreadable record, or an invalid
        payload.
        """
        return failure not in _UNTRIED if src in self.hierarchy.records else failure is Failure.INTEGRITY

    def _lift(self, limit: int) -> None:
        for key in self.residency.lift(limit):
            self.writeback.permitted(key)

    def _save_revived(self, limit: int) -> bool:
        """Queue pages that became reachable again to be saved, as if they had just been put."""
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
        """Apply the consequences of the last decisions until nothing more follows, and queue the transfers."""
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
