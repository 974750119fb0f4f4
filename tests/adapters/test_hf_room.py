"""A prompt that finds HBM full of pages which are not saved yet, or pages that others are still writing."""

from __future__ import annotations

from threading import Thread, current_thread, main_thread

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.tiny import PAGE, ask, generate, plain, random_prompt, tiny_llama
from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, page_tensor
from tests.support.stalls import OUT
from tests.support.waiting import wait_for
from tierstore.adapters.huggingface import TierStoreCache, page_specs
from tierstore.config import load_config
from tierstore.types import PageKey, Tier

HBM, PROMPT = 32, 28
"""In pages: two prompts have no room side by side."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def opened(model: LlamaForCausalLM) -> Bench:
    specs = page_specs(model, PAGE)
    nbytes = sum(spec.page_nbytes for spec in specs)
    config = load_config(
        {"hbm": {"capacity": HBM * nbytes, "device": "cpu"}, "host": {"capacity": 2 * HBM * nbytes}}
    )
    return open_bench(config, specs, pump=True)


def full_of_unsaved_pages(model: LlamaForCausalLM, first: list[int], second: list[int]) -> Bench:
    """HOST has the first prompt, HBM alone the second: nothing can leave."""
    bench = opened(model)
    ask(bench.store, model, first)
    bench.store.demote(bench.store.keys(first), Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.copies.hold(OUT)
    ask(bench.store, model, second)
    return bench


def test_a_prompt_waits_for_the_room_that_pages_being_saved_are_about_to_leave(
    model: LlamaForCausalLM,
) -> None:
    first, second = (random_prompt(PROMPT * PAGE + 3, seed) for seed in (1, 2))
    bench = full_of_unsaved_pages(model, first, second)

    def save() -> None:
        wait_for(lambda: any(record.wants_room for record in list(bench.store._leases._line)))
        bench.copies.open()

    saving = Thread(target=save)
    saving.start()
    with TierStoreCache(
        bench.store, first, model=model, wait_for_room_s=PATIENCE_S, timeout_s=PATIENCE_S
    ) as cache:
        answer = generate(model, first, cache)
        assert cache.reused_tokens >= PROMPT * PAGE
    saving.join(PATIENCE_S)
    assert answer == plain(model, first)
    assert bench.store.stats()["leases"] == 0
    bench.close()


def test_a_prompt_whose_room_does_not_come_is_computed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (random_prompt(PROMPT * PAGE + 3, seed) for seed in (1, 2))
    bench = full_of_unsaved_pages(model, first, second)
    release, allocate = bench.copies.open, bench.store.allocate

    def room_for_what_is_computed(n: int, timeout_s: float = 1.0) -> list[int]:
        release()
        return allocate(n, timeout_s)

    monkeypatch.setattr(bench.store, "allocate", room_for_what_is_computed)
    with TierStoreCache(bench.store, first, model=model, wait_for_room_s=0.0) as cache:
        answer = generate(model, first, cache)
        assert cache.reused_tokens < PROMPT * PAGE
    assert answer == plain(model, first)
    assert bench.store.stats()["leases"] == 0
    bench.close()


def test_a_wait_for_room_that_has_no_end_is_refused(model: LlamaForCausalLM) -> None:
    bench = opened(model)
    with pytest.raises(ValueError, match="wait_for_room_s must be a finite number of seconds"):
        TierStoreCache(bench.store, [1, 2, 3], model=model, wait_for_room_s=float("inf"))
    bench.close()


class AwaitedEvent(ManualEvent):
    """Counts how often the test's own thread asks for it: again and again while that waits for it."""

    asked = 0

    def query(self) -> bool:
        self.asked += current_thread() is main_thread()
        return super().query()


def put_late(bench: Bench, prompt: list[int]) -> tuple[list[int], torch.Tensor, AwaitedEvent]:
    """Put the stored pages of a prompt anew, as rubbish until the event. Return their slots and what belongs there."""
    store = bench.store
    keys = store.keys(prompt)
    with store.acquire(keys) as lease:
        assert lease.num_pages == len(keys)
        lease.wait(PATIENCE_S)
        right = page_tensor(store)[lease.slots].clone()
    store.evict(keys)
    slots, event = store.allocate(len(keys), PATIENCE_S), AwaitedEvent()
    page_tensor(store)[slots] = 1.0
    assert store.put(keys, slots, after=event) == slots
    return slots, right, event


def test_pages_that_are_never_written_are_computed_instead(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(6 * PAGE + 3, 3)
    bench = opened(model)
    ask(bench.store, model, prompt)
    _, _, event = put_late(bench, prompt)
    with TierStoreCache(bench.store, prompt, model=model, timeout_s=0.05, storing="read-only") as cache:
        answer = generate(model, prompt, cache)
    assert answer == plain(model, prompt)
    event.happen()
    bench.close()


@pytest.mark.parametrize("deadline_s", [None, PATIENCE_S], ids=["by layers", "at once"])
def test_a_prompt_waits_for_pages_that_others_are_still_writing(
    model: LlamaForCausalLM, deadline_s: float | None
) -> None:
    prompt = random_prompt(6 * PAGE + 3, 4)
    bench = opened(model)
    ask(bench.store, model, prompt)
    slots, right, event = put_late(bench, prompt)

    def write() -> None:
        wait_for(lambda: event.asked > before + 100)
        page_tensor(bench.store)[slots] = right
        event.happen()

    before, writing = event.asked, Thread(target=write, daemon=True)
    writing.start()
    with TierStoreCache(
        bench.store, prompt, model=model, deadline_s=deadline_s, timeout_s=PATIENCE_S
    ) as cache:
        answer = generate(model, prompt, cache)
        assert cache.reused_tokens >= 6 * PAGE
    assert answer == plain(model, prompt)
    writing.join(PATIENCE_S)
    bench.close()


def test_a_prompt_computed_beside_another_goes_on_in_its_pages_once_they_are_written(
    model: LlamaForCausalLM,
) -> None:
    """Its put answers with the slots that the other request is still writing."""
    prompt = random_prompt(6 * PAGE + 3, 5)
    bench = opened(model)
    store, keys = bench.store, bench.store.keys(prompt)
    ask(store, model, prompt)
    slots, right, event = put_late(bench, prompt)
    store.evict(keys)
    cache = TierStoreCache(store, prompt, model=model, timeout_s=PATIENCE_S)
    late = store.allocate(len(keys), PATIENCE_S)
    assert store.put(keys, late, after=event) == late

    def write() -> None:
        wait_for(lambda: _pins(bench, keys[0]) > 1)
        before = event.asked
        wait_for(lambda: event.asked > before + 100)
        page_tensor(store)[[*slots, *late]] = torch.cat([right, right])
        event.happen()

    writing = Thread(target=write, daemon=True)
    writing.start()
    with cache:
        answer = generate(model, prompt, cache)
        assert cache.reused_tokens == 0
    assert answer == plain(model, prompt)
    writing.join(PATIENCE_S)
    assert store.match(keys).num_pages == 6
    bench.close()


def _pins(bench: Bench, key: PageKey) -> int:
    copies = bench.store.explain([key])[0]["copies"]
    assert isinstance(copies, dict)
    return int(copies["HBM"]["pins"])
