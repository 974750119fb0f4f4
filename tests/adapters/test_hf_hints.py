"""Test prefetching for chats: after its usual pause, a session finds its pages in HBM. Answers do not change."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from prefetch.prefetcher import PrefetchLoop
from tests.adapters.tiny import PAGE, open_store, plain, random_prompt, tiny_llama
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import PrefixCache
from tierstore.config import PrefetchConfig
from tierstore.store import TierStore
from tierstore.types import Tier

ANSWER: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
PAUSE_S = 30.0


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def pause(store: TierStore, clock: Clock, loop: PrefetchLoop | None, tokens: tuple[int, ...]) -> list[Tier]:
    """Demote the session's pages to disk, advance the clock by a pause, and return the tiers that then hold them."""
    keys = store.keys(tokens[: len(tokens) - len(tokens) % PAGE])
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    for _ in range(10):
        if loop is not None:
            loop.turn(0.0)
        assert store.drain(PATIENCE_S)
        clock.now += PAUSE_S / 10
    return list(store.match(keys).tiers)


@pytest.mark.parametrize("prefetched", [True, False])
def test_a_session_finds_its_pages_in_hbm_once_its_pauses_are_known(
    model: LlamaForCausalLM, tmp_path: Path, prefetched: bool
) -> None:
    clock = Clock()
    with open_store(model, host=32, disk=tmp_path) as store, PrefixCache(store, model, clock=clock) as cache:
        loop = PrefetchLoop(store, PrefetchConfig(share_of_host=1.0), None, clock) if prefetched else None
        session, found = cache.session("a"), []
        for number in range(6):
            session.append(random_prompt(PAGE, seed=number))
            expected = plain(model, list(session.tokens), max_new_tokens=4)
            assert session.generate(**ANSWER) == expected
            found.append(set(pause(store, clock, loop, session.tokens)))
        usual = {Tier.HBM} if prefetched else {Tier.NVME}
        assert found == [{Tier.NVME}] * 3 + [usual] * 3
        store.check()


def test_ended_session_is_no_longer_expected(model: LlamaForCausalLM, tmp_path: Path) -> None:
    clock = Clock()
    with open_store(model, host=32, disk=tmp_path) as store, PrefixCache(store, model, clock=clock) as cache:
        loop = PrefetchLoop(store, PrefetchConfig(), None, clock)
        for name in ("dropped", "expired", "closed"):
            session = cache.session(name, ttl_s=100.0)
            for number in range(4):
                clock.now += PAUSE_S
                session.append(random_prompt(PAGE, seed=number))
                session.generate(**ANSWER)
            loop.turn(0.0)
            assert len(loop.expected) == 1
            if name == "dropped":
                session.drop()
            elif name == "expired":
                clock.now += 101.0
                cache.expire()
            else:
                cache.close()
            loop.turn(0.0)
            assert len(loop.expected) == 0, name
