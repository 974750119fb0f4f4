"""Tests the prefetcher and the store's promotions with random steps. Also tests that planted bugs are detected."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from prefetch import prefetcher
from tests.prefetch.prefetcher_machine import PrefetcherMachine
from tests.support import lanes, planting
from tests.support.planting import SEARCH, Bug, load, require_noticed
from tierstore.directory import loads

SHOWN = (*planting.NOTICED, LookupError, ValueError, RuntimeError, pytest.fail.Exception)
FEWER = settings(SEARCH, max_examples=400)

PROMOTING = [
    Bug("a hint that was withdrawn counts", "if in_force and sources", "if sources"),
    Bug(
        "leases that wait do not matter",
        "sources and not any(map(self._awaited, sources)):",
        "sources:",
    ),
    Bug(
        "retained pages are displaced",
        "victim is not None and table.copies[victim].rank < BAND",
        "victim is not None",
    ),
    Bug(
        "kept pages are kept forever",
        "            if self._ending[0]:\n                self._let_go(self._ending[0].popitem()[0])",
        "            if self._ending[0]:\n                self._ending[0].popitem()",
    ),
    Bug(
        "a hint's end lets nothing go",
        "        ended = self._hints.ended\n        while ended:",
        "        ended = self._hints.ended\n        while False:",
    ),
    Bug("nothing ever lands", "if copy is None or copy.ready:", "if False:"),
    Bug("everything has landed", "if copy is None or copy.ready:", "if True:"),
]
BRINGING = [
    Bug(
        "pages in flight have no limit",
        "            if room <= 0:\n                break\n",
        "            room = 32\n",
    ),
    Bug(
        "the latest go first",
        "expected = self.expected.in_order()",
        "expected = self.expected.in_order()[::-1]",
    ),
    Bug("resident pages are not kept", "            self._kept.ask(tier)\n", ""),
    Bug("planning happens only once", "if fresh or now >= self._plan_at:", "if fresh:"),
    Bug("new hints are not taken", "        self.expected.take(hints, self._clock())\n", ""),
    Bug(
        "loads are never started",
        "for tier in self._promotions.tiers:",
        "for tier in {*self._promotions.tiers} - {0}:",
    ),
]
INTAKE = [
    Bug(
        "a cancel is not heard",
        "            self._expected.pop(hint.request_id, None)\n            if hint.keys",
        "            if hint.keys",
    ),
    Bug("only the first revision counts", "hint.revision <= known.hint.revision", "True"),
]


def machine_over(**modules: ModuleType) -> type[PrefetcherMachine]:
    return type("Planted", (PrefetcherMachine,), modules)


def test_no_order_of_hints_leases_and_stalls_breaks_the_rules() -> None:
    few = settings(max_examples=lanes.examples(6, 60), stateful_step_count=25)
    run_state_machine_as_test(PrefetcherMachine, settings=few)


@pytest.mark.deep
@pytest.mark.parametrize("bug", PROMOTING, ids=[bug.name for bug in PROMOTING])
def test_the_machine_notices_a_bug_in_promotions(bug: Bug) -> None:
    require_noticed(machine_over(promoting_module=load(loads, bug)), FEWER, SHOWN)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BRINGING, ids=[bug.name for bug in BRINGING])
def test_the_machine_notices_a_bug_in_the_prefetcher(bug: Bug) -> None:
    require_noticed(machine_over(loop_module=load(prefetcher, bug)), FEWER, SHOWN)


@pytest.mark.deep
@pytest.mark.parametrize("bug", INTAKE, ids=[bug.name for bug in INTAKE])
def test_the_machine_notices_a_bug_in_the_intake(bug: Bug) -> None:
    require_noticed(machine_over(loop_module=load(prefetcher, bug)), FEWER, SHOWN)


@pytest.mark.deep
def test_the_loaded_copies_without_a_bug_pass() -> None:
    """Show that failures come from the planted bugs, and not from loading copies of the modules."""
    machine = machine_over(loop_module=load(prefetcher), promoting_module=load(loads))
    run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=10))
