"""Tests of failing turns, sessions used after their end, and pages that do not fit: no page is lost or wrong."""

# mypy: allow-untyped-calls
from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.test_hf_sessions import ANSWER, Clock, owned
from tests.adapters.tiny import PAGE, ask, generate, open_store, plain, random_prompt, tiny_llama, watch
from tierstore.adapters.huggingface import PrefixCache, TierStoreCache, cache_argument


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_appended_tokens_that_differ_from_the_answer_are_computed_again(model: LlamaForCausalLM) -> None:
    """The session's partially filled page is valid only if the sequence begins with the tokens fed to the model."""
    prompt, answer = random_prompt(PAGE - 2), [5, 6, *[7] * (PAGE + 3)]
    with open_store(model) as store, PrefixCache(store, model) as cache, torch.no_grad():
        session = cache.session("a")
        session.append(prompt)
        with session.turn() as turn:
            model(torch.tensor([prompt + answer]), **{cache_argument(model): turn})
        assert session.keeps_page
        ask(store, model, [*prompt, 5, 9, *answer[2:]], max_new_tokens=1)
        session.append([5, 9, *answer[2:], 8])
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        with watch(model) as fed:
            assert session.generate(**ANSWER) == expected
        assert fed.widths[0] == len(prompt + answer) + 1 - 2 * PAGE


def test_page_of_a_turn_that_could_not_begin_is_released(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(PAGE + 2))
        session.generate(**ANSWER)
        assert owned(store) == 1
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="attn_implementation"):
            session.generate(**ANSWER)
        model.set_attn_implementation("tierstore")
        assert owned(store) == 0
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected


@pytest.mark.parametrize("end", ["drop", "expire", "close"])
def test_a_dropped_or_expired_session_still_answers_but_keeps_no_page(
    model: LlamaForCausalLM, end: str
) -> None:
    clock = Clock()
    with open_store(model) as store, PrefixCache(store, model, clock=clock) as cache:
        session = cache.session("a", ttl_s=10.0)
        session.append(random_prompt(PAGE + 2))
        session.generate(**ANSWER)
        clock.now += 11.0
        {"drop": session.drop, "expire": cache.expire, "close": cache.close}[end]()
        successor = cache.session("a", ttl_s=10.0)
        successor.append(random_prompt(3, seed=4))
        successor.generate(**ANSWER)
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected
        assert not session.keeps_page
        assert cache.session("a") is successor
        assert owned(store) == 1


def test_session_dropped_within_a_turn_keeps_no_page(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(PAGE + 2))
        with session.turn() as turn:
            generate(model, list(session.tokens), turn)
            session.drop()
        assert owned(store) == 0
        assert cache.session("a") is not session


def test_turn_that_raises_releases_everything(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(2 * PAGE + 2))

        def interrupted() -> None:
            with session.turn() as turn:
                generate(model, list(session.tokens), turn)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert owned(store) == 0
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected
        assert session.turns[-1].reused_tokens > 2 * PAGE


def test_tail_for_several_prompts_is_refused_and_released(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(PAGE + 3)
    with open_store(model) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            generate(model, prompt, cache)
            tail = cache.take_tail()
        assert owned(store) == 1
        with pytest.raises(ValueError, match="tail needs a single prompt, got 2 prompts"):
            TierStoreCache(store, torch.tensor([prompt] * 2), model=model, tail=tail)
        assert owned(store) == 0


def test_generating_with_scores_gives_the_same_answer(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(PAGE + 2))
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(return_dict_in_generate=True, output_scores=True, **ANSWER) == expected
