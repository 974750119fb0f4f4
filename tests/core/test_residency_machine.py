"""Tests residency with random sequences of slot allocations, copies, pins, failures and evictions."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.machine import ResidencyMachine
from tests.support import lanes
from tierstore.types import Tier


class ChainMachine(ResidencyMachine):
    """The state machine with a second record tier below the first."""

    records = (Tier.NVME, Tier.REMOTE)


def test_no_order_of_calls_breaks_residency_over_two_tiers_of_records() -> None:
    run_state_machine_as_test(
        ChainMachine, settings=settings(max_examples=lanes.examples(25, 1200), stateful_step_count=50)
    )


def test_no_order_of_calls_breaks_residency() -> None:
    run_state_machine_as_test(
        ResidencyMachine, settings=settings(max_examples=lanes.examples(25, 1200), stateful_step_count=50)
    )
