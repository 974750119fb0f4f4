"""Tests of prefixes that arrive layer by layer: a layer is used once it has arrived; lost pages are recomputed."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.adapters.store_machine import plain_kv
from tests.adapters.test_hf_windows import tiny_gemma
from tests.adapters.tiny import (
    NEW,
    PAGE,
    ask,
    generate,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    tiny_llama,
    watch,
)
from tests.store.test_ready import Let
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import PrefixCache, TierStoreCache, cache_argument
from tierstore.adapters.huggingface.batch import PagedBatch
from tierstore.adapters.huggingface.prefix import Arrival
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.adapters.huggingface.sequence import PagedSequence
from tierstore.errors import CapacityError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Event, LeaseState, Tier

LAYERS, PAGES = 6, 4
PROMPT = random_prompt(PAGES * PAGE + 3)

lets: list[Let] = []
"""The gates of the current test. ``below`` opens them at the end, so that no copy keeps waiting."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_layers=LAYERS)


@contextmanager
def below(model: PreTrainedModel, *prompts: list[int], keep: int = 0) -> Iterator[TierStore]:
    """Yield a store with the full pages of these prompts in HOST, except the first ``keep`` of each, which stay in HBM.

    All free HBM slots contain garbage.
    """
    with open_store(model, host=32) as store:
        for prompt in prompts:
            compute(store, model, prompt)
        keys = [key for prompt in prompts for key in store.keys(prompt)[keep:]]
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        slots = store.allocate(32 - keep)
        for group in PageGroups(store).groups:
            group[slots] = 1e3
        store.free(slots)
        try:
            yield store
        finally:
            for let in lets:
                let.go(1000)
            lets.clear()


def compute(store: TierStore, model: PreTrainedModel, prompt: list[int]) -> None:
    """Run the model over the prompt, so that its full pages are in the store."""
    with TierStoreCache(store, prompt, model=model) as cache, torch.no_grad():
        ids = torch.tensor([prompt[cache.get_seq_length() :]])
        model(ids, **{cache_argument(model): cache})


def gate(patch: pytest.MonkeyPatch) -> Let:
    lets.append(Let(patch))
    return lets[-1]


def let_go_when_asked(patch: pytest.MonkeyPatch, let: Let, parts: int) -> list[int]:
    """When a lease is first asked for a layer, let ``parts`` copies finish and add the layer to the returned list."""
    asked: list[int] = []
    known: set[tuple[int, int]] = set()
    ready = Lease.ready

    def noted(lease: Lease, layer: int, timeout_s: float | None = None) -> Event | None:
        if (id(lease), layer) not in known:
            known.add((id(lease), layer))
            asked.append(layer)
            let.go(parts)
        return ready(lease, layer, timeout_s)

    patch.setattr(Lease, "ready", noted)
    return asked


def broken_after_the_first_layer(patch: pytest.MonkeyPatch, parts: int) -> Let:
    """When a lease waits for layer 0, let ``parts`` copies finish. When it waits for a later layer, fail all others."""
    let = gate(patch)
    known: set[int] = set()
    ready = Lease.ready

    def noted(lease: Lease, layer: int, timeout_s: float | None = None) -> Event | None:
        let.broken |= layer > 0
        if layer or id(lease) not in known:
            let.go(100 if layer else parts)
        known.add(id(lease))
        return ready(lease, layer, timeout_s)

    patch.setattr(Lease, "ready", noted)
    return let


def progress(model: LlamaForCausalLM, patch: pytest.MonkeyPatch, timeout_s: float = PATIENCE_S) -> None:
    """Require that a lease is asked for each layer only when the model is about to compute that layer."""
    expected = plain(model, PROMPT)
    asked: list[int] = []
    seen: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, at=at: seen.append(at - len(asked)))
        for at, layer in enumerate(model.model.layers)
    ]
    with below(model, PROMPT) as store:
        asked = let_go_when_asked(patch, gate(patch), PAGES)
        seen.clear()
        with watch(model) as fed, TierStoreCache(store, PROMPT, model=model, timeout_s=timeout_s) as cache:
            assert asked == []
            assert cache.batch.rows[0].arrival is not None
            assert generate(model, PROMPT, cache) == expected
            assert cache.reused_tokens == PAGES * PAGE
            assert fed.widths[0] == 3
            assert len(fed.widths) == NEW
    for hook in hooks:
        hook.remove()
    assert asked == list(range(LAYERS))
    assert seen[:LAYERS] == [-1] + [0] * (LAYERS - 1), (
        "layers that were computed before the next was asked for"
    )


def test_layer_is_computed_while_later_layers_are_in_flight(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress(model, monkeypatch)


def lose(model: PreTrainedModel, patch: pytest.MonkeyPatch, kept: int = 0) -> None:
    """Make copies fail after the first layer. Check the answer, and that only the ``kept`` pages in HBM are reused."""
    expected = plain(model, PROMPT)
    with below(model, PROMPT, keep=kept) as store:
        with patch.context() as inner, watch(model) as fed:
            let = broken_after_the_first_layer(inner, PAGES - kept)
            cache = TierStoreCache(store, PROMPT, model=model)
            assert cache.reused_tokens == PAGES * PAGE
            assert generate(model, PROMPT, cache) == expected
            assert cache.reused_tokens == kept * PAGE
            assert cache.get_seq_length() == len(PROMPT) + NEW - 1
            cache.close()
        assert fed.widths[:3] == [3, len(PROMPT) - kept * PAGE, 1]
        let.broken = False
        let.go(100)
        pages_are_right(store, model)
        answer, cache = ask(store, model, PROMPT)
        assert answer == expected
        assert cache.reused_tokens == len(PROMPT) - 1


def pages_are_right(store: TierStore, model: PreTrainedModel) -> None:
    kv = plain_kv(model, PROMPT)
    with store.acquire(store.keys(PROMPT)) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == PAGES
        (group,) = PageGroups(store).groups
        for layer in range(LAYERS):
            found = group[lease.slots, layer].transpose(0, 1).flatten(1, 2).transpose(1, 2)
            torch.testing.assert_close(found, kv[layer][:, :, : PAGES * PAGE], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kept", [0, 1, PAGES - 1])
def test_pages_that_fail_after_their_first_layers_are_computed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    lose(model, monkeypatch, kept)
    assert "cannot be written" in caplog.text


def test_pages_that_stop_arriving_are_computed_after_the_timeout(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(model, PROMPT)
    with below(model, PROMPT) as store:
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, PROMPT, model=model, timeout_s=0.5) as cache:
            assert cache.reused_tokens == PAGES * PAGE
            assert generate(model, PROMPT, cache) == expected
            assert cache.reused_tokens == 0
            let.go(100)
        let.go(100)
        assert store.drain(PATIENCE_S)


def test_layers_that_never_start_arriving_are_computed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(model, PROMPT)
    with below(model, PROMPT) as store:
        let = gate(monkeypatch)
        with watch(model) as fed, TierStoreCache(store, PROMPT, model=model, timeout_s=0.1) as cache:
            assert cache.reused_tokens == PAGES * PAGE
            assert generate(model, PROMPT, cache) == expected
            assert cache.reused_tokens == 0
            assert fed.widths[0] == len(PROMPT), "no pass is made over what does not come"
            let.go(100)


def branch(model: LlamaForCausalLM, patch: pytest.MonkeyPatch, broken: bool) -> None:
    """Answer a prompt that diverges from a stored one inside a page. That page is copied while it arrives."""
    prompt = PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5)
    expected = plain(model, prompt)
    with below(model, PROMPT) as store:
        let = gate(patch)
        asked = let_go_when_asked(patch, let, 3)
        with watch(model) as fed, TierStoreCache(store, prompt, model=model) as cache:
            assert (cache.copied_tokens, cache.reused_tokens) == (5, 2 * PAGE + 5)
            assert cache.batch.comes()
            let.broken = broken
            assert generate(model, prompt, cache) == expected
            assert (cache.copied_tokens, cache.reused_tokens) == ((0, 0) if broken else (5, 2 * PAGE + 5))
        assert fed.widths[: 1 + broken] == ([4, len(prompt)] if broken else [4])
        assert asked == [layer for layer in range(LAYERS) for _ in range(2)]
        let.broken = False
        let.go(100)
        assert store.drain(PATIENCE_S)


@pytest.mark.parametrize("broken", [False, True])
def test_half_a_page_is_copied_layer_by_layer(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    branch(model, monkeypatch, broken)


def test_only_the_partially_used_page_fails(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5)
    with below(model, PROMPT, keep=2) as store:
        let = gate(monkeypatch)
        let.go(1)
        with watch(model) as fed, TierStoreCache(store, prompt, model=model) as cache:
            assert (cache.copied_tokens, cache.reused_tokens) == (5, 2 * PAGE + 5)
            assert cache.batch.comes()
            let.broken = True
            let.go(10)
            assert generate(model, prompt, cache) == plain(model, prompt)
            assert (cache.copied_tokens, cache.reused_tokens) == (0, 2 * PAGE)
        assert fed.widths[:2] == [4, 9]


def test_lost_pages_of_a_padded_batch_are_computed_for_every_row(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, random_prompt(2 * PAGE + 2, seed=3)]
    ids, mask = pad_left(prompts)
    expected = plain_batch(model, ids, attention_mask=mask)
    with below(model, *prompts) as store:
        broken_after_the_first_layer(monkeypatch, PAGES + 1)
        with TierStoreCache(store, ids, mask, model=model) as cache:
            assert cache.reused_tokens > 0
            assert torch.equal(generate_batch(model, ids, cache, attention_mask=mask), expected)
            assert cache.reused_tokens == 0


@pytest.mark.parametrize("how", [{"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}])
def test_lost_pages_of_several_answers_are_computed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    ids = torch.tensor([PROMPT])
    torch.manual_seed(1)
    expected = plain_batch(model, ids, **how)
    with below(model, PROMPT) as store:
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            assert cache.batch.comes()
            let.broken = True
            let.go(100)
            torch.manual_seed(1)
            assert torch.equal(generate_batch(model, ids, cache, **how), expected)
            assert cache.reused_tokens == 0


def test_output_of_a_repeated_pass_has_only_the_columns_that_were_fed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = model(ids, use_cache=False, output_hidden_states=True)
    with below(model, PROMPT) as store, torch.no_grad():
        broken_after_the_first_layer(monkeypatch, PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            start = cache.get_seq_length()
            found = model(ids[:, start:], output_hidden_states=True, **{cache_argument(model): cache})
    torch.testing.assert_close(found.logits, expected.logits[:, start:], rtol=0, atol=1e-4)
    assert len(found.hidden_states) == len(expected.hidden_states)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other[:, start:], rtol=0, atol=1e-4)


def test_embeddings_wait_for_all_layers_and_survive_lost_pages(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([PROMPT])
    embedded = model.get_input_embeddings()(ids)
    with below(model, PROMPT) as store, torch.no_grad():
        expected = model(ids, use_cache=False).logits
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            assert cache.batch.comes()
            let.broken = True
            let.go(100)
            given = {cache_argument(model): cache}
            found = model(inputs_embeds=embedded[:, cache.get_seq_length() :], **given).logits
    assert found.shape[1] == 3
    torch.testing.assert_close(found, expected[:, -3:], rtol=0, atol=1e-4)


def test_cache_cropped_before_its_first_pass_loses_no_token(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with below(model, PROMPT) as store, torch.no_grad():
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            assert cache.batch.comes()
            let.broken = True
            let.go(100)
            cache.crop(-3)
            start = cache.get_seq_length()
            assert start == PAGES * PAGE - 3
            found = model(torch.tensor([PROMPT[start:]]), **{cache_argument(model): cache}).logits
            expected = model(torch.tensor([PROMPT]), use_cache=False).logits
    torch.testing.assert_close(found, expected[:, start:], rtol=0, atol=1e-4)


@contextmanager
def interrupted(patch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt in this wait for pages, counted from 1. Require that the ``with`` block raises it."""
    waits, reach = count(1), PageGroups.reach

    def once(pages: PageGroups, lease: Lease, timeout_s: float) -> LeaseState:
        if next(waits) == number:
            raise KeyboardInterrupt
        return reach(pages, lease, timeout_s)

    with patch.context() as inner:
        inner.setattr(PageGroups, "reach", once)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("number", [1, 2], ids=["full pages", "the copied page"])
@pytest.mark.parametrize("how", ["crop", "pass"])
def test_pages_that_fail_after_the_wait_for_them_was_interrupted_are_computed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, how: str, number: int
) -> None:
    prompt = PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5)
    kept = 0 if number == 1 else 2
    with below(model, PROMPT, keep=kept) as store, torch.no_grad(), monkeypatch.context() as inner:
        if how == "crop":
            let = gate(inner)
            let.go(3 - kept)
        else:
            let = broken_after_the_first_layer(inner, 3 - kept)
        with TierStoreCache(store, prompt, model=model) as cache:
            given = {cache_argument(model): cache}
            assert (cache.copied_tokens, cache.reused_tokens) == (5, 2 * PAGE + 5)
            assert cache.batch.comes()
            with interrupted(monkeypatch, number):
                if how == "crop":
                    cache.crop(-1)
                else:
                    model(torch.tensor([prompt[cache.get_seq_length() :]]), **given)
            let.broken = True
            let.go(100)
            assert store.drain(PATIENCE_S)
            start = cache.get_seq_length()
            assert start == 2 * PAGE + 5
            found = model(torch.tensor([prompt[start:]]), **given).logits
            expected = model(torch.tensor([prompt]), use_cache=False).logits
    torch.testing.assert_close(found, expected[:, start:], rtol=0, atol=1e-4)


def test_lost_pages_of_one_row_are_computed_after_the_wait_for_another_row_was_interrupted(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT, random_prompt(2 * PAGE + 2, seed=3)]
    ids, mask = pad_left(prompts)
    with below(model, *prompts) as store:
        let = gate(monkeypatch)
        let.go(PAGES + 2)
        with TierStoreCache(store, ids, mask, model=model) as cache:
            assert cache.batch.comes()
            let.broken = True
            let.go(2)
            with interrupted(monkeypatch, 2):
                cache.crop(-1)
            assert [row.arrival is None for row in cache.batch.rows] == [True, False]
            let.broken = False
            let.go(100)
            answers = generate_batch(model, ids, cache, attention_mask=mask)
            assert torch.equal(answers, plain_batch(model, ids, attention_mask=mask))


@pytest.mark.parametrize("late", [False, True], ids=["before the pass", "during the pass"])
def test_pass_without_space_for_lost_pages_leaves_the_cache_unchanged(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    ids = torch.tensor([PROMPT])
    with below(model, PROMPT) as store, torch.no_grad(), monkeypatch.context() as inner:
        let = broken_after_the_first_layer(inner, PAGES) if late else gate(inner)
        cache = TierStoreCache(store, PROMPT, model=model, timeout_s=0.3)
        start, given = cache.get_seq_length(), {cache_argument(model): cache}
        taken, settle = store.allocate(32 - PAGES - 1), PagedBatch.settle

        def and_take_the_lost_slots(batch: PagedBatch) -> bool:
            lost = settle(batch)
            if lost:
                let.go(1000)
                assert store.drain(PATIENCE_S)
                taken.extend(store.allocate(PAGES))
            return lost

        inner.setattr(PagedBatch, "settle", and_take_the_lost_slots)
        with cache:
            with pytest.raises(CapacityError):
                model(ids[:, start:], **given)
            assert cache.get_seq_length() == start == PAGES * PAGE
            store.free(taken)
            found = model(ids[:, start:], **given).logits
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected[:, start:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("again", [TierStoreCache.reset, lambda cache: cache.crop(-1)], ids=["reset", "crop"])
def test_cache_changed_after_an_interrupted_pass_survives_a_pass_that_fails(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, again: Callable[[TierStoreCache], None]
) -> None:
    """A pass that fails must restore the length of the changed cache, not its length before the interrupted pass."""
    ids = torch.tensor([PROMPT])
    with below(model, PROMPT) as store, torch.no_grad():
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            given = {cache_argument(model): cache}
            assert cache.batch.comes()
            let.broken = True
            let.go(100)
            assert cache.batch.settle()
            for error in (KeyboardInterrupt, CapacityError):
                with monkeypatch.context() as inner:
                    inner.setattr(TierStore, "allocate", Mock(side_effect=error("no slots")))
                    with pytest.raises(error):
                        model(ids[:, cache.get_seq_length() :], **given)
                if error is KeyboardInterrupt:
                    again(cache)
                    start = cache.get_seq_length()
                assert cache.get_seq_length() == start
            found = model(ids[:, start:], **given).logits
            expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected[:, start:], rtol=0, atol=1e-4)


def test_embeddings_after_an_interrupted_pass_need_positions(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is shorter then, so embeddings that the caller believes to follow it would get wrong positions."""
    ids = torch.tensor([PROMPT])
    embedded = model.get_input_embeddings()(ids)
    with below(model, PROMPT) as store, torch.no_grad():
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            given = {cache_argument(model): cache}
            assert cache.batch.comes()
            let.broken = True
            let.go(100)
            assert cache.batch.settle()
            before = cache.get_seq_length()
            assert before == PAGES * PAGE
            with monkeypatch.context() as inner:
                inner.setattr(TierStore, "allocate", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    model(inputs_embeds=embedded[:, before:], **given)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"interrupted.*the cache now holds 0 columns"):
                    model(inputs_embeds=embedded[:, before:], **given)
                assert cache.get_seq_length() == 0
            positions = torch.arange(len(PROMPT))[None]
            with pytest.raises(ValueError, match="position"):
                model(inputs_embeds=embedded[:, before:], position_ids=positions[:, before:], **given)
            found = model(inputs_embeds=embedded, position_ids=positions, **given).logits
            expected = model(ids, use_cache=False).logits
            again = model(inputs_embeds=embedded[:, :1], **given).logits
            assert again.shape[1] == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_pages_that_could_not_be_loaded_do_not_count_as_shared(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with below(model, PROMPT) as store:
        let = gate(monkeypatch)
        let.go(PAGES)
        with TierStoreCache(store, torch.tensor([PROMPT, PROMPT]), model=model) as cache:
            assert cache.batch.comes()
            assert cache.shared_pages == PAGES
            let.broken = True
            let.go(100)
            assert store.drain(PATIENCE_S)
            assert cache.batch.arriving
            assert cache.shared_pages == 0


def test_partially_used_page_fails_while_its_lease_is_read(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5)
    with below(model, PROMPT, keep=2) as store, torch.no_grad():
        let = gate(monkeypatch)
        let.go(1)
        with TierStoreCache(store, prompt, model=model) as cache:
            arrival = cache.batch.rows[0].arrival
            assert arrival is not None
            half, reads, slots = arrival.half, count(1), Lease.__dict__["slots"].fget

            def read(lease: Lease) -> list[int]:
                found: list[int] = slots(lease)
                if lease is half and next(reads) == 1:
                    let.broken = True
                    let.go(100)
                    assert store.drain(PATIENCE_S)
                return found

            monkeypatch.setattr(Lease, "slots", property(read))
            start = cache.get_seq_length()
            found = model(torch.tensor([prompt[start:]]), **{cache_argument(model): cache}).logits
            assert cache.copied_tokens == 0
        expected = model(torch.tensor([prompt]), use_cache=False).logits
    torch.testing.assert_close(found, expected[:, start:], rtol=0, atol=1e-4)


def test_request_whose_pages_failed_continues_in_pages_that_another_request_has_stored(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a lease that had lost all its pages was treated like one whose pages had never been written."""
    expected = plain(model, PROMPT)
    with below(model, PROMPT) as store:
        let = gate(monkeypatch)
        let.broken = True
        let.go(1000)
        first, second = (TierStoreCache(store, PROMPT, model=model, deadline_s=PATIENCE_S) for _ in range(2))
        for cache in (first, second):
            assert cache.missing_because == "failed"
        with first, second:
            assert generate(model, PROMPT, first) == expected
            assert generate(model, PROMPT, second) == expected
            slots = [cache.batch.rows[0].table.slots[:PAGES] for cache in (first, second)]
            assert slots[0] == slots[1]


def test_interrupted_constructor_leaks_no_slot(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5)
    with below(model, PROMPT) as store:
        gate(monkeypatch)
        with interrupted(monkeypatch, 1):
            TierStoreCache(store, prompt, model=model)


def test_chat_continues_after_pages_fail_between_turns(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(model, host=32) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(PROMPT)
        session.generate(max_new_tokens=4, do_sample=False, pad_token_id=0)
        store.demote(store.keys(session.tokens), Tier.HOST)
        assert store.drain(PATIENCE_S)
        assert session.keeps_page
        session.append(random_prompt(3, seed=8))
        expected = plain(model, list(session.tokens), max_new_tokens=4)
        with monkeypatch.context() as patch:
            broken_after_the_first_layer(patch, PAGES)
            assert session.generate(max_new_tokens=4, do_sample=False, pad_token_id=0) == expected
        store.check()


@contextmanager
def slot_of_a_lost_page_in_use(
    model: LlamaForCausalLM, patch: pytest.MonkeyPatch
) -> Iterator[TierStoreCache]:
    """Yield a cache with two rows: row 0's last page failed to load, and row 1 now uses its slot for a copied page.

    HBM has no other free slot when row 1 is opened, so row 1 waits until the store frees the slot of the failed page.
    """
    like = random_prompt(PAGE + 1, seed=7)
    ids, mask = pad_left([PROMPT, like[:5] + random_prompt(4, seed=8)])
    with below(model, PROMPT, keep=PAGES - 1) as store:
        compute(store, model, like)
        slots = store.allocate(31 - PAGES)
        let, right = gate(patch), TierStore.allocate

        def once_it_failed(store: TierStore, count: int, **options: Any) -> list[int]:
            let.go(LAYERS - 1)
            let.broken = True
            let.go(1)
            return right(store, count, **options)

        with store.acquire(store.keys(like)), patch.context() as inner:
            inner.setattr(TierStore, "allocate", once_it_failed)
            cache = TierStoreCache(store, ids, mask, model=model)
        lost, row = cache.batch.rows
        assert (row.copied_tokens, row.table.slots) == (5, lost.table.slots[PAGES - 1 :])
        store.free(slots)
        let.broken = False
        let.go(1000)
        with cache:
            yield cache
        pages_are_right(store, model)


def test_page_whose_slot_was_lost_is_not_sealed_when_the_cache_is_closed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slot_of_a_lost_page_in_use(model, monkeypatch):
        pass


def test_row_that_lost_a_page_does_not_free_the_slot_that_another_row_took_over(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slot_of_a_lost_page_in_use(model, monkeypatch) as cache:
        row, store = cache.batch.rows[1], cache.batch.terms.store
        cache.batch.settle()
        assert row.table.private.sole(row.table.slots[0])
        free = store.allocate(31 - PAGES)
        assert row.table.slots[0] not in free
        store.free(free)


def test_kv_groups_are_loaded_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gemma()
    expected = plain(model, PROMPT)
    with below(model, PROMPT) as store:
        broken_after_the_first_layer(monkeypatch, 2 * PAGES)
        with TierStoreCache(store, PROMPT, model=model) as cache:
            assert cache.reused_tokens == PAGES * PAGE
            assert generate(model, PROMPT, cache) == expected


def test_cache_closed_while_pages_arrive_leaks_nothing(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5)
    with below(model, PROMPT) as store:
        let_go_when_asked(monkeypatch, gate(monkeypatch), 3)
        cache = TierStoreCache(store, prompt, model=model)
        assert cache.copied_tokens == 5
        cache.close()


def too_late(model: LlamaForCausalLM, patch: pytest.MonkeyPatch, prompt: list[int], parts: int) -> None:
    """Let the wait for layer 1 time out, and later layers arrive. Check the answer, and that no token was reused."""
    expected = plain(model, prompt)
    with below(model, PROMPT) as store:
        let = gate(patch)
        let.go(parts)
        ready = Lease.ready

        def noted(lease: Lease, layer: int, timeout_s: float | None = None) -> Event | None:
            if layer == 1:
                raise TimeoutError("the time is up")
            if layer > 1:
                let.go(1000)
            return ready(lease, layer, timeout_s)

        patch.setattr(Lease, "ready", noted)
        with TierStoreCache(store, prompt, model=model) as cache:
            assert cache.reused_tokens >= 2 * PAGE
            assert generate(model, prompt, cache) == expected
            assert (cache.copied_tokens, cache.reused_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [(PROMPT, PAGES), (PROMPT[: 2 * PAGE + 5] + random_prompt(4, seed=5), 3)],
    ids=["whole pages", "half a page"],
)
def test_layers_that_arrive_after_they_were_computed_are_not_counted(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, prompt: list[int], parts: int
) -> None:
    too_late(model, monkeypatch, prompt, parts)


# -- planted bugs -----------------------------------------------------------------------------------------------


def no_layer_is_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrival, "layer", lambda self, group, index: None)


def all_is_awaited_at_first(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Arrival, group: int, index: int) -> None:
        for layer in range(LAYERS):
            self._queued(self._lease, layer)

    patch.setattr(Arrival, "layer", wrong)


def what_is_lost_counts(patch: pytest.MonkeyPatch) -> None:
    settle = PagedSequence.settle

    def wrong(self: PagedSequence) -> bool:
        settle(self)
        return False

    patch.setattr(PagedSequence, "settle", wrong)


def owed_tokens_are_the_first(patch: pytest.MonkeyPatch) -> None:
    owed = PagedBatch.owed

    def wrong(self: PagedBatch, rows: int) -> tuple[list[list[int]], list[list[int]]]:
        tokens, positions = owed(self, rows)
        return [each[:1] + each[:-1] for each in tokens], positions

    patch.setattr(PagedBatch, "owed", wrong)


def half_a_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageGroups, "copy_layer", lambda self, group, index, src, dst: None)


def half_a_page_always_comes(patch: pytest.MonkeyPatch) -> None:
    settle = Arrival.settle
    patch.setattr(Arrival, "settle", lambda self: (PAGES if settle(self)[0] else 2, True))


def progress_soon(model: LlamaForCausalLM, patch: pytest.MonkeyPatch) -> None:
    progress(model, patch, timeout_s=0.3)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("plant", "scene"),
    [
        (no_layer_is_awaited, progress_soon),
        (all_is_awaited_at_first, progress_soon),
        (what_is_lost_counts, lose),
        (owed_tokens_are_the_first, lose),
        (half_a_page_is_not_copied, lambda model, patch: branch(model, patch, broken=False)),
        (half_a_page_always_comes, lambda model, patch: branch(model, patch, broken=True)),
    ],
)
def test_planted_bug_is_found(
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    scene: Callable[[LlamaForCausalLM, pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        scene(model, monkeypatch)
