"""The adapter's state machine over copies that fail at any layer: what is lost is computed, answers stay right."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.adapters.machine import AdapterMachine
from tests.adapters.test_hf_machine import STEPS, one_thread, small_llama
from tests.adapters.test_hf_windows import tiny_gemma
from tests.adapters.walk import walk
from tests.support import lanes
from tierstore.gpu.layer_groups import Part
from tierstore.gpu.pool import CpuPool

__all__ = ["one_thread"]

FAILS = 0.3
FAILED: list[int] = []
"""Slots, of the run."""
OPENED: list[int] = []
"""Stores, of the run: other copies fail in each."""


class FlakyMachine(AdapterMachine):
    """Some parts of pages on their way into HBM leave rubbish there, and fail."""

    flaky = True

    def open_store(self) -> None:
        super().open_store()
        pool = self.store._parts.pool
        assert isinstance(pool, CpuPool)
        OPENED.append(len(OPENED))
        right, chance = pool.write_part, Random(len(OPENED))

        def write_part(slot: int, page: NDArray[np.uint8], part: Part) -> None:
            if chance.random() < FAILS:
                FAILED.append(slot)
                right(slot, np.full_like(page, 0x47), part)
                raise RuntimeError("this part cannot be written")
            right(slot, page, part)

        pool.write_part = write_part  # type: ignore[method-assign]


@pytest.mark.parametrize("build", [small_llama, tiny_gemma], ids=["full", "groups"])
def test_copies_that_fail_at_any_layer_cost_tokens_and_never_an_answer(
    build: Callable[[], PreTrainedModel],
) -> None:
    kind = type("Machine", (FlakyMachine,), {"model": build()})
    FAILED.clear()
    OPENED.clear()
    for seed in lanes.seeds(1, 4):
        walk(kind, seed, STEPS)
    assert FAILED, "nothing was lost: this shows nothing"
