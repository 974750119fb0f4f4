"""A state machine that calls the methods of ``Residency`` in random order and checks it against a reference model."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.model import KEYS, PARENTS, RECORD, SLOTTED, Code, ResidencyModel
from tierstore.directory.invariants import check_residency
from tierstore.directory.residency import Residency, TierTable
from tierstore.types import PageKey, Tier

key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)


class ResidencyMachine(ResidencyModel, RuleBasedStateMachine):
    """Calls the methods of residency in random order. ``code`` contains the classes under test."""

    code: ClassVar[Code] = Code(Residency, TierTable)

    @initialize(
        hbm=st.integers(2, 3),
        host=st.integers(2, 3),
        budget=st.sampled_from((20, 25, 34)),
        policy=st.sampled_from(("lru", "fifo", "gdsf", "session", "adaptive")),
    )
    def start(self, hbm: int, host: int, budget: int, policy: str) -> None:
        self.begin(self.code, hbm, host, budget, policy)

    # -- slots owned by callers ---------------------------------------------------------------------------------

    @precondition(lambda self: not self.owned)
    @rule()
    def take(self) -> None:
        self._take()

    @rule(data=st.data(), told=st.booleans(), confine=st.booleans(), decline=st.booleans())
    def put(self, data: st.DataObject, told: bool, confine: bool, decline: bool) -> None:
        if not self.owned:
            self._take()
        keys = [key for key in KEYS if key not in self.ready[Tier.HBM]]
        if self.owned and keys:
            key = data.draw(st.sampled_from(keys))
            slot = data.draw(st.sampled_from(self.owned))
            self._adopt(
                slot, key, PARENTS[key] if told else None, confine=confine and not decline, decline=decline
            )

    @precondition(lambda self: any(f.live and f.dst is Tier.HBM for f in self.flights))
    @rule(data=st.data())
    def put_what_is_arriving(self, data: st.DataObject) -> None:
        if self.owned or self._take() is not None:
            keys = [f.key for f in self.flights if f.live and f.dst is Tier.HBM]
            self._adopt(
                self.owned[0], data.draw(st.sampled_from(keys)), None, confine=data.draw(st.booleans())
            )

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.owned))
        self.residency.retire(Tier.HBM, slot)
        self.owned.remove(slot)
        self.retired.append(slot)

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def release_retired(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.retired))
        self.residency.release_retired(Tier.HBM, slot)
        self.retired.remove(slot)

    # -- copies -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._edges())
    @rule(data=st.data(), nbytes=st.sampled_from((4, RECORD)), told=st.booleans())
    def start_copy(self, data: st.DataObject, nbytes: int, told: bool) -> None:
        self._reserve(*data.draw(st.sampled_from(self._edges())), nbytes, told)

    @precondition(lambda self: self._edges())
    @rule(data=st.data(), nbytes=st.sampled_from((4, RECORD)), told=st.booleans())
    def whole_copy(self, data: st.DataObject, nbytes: int, told: bool) -> None:
        flight = self._reserve(*data.draw(st.sampled_from(self._edges())), nbytes, told)
        if flight is not None:
            self._settle(flight, well=True)

    @rule(keys=key_lists, data=st.data(), up=st.booleans())
    def start_copies_of_a_run(self, keys: list[PageKey], data: st.DataObject, up: bool) -> None:
        """Start to copy several pages along one edge, mostly from HOST to HBM. The caller pins each new copy."""
        src, dst = (Tier.HOST, Tier.HBM) if up else data.draw(st.permutations(self.tiers))[:2]
        self._reserve_run(keys, src, dst)

    @rule(data=st.data(), nbytes=st.sampled_from((4, RECORD)))
    def start_write(self, data: st.DataObject, nbytes: int) -> None:
        """Let an engine start to write a page directly into a tier."""
        dst = data.draw(st.sampled_from(self.tiers))
        keys = [key for key in KEYS if key not in self.ready[dst] and not self._arriving(key, dst)]
        keys = [key for key in keys if self._may_be_in(key, dst)]
        if keys:
            confine = dst not in self.records and data.draw(st.booleans())
            self._reserve(data.draw(st.sampled_from(keys)), None, dst, nbytes, told=True, confine=confine)

    @rule(
        child=st.sampled_from([key for key in KEYS if PARENTS[key] is not None]),
        nbytes=st.sampled_from((4, RECORD)),
    )
    def write_a_family_below(self, child: PageKey, nbytes: int) -> None:
        """Write a page and the page after it to the lowest tier, so that the tier's rules for leaves apply."""
        lowest = self.records[-1]
        for key in (PARENTS[child], child):
            if key is None or not self._may_be_in(key, lowest):
                continue
            if key not in self.ready[lowest] and not self._arriving(key, lowest):
                flight = self._reserve(key, None, lowest, nbytes, told=True)
                if flight is not None:
                    self._settle(flight, well=True)

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), well=st.sampled_from((True, True, False)))
    def settle(self, data: st.DataObject, well: bool) -> None:
        self._settle(data.draw(st.sampled_from(self.flights)), well=well)

    @precondition(lambda self: any(f.src for f in self.flights))
    @rule(data=st.data())
    def a_run_arrives(self, data: st.DataObject) -> None:
        edge = data.draw(st.sampled_from(sorted({(f.src, f.dst) for f in self.flights if f.src})))
        flights = [f for f in self.flights if (f.src, f.dst) == edge]
        self._arrive(data.draw(st.permutations(flights)))

    @precondition(lambda self: any(f.live for f in self.flights))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if f.live]))
        self.residency.abort(flight.key, flight.dst)
        flight.live = False
        self._forget_if_gone(flight.key)

    @precondition(lambda self: any(f.live and f.src is None for f in self.flights))
    @rule(data=st.data(), well=st.booleans())
    def abort_and_start_again(self, data: st.DataObject, well: bool) -> None:
        """Abort a write, start it again, and then end the first transfer, which must not affect the newer copy."""
        first = data.draw(st.sampled_from([f for f in self.flights if f.live and f.src is None]))
        self.residency.abort(first.key, first.dst)
        first.live = False
        self._forget_if_gone(first.key)
        self._reserve(first.key, None, first.dst, RECORD, told=True)
        self._settle(first, well=well)

    @precondition(lambda self: self.hardware.at_work)
    @rule(data=st.data())
    def disk_works(self, data: st.DataObject) -> None:
        self.hardware.turn(data.draw(st.sampled_from(self.hardware.at_work)))

    # -- pins, eviction order, evictions ------------------------------------------------------------------------

    @precondition(lambda self: self._places())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self._places()))
        assert self.residency.pin((hold.key,), hold.tier) == [hold.slot]
        self.holds.append(hold)

    @rule(keys=key_lists, data=st.data())
    def pin_a_run(self, keys: list[PageKey], data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from(self.tiers))
        places = {hold.key: hold for hold in self._places() if hold.tier is tier}
        run = [places[key] for key in takewhile(places.__contains__, keys)]
        if not run:
            self._refused(partial(self.residency.pin, keys, tier))
            return
        assert self.residency.pin(keys, tier) == [hold.slot for hold in run]
        self.holds += run

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.residency.unpin((hold.key,), hold.tier, (hold.slot,))
        self.holds.remove(hold)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), used=st.sampled_from((True, True, False)))
    def release_a_run(self, data: st.DataObject, used: bool) -> None:
        """Release some pins of one tier together, in any order. Several of them may pin the same page."""
        tier = data.draw(st.sampled_from(sorted({hold.tier for hold in self.holds})))
        holds = data.draw(st.permutations([hold for hold in self.holds if hold.tier is tier]))
        self._release(holds[: data.draw(st.integers(1, len(holds)))], used=used)

    @rule(keys=key_lists)
    def touch(self, keys: list[PageKey]) -> None:
        for key in keys:
            self.history.hit(key, below=False)
        self.residency.touch(keys)

    @rule(keys=key_lists, wanted=st.booleans())
    def set_wanted(self, keys: list[PageKey], wanted: bool) -> None:
        self.residency.queues.set_wanted(keys, wanted=wanted)

    @rule(keys=key_lists)
    def end_retention(self, keys: list[PageKey]) -> None:
        self.residency.queues.end_retention(keys)

    @precondition(lambda self: any(self.ready.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        tier, key = data.draw(
            st.sampled_from([(tier, key) for tier in self.tiers for key in self.ready[tier]])
        )
        drop = self.residency.evict(key, tier)
        assert (drop.tier, drop.key) == (tier, key)
        self._left(key, tier, last=drop.last)

    @rule(
        child=st.sampled_from([key for key in KEYS if PARENTS[key] is not None]),
        confined=st.sampled_from((2, 2, 1)),
        declined=st.sampled_from((0, 1, 2, 3)),
    )
    def write_a_family_to_memory(self, child: PageKey, confined: int, declined: int) -> None:
        """Write a page and the page after it to HOST, where both or only the first may be memory-only.

        Args:
            child: The second page.
            confined: Number of pages that the caller puts as memory-only, starting with the first.
            declined: Bit mask of the pages that admission refuses instead.
        """
        for i, key in enumerate((PARENTS[child], child)):
            if key is not None and key not in self.ready[Tier.HOST] and not self._arriving(key, Tier.HOST):
                decline = bool(declined & (1 << i))
                flight = self._reserve(
                    key, None, Tier.HOST, 0, True, confine=i < confined and not decline, decline=decline
                )
                if flight is not None:
                    self._settle(flight, well=True)

    @precondition(lambda self: self.confined)
    @rule(data=st.data(), at_once=st.booleans())
    def permit(self, data: st.DataObject, at_once: bool) -> None:
        """Permit a memory-only page and all earlier ones to be stored on disk. If ``at_once``, also call ``lift``."""
        key = data.draw(st.sampled_from(sorted(self.confined)))
        self.residency.memory_only.permit(key)
        self.permitted.add(key)
        if at_once:
            self.lift()

    @precondition(lambda self: self.confined)
    @rule(data=st.data(), everything=st.sampled_from((False, False, True)))
    def permit_by_reason(self, data: st.DataObject, everything: bool) -> None:
        """Permit all pages that admission refused or, unless ``everything``, one page that a caller restricted."""
        if everything:
            self.residency.memory_only.permit_refused()
            self.permitted |= self.declined
            return
        key = data.draw(st.sampled_from(sorted(self.confined)))
        self.residency.memory_only.permit_named(key)
        if key not in self.declined:
            self.permitted.add(key)

    @rule()
    def lift(self) -> None:
        while self.residency.memory_only.lifting:
            self.residency.lift(1)
        self._lift()

    @rule(key=st.sampled_from(KEYS), data=st.data())
    def misuse(self, key: PageKey, data: st.DataObject) -> None:
        """Make calls that are not allowed now. Each must raise LeaseError and change nothing."""
        tier = data.draw(st.sampled_from(self.tiers))
        residency, parent = self.residency, PARENTS[key]
        if key in self.ready[tier]:
            self._refused(partial(residency.abort, key, tier))
        else:
            self._refused(partial(residency.evict, key, tier))
        if any(place[:2] == (key, tier) for place in self._places()):
            self._refused(partial(residency.reserve, (key,), tier))
        else:
            self._refused(partial(residency.pin, (key,), tier))
        if key in self.confined:
            for below in self.records:
                self._refused(partial(residency.reserve, (key,), below))
        if key in self.ready[Tier.HBM]:
            for slot in self.owned:
                self._refused(partial(residency.adopt, key, Tier.HBM, slot, parent))
        for slot in self.ready[Tier.HBM].values():
            self._refused(partial(residency.retire, Tier.HBM, slot))

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def accounts_balance(self) -> None:
        self._take_erases()
        check_residency(self.residency)

    @invariant()
    def every_readable_copy_holds_its_own_page(self) -> None:
        for tier in SLOTTED:
            for key, slot in self.ready[tier].items():
                assert self.hardware.memory[tier, slot] == key
        for tier, disk in self.hardware.disks.items():
            for key in self.ready[tier]:
                assert key in disk.records, "the record of a readable page was erased"
                assert key in disk.after_queue(), "the record of a readable page will be erased"

    @invariant()
    def what_cannot_be_reached_is_what_the_model_says(self) -> None:
        assert self.residency.orphans.keys == {key for key in KEYS if self._cut_off(key)}
        for table in self.residency.tables.values():
            copies = table.copies.items()
            ranks = [(c.rank, self._cut_off(key)) for key, c in copies if c.ready and not c.pins]
            assert [cut_off for _, cut_off in sorted(ranks)] == sorted((c for _, c in ranks), reverse=True)

    @invariant()
    def tables_say_what_the_model_says(self) -> None:
        for tier, table in self.residency.tables.items():
            assert {k: c.slot for k, c in table.copies.items() if c.ready} == self.ready[tier]
            arriving = {f.key: f.dst_slot for f in self.flights if f.live and f.dst is tier}
            assert {k: c.slot for k, c in table.copies.items() if not c.ready} == arriving
        for key in KEYS:
            tiers = [tier for tier in self.tiers if key in self.ready[tier]]
            assert self.residency.where(key) == (tiers[0] if tiers else None)
            assert self.residency.lineage.parent(key) == self.parents.get(key)
            children = {child for child, parent in self.parents.items() if parent == key}
            assert set(self.residency.lineage.children(key)) == children

    @invariant()
    def a_slot_has_exactly_its_holders(self) -> None:
        pins, users = self._pins(), self._users()
        for tier, table in self.residency.tables.items():
            assert {c.slot: c.pins for c in table.copies.values() if c.pins} == {
                slot: pins[tier, slot] for slot in (c.slot for c in table.copies.values()) if pins[tier, slot]
            }
            live = {c.slot for c in table.copies.values()}
            dead = {slot: n for (t, slot), n in users.items() if t is tier and slot not in live}
            assert {slot: d.holders for slot, d in table.quarantine.items()} == dead
        assert self.residency.tables[Tier.HBM].owned == set(self.owned)

    @invariant()
    def memory_only_pages_are_those_of_the_model_and_never_on_disk(self) -> None:
        assert self.residency.memory_only.keys == self.confined
        assert self.residency.memory_only.refused == self.declined
        for below in self.records:
            assert self.confined.isdisjoint(self.residency.tables[below].copies)
        stored = {key for key in self.parents if self._readable(key)} - self.confined
        stored_after = {self.parents[key] for key in stored} & self.confined
        assert stored_after <= self.permitted

    @invariant()
    def the_disk_keeps_nothing_unaccounted(self) -> None:
        for tier, disk in self.hardware.disks.items():
            table = self.residency.tables[tier]
            assert disk.after_queue() <= {*table.copies, *(d.key for d in table.quarantine.values())}
