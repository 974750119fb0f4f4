"""A state machine of a store whose prefetcher runs turn by turn. Gates can hold back copies and reads.

The model knows which pages are expected, retained and leased. It checks that each turn follows the rules.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefetch import prefetcher
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, page_tensor, require_nothing_held, same, tiers, write
from tests.support.stalls import IN, Lane
from tierstore.config import PrefetchConfig
from tierstore.directory import directory, loads
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, LeaseState, PageKey, Promoted, Tier

HBM, HOST, MOST, SHARE = 4, 6, 2, 3
SEQUENCES = [chain(3, "a"), chain(3, "b"), chain(2, "c"), [*chain(3, "a")[:1], *chain(1, "d")]]
UP: Lane = (Tier.NVME, Tier.HOST)
PAGES = list(dict.fromkeys(key for keys in SEQUENCES for key in keys))

names = st.sampled_from("xyz")
sequences = st.sampled_from(SEQUENCES)


class Asked(NamedTuple):
    """An active hint, its deadline on the machine's clock, and its number in order of arrival."""

    hint: Hint
    deadline: float
    number: int

    @property
    def order(self) -> tuple[float, int]:
        return (self.deadline, self.number)


class PrefetcherMachine(RuleBasedStateMachine):
    """Runs a prefetcher while random hints, leases, evictions and failures occur.

    ``loop_module`` and ``promoting_module`` are the modules under test, possibly copies with a planted bug.
    """

    loop_module: ClassVar[ModuleType] = prefetcher
    promoting_module: ClassVar[ModuleType] = loads

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="tierstore-prefetch-"))
        self.now = 1000.0
        self.revision = 0
        self.number = 0
        self.asked: dict[str, Asked] = {}
        self.kept: dict[str, list[PageKey]] = {}
        self.leases: list[Lease] = []
        self.failures = False
        self.moving: set[tuple[PageKey, Tier]] = set()
        """Copies that the prefetcher has started and that may still be in flight."""
        self.bench: Bench | None = None

    @initialize(places=st.tuples(*[st.sampled_from([Tier.HBM, Tier.HOST, Tier.NVME])] * len(SEQUENCES)))
    def open(self, places: tuple[Tier, ...]) -> None:
        vars(directory)["Promotions"] = self.promoting_module.Promotions
        self.bench = open_bench(tiers(HBM, HOST, self.home), SPEC)
        self.store = self.bench.store
        vars(self.store)["promote"] = self.promote
        limits = PrefetchConfig(max_in_flight=MOST * SPEC.page_nbytes, share_of_host=SHARE / HOST)
        self.subject: prefetcher.PrefetchLoop = self.loop_module.PrefetchLoop(
            self.store, limits, None, lambda: self.now
        )
        for keys in SEQUENCES:
            write(self.store, keys)
            self.store.demote(keys, Tier.NVME)
            assert self.store.drain(PATIENCE_S)
        for keys, place in zip(SEQUENCES, places, strict=True):
            self.raise_to(place, keys)

    def promote(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint] = ()) -> Promoted:
        """Call ``TierStore.promote``, which this method replaces, and record which copies start."""
        found = TierStore.promote(self.store, hint, keys, tier, over)
        self.moving.update((key, tier) for key in found.keys)
        return found

    def raise_to(self, place: Tier, keys: list[PageKey]) -> None:
        """Acquire pages, as an engine does, so that ``place`` is the highest tier that holds them."""
        if place < Tier.NVME:
            with self.store.acquire(keys) as lease:
                lease.wait(PATIENCE_S)
            if place == Tier.HOST:
                self.store.evict(keys, Tier.HBM)

    def teardown(self) -> None:
        vars(directory)["Promotions"] = loads.Promotions
        if self.bench is None:
            return
        try:
            self.end()
        finally:
            self.bench.close()
            shutil.rmtree(self.home)

    # -- steps of schedulers and engines ------------------------------------------------------------------------

    @rule(name=names, keys=sequences, length=st.integers(1, 3), in_s=st.sampled_from([1.0, 5.0, 20.0]))
    def expect(self, name: str, keys: list[PageKey], length: int, in_s: float) -> None:
        self.revision += 1
        self.number += 1
        hint = Hint(name, self.revision, tuple(keys[:length]), deadline_s=in_s)
        assert self.store.hint(hint) is HintResult.DEFERRED
        self.kept.pop(name, None)
        self.asked[name] = Asked(hint, self.now + in_s, self.number)

    @rule(name=names)
    def cancel(self, name: str) -> None:
        self.revision += 1
        self.store.hint(Hint(name, self.revision, ()))
        self.asked.pop(name, None)
        self.kept.pop(name, None)

    @rule(name=names, keys=sequences)
    def retain(self, name: str, keys: list[PageKey]) -> None:
        self.revision += 1
        self.store.hint(Hint(name, self.revision, tuple(keys), "retain"))
        self.asked.pop(name, None)
        self.kept[name] = [key for key in keys if self.in_hbm(key)]

    @rule(keys=sequences)
    def acquire(self, keys: list[PageKey]) -> None:
        if len(self.leases) < 2:
            self.leases.append(self.store.acquire(keys))

    @rule(which=st.integers(0, 1))
    def release(self, which: int) -> None:
        if which < len(self.leases):
            self.leases.pop(which).release()

    @rule(keys=sequences, tier=st.sampled_from([Tier.HBM, Tier.HOST]))
    def evict(self, keys: list[PageKey], tier: Tier) -> None:
        """Evict copies that no lease pins, if a lower tier has the page."""
        pinned = {key for lease in self.leases for key in lease.keys}
        idle = [
            k for k in keys if k not in pinned and self.store.match([k]).num_pages and self.saved(k, tier)
        ]
        self.store.evict(idle, tier)
        for name, kept in self.kept.items():
            self.kept[name] = [key for key in kept if key not in idle]

    def saved(self, key: PageKey, tier: Tier) -> bool:
        copies = self.copies(key)
        return any(copies.get(below) == "ready" for below in Tier if below > tier)

    # -- events -------------------------------------------------------------------------------------------------

    @rule(lane=st.sampled_from([IN, UP]))
    def hold(self, lane: Lane) -> None:
        assert self.bench is not None
        (self.bench.copies if lane == IN else self.bench.records).hold(lane)

    @rule()
    def open_gates(self) -> None:
        assert self.bench is not None
        self.bench.open_gates()
        self.bench.settle()

    @rule()
    def settle(self) -> None:
        assert self.bench is not None
        self.bench.settle()

    @rule(lane=st.sampled_from([IN, UP]))
    def fail(self, lane: Lane) -> None:
        assert self.bench is not None
        if lane == IN or not self.failures:
            (self.bench.copies if lane == IN else self.bench.records).fail_next(lane, 0)
            self.failures = True

    @rule(seconds=st.sampled_from([0.06, 0.3, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def go_on(self) -> None:
        """Open the gates, then run four turns and check each turn."""
        self.open_gates()
        for _ in range(4):
            self.turn()
            assert self.store.drain(PATIENCE_S)
            self.now += 0.06

    # -- combinations that random steps would rarely reach ------------------------------------------------------

    @rule(name=names, first=sequences, second=sequences)
    def expect_while_a_lease_waits(self, name: str, first: list[PageKey], second: list[PageKey]) -> None:
        """Expect a request while the load of a lease on other pages of the same tier is held back."""
        self.below(Tier.HOST, [*first, *second])
        self.expect(name, second, 3, 1.0)
        self.hold(IN)
        self.acquire(first)
        self.turn()

    @rule(name=names, first=sequences, second=sequences)
    def expect_while_a_lease_reads(self, name: str, first: list[PageKey], second: list[PageKey]) -> None:
        self.below(Tier.NVME, [*first, *second])
        self.expect(name, second, 3, 1.0)
        self.hold(UP)
        self.acquire(first)
        self.turn()

    @rule(name=names, kept=sequences, other=sequences)
    def expect_where_pages_are_retained(self, name: str, kept: list[PageKey], other: list[PageKey]) -> None:
        self.open_gates()
        self.raise_to(Tier.HBM, kept)
        self.retain("x" if name == "y" else "y", kept)
        self.expect(name, other, 3, 1.0)
        self.go_on()

    @rule(first=sequences, second=sequences, since=sequences)
    def expect_what_is_there_and_something_later(
        self, first: list[PageKey], second: list[PageKey], since: list[PageKey]
    ) -> None:
        """Give hints for pages that have been in HBM longer than all others, and for pages that are needed later."""
        self.open_gates()
        self.raise_to(Tier.HBM, first)
        self.raise_to(Tier.HBM, since)
        self.expect("x", first, 3, 1.0)
        self.expect("y", second, 3, 20.0)
        self.go_on()

    @rule(name=names)
    def cancel_in_a_turn(self, name: str) -> None:
        """Cancel a request after the turn has taken the hints, and before it starts copies."""
        self.turn_with("take_hints", lambda: self.cancel(name))

    @rule(name=names, kept=sequences, other=sequences)
    def retain_in_a_turn(self, name: str, kept: list[PageKey], other: list[PageKey]) -> None:
        """Retain pages that a turn may evict, after it has asked which pages must stay and before it starts copies."""
        self.below(Tier.HOST, other)
        self.raise_to(Tier.HBM, kept)
        self.expect("x" if name == "y" else "y", other, 3, 1.0)
        self.turn_with("staying", lambda: self.retain(name, kept))

    def turn_with(self, method: str, act: Callable[[], None]) -> None:
        """Run a turn that calls ``act`` right after it calls this method of the store."""
        ask = getattr(self.store, method)

        def ask_and_act(*args: object) -> object:
            found = ask(*args)
            act()
            return found

        vars(self.store)[method] = ask_and_act
        try:
            self.turn()
        finally:
            del vars(self.store)[method]

    def below(self, tier: Tier, keys: list[PageKey]) -> None:
        """Evict all unpinned pages above ``tier`` of the sequences that contain these keys."""
        self.open_gates()
        for sequence in [x for x in SEQUENCES if set(x) & set(keys)]:
            if tier == Tier.HOST:
                self.raise_to(Tier.HBM, sequence)
            self.evict(sequence, Tier.HBM)
            if tier == Tier.NVME:
                self.evict(sequence, Tier.HOST)

    @rule()
    def turn(self) -> None:
        before = {key: self.copies(key) for key in PAGES}
        staged = self.staged()
        waiting = [lease for lease in self.leases if lease.wait(0.0) is LeaseState.PENDING]
        self.subject.turn(0.0)
        after = {key: self.copies(key) for key in PAGES}
        started = [
            (k, t) for k in PAGES for t in after[k] if t not in before[k] and after[k][t] == "arriving"
        ]
        brought = [(k, t) for k in PAGES for t in after[k] if t not in before[k]]
        wanted = {key for asked in self.asked.values() for key in asked.hint.keys}
        assert {key for key, _ in brought} <= wanted, "a copy started for nobody, or for who had cancelled"
        # the leases that waited before the turn and still do
        waiting = [lease for lease in waiting if lease.wait(0.0) is LeaseState.PENDING]
        if waiting and self.waits_on(waiting, before, Tier.HOST):
            assert not [t for _, t in started if t == Tier.HBM], (
                "a load starts while a lease waits for its own"
            )
        if self.reads_for(waiting, before, after):
            assert not [t for _, t in started if t == Tier.HOST], (
                "a read starts while a lease waits for its own"
            )
        self.moving = {(k, t) for k, t in self.moving if after[k].get(t) == "arriving"}
        assert len(self.moving) <= MOST, "too much is under way"
        lost = [k for k in PAGES if before[k].get(Tier.HBM) == "ready" and Tier.HBM not in after[k]]
        kept = {key for keys in self.kept.values() for key in keys}
        assert not kept & set(lost), "a retained page is displaced"
        self.require_later(lost, [k for k, t in brought if t == Tier.HBM])
        self.require_room_in_host(staged, [k for k, t in brought if t == Tier.HOST])

    def waits_on(self, waiting: list[Lease], before: dict[PageKey, dict[Tier, str]], src: Tier) -> bool:
        """Return whether leases are waiting for pages, and all these pages are in ``src``."""
        pages = {key for lease in waiting for key in lease.keys[: lease.num_pages]}
        return any(
            before[k].get(Tier.HBM) == "arriving" and before[k].get(src) == "ready" for k in pages
        ) and not any(before[k].get(src) != "ready" and before[k].get(Tier.HBM) == "arriving" for k in pages)

    def reads_for(self, waiting: list[Lease], *looks: dict[PageKey, dict[Tier, str]]) -> bool:
        """Return whether a lease waits for a page that is in neither HOST nor HBM, according to all of ``looks``."""
        pages = {key for lease in waiting for key in lease.keys[: lease.num_pages]}
        return any(
            all(look[k].get(Tier.HBM) == "arriving" and look[k].get(Tier.HOST) != "ready" for look in looks)
            for k in pages
        )

    def require_later(self, lost: Sequence[PageKey], loaded: Sequence[PageKey]) -> None:
        """Assert that expected pages were evicted from HBM only for pages of the same or an earlier request."""
        for key in lost:
            needed = [a.order for a in self.asked.values() if key in a.hint.keys]
            if needed:
                sooner = [a for a in self.asked.values() if set(a.hint.keys) & set(loaded)]
                assert any(a.order <= min(needed) for a in sooner), "it is displaced by what is needed later"

    def staged(self) -> list[PageKey]:
        return [k for k in PAGES if Tier.HOST in (c := self.copies(k)) and Tier.HBM not in c]

    def require_room_in_host(self, staged: list[PageKey], read: list[PageKey]) -> None:
        """Assert that a turn reads no more pages than fit into the prefetcher's share of host memory."""
        assert len(read) <= SHARE

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def leases_are_whole_and_right(self) -> None:
        for lease in self.leases:
            if lease.wait(0.0) is LeaseState.PENDING:
                continue
            assert self.failures or not lease._record.cut, "a lease was cut"
            for key, slot in zip(lease.keys, lease.slots, strict=False):
                assert same(page_tensor(self.store)[slot], key)

    @invariant()
    def the_store_is_sound(self) -> None:
        if self.bench is not None:
            self.store.check()

    def end(self) -> None:
        """Check that expected requests get the pages that fit, and that nothing is kept once they are cancelled."""
        assert self.bench is not None
        self.bench.open_gates()
        while self.leases:
            self.leases.pop().release()
        for name in list(self.kept):
            self.cancel(name)
        assert self.store.drain(PATIENCE_S)
        for _ in range(25):
            self.subject.turn(0.0)
            assert self.store.drain(PATIENCE_S)
            self.now += 0.03
        wanted = {key for asked in self.asked.values() for key in asked.hint.keys}
        ordered = sorted(self.asked.values(), key=lambda asked: asked.order)
        for asked in ordered if len(wanted) <= HBM else ordered[:1]:
            tiers = set(self.store.match(asked.hint.keys).tiers)
            assert tiers <= {Tier.HBM}, "who is expected does not get its pages"
        for name in list(self.asked):
            self.cancel(name)
        self.subject.turn(0.0)
        self.store.poll()
        assert not self.bench.directory.residency.queues.kept
        assert len(self.subject.expected) == 0
        require_nothing_held(self.store)

    # -- queries ------------------------------------------------------------------------------------------------

    def copies(self, key: PageKey) -> dict[Tier, str]:
        found = self.store.explain([key])[0]["copies"]
        assert isinstance(found, dict)
        return {Tier[name]: copy["state"] for name, copy in found.items()}

    def in_hbm(self, key: PageKey) -> bool:
        return self.copies(key).get(Tier.HBM) == "ready"
