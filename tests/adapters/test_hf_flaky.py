"""Test the adapter's state machine with failing copies and interrupted waits: no answer is wrong and nothing leaks."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.adapters.machine import AdapterMachine
from tests.adapters.store_machine import Open
from tests.adapters.test_hf_machine import STEPS, one_thread, small_llama
from tests.adapters.test_hf_windows import tiny_gemma
from tests.adapters.walk import walk
from tests.support import lanes
from tierstore.adapters.huggingface.prefix import Arrival
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.gpu.layer_groups import Part
from tierstore.gpu.pool import CpuPool

__all__ = ["one_thread"]

FAILS = 0.3
FAILED: list[int] = []
"""The slots whose copies failed in this run."""
INTERRUPTS = 0.1
INTERRUPTED: list[str] = []
"""The waits that were interrupted in this run."""
OPENED: list[int] = []
"""One entry for each store opened in this run. Each store makes different copies fail."""


class FlakyMachine(AdapterMachine):
    """Makes some copies into HBM fail after they have written garbage, and interrupts some waits for pages.

    An interrupted call must leave the cache as it was before. The walk then continues with that cache.
    """

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

    def forward(self, cache: Open, new: list[list[int]], width: int) -> torch.Tensor | None:
        start = cache.columns
        try:
            return super().forward(cache, new, width)
        except KeyboardInterrupt:
            # If the interrupted pass was to compute lost tokens, the cache no longer counts them.
            assert cache.columns <= start
            for row, pad in enumerate(cache.paddings):
                count = max(0, cache.columns - pad)
                cache.rest[row] = cache.fed[row][count:] + cache.rest[row]
                del cache.fed[row][count:]
            return None

    def generate(self, at: int) -> None:
        try:
            super().generate(at)
        except KeyboardInterrupt:
            cache = self.pick(at)
            assert cache is not None
            self.end_cache(cache)


def interruptible(name: str) -> Callable[..., None]:
    """Return the rule ``name`` of ``AdapterMachine``, with KeyboardInterrupt suppressed."""

    def run(machine: FlakyMachine, **arguments: Any) -> None:
        with suppress(KeyboardInterrupt):
            getattr(AdapterMachine, name)(machine, **arguments)

    return run


for rule in ("open_cache", "crop", "reset", "choose", "answer", "turn_by_hand"):
    setattr(FlakyMachine, rule, interruptible(rule))


def interrupt_some(patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    """Make some calls of a method raise KeyboardInterrupt at their start."""
    right, chance = getattr(kind, name), Random(f"{name} {lanes.SEED}")

    def method(*arguments: Any) -> Any:
        if chance.random() < INTERRUPTS:
            INTERRUPTED.append(name)
            raise KeyboardInterrupt
        return right(*arguments)

    patch.setattr(kind, name, method)


@pytest.mark.parametrize(
    "build", lanes.some([small_llama, tiny_gemma], (tiny_gemma,).__contains__), ids=["full", "groups"]
)
def test_copies_failing_at_any_layer_cost_recomputation_but_no_wrong_answer(
    build: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_some(monkeypatch, PageGroups, "reach")
    interrupt_some(monkeypatch, Arrival, "_queued")
    kind = type("Machine", (FlakyMachine,), {"model": build()})
    FAILED.clear()
    OPENED.clear()
    INTERRUPTED.clear()
    for seed in lanes.seeds(1, 4):
        walk(kind, seed, STEPS)
    assert FAILED, "nothing was lost: this shows nothing"
    assert INTERRUPTED, "nothing was interrupted: this shows nothing"
