"""The connector between a simulated vLLM and real tiers; and the bugs that this must find."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings

from tests.adapters.vllm_machine import EngineMachine
from tests.adapters.vllm_planted import PLANTED
from tests.support.planting import SEARCH, Plant, require_noticed

logging.getLogger("tierstore.adapters.vllm.versions").setLevel(logging.ERROR)

FEWER = settings(SEARCH, max_examples=2000, stateful_step_count=40)

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


QUICK = {
    "blocks_are_freed_before_they_are_copied",
    "told_before_it_is_there",
    "keys_leave_out_the_last_token",
}


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(p, marks=[] if p.__name__ in QUICK else [pytest.mark.long], id=p.__name__)
        for p in PLANTED
    ],
)
def test_the_machine_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    require_noticed(EngineMachine, FEWER)
