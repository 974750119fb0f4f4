"""A state machine that calls the methods of a promotion queue of a real store in random order.

The model is an ordered list of wants. Each call that the queue makes to the store is checked against this list:
the hint, the pages, and the number of pages in flight.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefetch import promotions
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, tiers, where, write
from tests.support.stalls import IN, Lane
from tierstore.store import TierStore
from tierstore.types import Hint, PageKey, Promoted, Tier

UP: Lane = (Tier.NVME, Tier.HOST)
SEQUENCES = [chain(5, name) for name in "abc"]
PAGES = [key for keys in SEQUENCES for key in keys]
STEP = 3


@dataclass(eq=False)
class Wanted:
    """A want that has not ended. ``left`` contains the pages that are still to be promoted."""

    hint: Hint
    tier: Tier
    order: tuple[float, int]
    """The order given by the caller, then the number of the want."""
    left: list[PageKey]


class PromotionsMachine(RuleBasedStateMachine):
    """Calls a promotion queue in random order. ``module`` is the module under test, possibly with a planted bug."""

    module: ClassVar[ModuleType] = promotions

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="tierstore-promotions-"))
        self.wanted: list[Wanted] = []
        self.hints: dict[str, Hint] = {}
        """The active hint of each request."""
        self.ended: list[Hint] = []
        """Hints for which no more copies may start, because the caller has ended their wants."""
        self.withdrawn: list[Hint] = []
        self.revision = self.number = self.started = 0
        self.bench: Bench | None = None

    @initialize(most=st.integers(1, 4), passes=st.sampled_from([0, 0, 3]))
    def open(self, most: int, passes: int) -> None:
        self.most, self.passes = most, passes
        self.bench = open_bench(tiers(len(PAGES) + 1, len(PAGES) + 1, self.home), SPEC)
        self.store = self.bench.store
        for keys in SEQUENCES:
            write(self.store, keys)
            self.store.demote(keys, Tier.NVME)
            assert self.store.drain(PATIENCE_S)
        vars(self.store)["promote"] = self.promote
        self.store.take_hints()
        self.subject: promotions.PromotionQueue = self.module.PromotionQueue(self.store, most, passes=passes)

    def teardown(self) -> None:
        if self.bench is None:
            return
        try:
            self.end()
        finally:
            self.bench.close()
            shutil.rmtree(self.home)

    # -- calls of the queue to the store ------------------------------------------------------------------------

    def promote(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint] = ()) -> Promoted:
        """Check the call against the model, call ``TierStore.promote``, and update the model."""
        if not keys:
            return TierStore.promote(self.store, hint, keys, tier, over)
        assert hint not in self.ended, "it starts pages that are over"
        assert len(keys) <= self.most - self.in_flight(), "too much is in flight"
        waiting = [w for w in sorted(self.wanted, key=lambda w: w.order) if w.tier == tier]
        place = next(
            (i for i, w in enumerate(waiting) if w.hint is hint and w.left[: len(keys)] == [*keys]), -1
        )
        assert place >= 0, "nobody wants these pages next"
        assert place <= self.passes, "it is not the turn of these pages"
        want = waiting[place]
        found = TierStore.promote(self.store, hint, keys, tier, over)
        self.started += len(found.keys)
        if not found.in_force:
            self.forget(hint)
            return found
        del want.left[: found.covered]
        gone = found.covered < len(keys) and not self.store.match([want.left[0]]).num_pages
        if gone or not want.left:
            self.wanted.remove(want)
        return found

    def in_flight(self) -> int:
        return sum(state == "arriving" for key in PAGES for state in where(self.store, key).values())

    def forget(self, hint: Hint) -> None:
        self.wanted = [want for want in self.wanted if want.hint is not hint]

    # -- steps of callers ---------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from("xyz"),
        keys=st.sampled_from(SEQUENCES),
        tier=st.sampled_from([Tier.HOST, Tier.HOST, Tier.HBM]),
        soon=st.sampled_from([0.0, 1.0, 2.0]),
    )
    def want(self, name: str, keys: list[PageKey], tier: Tier, soon: float) -> None:
        """Replace a request's hint with a new one, and queue promotions of its pages to HOST and ``tier``."""
        self.withdraw(name)
        self.revision += 1
        hint = self.hints[name] = Hint(name, self.revision, tuple(keys))
        self.store.hint(hint)
        for each in {Tier.HOST, tier}:
            self.number += 1
            self.wanted.append(Wanted(hint, each, (soon, self.number), list(keys)))
            self.subject.want(hint, keys, each, order=(soon,))

    @rule(name=st.sampled_from("xyz"))
    def over(self, name: str) -> None:
        hint = self.hints.get(name)
        if hint is not None:
            self.subject.over(hint)
            self.ended.append(hint)
            self.forget(hint)

    @rule(name=st.sampled_from("xyz"))
    def withdraw(self, name: str) -> None:
        """Withdraw a hint from the store. The queue notices this when it next promotes pages for the hint."""
        hint = self.hints.pop(name, None)
        if hint is not None:
            self.revision += 1
            self.store.hint(Hint(name, self.revision, ()))
            self.withdrawn.append(hint)

    @rule()
    def clear(self) -> None:
        self.subject.clear()
        self.wanted.clear()

    @rule(tier=st.sampled_from([Tier.HBM, Tier.HOST]), most=st.sampled_from([None, STEP]))
    def advance(self, tier: Tier, most: int | None) -> None:
        self.started = 0
        before = {key: where(self.store, key) for key in PAGES}
        found = self.subject.advance(tier, most)
        assert self.started <= (most or self.started), "more is started than this call may start"
        assert sum(len(each.started) for each in found) == self.started
        brought = {key for key in PAGES if tier in where(self.store, key) and tier not in before[key]}
        assert brought == {key for each in found for key in each.started}
        for each in found:
            assert each.in_force == (each.hint not in self.withdrawn), "a hint's end is not noticed"
            assert not each.started or each.in_force

    @rule(most=st.integers(1, 4))
    def change_the_budget(self, most: int) -> None:
        self.most = self.subject.most = most

    # -- events -------------------------------------------------------------------------------------------------

    @rule(lane=st.sampled_from([IN, UP]))
    def hold(self, lane: Lane) -> None:
        assert self.bench is not None
        (self.bench.copies if lane == IN else self.bench.records).hold(lane)

    @rule()
    def open_gates(self) -> None:
        assert self.bench is not None
        self.bench.open_gates()
        assert self.store.drain(PATIENCE_S)

    @rule(key=st.sampled_from(PAGES))
    def lose(self, key: PageKey) -> None:
        """Evict a page from all tiers."""
        self.store.evict([key])

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def it_knows_what_waits(self) -> None:
        if self.bench is None:
            return
        assert bool(self.subject) == bool(self.wanted)
        assert self.subject.tiers == sorted({want.tier for want in self.wanted})
        for hint in (*self.hints.values(), *self.withdrawn):
            assert self.subject.left(hint) == sum(len(w.left) for w in self.wanted if w.hint is hint)
        assert self.subject.in_flight >= self.in_flight(), "it thinks that less is in flight than there is"

    @invariant()
    def the_store_is_sound(self) -> None:
        if self.bench is not None:
            self.store.check()

    def end(self) -> None:
        """Open the gates. Check that every want then ends, and that the pages that were still wanted arrive."""
        self.open_gates()
        last = [(hint, want) for hint in self.hints.values() for want in self.wanted if want.hint is hint]
        pages = [(want.tier, list(want.left)) for _, want in last]
        for _ in range(2 * len(PAGES)):
            for tier in self.subject.tiers:
                self.advance(tier, None)
            assert self.store.drain(PATIENCE_S)
        assert not self.subject, "a want does not end"
        self.it_knows_what_waits()
        for tier, keys in pages:
            readable = self.store.match(keys).tiers
            assert all(each <= tier for each in readable), "what is wanted does not come"
