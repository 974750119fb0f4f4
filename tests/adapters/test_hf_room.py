"""Tests of prompts while HBM is full of dirty pages, or while another request is still writing pages that they need."""

from __future__ import annotations

from collections.abc import Callable
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
from tierstore.adapters.compute_rate import ComputeRate
from tierstore.adapters.huggingface import TierStoreCache, page_specs, request
from tierstore.adapters.huggingface import cache as cache_module
from tierstore.config import load_config
from tierstore.types import PageKey, Tier

HBM, PROMPT = 32, 28
"""Sizes in pages. HBM cannot hold two prompts at once."""


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
    """Return a bench with the pages of ``first`` in HOST. HBM contains pages of ``second``, which cannot be evicted."""
    bench = opened(model)
    ask(bench.store, model, first)
    bench.store.demote(bench.store.keys(first), Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.copies.hold(OUT)
    ask(bench.store, model, second)
    return bench


def test_a_prompt_waits_for_space_that_pages_being_saved_are_about_to_free(
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


def test_a_prompt_whose_space_does_not_become_free_is_computed(
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


def test_an_infinite_wait_for_space_is_refused(model: LlamaForCausalLM) -> None:
    bench = opened(model)
    with pytest.raises(ValueError, match="wait_for_room_s must be a finite number of seconds"):
        TierStoreCache(bench.store, [1, 2, 3], model=model, wait_for_room_s=float("inf"))
    bench.close()


class AwaitedEvent(ManualEvent):
    """An event that counts how often the main thread polls it."""

    asked = 0

    def query(self) -> bool:
        self.asked += current_thread() is main_thread()
        return super().query()


def put_late(bench: Bench, prompt: list[int]) -> tuple[list[int], torch.Tensor, AwaitedEvent]:
    """Evict the stored pages of a prompt, and put them again with garbage in their slots.

    The pages count as written once the returned event occurs. A test can write the correct content before then.

    Returns the slots, the correct content, and the event.
    """
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


Late = tuple[TierStoreCache, Callable[[], None], AwaitedEvent]


def beside_another(bench: Bench, model: LlamaForCausalLM, prompt: list[int], timeout_s: float) -> Late:
    """Return a cache for ``prompt``, a function and an event.

    Another request has put the pages of the prompt, but has not written them. When the cache puts its own pages, the
    store returns the slots of the other request instead. The function writes the pages to these slots and then
    signals the event, for which the pages of both requests wait.
    """
    store, keys = bench.store, bench.store.keys(prompt)
    ask(store, model, prompt)
    slots, right, event = put_late(bench, prompt)
    store.evict(keys)
    cache = TierStoreCache(store, prompt, model=model, timeout_s=timeout_s)
    late = store.allocate(len(keys), PATIENCE_S)
    page_tensor(store)[late] = 1.0
    assert store.put(keys, late, after=event) == late

    def write() -> None:
        page_tensor(store)[[*slots, *late]] = torch.cat([right, right])
        event.happen()

    return cache, write, event


def test_a_prompt_computed_alongside_another_continues_in_its_pages_once_they_are_written(
    model: LlamaForCausalLM,
) -> None:
    prompt = random_prompt(6 * PAGE + 3, 5)
    bench = opened(model)
    store, keys = bench.store, bench.store.keys(prompt)
    cache, write_now, event = beside_another(bench, model, prompt, PATIENCE_S)

    def write() -> None:
        wait_for(lambda: _pins(bench, keys[0]) > 1)
        before = event.asked
        wait_for(lambda: event.asked > before + 100)
        write_now()

    writing = Thread(target=write, daemon=True)
    writing.start()
    with cache:
        answer = generate(model, prompt, cache)
        assert cache.reused_tokens == 0
    assert answer == plain(model, prompt)
    writing.join(PATIENCE_S)
    assert store.match(keys).num_pages == 6
    bench.close()


def test_pass_repeated_after_a_timeout_waits_again_for_the_pages_of_another_request(
    model: LlamaForCausalLM,
) -> None:
    prompt = random_prompt(6 * PAGE + 3, 5)
    bench = opened(model)
    cache, write, _ = beside_another(bench, model, prompt, 0.05)
    with cache:
        for _ in range(2):
            with pytest.raises(TimeoutError, match="another request"):
                generate(model, prompt, cache)
        write()
        assert generate(model, prompt, cache) == plain(model, prompt)
    bench.close()


def test_pages_of_another_request_whose_device_failed_are_not_read(model: LlamaForCausalLM) -> None:
    """The store frees the slots of these pages, and the cache has no other copy of the pages."""
    prompt = random_prompt(6 * PAGE + 3, 5)
    bench = opened(model)
    cache, _, event = beside_another(bench, model, prompt, 0.05)
    with cache:
        with pytest.raises(TimeoutError):
            generate(model, prompt, cache)
        event.fail()
        with pytest.raises(RuntimeError, match="its device failed"):
            generate(model, prompt, cache)
        cache.reset()
        assert generate(model, prompt, cache) == plain(model, prompt)
    bench.close()


def test_slots_of_a_request_whose_device_failed_stay_with_their_new_owner(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(6 * PAGE + 3, 5)
    bench = opened(model)
    cache, _, event = beside_another(bench, model, prompt, 0.05)
    with cache:
        with pytest.raises(TimeoutError):
            generate(model, prompt, cache)
        table = cache.batch.rows[0].table
        lost = set(table.slots[:6])
        event.fail()
        for slot in lost:  # as if another row of the batch had got these slots from the store
            table.private.take(slot)
        with pytest.raises(RuntimeError, match="its device failed"):
            generate(model, prompt, cache)
        assert all(table.private.sole(slot) for slot in lost)
        table.private.let_go(lost)
    bench.close()


def _pins(bench: Bench, key: PageKey) -> int:
    copies = bench.store.explain([key])[0]["copies"]
    assert isinstance(copies, dict)
    return int(copies["HBM"]["pins"])


class Known(ComputeRate):
    """A compute rate of half a second per token, as on an overloaded machine."""

    def seconds(self, start: int, end: int) -> float | None:
        return (end - start) / 2


def test_a_prompt_waits_for_space_as_long_as_computing_its_pages_would_take(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a run waited for one second, reused 192 of 2,207 tokens, and computed the rest in 167 s."""
    first, second = (random_prompt(PROMPT * PAGE + 3, seed) for seed in (1, 2))
    bench = full_of_unsaved_pages(model, first, second)
    monkeypatch.setattr(request, "_ROOM_S", 0.0)
    monkeypatch.setattr(request, "_MOST_S", PATIENCE_S)
    monkeypatch.setattr(cache_module, "_rate_of", lambda of: Known())

    def save() -> None:
        wait_for(lambda: any(record.wants_room for record in list(bench.store._leases._line)))
        bench.copies.open()

    saving = Thread(target=save)
    saving.start()
    with TierStoreCache(bench.store, first, model=model) as cache:
        answer = generate(model, first, cache)
        assert cache.reused_tokens >= PROMPT * PAGE
        assert cache.missing_because is None
    saving.join(PATIENCE_S)
    assert answer == plain(model, first)
    bench.close()


def test_prompt_without_space_reports_no_room(model: LlamaForCausalLM) -> None:
    first, second = (random_prompt(PROMPT * PAGE + 3, seed) for seed in (1, 2))
    bench = full_of_unsaved_pages(model, first, second)
    with TierStoreCache(bench.store, first, model=model, wait_for_room_s=0.0) as cache:
        assert cache.missing_because == "no_room"
        bench.copies.open()
        assert generate(model, first, cache) == plain(model, first)
    bench.close()


def test_pages_that_do_not_arrive_in_time_are_reported_late(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(6 * PAGE + 3, 6)
    bench = opened(model)
    ask(bench.store, model, prompt)
    _, _, event = put_late(bench, prompt)
    with TierStoreCache(bench.store, prompt, model=model, timeout_s=0.05, storing="read-only") as cache:
        generate(model, prompt, cache)
        assert cache.missing_because == "late"
    event.happen()
    bench.close()


def terms(bench: Bench, takes_s: float | None, **more: float | None) -> request.Terms:
    pages = request.PageGroups(bench.store)
    return request.Terms(bench.store, pages, 1, (), None, b"", compute_s=lambda tokens: takes_s, **more)  # type: ignore[arg-type]


def test_waits_are_bounded_by_the_time_to_compute(model: LlamaForCausalLM) -> None:
    bench = opened(model)
    for takes_s, arrival_s, room_s in (
        (None, 10.0, 1.0),
        (0.001, 10.0, 1.0),
        (3.0, 10.0, 3.0),
        (20.0, 20.0, 20.0),
        (167.0, 60.0, 60.0),
    ):
        assert terms(bench, takes_s).arrival_s(100) == arrival_s
        assert terms(bench, takes_s).room_s(100) == room_s
        assert terms(bench, takes_s).space_s == 10.0
        given = terms(bench, takes_s, timeout_s=0.25, wait_for_room_s=0.125)
        assert (given.arrival_s(100), given.room_s(100), given.space_s) == (0.25, 0.125, 0.25)
        assert terms(bench, takes_s, timeout_s=0.25, wait_for_room_s=9.0).room_s(100) == 0.25
    bench.close()


def test_compute_rate_is_learned_from_passes_on_the_cpu(model: LlamaForCausalLM) -> None:
    bench, other = opened(model), tiny_llama()
    assert cache_module._rate_of(other).seconds(0, 100) is None
    for seed in (7, 8, 9):
        ask(bench.store, other, random_prompt(100, seed))
    seconds = cache_module._rate_of(other).seconds(0, 100)
    assert seconds is not None
    assert seconds > 0
    assert cache_module._rate_of(tiny_llama()).seconds(0, 100) is None
    bench.close()
