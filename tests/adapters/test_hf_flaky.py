"""Test the adapter's state machine with copies that fail at any layer: lost tokens are computed again, correctly."""

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
"""The slots whose copies failed in this run."""
OPENED: list[int] = []
"""One entry for each store opened in this run. Each store makes different copies fail."""


class FlakyMachine(AdapterMachine):
    """Makes some copies into HBM fail after they have written garbage."""

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


@pytest.mark.parametrize(
    "build", lanes.some([small_llama, tiny_gemma], (tiny_gemma,).__contains__), ids=["full", "groups"]
)
def test_copies_failing_at_any_layer_cost_recomputation_but_no_wrong_answer(
    build: Callable[[], PreTrainedModel],
) -> None:
    kind = type("Machine", (FlakyMachine,), {"model": build()})
    FAILED.clear()
    OPENED.clear()
    for seed in lanes.seeds(1, 4):
        walk(kind, seed, STEPS)
    assert FAILED, "nothing was lost: this shows nothing"
