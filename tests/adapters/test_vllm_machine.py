"""Test the connector between a simulated vLLM and real tiers with a state machine. Planted bugs must be found."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings

from tests.adapters.vllm_machine import EngineMachine
from tests.adapters.vllm_planted import PLANTED
from tests.support import lanes
from tests.support.planting import SEARCH, Plant, require_noticed

logging.getLogger("tierstore.adapters.vllm.versions").setLevel(logging.ERROR)

FEWER = settings(SEARCH, max_examples=2000, stateful_step_count=40)

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=lanes.examples(10, 60), stateful_step_count=40)


@pytest.mark.deep
@pytest.mark.parametrize(
    "plant",
    PLANTED,
    ids=lambda plant: plant.__name__,
)
def test_the_machine_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    require_noticed(EngineMachine, FEWER)
