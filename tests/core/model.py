"""A reference model of residency, which derives the content of every tier, slot and record from the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest

from tests.core.hardware import Flight, Hardware
from tierstore.directory.residency import Residency, TierTable
from tierstore.errors import CapacityError, LeaseError
from tierstore.policy import History, Known, make_policy
from tierstore.types import PageKey, Tier

RECORD = 10
TREE = {"a": None, "ab": "a", "abc": "ab", "ad": "a", "e": None, "ef": "e"}
KEYS = [PageKey(name.encode()) for name in TREE]
PARENTS = {PageKey(k.encode()): None if p is None else PageKey(p.encode()) for k, p in TREE.items()}
SLOTTED = (Tier.HBM, Tier.HOST)


class Code(NamedTuple):
    """The classes under test, which may be mutated copies."""

    residency: type[Residency]
    table: type[TierTable]


class Hold(NamedTuple):
    """A pin that has not been released yet."""

    key: PageKey
    tier: Tier
    slot: int


class ResidencyModel:
    """Applies each step to the residency and to its own state, and checks that the results agree.

    ``records`` contains the record tiers, fastest first.
    """

    records: ClassVar[tuple[Tier, ...]] = (Tier.NVME,)

    def begin(self, code: Code, hbm: int, host: int, budget: int, policy: str) -> None:
        """Create empty tiers of ``hbm`` and ``host`` slots, and record tiers of ``budget`` bytes each."""
        table = code.table
        self.history = History(5)
        known = Known(self.history, 2.0)
        self.residency = code.residency(
            {
                Tier.HBM: table(make_policy(policy, known, hbm), num_slots=hbm),
                Tier.HOST: table(make_policy(policy, known, host), num_slots=host),
                **{
                    tier: table(make_policy(policy, known, budget // RECORD), budget_nbytes=budget)
                    for tier in self.records
                },
            }
        )
        self.hardware = Hardware(dict.fromkeys(self.records, budget))
        self.ready: dict[Tier, dict[PageKey, int]] = {tier: {} for tier in self.tiers}
        self.parents: dict[PageKey, PageKey] = {}
        self.flights: list[Flight] = []
        self.holds: list[Hold] = []
        self.owned: list[int] = []
        self.retired: list[int] = []
        self.confined: set[PageKey] = set()
        self.declined: set[PageKey] = set()
        """The pages of ``confined`` that admission refused."""
        self.permitted: set[PageKey] = set()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, fastest first."""
        return (*SLOTTED, *self.records)

    # -- steps --------------------------------------------------------------------------------------------------

    def _take(self) -> int | None:
        slot = self._attempt(lambda: self.residency.take(Tier.HBM))
        if slot is not None:
            self._scribble(Tier.HBM, slot)
            self.owned.append(slot)
        return slot

    def _adopt(
        self,
        slot: int,
        key: PageKey,
        parent: PageKey | None,
        *,
        confine: bool = False,
        decline: bool = False,
    ) -> None:
        if decline and not self._held(key):
            self.residency.memory_only.refuse(key)
            self._put(key, confine=True, decline=True)
        self.history.put(key, parent)
        self.residency.adopt(key, Tier.HBM, slot, parent, memory_only=confine)
        self._put(key, confine=confine)
        self.owned.remove(slot)
        self.hardware.memory[Tier.HBM, slot] = key
        arriving = self._arriving(key, Tier.HBM)
        if arriving is not None:
            arriving.live = False
            moved, old = Hold(key, Tier.HBM, slot), Hold(key, Tier.HBM, arriving.dst_slot)
            self.holds = [moved if hold == old else hold for hold in self.holds]
        self._now_readable(key, Tier.HBM, slot, parent)

    def _reserve(
        self,
        key: PageKey,
        src: Tier | None,
        dst: Tier,
        nbytes: int,
        told: bool,
        *,
        confine: bool = False,
        decline: bool = False,
    ) -> Flight | None:
        reserved = RECORD if dst in self.records else 0
        first = src is None and not self._held(key)
        parent = PARENTS[key] if told else None
        cut_off = self._after_a_gap(parent) if first else self._cut_off(key)
        readable = {tier: set(keys) for tier, keys in self.ready.items()}
        slot = self._attempt(
            lambda: self.residency.reserve(
                (key,), dst, reserved, src, memory_only=confine, parents=(parent if first else None,)
            )[0][0]
        )
        if slot is None:
            return None
        if src is None or src < dst:
            gone = readable[dst] - set(self.ready[dst])
            assert not (cut_off and gone), "a page was evicted to make space for an unreachable page"
        if first:
            assert parent is None or self._held(parent) or parent not in readable[dst], (
                "the parent was evicted to make space for its child"
            )
            if parent is not None:
                self.parents[key] = parent
        if decline and not self._held(key):
            self.residency.memory_only.refuse(key)
        self._put(key, confine=confine or decline, decline=decline)
        self._scribble(dst, slot)
        src_slot = -1 if src is None else self.ready[src][key]
        flight = Flight(key, src, src_slot, dst, slot, min(nbytes, reserved), parent)
        self.flights.append(flight)
        if dst in self.records:
            self._take_erases()
            self.hardware.enqueue(dst, flight)
        return flight

    def _reserve_run(self, keys: list[PageKey], src: Tier, dst: Tier) -> None:
        """Start to copy several pages along an edge. Only the first may evict a page; the rest need free space."""
        reserved = RECORD if dst in self.records else 0
        table = self.residency.tables[dst]
        free = (
            len(table.free)
            if table.budget_nbytes is None
            else (table.budget_nbytes - table.used_nbytes) // RECORD
        )
        wanted: list[PageKey] = []
        for key in keys:
            taken = key in self.ready[dst] or self._arriving(key, dst)
            if taken or key not in self.ready[src] or not self._may_be_in(key, dst):
                break
            wanted.append(key)
        found: list[tuple[int, int]] = []

        def reserve() -> int:
            found.extend(self.residency.reserve(keys, dst, reserved, src, pins=1))
            return len(found)

        if not wanted:
            self._refused(reserve)
            return
        if self._attempt(reserve) is None:
            assert not free
            return
        del wanted[max(1, free) :]
        assert [src_slot for _, src_slot in found] == [self.ready[src][key] for key in wanted]
        for key, (slot, src_slot) in zip(wanted, found, strict=True):
            self._scribble(dst, slot)
            flight = Flight(key, src, src_slot, dst, slot, reserved, None)
            self.flights.append(flight)
            self.holds.append(Hold(key, dst, slot))
            if dst in self.records:
                self._take_erases()
                self.hardware.enqueue(dst, flight)

    def _settle(self, flight: Flight, *, well: bool) -> None:
        """End a flight. The source is unpinned first, as when an ack is applied."""
        source_live = flight.src is not None and self.ready[flight.src].get(flight.key) == flight.src_slot
        arrived = self.hardware.run(flight, well=well) and well
        assert arrived or not well or not source_live, "a pinned source lost its bytes"
        self.flights.remove(flight)
        key, dst, slot = flight.key, flight.dst, flight.dst_slot
        if flight.src is not None:
            self.residency.unpin((key,), flight.src, (flight.src_slot,))
        if not arrived:
            self.residency.fail(key, dst, slot)
            self._forget_if_gone(key)
            return
        readable = self.residency.commit(
            (key,), dst, (slot,), sizes=(flight.nbytes,), parents=(flight.parent,)
        )
        assert readable == [flight.live]
        if flight.live:
            self._now_readable(key, dst, slot, flight.parent)

    def _arrive(self, flights: list[Flight]) -> None:
        """End flights along one edge. One call commits all copies that arrive, and unpins their sources.

        Copies whose source record was evicted cannot arrive. They fail first, one by one.
        """
        arriving: list[Flight] = []
        for flight in flights:
            if self.hardware.run(flight, well=True) or not flight.live:
                arriving.append(flight)
            else:
                self._settle(flight, well=True)
        if not arriving:
            return
        for flight in arriving:
            self.flights.remove(flight)
        flights = arriving
        src, dst = flights[0].src, flights[0].dst
        found = self.residency.commit(
            [f.key for f in flights],
            dst,
            [f.dst_slot for f in flights],
            src,
            [f.src_slot for f in flights],
            sizes=[f.nbytes for f in flights],
            parents=[f.parent for f in flights],
        )
        assert found == [f.live for f in flights]
        for flight in flights:
            if flight.live:
                self._now_readable(flight.key, dst, flight.dst_slot, flight.parent)

    def _release(self, holds: list[Hold], *, used: bool) -> None:
        """Release pins in one tier together. ``used`` tells whether the pinned pages were used."""
        keys, slots = [hold.key for hold in holds], [hold.slot for hold in holds]
        if used:
            for key in keys:
                self.history.hit(key, below=False)
            self.residency.release(keys, holds[0].tier, slots)
        else:
            self.residency.unpin(keys, holds[0].tier, slots)
        for hold in holds:
            self.holds.remove(hold)

    # -- state of the model -------------------------------------------------------------------------------------

    def _places(self) -> list[Hold]:
        """Return the page, tier and slot of every copy, readable or arriving."""
        readable = [Hold(key, tier, slot) for tier in self.tiers for key, slot in self.ready[tier].items()]
        return readable + [Hold(f.key, f.dst, f.dst_slot) for f in self.flights if f.live]

    def _edges(self) -> list[tuple[PageKey, Tier, Tier]]:
        """Return the page, source and destination of each copy that could start now."""
        return [
            (key, src, dst)
            for src in self.tiers
            for key in self.ready[src]
            for dst in self.tiers
            if key not in self.ready[dst] and not self._arriving(key, dst) and self._may_be_in(key, dst)
        ]

    def _may_be_in(self, key: PageKey, tier: Tier) -> bool:
        return tier not in self.records or key not in self.confined

    def _put(self, key: PageKey, *, confine: bool, decline: bool = False) -> None:
        """Model the put of a page. With ``confine``, it becomes memory-only, unless it has a copy or a storable child.

        With ``decline``, admission refuses the page. Without ``decline``, children that admission has refused count as
        storable, because admission may accept them later.
        """
        children = {child for child, parent in self.parents.items() if parent == key}
        may_precede = self.confined if decline else self.confined - self.declined
        if confine and not self._held(key) and children <= may_precede:
            self.confined.add(key)
            if decline:
                self.declined.add(key)

    def _forget_if_gone(self, key: PageKey) -> None:
        if not self._held(key):
            self.confined.discard(key)
            self.declined.discard(key)
            self.permitted.discard(key)
            self.parents.pop(key, None)

    def _cut_off(self, key: PageKey) -> bool:
        """Return whether a known page before this one has no copy, readable or in flight."""
        return self._after_a_gap(self.parents.get(key))

    def _after_a_gap(self, parent: PageKey | None) -> bool:
        return parent is not None and (not self._held(parent) or self._cut_off(parent))

    def _held(self, key: PageKey) -> bool:
        return self._readable(key) or any(f.live and f.key == key for f in self.flights)

    def _lift(self) -> None:
        for key in self.permitted:
            above: PageKey | None = key
            while above in self.confined:
                self.confined.discard(above)
                self.declined.discard(above)
                above = self.parents.get(above)
        self.permitted.clear()

    def _attempt(self, act: Callable[[], int]) -> int | None:
        """Call ``act``, which takes a slot, and apply its evictions. Return None if it raises CapacityError."""
        before = self._everything()
        try:
            slot = act()
        except CapacityError:
            assert self._everything() == before, "a call that raised CapacityError changed something"
            return None
        pins = self._pins()
        unreachable = {key for key in KEYS if self._cut_off(key)}
        drops = list(self.residency.dropped)
        self.residency.dropped.clear()
        for tier, key, last, memory_only, refused, cut_off in drops:
            assert cut_off is (key in unreachable)
            if not cut_off:
                first = {k for k, slot in self.ready[tier].items() if not pins[tier, slot]} & unreachable
                assert not first, "a reachable page was evicted before an unreachable one"
            assert memory_only is (key in self.confined)
            assert refused is (key in self.declined)
            assert not pins[tier, self.ready[tier][key]], "a pinned copy was dropped"
            self._left(key, tier, last=last)
            if last and not cut_off:
                lowest = Tier.HOST if memory_only else self.records[-1]
                assert tier is lowest, "a page was dropped that could have been saved to a lower tier"
                assert key not in self.parents.values(), "a page was evicted before its child"
        return slot

    def _refused(self, act: Callable[[], object]) -> None:
        before = self._everything()
        with pytest.raises(LeaseError):
            act()
        assert self._everything() == before, "a call that raised LeaseError changed something"

    def _scribble(self, tier: Tier, slot: int) -> None:
        """Assert that a slot that was just handed out is not in use, and overwrite it as its new owner would."""
        assert (tier, slot) not in self._users(), f"{tier.name} slot {slot} was handed out while in use"
        assert slot not in self.ready[tier].values()
        assert tier is not Tier.HBM or slot not in self.owned
        self.hardware.memory[tier, slot] = None

    def _now_readable(self, key: PageKey, tier: Tier, slot: int, parent: PageKey | None) -> None:
        first = not self._readable(key)
        self.ready[tier][key] = slot
        if parent is not None:
            self.parents.setdefault(key, parent)
        before = self.parents.get(key)
        if (
            (first or parent is not None)
            and before in self.confined
            and (key not in self.confined or (key in self.declined and before not in self.declined))
        ):
            self.permitted.add(before)

    def _left(self, key: PageKey, tier: Tier, *, last: bool) -> None:
        del self.ready[tier][key]
        assert last is not self._readable(key)
        self._forget_if_gone(key)

    def _readable(self, key: PageKey) -> bool:
        return any(key in copies for copies in self.ready.values())

    def _arriving(self, key: PageKey, tier: Tier) -> Flight | None:
        return next((f for f in self.flights if f.live and (f.key, f.dst) == (key, tier)), None)

    def _take_erases(self) -> None:
        erased = self.residency.erased
        while erased:
            tier, key = erased.popleft()
            assert tier in self.records
            assert key not in self.ready[tier], "a readable record is erased"
            assert not self._arriving(key, tier), "a record being written is erased"
            self.hardware.enqueue(tier, key)

    def _pins(self) -> Counter[tuple[Tier, int]]:
        pins = Counter((hold.tier, hold.slot) for hold in self.holds)
        pins.update((f.src, f.src_slot) for f in self.flights if f.src is not None)
        return pins

    def _users(self) -> Counter[tuple[Tier, int]]:
        """Count, for each slot, the pins, flights and retirements that keep it in use."""
        users = self._pins()
        users.update((f.dst, f.dst_slot) for f in self.flights)
        users.update((Tier.HBM, slot) for slot in self.retired)
        return users

    def _everything(self) -> Any:
        r = self.residency
        tables = [
            (
                list(t.free),
                {k: (c.slot, c.nbytes, c.rank, c.ready, c.pins) for k, c in t.copies.items()},
                set(t.owned),
                {s: (d.key, d.nbytes, d.holders) for s, d in t.quarantine.items()},
                (list(t.droppable), list(t.dirty), list(t.mirrors), t.used_nbytes),
            )
            for t in r.tables.values()
        ]
        memory_only = (set(r.memory_only.keys), set(r.memory_only.refused), r.memory_only.lifting)
        return (
            tables,
            memory_only,
            sorted(r.lineage.links()),
            list(r.dropped),
            list(r.erased),
            set(r.orphans.keys),
        )
