"""Bugs to plant in the store. Each is a small change of the code's behaviour, named after what goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support import pages
from tests.support.planting import Plants
from tierstore import store as saving_module
from tierstore.codecs.host_format import Packer, Unpacker
from tierstore.codecs.lossy import CodeExpander
from tierstore.directory import directory as directory_module
from tierstore.directory import invariants
from tierstore.directory.admission import AdmissionControl, MemoryOnly
from tierstore.directory.directory import Directory
from tierstore.directory.leases import LeaseRecord, Leases
from tierstore.directory.loads import Load
from tierstore.directory.residency import Residency, TierTable
from tierstore.directory.slots import SealedSlots
from tierstore.directory.transfers import Transfers
from tierstore.events import PendingEvents
from tierstore.gpu.events import HERE
from tierstore.mover import LocalMover
from tierstore.types import Erase, Event, Failure, PageKey, Tier, Transfer

BUGS_IN_MEMORY = Plants()
BUGS_ON_DISK = Plants()
BUGS_OF_SECRETS = Plants()
BUGS_OF_ADMISSION = Plants()
BUGS_OF_SICK_DISKS = Plants()
BUGS_OF_ENCODED_MEMORY = Plants()


@BUGS_IN_MEMORY.bug
def abort_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    let_go = Residency._let_go

    def abort(self: Residency, key: PageKey, dst: Tier) -> None:
        table = self.tables[dst]
        copy = table.copies.pop(key)
        table.put_back(copy.slot, copy.nbytes)

    def tolerant(self: Residency, tier: Tier, table: TierTable, slot: int) -> None:
        if slot in table.quarantine:
            let_go(self, tier, table, slot)

    patch.setattr(Residency, "abort", abort)
    patch.setattr(Residency, "_let_go", tolerant)


@BUGS_IN_MEMORY.bug
def a_load_is_ready_when_it_is_submitted(patch: pytest.MonkeyPatch) -> None:
    take = Directory.take_commands

    def eager(self: Directory) -> list[Transfer | Erase]:
        commands = take(self)
        for command in commands:
            if isinstance(command, Transfer) and command.dst == Tier.HBM:
                for slot in command.dst_slots:
                    if slot in self.loads.by_slot:
                        self.leases.arrived(self.loads.by_slot[slot])
        return commands

    patch.setattr(Directory, "take_commands", eager)


@BUGS_IN_MEMORY.bug
def a_layer_is_ready_when_it_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalMover, "arriving", lambda self, slots, layer: HERE)


@BUGS_IN_MEMORY.bug
def a_failed_page_is_served(patch: pytest.MonkeyPatch) -> None:
    def failed(self: Directory, transfer: Transfer, i: int, failure: Failure) -> None:
        self._arrived(transfer.part((i,)), iter((0,)), 0.0)

    patch.setattr(Directory, "_failed", failed)


@BUGS_IN_MEMORY.bug
def a_source_is_unpinned_at_submit(patch: pytest.MonkeyPatch) -> None:
    take, commit = Directory.take_commands, Residency.commit

    def early(self: Directory) -> list[Transfer | Erase]:
        commands = take(self)
        for command in commands:
            if isinstance(command, Transfer):
                self.residency.unpin(command.keys, command.src, command.src_slots)
        return commands

    def not_again(
        self: Residency,
        keys: Sequence[PageKey],
        dst: Tier,
        slots: Sequence[int],
        src: Tier | None = None,
        src_slots: Sequence[int] = (),
        **named: Any,
    ) -> list[bool]:
        return commit(self, keys, dst, slots, **named)

    patch.setattr(Directory, "take_commands", early)
    patch.setattr(Residency, "commit", not_again)


@BUGS_IN_MEMORY.bug
def a_lease_is_not_cut(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Leases, lease: LeaseRecord, index: int, reason: str) -> None:
        lease.waiting.discard(index)

    patch.setattr(Leases, "cut", cut)


@BUGS_IN_MEMORY.bug
def evict_forgets_a_tier(patch: pytest.MonkeyPatch) -> None:
    evict = Directory.evict

    def forgetful(self: Directory, keys: Sequence[PageKey], tiers: Sequence[Tier]) -> int:
        return evict(self, keys, tiers[:1])

    patch.setattr(Directory, "evict", forgetful)


@BUGS_IN_MEMORY.bug
def clear_takes_what_hbm_holds_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "begin_clear", lambda self: list(self.residency.tables[Tier.HBM].copies))


@BUGS_IN_MEMORY.bug
def no_watch_is_told_of_pages_that_are_loaded(patch: pytest.MonkeyPatch) -> None:
    commit = Residency.commit

    def silent(self: Residency, keys: Sequence[PageKey], dst: Tier, *args: Any, **named: Any) -> list[bool]:
        changed = self.changed
        self.changed = None if dst == Tier.HBM else changed
        found = commit(self, keys, dst, *args, **named)
        self.changed = changed
        return found

    patch.setattr(Residency, "commit", silent)


@BUGS_IN_MEMORY.bug
def an_adopted_page_keeps_the_old_slot(patch: pytest.MonkeyPatch) -> None:
    def moved(self: Leases, load: Load, slot: int) -> None:
        for lease, index in load.waiters:
            lease.waiting.discard(index)

    patch.setattr(Leases, "moved", moved)


@BUGS_IN_MEMORY.bug
def a_duplicate_is_not_freed(patch: pytest.MonkeyPatch) -> None:
    put = SealedSlots.put

    def leaky(self: SealedSlots, *args: Any, **named: Any) -> tuple[list[int], list[int]]:
        return put(self, *args, **named)[0], []

    patch.setattr(SealedSlots, "put", leaky)


@BUGS_ON_DISK.bug
def parents_are_lost_at_reopen(patch: pytest.MonkeyPatch) -> None:
    load = Residency.load

    def orphaned(self: Residency, tier: Tier, records: Iterable[tuple[PageKey, PageKey | None, int]]) -> None:
        load(self, tier, ((key, None, nbytes) for key, _, nbytes in records))

    patch.setattr(Residency, "load", orphaned)


@BUGS_ON_DISK.bug
def flush_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saving_module.Flush, "_until", lambda *_: None)


@BUGS_IN_MEMORY.bug
def release_ignores_its_event(patch: pytest.MonkeyPatch) -> None:
    release = PendingEvents.release

    def hasty(self: PendingEvents, lease: LeaseRecord, after: Event | None) -> bool:
        return release(self, lease, None)

    patch.setattr(PendingEvents, "release", hasty)


@BUGS_IN_MEMORY.bug
def free_ignores_its_event(patch: pytest.MonkeyPatch) -> None:
    free = PendingEvents.free

    def hasty(self: PendingEvents, slots: tuple[int, ...], after: Event | None) -> None:
        free(self, slots, None)

    patch.setattr(PendingEvents, "free", hasty)


@BUGS_IN_MEMORY.bug
def a_page_is_copied_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    put = SealedSlots.put

    def hasty(self: SealedSlots, *args: Any, **named: Any) -> tuple[list[int], list[int]]:
        return put(self, *args, **{**named, "written": True})

    def pages_of(self: PendingEvents, pages: Any) -> bool:
        self.writing.remove(pages)
        return False

    patch.setattr(SealedSlots, "put", hasty)
    patch.setattr(PendingEvents, "_written", pages_of)


@BUGS_IN_MEMORY.bug
def a_lease_is_ready_before_its_pages_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingEvents, "writers", lambda self, lease: [])


@BUGS_IN_MEMORY.bug
def a_lease_forgets_the_writers_of_what_was_sealed_under_it(patch: pytest.MonkeyPatch) -> None:
    writers = PendingEvents.writers

    def of_covered(self: PendingEvents, lease: LeaseRecord) -> list[Event]:
        return writers(self, replace(lease, held=[]))

    patch.setattr(PendingEvents, "writers", of_covered)


@BUGS_IN_MEMORY.bug
def a_put_returns_a_slot_that_others_are_writing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingEvents, "_written_by_others", lambda self, keys, after: set())


@BUGS_IN_MEMORY.bug
def a_replaced_slot_is_free_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    replaced = Residency.replace

    def hasty(self: Residency, key: PageKey, tier: Tier, slot: int) -> None:
        old = self.tables[tier].copies[key].slot
        replaced(self, key, tier, slot)
        dead = self.tables[tier].quarantine.pop(old)
        self.tables[tier].put_back(old, dead.nbytes)

    patch.setattr(Residency, "replace", hasty)


@BUGS_IN_MEMORY.bug
def leases_keep_a_page_whose_writer_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "never_written", lambda self, slots, event: None)


@BUGS_ON_DISK.bug
def erased_records_stay_on_disk(patch: pytest.MonkeyPatch) -> None:
    def silent(self: Transfers) -> None:
        self._residency.erased.clear()

    patch.setattr(Transfers, "emit_erases", silent)


@BUGS_IN_MEMORY.bug
def a_dropped_page_is_still_listed(patch: pytest.MonkeyPatch) -> None:
    evict = Residency.evict

    def half(self: Residency, key: PageKey, tier: Tier) -> Any:
        copy = self.tables[tier].copies.get(key)
        drop = evict(self, key, tier)
        if copy is not None and tier == Tier.HOST and copy.pins == 0:
            self.tables[tier].copies[key] = copy
        return drop

    patch.setattr(Residency, "evict", half)


@BUGS_OF_SECRETS.bug
def a_memory_only_page_is_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryOnly, "lowest_for", lambda self, key: self.lowest)


@BUGS_OF_SECRETS.bug
def a_page_is_memory_only_until_its_first_copy_goes(patch: pytest.MonkeyPatch) -> None:
    evict = Residency.evict

    def forgetful(self: Residency, key: PageKey, tier: Tier) -> Any:
        drop = evict(self, key, tier)
        self.memory_only.forget(key)
        return drop

    patch.setattr(Residency, "evict", forgetful)


@BUGS_OF_SECRETS.bug
def a_put_without_it_leaves_the_pages_before_memory_only(patch: pytest.MonkeyPatch) -> None:
    def lift(self: MemoryOnly, limit: int) -> list[PageKey]:
        lifted = list(self._lifting)
        self._lifting.clear()
        self.keys.difference_update(lifted)
        return lifted

    patch.setattr(MemoryOnly, "lift", lift)
    patch.setattr(invariants, "_check_memory_only", lambda _: None)


@BUGS_OF_ADMISSION.bug
def a_demoted_page_waits_for_admission(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdmissionControl, "insist", lambda self, keys: None)


@BUGS_OF_ADMISSION.bug
def a_flushed_page_waits_for_admission(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdmissionControl, "insist_on_all", lambda self: None)


@BUGS_OF_ADMISSION.bug
def an_admitted_page_leaves_those_before_it_refused(patch: pytest.MonkeyPatch) -> None:
    def lift(self: MemoryOnly, limit: int) -> list[PageKey]:
        lifted = list(self._lifting)
        self._lifting.clear()
        self.keys.difference_update(lifted)
        self.refused.difference_update(lifted)
        return lifted

    patch.setattr(MemoryOnly, "lift", lift)
    patch.setattr(invariants, "_check_memory_only", lambda _: None)


@BUGS_OF_SICK_DISKS.bug
def a_late_slot_is_free_at_once(patch: pytest.MonkeyPatch) -> None:
    let_go = Residency._let_go

    def late(self: Directory, key: PageKey, dst: Tier, slot: int) -> None:
        copy = self.residency.tables[dst].copies.get(key)
        if copy is not None and copy.slot == slot and not copy.ready:
            self.residency.fail(key, dst, slot)
            self._settled((key,), dst, (False,))

    def tolerant(self: Residency, tier: Tier, table: TierTable, slot: int) -> None:
        if slot in table.quarantine:
            let_go(self, tier, table, slot)

    patch.setattr(Directory, "_late", late)
    patch.setattr(Residency, "_let_go", tolerant)


@BUGS_OF_SICK_DISKS.bug
def a_late_page_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Directory, "_late", lambda self, key, dst, slot: None)


@BUGS_OF_SICK_DISKS.bug
def a_late_page_gives_up_its_source(patch: pytest.MonkeyPatch) -> None:
    late = Directory._late

    def early(self: Directory, key: PageKey, dst: Tier, slot: int) -> None:
        late(self, key, dst, slot)
        copy = self.residency.tables[Tier.NVME].copies.get(key)
        if copy is not None and copy.pins:
            self.residency.unpin((key,), Tier.NVME, (copy.slot,))

    patch.setattr(Directory, "_late", early)


@BUGS_OF_SICK_DISKS.bug
def a_page_that_was_not_tried_loses_its_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(directory_module, "_UNTRIED", frozenset())


@BUGS_OF_ENCODED_MEMORY.bug
def pages_lose_more_than_the_codec_says(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages, "STEADY", None)  # the codec now changes the content of the pages


@BUGS_OF_ENCODED_MEMORY.bug
def a_slot_keeps_what_it_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Packer, "pack", lambda self, page, slot: True)


@BUGS_OF_ENCODED_MEMORY.bug
def a_page_is_unpacked_once_too_often(patch: pytest.MonkeyPatch) -> None:
    unpack = Unpacker.unpack

    def twice(self: Unpacker, slot: Any, page: Any) -> None:
        unpack(self, slot, page)
        page[:] = slot[: page.nbytes]

    patch.setattr(Unpacker, "unpack", twice)


@BUGS_OF_ENCODED_MEMORY.bug
def compressed_codes_are_taken_for_codes(patch: pytest.MonkeyPatch) -> None:
    def as_it_is(self: CodeExpander, payload: Any, out: Any) -> None:
        out[: payload.nbytes] = payload

    patch.setattr(CodeExpander, "decode", as_it_is)
