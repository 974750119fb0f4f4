"""Test that plain vLLM always gives the same answer to a prompt, and different answers to different prompts.

Other tests of real engines rely on this.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.vllm.conftest import Oracle
from tests.vllm.prompts import documents
from tests.vllm.runner import Engines, ask, counts, reset

pytestmark = pytest.mark.vllm


def test_plain_vllm_answers_equally_with_and_without_its_own_cache(engines: Engines, oracle: Oracle) -> None:
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


def test_the_check_finds_nothing_wrong_with_this_vllm(engines: Engines) -> None:
    command = [str(engines.python), "-c", "from tierstore.cli import main; main()", "vllm-check", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["ok"] is True
