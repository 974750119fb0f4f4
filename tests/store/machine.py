"""A state machine that compares a whole store with a reference model of page contents, leases and flushed pages.

Nothing is simulated: the copies, the arena and LMDB are the real ones, with gates in front of them. Commands and acks
are exchanged as pickled bytes. The model contains only what a caller can rely on, and no rule depends on timing.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    page_tensor,
    require_nothing_held,
    same,
    tiers,
)
from tests.support.stalls import IN, OUT, Gate, Lane
from tierstore.errors import CapacityError
from tierstore.lease import Lease
from tierstore.types import Hint, LeaseState, PageChange, PageKey, Tier

HBM, HOST = 4, 3
SEQUENCES = [chain(3, "a"), chain(3, "b"), chain(2, "c"), chain(1, "d")]
DOWN: Lane = (Tier.HOST, Tier.NVME)
UP: Lane = (Tier.NVME, Tier.HOST)
DIRECT: list[Lane] = [(Tier.HBM, Tier.NVME), (Tier.NVME, Tier.HBM)]
RUBBISH = torch.full(SPEC.shape, 77.0, dtype=torch.float16)

Shape = tuple[int | None, int | None]

sequences = st.sampled_from(SEQUENCES)
prefixes = st.tuples(sequences, st.integers(1, 3)).map(lambda drawn: drawn[0][: drawn[1]])
below = st.sampled_from([Tier.HOST, Tier.NVME])
lanes = st.sampled_from([OUT, IN, DOWN, UP, *DIRECT])


@dataclass
class Held:
    """An open lease, and the pages that were put with it, with their slots."""

    lease: Lease
    sealed: list[tuple[PageKey, int]]
    settled: tuple[int, ...] | None = None
    failed: bool = False
    """Whether a page put under this lease was never written."""

    @property
    def pages(self) -> list[tuple[PageKey, int]]:
        """All pages that this lease pins, with their slots."""
        return [*zip(self.lease.keys, self.lease.slots, strict=False), *self.sealed]


class StoreMachine(RuleBasedStateMachine):
    """Calls the methods of a store in random order, and checks its promises against a model.

    Attributes:
        written: Keys that were ever put.
        flushed: Keys that must be found after a restart.
        gone: Keys that were evicted from all tiers or cleared, and not put again. They must not be found.
        may_be_stored: Keys that were put without ``memory_only``, and the keys before them.
        must_be_stored: Keys in ``may_be_stored`` that no memory-only put has named since. A flush must write them.
        tangled: Keys that were put under a lease, and the keys of that lease, which precede them.
    """

    shapes: ClassVar[list[Shape]] = [(HOST, None), (HOST, 200), (1, 200), (None, 200), (HOST, 6)]
    """Capacities of HOST and NVMe in pages, to choose from. None leaves the tier out."""

    host_more: ClassVar[dict[str, object]] = {}
    """Additional settings of HOST."""

    nvme_more: ClassVar[dict[str, object]] = {}
    """Additional settings of NVMe."""

    patience_s = PATIENCE_S
    """Seconds after which an operation counts as hanging."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="tierstore-machine-"))
        self.bench: Bench | None = None
        self.owned: list[int] = []
        self.held: list[Held] = []
        self.events: list[ManualEvent] = []
        self.lingering: list[tuple[ManualEvent, list[int]]] = []
        self.unwritten: list[tuple[ManualEvent, list[PageKey], list[int]]] = []
        self.written: set[PageKey] = set()
        self.flushed: set[PageKey] = set()
        self.gone: set[PageKey] = set()
        self.may_be_stored: set[PageKey] = set()
        self.must_be_stored: set[PageKey] = set()
        self.tangled: set[PageKey] = set()
        self.told: dict[Tier, set[PageKey]] = {}
        """The pages in each tier, according to the changes that the watch reported."""
        self.revision = 0
        self.failures_planned = 0

    # -- parts --------------------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def open(self, data: st.DataObject) -> None:
        host, nvme = data.draw(st.sampled_from(self.shapes))
        self.config = tiers(
            HBM,
            host,
            None if nvme is None else self.home,
            nvme_pages=nvme or 0,
            host_more=self.host_more,
            nvme_more=self.nvme_more,
        )
        self.roomy = nvme == 200
        self.reopened = False
        self._open()

    def _open(self) -> None:
        self.bench = open_bench(self.config, SPEC)
        self.told = self.readable()
        self.bench.store.watch(self.hear)

    def readable(self) -> dict[Tier, set[PageKey]]:
        """Return the readable pages of each tier."""
        tables = self.running.directory.residency.tables
        return {tier: {k for k, copy in table.copies.items() if copy.ready} for tier, table in tables.items()}

    def hear(self, change: PageChange) -> None:
        """Record a change that the watch reports."""
        there = self.told[change.tier]
        assert (change.key in there) is not change.came, (
            "the watch reported a page that entered twice, or left without having entered"
        )
        (there.add if change.came else there.remove)(change.key)

    @property
    def running(self) -> Bench:
        assert self.bench is not None
        return self.bench

    def gates(self) -> list[Gate]:
        return [gate for gate in (self.running.mover.copies, self.running.mover.records) if gate is not None]

    def gate(self, lane: Lane) -> Gate | None:
        """Return the gate in front of a lane, or None if this store has no such lane."""
        records = Tier.NVME in lane
        return self.running.mover.records if records else self.running.mover.copies

    # -- calls to the store -------------------------------------------------------------------------------------

    @rule(n=st.integers(1, 3))
    def allocate(self, n: int) -> None:
        try:
            slots = self.take(n)
        except CapacityError:
            return
        for slot in slots:
            page_tensor(self.running.store)[slot].copy_(RUBBISH)
        self.owned += slots

    def take(self, n: int) -> list[int]:
        """Allocate slots, and assert that none of them is in use."""
        slots = self.running.store.allocate(n, timeout_s=0.0)
        used = {slot for event, late in self.lingering if event.pending for slot in late}
        used |= self.being_written()
        assert used.union(self.pinned_slots(), self.owned).isdisjoint(slots), "a slot in use was handed out"
        assert len(set(slots)) == n
        return slots

    def being_written(self) -> set[int]:
        """Return the slots that were put but are not written yet."""
        return {slot for _, _, slots in self.unwritten for slot in slots}

    def pinned_slots(self) -> list[int]:
        """Return the slots of the leased pages and of the pages put under a lease."""
        leased = [slot for held in self.held for slot in (held.settled or ())]
        return leased + [slot for held in self.held for _, slot in held.sealed]

    @rule(keys=sequences, tier=below, stall=st.booleans(), broken=st.integers(0, 9))
    def acquire_from_below(self, keys: list[PageKey], tier: Tier, stall: bool, broken: int) -> None:
        """Write pages, demote them, and acquire them while copies to the upper tiers are stalled or fail."""
        if tier not in self.running.directory.residency.tables:
            return
        self.write(keys)
        self.running.store.demote(keys, tier)
        self.calm()
        up = (
            IN
            if tier == Tier.HOST
            else (UP if Tier.HOST in self.running.directory.residency.tables else DIRECT[1])
        )
        if stall:
            self.stall(up)
        if broken < len(keys):
            self.fail(up, broken)
        self.acquire(keys, None)

    @rule(keys=sequences)
    def write(self, keys: list[PageKey], secret: bool = False) -> None:
        """Allocate, fill and put pages, if there is space. ``secret`` tells whether they are memory-only."""
        with suppress(CapacityError):
            slots = self.take(len(keys))
            self.fill(keys, slots)
            self.running.store.put(keys, slots, memory_only=secret)
            self.was_put(keys, keys, secret)

    def was_put(self, keys: list[PageKey], prefix: list[PageKey], secret: bool) -> None:
        """Update the model after a put. ``prefix`` is the sequence up to and including the last page that was put."""
        self.written.update(keys)
        self.gone.difference_update(keys)
        if secret:
            self.must_be_stored.difference_update(keys)
            return
        self.may_be_stored.update(prefix)
        self.must_be_stored.update(keys)
        if self.tangled.isdisjoint(prefix):
            self.must_be_stored.update(prefix)
        else:
            self.may_be_stored.update(self.tangled)

    @rule(keys=prefixes, under=st.booleans(), late=st.booleans())
    def put(self, keys: list[PageKey], under: bool, late: bool, secret: bool = False) -> None:
        if not self.owned:
            return
        keys = keys[: len(self.owned)]
        slots = [self.owned.pop() for _ in keys]
        held = self.held[-1] if under and self.held else None
        event = ManualEvent() if late else None
        if event is None:
            self.fill(keys, slots)
        lease = None if held is None else held.lease
        if held is not None:
            self.tangled.update(keys, held.lease.keys, (key for key, _ in held.sealed))
        writing = self.being_written()
        kept = self.running.store.put(keys, slots, after=event, lease=lease, memory_only=secret)
        if lease is None:
            assert writing.isdisjoint(kept), "put returned a slot that another writer is still writing"
        if held is not None:
            held.sealed += zip(keys, kept, strict=True)
        if event is not None:
            mine = [(k, s) for k, s, now in zip(keys, slots, kept, strict=True) if s == now]
            self.unwritten.append((event, [k for k, _ in mine], [s for _, s in mine]))
            self.lingering.append((event, [s for s, now in zip(slots, kept, strict=True) if s != now]))
        assert self.running.store.match(keys).num_pages >= len(keys) or not self.roomy
        self.was_put(keys, keys, secret)

    def fill(self, keys: list[PageKey], slots: list[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            page_tensor(self.running.store)[slot].copy_(content(key))

    @rule()
    def finish_writing(self) -> None:
        if not self.unwritten:
            return
        event, keys, slots = self.unwritten.pop(0)
        self.fill(keys, slots)
        event.happen()

    @rule(which=st.integers(0, 9))
    def fail_writing(self, which: int) -> None:
        """Make the device of a writer fail. The pages in its slots must not be served to any caller."""
        if not self.unwritten:
            return
        event, _, slots = self.unwritten.pop(which % len(self.unwritten))
        event.fail()
        self.running.store.poll()
        for held in self.held:
            left = [(key, slot) for key, slot in held.sealed if slot not in slots]
            held.failed |= len(left) < len(held.sealed)
            held.sealed = left

    @rule(late=st.booleans())
    def free(self, late: bool) -> None:
        if not self.owned:
            return
        slot = self.owned.pop()
        self.running.store.free([slot], after=self.later([slot]) if late else None)

    def later(self, slots: list[int]) -> ManualEvent:
        """Return an event that has not occurred yet. The slots are in use until it occurs."""
        self.events.append(ManualEvent())
        self.lingering.append((self.events[-1], slots))
        return self.events[-1]

    @rule()
    def an_event_happens(self) -> None:
        if not self.events:
            return
        self.events.pop(0).happen()

    @rule(keys=prefixes, deadline_s=st.sampled_from([None, None, None, 0.0]))
    def acquire(self, keys: list[PageKey], deadline_s: float | None) -> None:
        lease = self.running.store.acquire(keys, deadline_s=deadline_s)
        assert set(keys[: lease.num_pages]) <= self.written
        self.held.append(Held(lease, []))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), late=st.booleans())
    def release(self, which: int, late: bool) -> None:
        held = self.held.pop(which % len(self.held))
        used = [*(held.settled or ()), *(slot for _, slot in held.sealed)]
        held.lease.release(after=self.later(used) if late else None)

    @rule(keys=prefixes, tier=below)
    def demote(self, keys: list[PageKey], tier: Tier) -> None:
        if tier in self.running.directory.residency.tables:
            self.running.store.demote(keys, tier)

    @rule(
        keys=sequences, tier=st.sampled_from([None, Tier.HBM, Tier.HOST, Tier.NVME]), which=st.integers(0, 2)
    )
    def evict(self, keys: list[PageKey], tier: Tier | None, which: int) -> None:
        self.running.store.evict(keys[which:], tier)
        if tier in (None, Tier.NVME):
            self.flushed.difference_update(keys[which:])
        if tier is None:
            self.gone.update(keys[which:])
            self.may_be_stored.difference_update(set(keys[which:]) - self.tangled)
            self.must_be_stored.difference_update(keys[which:])
            assert self.running.store.match(keys).num_pages <= which

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def clear(self, really: bool) -> None:
        if not really:
            return
        everything = {key for keys in SEQUENCES for key in keys}
        self.running.store.clear()
        self.flushed.clear()
        self.gone.update(everything)
        self.may_be_stored.intersection_update(self.tangled)
        self.must_be_stored.clear()

    @rule(which=st.integers(0, 9))
    def evict_what_is_arriving(self, which: int) -> None:
        """Evict a page that is still being loaded. Its slot must not be reused before the copy into it has ended."""
        hbm = self.running.directory.residency.tables[Tier.HBM]
        arriving = sorted(key for key, copy in hbm.copies.items() if not copy.ready)
        if arriving:
            self.running.store.evict([arriving[which % len(arriving)]], Tier.HBM)

    @rule(keys=sequences, need=st.sampled_from(["will_need", "wont_need", "retain"]))
    def hint(self, keys: list[PageKey], need: str) -> None:
        self.revision += 1
        assert need in ("will_need", "wont_need", "retain")
        self.running.store.hint(Hint("r", self.revision, tuple(keys), need))  # type: ignore[arg-type]

    # -- delays and faults --------------------------------------------------------------------------------------

    @rule(lane=lanes)
    def stall(self, lane: Lane) -> None:
        if (gate := self.gate(lane)) is not None:
            gate.hold(lane)

    @rule(lane=lanes, number=st.sampled_from([1, 1, 9]))
    def let_go(self, lane: Lane, number: int) -> None:
        if (gate := self.gate(lane)) is not None:
            gate.let_go(lane, number)

    @rule()
    def open_gates(self) -> None:
        self.running.open_gates()

    @rule(lane=lanes, page=st.integers(0, 2))
    def fail(self, lane: Lane, page: int) -> None:
        self.failures_planned += 1
        if (gate := self.gate(lane)) is not None:
            gate.fail_next(lane, page)
        if lane[0] == Tier.NVME:
            self.flushed.clear()  # a record that cannot be read is dropped

    @rule()
    def everything_begun_ends(self) -> None:
        self.running.settle()

    @rule()
    def everything_moves_until_nothing_is_left_to_do(self) -> None:
        self.calm()
        if not (self.events or self.unwritten):
            for held in self.held:
                assert held.lease.wait(0.0) is not LeaseState.PENDING

    def calm(self) -> None:
        """Open all gates, and wait until everything that can end has ended."""
        self.running.open_gates()
        if self.events or self.unwritten:
            self.running.store.drain(0.0)
            self.running.settle()
        else:
            assert self.running.store.drain(self.patience_s), "the store is still not idle"

    @precondition(lambda self: self.roomy)
    @rule()
    def flush(self) -> None:
        self.running.open_gates()
        for event, keys, slots in self.unwritten:
            self.fill(keys, slots)
            event.happen()
        self.unwritten.clear()
        readable = {key for key in self.written if self.running.store.match([key]).num_pages}
        nvme = self.running.directory.residency.tables[Tier.NVME]
        while self.failures_planned:  # these flushes hit the planned failures
            self.failures_planned -= 1
            self.running.store.flush()
        self.running.store.flush()
        self.flushed = {key for key in readable if nvme.ready(key)}
        assert self.must_be_stored & readable <= self.flushed, "a page was not flushed"

    @precondition(lambda self: not self.reopened and Tier.NVME in self.running.directory.residency.tables)
    @rule(keys=sequences, flush=st.booleans(), evict=st.integers(0, 5))
    def reopen(self, keys: list[PageKey], flush: bool, evict: int) -> None:
        self.reopened = True
        self.write(keys)
        if flush and self.roomy:
            self.flush()
        if evict < 3:
            self.evict(keys, None, evict)
        self.let_everyone_go()
        # A page put under a lease may have a new parent, which its record, written earlier, does not name.
        told = sorted(self.flushed - self.tangled)
        parents = {page["key"]: page["parent"] for page in self.running.store.explain(told)}
        self.running.store.close()
        self._open()
        for key in self.flushed:
            assert self.running.store.match([key]).num_pages == 1, "a flushed page is lost after a reopen"
        for key in self.gone:
            assert self.running.store.match([key]).num_pages == 0, "an evicted page is found after a reopen"
        for key in self.written - self.may_be_stored:
            assert self.running.store.match([key]).num_pages == 0, (
                "a memory-only page is found after a reopen"
            )
        found = self.running.store.explain(told)
        assert parents == {page["key"]: page["parent"] for page in found}

    def let_everyone_go(self) -> None:
        """Release all leases and slots, and complete all writes and events."""
        self.running.open_gates()
        for event, keys, slots in self.unwritten:
            self.fill(keys, slots)
            event.happen()
        for event in self.events:
            event.happen()
        for held in self.held:
            held.lease.release()
        self.running.store.free(self.owned)
        self.unwritten, self.events, self.held, self.owned = [], [], [], []

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def every_leased_page_has_the_bytes_of_its_key(self) -> None:
        if self.bench is None:
            return
        for gate in self.gates():
            gate.settle()  # transfers that passed a gate have ended, so the same choices always lead to the same state
        pages = page_tensor(self.running.store)
        writing = self.being_written()
        for held in self.held:
            for layer in range(pages.shape[1]):
                self.a_ready_layer_has_its_bytes(held, layer)
            state, writers = held.lease.wait(0.0), {slot for _, slot in held.pages} & writing
            only_written = (
                state is LeaseState.PENDING and held.lease.wait(0.0, written=False) is not LeaseState.PENDING
            )
            if only_written:  # on a GPU, the last copy may have ended between the two calls
                state = held.lease.wait(0.0)
            if state is LeaseState.PENDING:
                assert held.settled is None or writers, "a final lease became pending again"
                assert not only_written or writers, (
                    "a lease is PENDING although all its copies and writes have ended"
                )
                continue
            assert not writers or held.failed, "a lease is ready before its pages are written"
            assert (state is LeaseState.FAILED) or not held.failed, "a page that was never written is ready"
            slots = tuple(held.lease.slots)
            assert held.settled in (None, slots), "a leased page is in another slot than before"
            held.settled = slots
            for key, slot in held.pages:
                assert slot in writing or same(pages[slot], key), "wrong bytes"

    def a_ready_layer_has_its_bytes(self, held: Held, layer: int) -> None:
        try:
            written = held.lease.ready(layer, timeout_s=0.0)
        except TimeoutError:
            return
        writing = self.being_written()
        for key, slot in held.pages:
            assert slot not in writing or written is not None, "a layer that is still being written is ready"
            there = page_tensor(self.running.store)[slot][layer].cpu().contiguous().view(torch.uint8)
            right = torch.equal(there, content(key)[layer].view(torch.uint8))
            assert right or written is not None, "a layer that is ready has wrong bytes"

    @invariant()
    def accounts_balance(self) -> None:
        if self.bench is not None:
            self.running.store.check()

    @invariant()
    def a_watch_knows_where_every_page_is(self) -> None:
        if self.bench is not None:
            self.running.store.poll()
            assert self.told == self.readable()

    @invariant()
    def what_was_evicted_is_not_found(self) -> None:
        if self.bench is not None:
            found = [key for key in self.gone if self.running.store.match([key]).num_pages]
            assert not found, "an evicted page is found"

    @invariant()
    def memory_only_pages_are_never_on_disk(self) -> None:
        nvme = None if self.bench is None else self.running.directory.residency.tables.get(Tier.NVME)
        if nvme is not None:
            assert (self.written - self.may_be_stored).isdisjoint(nvme.copies), "a memory-only page is stored"

    @invariant()
    def no_copy_of_an_unwritten_page_exists(self) -> None:
        for event, keys, slots in self.unwritten:
            assert not event.query()
            for key, slot in zip(keys, slots, strict=True):
                copy = self.running.directory.residency.tables[Tier.HBM].copies.get(key)
                if copy is not None and copy.slot == slot:
                    assert self.running.store.match([key]).num_pages == 1

    def teardown(self) -> None:
        try:
            if self.bench is not None:
                self.at_the_end_nothing_is_held()
        finally:
            try:
                if self.bench is not None:
                    self.bench.open_gates()
                    self.bench.store.close(timeout_s=self.patience_s)
            finally:
                shutil.rmtree(self.home)

    def at_the_end_nothing_is_held(self) -> None:
        self.let_everyone_go()
        directory = self.running.directory
        if directory.space.failing:
            # A failed copy is retried by a timer or when a page is put. Timers are disabled during a test.
            directory.writeback._next_spill = directory.writeback._next_try = 0.0
        require_nothing_held(self.running.store, self.patience_s)
