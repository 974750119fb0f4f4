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
        "successes do not end a row",
        "            self._failures = 0\n            self._pause_s",
        "            self._pause_s",
    ),
    Bug("one failure too many", "self._failures >= self._limit", "self._failures > self._limit"),
    Bug("a probe has to fail as often", "self.state is Circuit.PROBING or self._failures", "self._failures"),
    Bug(
        "old failures count",
        "if ticket != self._ticket or self.state is Circuit.OPEN:",
        "if self.state is Circuit.OPEN:",
    ),
    Bug(
        "old successes close it",
        "if ticket == self._ticket and self.state is not Circuit.OPEN:\n            self.state",
        "if self.state is not Circuit.OPEN:\n            self.state",
    ),
    Bug(
        "old successes say nothing",
        "            self._again = min(self._again, now)\n\n    def failed",
        "            pass\n\n    def failed",
    ),
    Bug("more than one probe", "            self.state = Circuit.PROBING\n", ""),
    Bug("no pause", "self._again = now + self._pause_s", "self._again = now"),
    Bug("the pause stays short", "min(2 * self._pause_s, self._longest_pause_s)", "self._pause_s"),
    Bug(
        "the pause grows without a limit",
        "min(2 * self._pause_s, self._longest_pause_s)",
        "2 * self._pause_s",
    ),
    Bug(
        "the pause stays long",
        "            self._pause_s = self._first_pause_s\n        elif",
        "        elif",
    ),
    Bug("tickets do not change", "        self._ticket += 1\n", ""),
    Bug(
        "a probe that was not tried is awaited forever",
        "            self.state = Circuit.OPEN\n            self._again = min",
        "            self._again = min",
    ),
    Bug(
        "old hangs open it again",
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
