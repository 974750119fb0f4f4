"""A state machine that changes expected requests and pages at random, and checks each plan against the rules."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import ModuleType
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefetch import planner
from prefetch.types import Compute, Machine, Plan, Retained, Want
from tests.prefetch.world import SEQUENCES, covered, done_with, order, require_possible, require_room
from tierstore.types import PageKey, Tier

NOW = 100.0
TIERS = [Tier.HBM, Tier.HOST, Tier.NVME]
deadlines = st.sampled_from([NOW - 3, NOW, NOW + 4, NOW + 9, NOW + 20, inf])


class PlannerMachine(RuleBasedStateMachine):
    """Plans random requests. ``subject`` is the module under test. Times are whole numbers, to avoid rounding."""

    subject: ClassVar[ModuleType] = planner

    def __init__(self) -> None:
        super().__init__()
        self.subject.PIECE_PAGES = 1  # type: ignore[attr-defined]
        self.where: dict[PageKey, Tier] = {}
        self.asked: dict[str, tuple[int, float, int]] = {}
        self.kept: dict[int, float] = {}
        self.machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=8, host_pages=4)

    def teardown(self) -> None:
        planner.PIECE_PAGES = 32

    @rule(which=st.integers(0, 3), tiers=st.lists(st.sampled_from(TIERS), max_size=5))
    def move(self, which: int, tiers: list[Tier]) -> None:
        """Put the first pages of a sequence into these tiers. The other pages are in no tier."""
        for key in SEQUENCES[which]:
            self.where.pop(key, None)
        self.where.update(zip(SEQUENCES[which], tiers, strict=False))

    @rule(
        name=st.sampled_from("pqr"), which=st.integers(0, 3), deadline=deadlines, priority=st.integers(0, 1)
    )
    def ask(self, name: str, which: int, deadline: float, priority: int) -> None:
        self.asked.pop(name, None)
        self.asked[name] = (which, deadline, priority)

    @rule(name=st.sampled_from("pqr"))
    def cancel(self, name: str) -> None:
        self.asked.pop(name, None)

    @rule(which=st.integers(0, 3), until=st.none() | deadlines)
    def retain(self, which: int, until: float | None) -> None:
        self.kept.pop(which, None)
        if until is not None:
            self.kept[which] = until

    @rule(
        read_s=st.sampled_from([2.0, 3.0, 4.0]),
        load_s=st.sampled_from([1.0, 2.0]),
        hbm_pages=st.integers(0, 8),
        host_pages=st.none() | st.integers(0, 4),
        compute=st.none() | st.builds(Compute, st.sampled_from([1.0, 3.0, 6.0]), st.sampled_from([0.0, 1.0])),
    )
    def rig(
        self,
        read_s: float,
        load_s: float,
        hbm_pages: int,
        host_pages: int | None,
        compute: Compute | None,
    ) -> None:
        self.machine = Machine(
            read_s=read_s, load_s=load_s, hbm_pages=hbm_pages, host_pages=host_pages, compute=compute
        )

    def tiers(self, which: int) -> tuple[Tier, ...]:
        found: list[Tier] = []
        for key in SEQUENCES[which]:
            if key not in self.where:
                break
            found.append(self.where[key])
        if self.machine.host_pages is None:  # without host memory, these pages are on disk
            found = [Tier.NVME if tier == Tier.HOST else tier for tier in found]
        return tuple(found)

    def wants(self) -> list[Want]:
        return [
            Want(
                request_id=name,
                keys=tuple(SEQUENCES[which]),
                tiers=self.tiers(which),
                deadline=deadline,
                priority=priority,
            )
            for name, (which, deadline, priority) in self.asked.items()
        ]

    def retained(self) -> list[Retained]:
        return [
            Retained(keys=tuple(SEQUENCES[which]), tiers=self.tiers(which), until=until)
            for which, until in self.kept.items()
        ]

    def plan(self, wants: list[Want], machine: Machine, retained: list[Retained]) -> Plan:
        found: Plan = self.subject.plan(wants, machine, NOW, retained)
        return found

    @invariant()
    def every_plan_keeps_the_rules(self) -> None:
        wants, retained = self.wants(), self.retained()
        found = self.plan(wants, self.machine, retained)
        assert set(found.outcomes) == {want.request_id for want in wants}
        require_possible(found, wants, self.machine, NOW)
        require_room(found, wants, self.machine, retained)
        assert [p.starts for p in found.promotions] == sorted(p.starts for p in found.promotions)
        ends = {p.keys[0]: p.ends for p in found.promotions if p.dst == Tier.HBM}
        for want in wants:
            outcome = found.outcomes[want.request_id]
            there = [ends.get(key, NOW) for key in want.keys[: outcome.load]]
            assert outcome.ready == max(there, default=NOW)

    @invariant()
    def what_comes_later_changes_nothing_for_what_comes_sooner(self) -> None:
        wants, retained = order(self.wants()), self.retained()
        found = self.plan(self.wants(), self.machine, retained)
        for number in range(len(wants)):
            fewer = self.plan(wants[: number + 1], self.machine, retained)
            for want in wants[: number + 1]:
                assert fewer.outcomes[want.request_id] == found.outcomes[want.request_id]

    @invariant()
    def the_first_of_them_could_not_be_done_sooner(self) -> None:
        wants = order(self.wants())[:1]
        if not wants or wants[0].deadline == inf or self.machine.compute is None:
            return
        want, best = wants[0], inf
        for load in range(len(want.tiers) + 1):
            part = replace(want, tiers=want.tiers[:load])
            found = self.plan([part], replace(self.machine, compute=None), [])
            outcome = found.outcomes[want.request_id]
            if outcome.load == load:
                reads = [p.ends for p in found.promotions if p.src == Tier.NVME]
                best = min(best, done_with(want, outcome, max(reads, default=NOW), self.machine, NOW))
        found = self.plan(wants, self.machine, [])
        outcome = found.outcomes[want.request_id]
        reads = [p.ends for p in found.promotions if p.src == Tier.NVME and p.keys[0] in covered(found, want)]
        assert outcome.done == done_with(want, outcome, max(reads, default=NOW), self.machine, NOW)
        assert outcome.done <= best

    @invariant()
    def the_link_is_never_idle_while_a_page_is_there_for_it(self) -> None:
        found = self.plan(self.wants(), self.machine, [])
        read = {p.keys[0]: p.ends for p in found.promotions if p.src == Tier.NVME}
        loads = [p for p in found.promotions if p.src == Tier.HOST]
        for p in loads:
            free = read.get(p.keys[0], NOW)
            for other in sorted(loads, key=lambda q: q.starts):
                if free < other.ends <= p.starts:
                    assert other.starts - free < self.machine.load_s
                    free = other.ends
            assert p.starts - free < self.machine.load_s

    @invariant()
    def nothing_is_left_out_without_a_reason(self) -> None:
        """Assert that, if no page can be computed and there is space, the whole prefix of every want is loaded."""
        wants, machine = self.wants(), replace(self.machine, compute=None)
        found = self.plan(wants, machine, [])
        mine = {key for want in wants for key in want.keys[: found.outcomes[want.request_id].load]}
        if len(mine) < machine.hbm_pages and machine.host_pages != 0:
            assert all(found.outcomes[w.request_id].load == len(w.tiers) for w in wants)
        waiting = [
            key
            for want in wants
            for key, tier in zip(want.keys, want.tiers, strict=False)
            if tier == Tier.NVME and key not in mine
        ]
        staged = {p.keys[0] for p in found.promotions if p.dst == Tier.HOST} - mine
        if machine.host_pages and len(staged) < machine.host_pages:
            assert set(waiting) <= staged, "places in host memory are left empty"
