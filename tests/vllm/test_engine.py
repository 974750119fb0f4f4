"""The tests' own ground: plain vLLM answers alike however it is asked, and what each text says matters."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Oracle
from tests.vllm.prompts import documents
from tests.vllm.runner import Engines, ask, counts, reset

pytestmark = pytest.mark.vllm


def test_plain_vllm_answers_alike_with_and_without_its_own_cache(engines: Engines, oracle: Oracle) -> None:
    prompts = documents(6, 12)
    expected = oracle(prompts, 24)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    cold, warm, _, together, found = engines.life(
        [ask(prompts, 24), ask(prompts, 24), reset(), ask(prompts, 24, together=True), counts()],
        in_process=True,
    )
    for answers in (cold, warm, together):
        assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in cold] == [0] * len(prompts)
    assert all(answer["cached"] >= answer["prompt"] - 40 for answer in warm)
    assert [answer["cached"] for answer in together] == [0] * len(prompts)
    assert found["vllm:external_prefix_cache_hits"] == 0
