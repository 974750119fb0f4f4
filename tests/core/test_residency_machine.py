"""Residency under every order of takes, copies, pins, failures and evictions that hypothesis can think of."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.machine import ResidencyMachine
from tests.support import lanes


def test_no_order_of_calls_breaks_residency() -> None:
    run_state_machine_as_test(
        ResidencyMachine, settings=settings(max_examples=lanes.examples(100, 1200), stateful_step_count=50)
    )
