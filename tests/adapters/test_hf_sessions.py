"""Tests of chats: a turn computes its new tokens and one more, a fork shares the common pages, and sessions expire."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.tiny import (
    PAGE,
    generate,
    open_store,
    plain,
    plain_batch,
    random_prompt,
    tiny_llama,
    watch,
)
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import PrefixCache, TierStoreCache
from tierstore.store import TierStore
from tierstore.types import Tier

ANSWER: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def owned(store: TierStore) -> int:
    tiers: Any = store.stats()["tiers"]
    return int(tiers["HBM"]["owned"])


def test_each_of_six_turns_computes_only_new_tokens_and_one_more(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        for number, length in enumerate((2 * PAGE + 3, 4, 1, PAGE, PAGE - 1, 3)):
            session.append(random_prompt(length, seed=number))
            with watch(model) as fed:
                expected_prompt = list(session.tokens)
                answer = session.generate(**ANSWER)
            assert answer == plain(model, expected_prompt, max_new_tokens=5)
            turn = session.turns[-1]
            assert turn.new_tokens == length
            assert turn.computed_tokens == fed.widths[0] == length + (number > 0)
            assert turn.copied_tokens == 0
            store.check()


def test_pad_token_at_the_end_of_a_conversation_is_a_token(model: LlamaForCausalLM) -> None:
    """Without a mask, transformers treats a pad token as padding, but a model may generate it as part of an answer."""
    said = [*random_prompt(2 * PAGE, seed=15), 0]
    without_mask = plain_batch(model, torch.tensor([said]), **ANSWER)[0, len(said) :].tolist()
    expected = plain(model, said, **ANSWER)
    assert expected != without_mask, "the mask does not matter: this shows nothing"
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(said)
        assert session.generate(**ANSWER) == expected


def test_fork_inside_a_page_of_an_earlier_turn_copies_that_page(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        for number in range(5):
            session.append(random_prompt(PAGE + 1, seed=number))
            session.generate(**ANSWER)
        at = 3 * (PAGE + 1) + 2 * 5 + 2
        assert at % PAGE, "the fork is to be inside a page"
        fork = session.fork("b", at)
        fork.append(random_prompt(4, seed=9))
        assert fork.generate(**ANSWER) == plain(
            model, [*session.tokens[:at], *random_prompt(4, seed=9)], max_new_tokens=5
        )
        turn = fork.turns[-1]
        assert (turn.computed_tokens, turn.copied_tokens) == (4, at % PAGE)
        # The fork does not affect the first session.
        session.append(random_prompt(3, seed=10))
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected
        assert session.turns[-1].computed_tokens == 3 + 1


def test_fork_inside_the_half_full_page_copies_it(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(PAGE + 2))
        session.generate(**ANSWER)
        assert (len(session.tokens) - 1) % PAGE == 6
        fork = session.fork("b", 2 * PAGE - 3)
        assert owned(store) == 2
        fork.append(random_prompt(2, seed=3))
        expected = plain(model, list(fork.tokens), max_new_tokens=5)
        assert fork.generate(**ANSWER) == expected
        assert fork.turns[-1].computed_tokens == 2
        session.append([5])
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected
        assert session.turns[-1].computed_tokens == 2


def test_turns_continue_after_their_pages_were_demoted(model: LlamaForCausalLM) -> None:
    with open_store(model, host=32) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(3 * PAGE + 2))
        session.generate(**ANSWER)
        keys = store.keys(session.tokens)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        session.append([7, 8])
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected
        assert session.turns[-1].computed_tokens == 3


def test_turn_after_its_pages_were_evicted_computes_them_again(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(3 * PAGE + 2))
        session.generate(**ANSWER)
        store.evict(store.keys(session.tokens)[1:])
        session.append([7, 8])
        expected = plain(model, list(session.tokens), max_new_tokens=5)
        assert session.generate(**ANSWER) == expected
        assert session.turns[-1].reused_tokens == PAGE
        assert owned(store) == session.keeps_page


def test_session_expires_and_releases_its_page(model: LlamaForCausalLM) -> None:
    clock = Clock()
    with open_store(model) as store, PrefixCache(store, model, clock=clock) as cache:
        session = cache.session("a", ttl_s=10.0)
        session.append(random_prompt(PAGE + 2))
        session.generate(**ANSWER)
        assert owned(store) == 1
        clock.now += 9.9
        assert cache.session("a", ttl_s=10.0) is session
        session.retain(10.0)
        clock.now += 9.9
        assert cache.expire() == 0
        clock.now += 0.2
        assert cache.expire() == 1
        assert owned(store) == 0
        assert cache.session("a").tokens == ()
        # The session's sealed pages are still found by their tokens.
        with cache.request(random_prompt(PAGE + 2)) as request:
            assert request.reused_tokens == PAGE


def test_dropped_session_releases_everything_and_its_pages_are_evicted_first(model: LlamaForCausalLM) -> None:
    with open_store(model, hbm=8) as store, PrefixCache(store, model) as cache:
        for name in ("old", "dropped"):
            session = cache.session(name)
            session.append(random_prompt(2 * PAGE, seed=len(name)))
            session.generate(do_sample=False, max_new_tokens=PAGE + 1, pad_token_id=0)
        session.drop()
        session.drop()
        assert owned(store) == 0
        keys = store.keys(session.tokens)
        store.free(store.allocate(4))
        assert store.match(keys).num_pages < 3
        assert store.match(store.keys(cache.session("old").tokens)).num_pages == 3


def test_half_full_pages_of_idle_sessions_take_at_most_a_share_of_hbm(model: LlamaForCausalLM) -> None:
    with open_store(model, hbm=32) as store, PrefixCache(store, model) as cache:
        sessions = []
        for number in range(7):
            sessions.append(cache.session(f"s{number}"))
            sessions[-1].append(random_prompt(3, seed=number))
            sessions[-1].generate(do_sample=False, max_new_tokens=2, pad_token_id=0)
        assert owned(store) == 32 // 8
        assert [each.keeps_page for each in sessions] == [False] * 3 + [True] * 4
        sessions[0].append([9])
        expected = plain(model, list(sessions[0].tokens), max_new_tokens=5)
        assert sessions[0].generate(**ANSWER) == expected


def test_conversation_without_sessions_is_reused_up_to_its_last_full_page(model: LlamaForCausalLM) -> None:
    tokens = random_prompt(2 * PAGE + 3)
    with open_store(model) as store:
        for number in range(6):
            with TierStoreCache(store, tokens, model=model) as cache:
                if number:
                    assert cache.reused_tokens == (len(tokens) - 4 - 1) // PAGE * PAGE
                answer = generate(model, tokens, cache, max_new_tokens=5)
            assert answer == plain(model, tokens, max_new_tokens=5)
            tokens = tokens + answer + random_prompt(4, seed=number)


def test_a_session_refuses_empty_conversations_several_answers_and_impossible_forks(
    model: LlamaForCausalLM,
) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        with pytest.raises(ValueError, match="empty"):
            session.generate(**ANSWER)
        session.append([5, 6, 7])
        with pytest.raises(ValueError, match="one answer per turn"):
            session.generate(num_return_sequences=2, do_sample=True)
        with pytest.raises(ValueError, match=r"must be from 0 to 3 \(the length of the session\), got 4"):
            session.fork("b", 4)
        with pytest.raises(ValueError, match="already"):
            session.fork("a")
        with session.turn(), pytest.raises(ValueError, match="turn in progress"), session.turn():
            pass


def test_session_over_a_closed_store_can_still_be_dropped(model: LlamaForCausalLM) -> None:
    with open_store(model) as store:
        cache = PrefixCache(store, model)
        session = cache.session("a")
        session.append(random_prompt(PAGE + 2))
        session.generate(**ANSWER)
        cache.close()
    session.drop()
    cache.close()


def test_tokens_that_no_turn_could_compute_are_refused_when_appended(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        for tokens, complaint in (
            ([5, 97], r"vocabulary \(0 to 96\)"),
            ([[5], [6]], "a single conversation"),
        ):
            with pytest.raises(ValueError, match=complaint):
                session.append(tokens)  # type: ignore[arg-type]
        assert session.tokens == ()
        with pytest.raises(ValueError, match="storing must be one of all, memory-only"):
            PrefixCache(store, model, storing="none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ttl_s", "error"),
    [(-1, ValueError), (float("nan"), ValueError), ("600", TypeError), (None, TypeError), (True, TypeError)],
)
def test_invalid_ttl_is_refused_and_changes_nothing(
    model: LlamaForCausalLM, ttl_s: Any, error: type[Exception]
) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a", ttl_s=60)
        for call in (lambda: cache.session("a", ttl_s=ttl_s), lambda: session.retain(ttl_s)):
            with pytest.raises(error, match=r"ttl_s must be a number of seconds"):
                call()
        assert session.ttl_s == 60
        with pytest.raises(error):
            cache.session("b", ttl_s=ttl_s)
        with pytest.raises(TypeError, match="session_id must be a string, got 7"):
            cache.session(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [True, 1.0, "1", -1, 9])
def test_fork_at_an_invalid_token_count_is_refused_and_creates_no_session(
    model: LlamaForCausalLM, count: Any
) -> None:
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("a")
        session.append(random_prompt(8))
        with pytest.raises((TypeError, ValueError), match=r"must be "):
            session.fork("b", count)
        three: Any = np.int64(3)
        assert session.fork("b", three).tokens == session.tokens[:3]
        with pytest.raises(TypeError, match="session_id must be a string, got 7"):
            session.fork(7)  # type: ignore[arg-type]


def test_a_session_may_last_forever(model: LlamaForCausalLM) -> None:
    clock = Clock()
    with open_store(model) as store, PrefixCache(store, model, clock=clock) as cache:
        session = cache.session("a", ttl_s=float("inf"))
        session.append(random_prompt(PAGE + 1))
        session.generate(**ANSWER)
        clock.now += 1e12
        assert cache.session("a") is session
