"""The prefetcher and the store's promotions under whatever hypothesis can think of; planted bugs are noticed."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from prefetch import intake, prefetcher
from tests.core.planting import SEARCH, Bug, load
from tests.prefetch.prefetcher_machine import PrefetcherMachine
from tierstore import promoting

NOTICED = (AssertionError, LookupError, ValueError, RuntimeError, pytest.fail.Exception)

PROMOTING = [
    Bug(
        "retained pages are displaced",
        "victim is not None and table.copies[victim].rank < BAND",
        "victim is not None",
    ),
    Bug(
        "nothing is kept",
        "        if copy.rank < BAND:\n            self._residency",
        "        if False:\n            self._residency",
    ),
    Bug(
        "what is kept is kept for ever",
        "            if self._ending[0]:\n                self._let_go(self._ending[0].popitem()[0])",
        "            if self._ending[0]:\n                self._ending[0].popitem()",
    ),
    Bug(
        "a hint's end lets nothing go",
        "        ended = self._hints.ended\n        while ended:",
        "        ended = self._hints.ended\n        while False:",
    ),
    Bug(
        "host memory stays kept after the load",
        "if tier == Tier.HBM and (key, Tier.HOST) in kept:",
        "if False:",
    ),
    Bug("nothing ever lands", "            if copy is None or copy.ready:\n", "            if False:\n"),
    Bug("everything has landed", "            if copy is None or copy.ready:\n", "            if True:\n"),
]
PREFETCHER = [
    Bug(
        "there is no limit in flight",
        "            if room <= 0:\n                break\n",
        "            room = 32\n",
    ),
    Bug(
        "the latest go first",
        "expected = self._intake.in_order()",
        "expected = self._intake.in_order()[::-1]",
    ),
    Bug("it plans once", "if fresh or now >= self._plan_at:", "if fresh:"),
    Bug("it does not hear of what is new", "        self._intake.take(hints, self._clock())\n", ""),
    Bug(
        "what was planned stays when nobody is expected",
        "            self._ahead, self._staged = {}, set()\n            return _IDLE_S",
        "            return _IDLE_S",
    ),
    Bug(
        "loads are never started", "for tier in list(self._ahead))", "for tier in list(self._ahead) if tier)"
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


def require_noticed(machine: type[PrefetcherMachine]) -> None:
    with pytest.raises(NOTICED):
        run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=400))


def test_no_order_of_hints_leases_and_stalls_breaks_the_rules() -> None:
    few = settings(max_examples=20, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(PrefetcherMachine, settings=few)


@pytest.mark.parametrize("bug", PROMOTING, ids=[bug.name for bug in PROMOTING])
def test_the_machine_notices_a_bug_in_promotions(bug: Bug) -> None:
    require_noticed(machine_over(promoting_module=load(promoting, bug)))


@pytest.mark.parametrize("bug", PREFETCHER, ids=[bug.name for bug in PREFETCHER])
def test_the_machine_notices_a_bug_in_the_prefetcher(bug: Bug) -> None:
    require_noticed(machine_over(prefetcher_module=load(prefetcher, bug)))


@pytest.mark.parametrize("bug", INTAKE, ids=[bug.name for bug in INTAKE])
def test_the_machine_notices_a_bug_in_the_intake(bug: Bug) -> None:
    subject = load(prefetcher)
    subject.Intake = load(intake, bug).Intake  # type: ignore[attr-defined]
    require_noticed(machine_over(prefetcher_module=subject))


def test_the_loaded_copies_without_a_bug_pass() -> None:
    """So it is the bugs that are noticed, and not the way the code is loaded."""
    machine = machine_over(prefetcher_module=load(prefetcher), promoting_module=load(promoting))
    run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=10))
