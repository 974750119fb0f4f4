"""A prompt that finds HBM full of pages which are not saved yet."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from tests.adapters.tiny import PAGE, ask, plain, random_prompt, tiny_llama
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S
from tests.support.stalls import OUT
from tierstore.adapters.huggingface import page_specs
from tierstore.config import load_config
from tierstore.types import Tier

HBM, PROMPT = 32, 28
"""In pages: two prompts have no room side by side."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def full_of_unsaved_pages(model: LlamaForCausalLM, first: list[int], second: list[int]) -> Bench:
    """HOST has the first prompt, HBM alone the second: nothing can leave."""
    specs = page_specs(model, PAGE)
    nbytes = sum(spec.page_nbytes for spec in specs)
    config = load_config(
        {"hbm": {"capacity": HBM * nbytes, "device": "cpu"}, "host": {"capacity": 2 * HBM * nbytes}}
    )
    bench = open_bench(config, specs, pump=True)
    ask(bench.store, model, first)
    bench.store.demote(bench.store.keys(first), Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.copies.hold(OUT)
    ask(bench.store, model, second)
    return bench


def test_a_prompt_waits_for_the_room_that_pages_being_saved_are_about_to_leave(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (random_prompt(PROMPT * PAGE + 3, seed) for seed in (1, 2))
    bench = full_of_unsaved_pages(model, first, second)
    drain = bench.store.drain

    def open_and_drain(timeout_s: float) -> bool:
        bench.copies.open()
        return drain(PATIENCE_S)

    monkeypatch.setattr(bench.store, "drain", open_and_drain)
    answer, cache = ask(bench.store, model, first)
    assert cache.reused_tokens >= PROMPT * PAGE
    assert answer == plain(model, first)
    assert bench.store.stats()["leases"] == 0
    bench.close()


def test_a_prompt_whose_room_does_not_come_is_computed_after_one_look(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (random_prompt(PROMPT * PAGE + 3, seed) for seed in (1, 2))
    bench = full_of_unsaved_pages(model, first, second)
    looks: list[float] = []
    drain, release = bench.store.drain, bench.copies.open
    allocate = bench.store.allocate

    def look(timeout_s: float) -> bool:
        looks.append(timeout_s)
        return drain(0.0)

    def room_for_what_is_computed(n: int, timeout_s: float = 1.0) -> list[int]:
        release()
        return allocate(n, timeout_s)

    monkeypatch.setattr(bench.store, "drain", look)
    monkeypatch.setattr(bench.store, "allocate", room_for_what_is_computed)
    answer, cache = ask(bench.store, model, first)
    assert cache.reused_tokens < PROMPT * PAGE
    assert len(looks) == 1
    assert answer == plain(model, first)
    assert bench.store.stats()["leases"] == 0
    bench.close()
