"""Test the read breaker: repeated failures or a hung read open it, then it admits one read, whose success closes it."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.nvme.breaker_machine import BreakerMachine
from tests.support.planting import SEARCH, Bug, load
from tierstore.nvme import read_breaker
from tierstore.nvme.read_breaker import Breaker, Circuit

TestBreaker = BreakerMachine.TestCase

BUGS = [
    Bug(
        "successes do not end a series of failures",
        "            self._failures = 0\n            self._pause_s",
        "            self._pause_s",
    ),
    Bug("one failure too many is needed", "self._failures >= self._limit", "self._failures > self._limit"),
    Bug(
        "a failed probe does not open the breaker",
        "self.state is Circuit.PROBING or self._failures",
        "self._failures",
    ),
    Bug(
        "failures from before the last change of state count",
        "if ticket != self._ticket or self.state is Circuit.OPEN:",
        "if self.state is Circuit.OPEN:",
    ),
    Bug(
        "successes from before the last change of state close the breaker",
        "if ticket == self._ticket and self.state is not Circuit.OPEN:\n            self.state",
        "if self.state is not Circuit.OPEN:\n            self.state",
    ),
    Bug(
        "late successes do not shorten the pause",
        "            self._again = min(self._again, now)\n\n    def failed",
        "            pass\n\n    def failed",
    ),
    Bug("several probes are admitted", "            self.state = Circuit.PROBING\n", ""),
    Bug("there is no pause before a probe", "self._again = now + self._pause_s", "self._again = now"),
    Bug("the pause does not grow", "min(2 * self._pause_s, self._longest_pause_s)", "self._pause_s"),
    Bug(
        "the pause grows without a limit",
        "min(2 * self._pause_s, self._longest_pause_s)",
        "2 * self._pause_s",
    ),
    Bug(
        "the pause is not reset",
        "            self._pause_s = self._first_pause_s\n        elif",
        "        elif",
    ),
    Bug("the ticket is not changed", "        self._ticket += 1\n", ""),
    Bug(
        "a probe that was not attempted stays pending",
        "            self.state = Circuit.OPEN\n            self._again = min",
        "            self._again = min",
    ),
    Bug(
        "hangs from before the last change of state open the breaker",
        "if ticket == self._ticket and self.state is not Circuit.OPEN:\n            self._open",
        "if self.state is not Circuit.OPEN:\n            self._open",
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    module = load(read_breaker, bug)
    machine = type("Machine", (BreakerMachine,), {"module": module})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=SEARCH)


def test_a_disk_that_fails_now_and_then_stays_in_use() -> None:
    breaker = Breaker(limit=2)
    for now in range(20):
        ticket = breaker.admit(now)
        assert ticket is not None
        (breaker.failed if now % 2 else breaker.succeeded)(ticket, now)
    assert breaker.state is Circuit.CLOSED
