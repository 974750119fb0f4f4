"""Tests which pages count as exact, with a state machine that knows the content of every slot.

Also tests that this state machine detects planted bugs.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import tierstore.directory.residency
from tests.support import lanes
from tests.support.planting import SEARCH, Bug, load
from tierstore.directory.residency import Residency, TierTable
from tierstore.errors import CapacityError
from tierstore.policy import make_policy
from tierstore.types import PageKey, Tier

KEYS = [PageKey(bytes([number]) * 36) for number in range(2)]
"""Keys of one sequence: the parent of each page is the page before it."""

TIERS = [Tier.HBM, Tier.HOST, Tier.NVME]
keys = st.integers(0, len(KEYS) - 1)
which = st.integers(0, 26)


class ExactnessMachine(RuleBasedStateMachine):
    """Calls the methods of residency in random order. ``room`` is the module under test.

    ``truth`` is True for a slot whose copy has exactly the bytes that were put, if all pages before the page were exact
    when it was put.
    """

    room: ModuleType = tierstore.directory.residency

    @initialize(lossy=st.sampled_from([None, Tier.HOST, Tier.NVME]))
    def open(self, lossy: Tier | None) -> None:
        self.lossy = lossy
        tables = {tier: TierTable(make_policy("lru"), num_slots=6, lossy=tier == lossy) for tier in TIERS}
        self.residency = Residency(tables)
        self.residency.exactness = self.room.Exactness(self.residency.tables)
        self.truth: dict[tuple[Tier, int], bool] = {}
        self.moving: list[tuple[PageKey, Tier, int, Tier, int]] = []

    def teardown(self) -> None:
        if hasattr(self, "residency"):
            self.check()

    def check(self) -> None:
        for key in KEYS:
            fastest = self.residency.where(key)
            if fastest is None:
                assert self.lossy is None or not self.residency.exactness.exact(key), (
                    "a page without a copy counts as exact"
                )
            elif self.residency.exactness.exact(key):
                slot = self.residency.tables[fastest].copies[key].slot
                assert self.truth[fastest, slot], (
                    "a page that differs from the page that was put counts as exact"
                )
        if self.lossy is None:
            assert all(self.residency.exactness.exact(key) for key in KEYS if self.residency.where(key))

    @rule(number=keys, alone=st.booleans())
    def put(self, number: int, alone: bool) -> None:
        key, parent = KEYS[number], KEYS[number - 1] if number and not alone else None
        if self.residency.tables[Tier.HBM].ready(key) or (parent and self.residency.where(parent) is None):
            return
        try:
            slot = self.residency.take(Tier.HBM)
        except CapacityError:
            return
        # Taking the slot may have evicted the parent, or a copy of the page itself.
        exact = parent is None or self.residency.exactness.exact(parent)
        above = [tier for tier in TIERS if self.lossy is None or tier < self.lossy]
        # A put replaces a copy that is in flight to HBM.
        stale = any(
            self.residency.tables[tier].ready(key)
            if tier is Tier.HBM
            else key in self.residency.tables[tier].copies
            for tier in above
        )
        self.residency.adopt(key, Tier.HBM, slot, parent)
        self.truth[Tier.HBM, slot] = exact
        if exact and not stale:
            assert self.residency.exactness.exact(key), "a page that was put just now does not count as exact"
        self.check()

    @rule(which=which)
    def begin(self, which: int) -> None:
        possible = [
            (key, src, dst) for key in KEYS for src in TIERS for dst in TIERS if self.may_move(key, src, dst)
        ]
        if possible:
            self.start(*possible[which % len(possible)])
        self.check()

    @rule(number=keys, dst=st.sampled_from([Tier.HBM, Tier.HOST]), arrives=st.booleans(), again=st.booleans())
    def down_and_up_again(self, number: int, dst: Tier, arrives: bool, again: bool) -> None:
        """Move a page to the disk and start to load it from there, unless it is in flight already.

        Args:
            number: The index of the page in ``KEYS``.
            dst: The destination of the load.
            arrives: Whether the load is also finished.
            again: Whether the page is then put again.
        """
        key = KEYS[number]
        fastest = self.residency.where(key)
        if fastest is not None and self.may_move(key, fastest, Tier.NVME):
            self.start(key, fastest, Tier.NVME)
            self.finish(len(self.moving) - 1, arrives=True)
        for tier in (Tier.HBM, Tier.HOST):
            if self.residency.tables[tier].ready(key):
                self.residency.evict(key, tier)
        if self.may_move(key, Tier.NVME, dst):
            self.start(key, Tier.NVME, dst)
            if arrives:
                self.finish(len(self.moving) - 1, arrives=True)
        if again:
            self.put(number, alone=True)
        self.check()

    def start(self, key: PageKey, src: Tier, dst: Tier) -> None:
        [(slot, src_slot)] = self.residency.reserve((key,), dst, src=src)
        self.moving.append((key, src, src_slot, dst, slot))

    def may_move(self, key: PageKey, src: Tier, dst: Tier) -> bool:
        """Return whether the copy may start. Pages are copied up only from the fastest tier that has them."""
        tables = self.residency.tables
        if src == dst or not tables[src].ready(key) or key in tables[dst].copies or not tables[dst].free:
            return False
        return dst > src or src == self.residency.where(key)

    @rule(which=which, arrives=st.sampled_from([True, True, False]))
    def end(self, which: int, arrives: bool) -> None:
        if self.moving:
            self.finish(which % len(self.moving), arrives=arrives)
        self.check()

    def finish(self, index: int, *, arrives: bool) -> None:
        key, src, src_slot, dst, slot = self.moving.pop(index)
        if arrives:
            through = self.lossy is not None and (src >= self.lossy or dst >= self.lossy)
            self.truth[dst, slot] = self.truth[src, src_slot] and not through
            self.residency.commit((key,), dst, (slot,))
        else:
            self.residency.fail(key, dst, slot)
        self.residency.unpin((key,), src, (src_slot,))

    @rule(which=which)
    def evict(self, which: int) -> None:
        ready = [(key, tier) for key in KEYS for tier in TIERS if self.residency.tables[tier].ready(key)]
        if ready:
            self.residency.evict(*ready[which % len(ready)])
        self.check()


BUGS = [
    Bug(
        "pages promoted from a lossy tier are exact",
        "if first is not None and dst < first <= src",
        "if False",
    ),
    Bug(
        "a put makes a page exact even if inexact copies are in use",
        "if not self.stays_tainted(key)",
        "if True",
    ),
    Bug(
        "copies in flight make no page inexact",
        "(tier != Tier.HBM or copies[key].ready)",
        "copies[key].ready",
    ),
    Bug(
        "copies in flight to HBM make their replacements inexact",
        "(tier != Tier.HBM or copies[key].ready)",
        "True",
    ),
    Bug(
        "pages after inexact ones are exact",
        "if parent is not None and not (self.exact(parent) or self._coming(parent)):",
        "if False:",
    ),
    Bug("lossy copies are exact", "first is None or tier < first", "True"),
    Bug("the tier below a lossy one is exact", "tier < first\n", "tier != first\n"),
    Bug(
        "a copy in flight is exact",
        "return any(key in copies and copies[key].ready for",
        "return any(key in copies for",
    ),
    Bug(
        "a page that was inexact once is never exact again",
        "            self._tainted.discard(key)\n        if",
        "            pass\n        if",
    ),
]


def test_pages_marked_exact_are_those_put_unchanged() -> None:
    run_state_machine_as_test(
        ExactnessMachine, settings=settings(max_examples=lanes.examples(50, 500), stateful_step_count=40)
    )


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    planted = load(tierstore.directory.residency, bug)
    machine = type("Planted", (ExactnessMachine,), {"room": planted})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=SEARCH)
