"""Test that requests for exact pages never use lossy ones, and that other requests do."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.adapters.test_hf_windows import WINDOW, tiny_mistral
from tests.adapters.tiny import PAGE, generate, open_store, plain, random_prompt, tiny_llama
from tests.support import lanes
from tests.support.pages import PATIENCE_S, page_tensor
from tierstore.adapters.huggingface import ATTENTION, PrefixCache, TierStoreCache, prefix, sequence
from tierstore.adapters.huggingface.prefix import ROLLBACK, Tail
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

ANSWER: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def ask(store: TierStore, model: PreTrainedModel, prompt: list[int], *, exact: bool) -> tuple[list[int], int]:
    with TierStoreCache(store, prompt, model=model, exact=exact) as cache:
        return generate(model, prompt, cache), cache.reused_tokens


def drop_memory(store: TierStore, keys: list[PageKey]) -> None:
    store.flush()
    for tier in (Tier.HBM, Tier.HOST):
        store.evict(keys, tier)


@pytest.mark.parametrize("codec", ["int8", "int8+zstd", "int4"])
def test_after_a_restart_an_exact_request_is_computed_again(
    model: LlamaForCausalLM, tmp_path: Path, codec: str
) -> None:
    prompt = random_prompt(6 * PAGE + 3)
    expected = plain(model, prompt)
    with open_store(model, host=16, disk=tmp_path, codec=codec) as store:
        assert ask(store, model, prompt, exact=False) == (expected, 0)
    with open_store(model, host=16, disk=tmp_path, codec=codec) as store:
        assert not store.match(store.keys(prompt)).exact
        assert ask(store, model, prompt, exact=True) == (expected, 0)
        assert store.match(store.keys(prompt), exact=True).num_pages == 6
        assert ask(store, model, prompt, exact=True) == (expected, 6 * PAGE + 2)  # all but the last token


def test_without_exact_lossy_pages_are_reused_and_may_change_the_answer(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompts = [random_prompt(4 * PAGE + 3, seed=seed) for seed in range(6)]
    expected = [plain(model, prompt) for prompt in prompts]
    with open_store(model, host=16, disk=tmp_path, codec="int4") as store:
        assert [ask(store, model, prompt, exact=False)[0] for prompt in prompts] == expected
    with open_store(model, host=16, disk=tmp_path, codec="int4") as store:
        found = [ask(store, model, prompt, exact=False) for prompt in prompts]
        assert [reused for _, reused in found] == [4 * PAGE] * 6
        assert [answer for answer, _ in found] != expected  # with 4 bits, answers differ
        assert [ask(store, model, prompt, exact=True)[0] for prompt in prompts] == expected


def test_exact_request_copies_no_partially_matching_lossy_page(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    first = random_prompt(4 * PAGE)
    other = [*first[: 3 * PAGE + 5], *random_prompt(9, seed=1)]
    with open_store(model, host=16, disk=tmp_path, codec="int4") as store:
        ask(store, model, first, exact=False)
        drop_memory(store, store.keys(first)[3:])
        assert ask(store, model, other, exact=True) == (plain(model, other), 3 * PAGE)
        with TierStoreCache(store, first, model=model) as cache:  # the index of prefixes still has the page
            assert cache.reused_tokens == 4 * PAGE - 1


def test_lossy_pages_held_by_another_request_are_not_used_for_an_exact_answer(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt = random_prompt(5 * PAGE + 2)
    expected = plain(model, prompt)
    with open_store(model, host=16, disk=tmp_path, codec="int4") as store:
        ask(store, model, prompt, exact=False)
        drop_memory(store, store.keys(prompt))
        with TierStoreCache(store, prompt, model=model) as holder:
            assert holder.reused_tokens >= 5 * PAGE
            assert ask(store, model, prompt, exact=True) == (expected, 0)
            assert store.match(store.keys(prompt), exact=True).num_pages == 0
        assert ask(store, model, prompt, exact=True) == (expected, 0)
        assert store.match(store.keys(prompt), exact=True).num_pages == 5
        store.check()


def test_exact_chat_stays_exact_after_its_pages_left_memory(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with (
        open_store(model, host=16, disk=tmp_path, codec="int4") as store,
        PrefixCache(store, model, exact=True) as cache,
    ):
        session = cache.session("a")
        for number in range(4):
            session.append(random_prompt(PAGE + 3, seed=number))
            expected = plain(model, list(session.tokens), max_new_tokens=5)
            assert session.generate(**ANSWER) == expected
            drop_memory(store, cache.keys(session.tokens))
        assert session.turns[-1].reused_tokens == 0


@pytest.mark.parametrize("exact", ["yes", 1, None])
def test_exact_must_be_a_bool(model: LlamaForCausalLM, exact: Any) -> None:
    with open_store(model) as store:
        with pytest.raises(TypeError, match=rf"exact must be True or False, got {exact!r}"):
            TierStoreCache(store, [1, 2, 3], model=model, exact=exact)
        with pytest.raises(TypeError, match=rf"exact must be True or False, got {exact!r}"):
            PrefixCache(store, model, exact=exact)


@pytest.mark.parametrize("seconds", [float("nan"), float("-inf"), "1", True])
def test_invalid_timeouts_and_deadlines_are_refused(model: LlamaForCausalLM, seconds: Any) -> None:
    with open_store(model) as store:
        for name in ("timeout_s", "deadline_s"):
            with pytest.raises(
                (TypeError, ValueError), match=rf"{name} must be a number of .*got {seconds!r}"
            ):
                TierStoreCache(store, [1, 2, 3], model=model, **{name: seconds})
        with pytest.raises(
            (TypeError, ValueError), match=rf"timeout_s must be a number of .*got {seconds!r}"
        ):
            PrefixCache(store, model, timeout_s=seconds)


def test_exact_request_ignores_lossy_pages_behind_the_window_but_not_in_it(
    tmp_path: Path,
) -> None:
    model = tiny_mistral()
    prompt = random_prompt(16 * PAGE + 3)
    behind = (16 * PAGE - WINDOW - ROLLBACK) // PAGE
    with open_store(model, host=40, disk=tmp_path, codec="int4") as store:
        expected = plain(model, prompt)
        ask(store, model, prompt, exact=False)
        keys = store.keys(prompt)
        drop_memory(store, keys[:behind])
        assert not store.match(keys).exact
        assert ask(store, model, prompt, exact=True) == (expected, 16 * PAGE + 2)
        drop_memory(store, keys[behind:])
        assert ask(store, model, prompt, exact=True) == (expected, 0)
        assert ask(store, model, prompt, exact=True)[1] >= 16 * PAGE


def test_page_whose_first_tokens_attend_to_lossy_pages_is_inexact(
    tmp_path: Path,
) -> None:
    model, size = tiny_mistral(), 128
    assert size > WINDOW + ROLLBACK, "the window is to leave the pages before it within the page"
    prompt = random_prompt(2 * size + 3)
    with open_store(model, hbm=6, host=6, disk=tmp_path, codec="int4", page_size=size) as store:
        ask(store, model, prompt, exact=False)
        drop_memory(store, store.keys(prompt))
        with TierStoreCache(store, prompt, model=model) as cache:
            assert cache.reused_tokens == 2 * size
            answer = generate(model, prompt, cache, max_new_tokens=size)
        (key,) = store.keys([*prompt, *answer])[2:]
        assert not store.match([key]).num_pages or not store.match([key]).exact


# -- a random walk of requests of both kinds, chats and evictions -------------------------------------------


class Walk:
    """Makes random requests (exact or not), chats and evictions.

    ``check`` compares exact pages with what the model computes.
    """

    def __init__(self, model: LlamaForCausalLM, store: TierStore, seed: int) -> None:
        self.model, self.store, self.random = model, store, Random(seed)
        self.known: list[list[int]] = [random_prompt(3 * PAGE + 4, seed=9)]
        self.cache = PrefixCache(store, model)
        self.session = self.cache.session("a")
        self.reference: dict[tuple[int, ...], torch.Tensor] = {}

    def prompt(self) -> list[int]:
        """Return a known sequence, cut at a random position, followed by a few new tokens."""
        start = self.random.choice(self.known)
        cut = self.random.randrange(1, len(start) + 1)
        return [
            *start[:cut],
            *(self.random.randrange(2, 90) for _ in range(self.random.choice([0, 3, PAGE]))),
        ]

    def ask(self, *, exact: bool) -> None:
        own = list(self.session.tokens)
        prompt = own if own and self.random.random() < 0.3 else self.prompt()[: 6 * PAGE]
        answer, _ = ask(self.store, self.model, prompt, exact=exact)
        if exact:
            assert answer == plain(self.model, prompt)
        self.known.append([*prompt, *answer])

    def chat(self) -> None:
        if len(self.session.tokens) > 6 * PAGE:
            self.session.drop()
            self.session = self.cache.session("a")
        if not self.session.tokens:
            self.session.append(self.prompt()[: 3 * PAGE])
        self.session.append([self.random.randrange(2, 90) for _ in range(3)])
        self.session.generate(**ANSWER)
        self.known.append(list(self.session.tokens))

    def drop(self) -> None:
        keys = self.store.keys(self.random.choice(self.known))
        if keys:
            first = self.random.randrange(len(keys))
            drop_memory(self.store, keys[first : first + self.random.choice([1, len(keys)])])

    def check(self) -> None:
        for tokens in self.known[-12:]:
            with self.store.acquire(self.store.keys(tokens), exact=True) as lease:
                if lease.wait(PATIENCE_S) is not LeaseState.READY or not lease.num_pages:
                    continue
                assert lease.exact
                expected = self.computed(tokens[: lease.num_pages * PAGE])
                for page, slot in enumerate(lease.slots):
                    found = page_tensor(self.store)[slot]
                    torch.testing.assert_close(
                        found, expected[:, :, page * PAGE : (page + 1) * PAGE], rtol=1e-3, atol=1e-3
                    )

    def computed(self, tokens: list[int]) -> torch.Tensor:
        """Return the K and V that the model computes without a store, ``[layers, 2, tokens, heads, dim]``."""
        if tuple(tokens) not in self.reference:
            self.model.set_attn_implementation("sdpa")
            with torch.no_grad():
                cache = self.model(torch.tensor([tokens]), use_cache=True).past_key_values
            self.model.set_attn_implementation(ATTENTION)
            pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
            self.reference[tuple(tokens)] = torch.stack(pairs).transpose(2, 3)
        return self.reference[tuple(tokens)]


def walk(model: LlamaForCausalLM, home: Path, seed: int, steps: int = 24) -> None:
    with open_store(model, hbm=48, host=32, disk=home, codec="int4") as store:
        course = Walk(model, store, seed)
        with course.cache:
            for _ in range(steps):
                act = course.random.choice(["exact", "any", "any", "chat", "chat", "drop", "drop", "drop"])
                if act in ("exact", "any"):
                    course.ask(exact=act == "exact")
                elif act == "chat":
                    course.chat()
                else:
                    course.drop()
                course.check()
                store.check()


def walk_often(model: LlamaForCausalLM, home: Path, walks: int) -> None:
    for seed in range(walks):
        walk(model, home / str(seed), seed)


def test_random_exact_requests_equal_what_the_model_computes(model: LlamaForCausalLM, tmp_path: Path) -> None:
    walk_often(model, tmp_path, walks=lanes.examples(1, 6))


def half_pages_are_copied_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "_copy_half_page", _with_any_page(prefix._copy_half_page))


def tails_are_exact(patch: pytest.MonkeyPatch) -> None:
    take = sequence.PagedSequence.take_tail

    def wrong(self: sequence.PagedSequence) -> Tail | None:
        tail = take(self)
        return None if tail is None else replace(tail, exact=True)

    patch.setattr(sequence.PagedSequence, "take_tail", wrong)


def _with_any_page(copy: Callable[..., None]) -> Callable[..., None]:
    def wrong(*given: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Lease, "exact", property(lambda self: False))
            copy(*given)

    return wrong


@pytest.mark.deep
@pytest.mark.parametrize(
    "plant",
    [half_pages_are_copied_as_they_are, tails_are_exact],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(
    model: LlamaForCausalLM, tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            walk_often(model, tmp_path, walks=40)
