"""Test the planner with random requests, and test that the state machine detects planted bugs."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from prefetch import planner
from tests.prefetch.planner_machine import PlannerMachine
from tests.support import lanes
from tests.support.planting import SEARCH, Bug, load

BUGS = [
    Bug("the latest goes first", "item.deadline, -item.priority", "-item.deadline, -item.priority"),
    Bug("the lowest priority goes first", "item.deadline, -item.priority", "item.deadline, item.priority"),
    Bug("free space has no limit", "                if room == 0:\n                    break\n", ""),
    Bug("a resident page takes no space", "                room -= 1\n", ""),
    Bug(
        "space taken by a want is free for the next",
        "                self._room -= 1\n        self._emit",
        "                pass\n        self._emit",
    ),
    Bug("retained pages take no space", "key not in self._there and self._room > 0:", "False:"),
    Bug("retained pages in lower tiers take space", "if tier == Tier.HBM and key", "if key"),
    Bug("retained pages go last", "(item.until, -(1 << 62))", "(float('inf'), 0)"),
    Bug(
        "loads do not wait for reads",
        "self._load(tried, i, cursor.place(disk))",
        "self._load(tried, i, cursor.place(start))",
    ),
    Bug("reads go at the same time", "            disk = start + self._machine.read_s\n", ""),
    Bug("reads of the next want go at the same time", "                self._disk_free = step.ends\n", ""),
    Bug(
        "the link is never taken",
        "        self._link.take([step.starts for step in steps if step.src == Tier.HOST])\n",
        "",
    ),
    Bug("places are given back after the read", "heappush(places, tried.there[i])", "heappush(places, disk)"),
    Bug(
        "the next want finds all places empty",
        "                    heappush(self._places, tried.there[step.index])",
        "                    heappush(self._places, self._now)",
    ),
    Bug(
        "staged pages keep no slot",
        "max(self._disk_free, heappop(self._places))",
        "max(self._disk_free, self._places[0])",
    ),
    Bug("staged pages are read again", "self._there or key in self._staged:", "self._there:"),
    Bug("nothing waits in host memory", "            self._stage(want, load)", "            pass"),
    Bug("computing starts before the reads have ended", "max(start, read) + compute", "start + compute"),
    Bug("computing starts before the request", "max(start, read) + compute", "read + compute"),
    Bug(
        "computed pages are counted from the first page",
        "compute.seconds(load, total)",
        "compute.seconds(0, total)",
    ),
    Bug(
        "only read pages are computed",
        "total = self._machine.compute, len(want.keys)",
        "total = self._machine.compute, len(want.tiers)",
    ),
    Bug(
        "all or nothing",
        "for load in range(1, len(tried.there) + 1):",
        "for load in [len(tried.there)] if tried.there else []:",
    ),
    Bug(
        "never all", "for load in range(1, len(tried.there) + 1):", "for load in range(1, len(tried.there)):"
    ),
    Bug(
        "skipped pages are loaded",
        "steps = [step for step in tried.steps if step.index < load]",
        "steps = tried.steps",
    ),
    Bug(
        "shared pages are brought twice",
        "if key not in self._there:\n                if room",
        "if True:\n                if room",
    ),
    Bug(
        "shared pages are there at once",
        "self._there[want.keys[i]] = (tried.there[i], tried.read[i])",
        "self._there[want.keys[i]] = (self._now, self._now)",
    ),
    Bug("a prefix without places goes on", "                self._cut(tried, i)\n", ""),
    Bug(
        "promotions come as they were decided",
        "sorted(planning.promotions, key=lambda p: p.starts)",
        "planning.promotions",
    ),
]
NOTICED = (AssertionError, LookupError, ValueError, StopIteration, pytest.fail.Exception)
TIMELINE_BUGS = [
    Bug("a page may end after its free time", "if begin + self._page_s <= end:", "if begin < end:"),
    Bug("pages start before they are there", "begin = max(start, self._at)", "begin = start"),
    Bug("a place counts twice", "self._at = begin + self._page_s", "self._at = begin"),
    Bug("gaps are lost", "            if start < taken:\n                free.append((start, taken))\n", ""),
]


def test_every_plan_keeps_the_rules() -> None:
    run_state_machine_as_test(
        PlannerMachine, settings=settings(max_examples=lanes.examples(40, 400), stateful_step_count=20)
    )


def machine_over(subject: ModuleType) -> type[PlannerMachine]:
    return type("Planted", (PlannerMachine,), {"subject": subject})


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_machine_notices_a_planted_bug(bug: Bug) -> None:
    planted = machine_over(load(planner, bug))
    with pytest.raises(NOTICED):
        run_state_machine_as_test(planted, settings=SEARCH)


@pytest.mark.deep
@pytest.mark.parametrize("bug", TIMELINE_BUGS, ids=[bug.name for bug in TIMELINE_BUGS])
def test_the_machine_notices_a_bug_in_the_timeline(bug: Bug) -> None:
    planted = machine_over(load(planner, bug))
    with pytest.raises(NOTICED):
        run_state_machine_as_test(planted, settings=SEARCH)


@pytest.mark.deep
def test_the_loaded_copy_without_a_bug_passes() -> None:
    """Show that failures come from the planted bugs, and not from loading a copy of the module."""
    few = settings(SEARCH, max_examples=30)
    run_state_machine_as_test(machine_over(load(planner)), settings=few)
