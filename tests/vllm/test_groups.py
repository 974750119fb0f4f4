"""Tests of models with sliding windows in separate KV groups: answers equal those of vLLM without a connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import tiny_model
from tests.vllm.conftest import Oracle
from tests.vllm.runner import Engines, ask, blocks, check, connector, counts, fail_loads, reset, storm, talk
from tests.vllm.test_connector import EXTERNAL, cached, tiers, tokens_of

pytestmark = pytest.mark.vllm


def test_groups_with_windows_loaded_from_every_tier_match_plain_vllm(
    window_engines: Engines, window_oracle: Oracle, tmp_path: Path
) -> None:
    prompts, tokens, whole = tiny_model.prompts(8, 180), 40, [160] * 8
    expected = window_oracle(prompts, tokens)
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    places = tiers(tmp_path / "a", 300, tiny_model.PAGE_NBYTES, "64MiB")

    cold, _, host, found = window_engines.life(
        [ask(prompts, tokens), reset(), ask(prompts, tokens), counts()], transfer=connector(places)
    )
    assert "kv cache group sizes (32, 32, 32)" in window_engines.log()
    assert tokens_of(cold) == tokens_of(host) == expected
    assert cached(host) == whole
    assert found[EXTERNAL] == sum(whole)

    _, restarted, _, _, failing, storming, free, clean = window_engines.life(
        [
            fail_loads(0),
            ask(prompts, tokens),
            reset(),
            fail_loads(3),
            ask(prompts, tokens, together=True),
            storm(prompts, requests=60, tokens=tokens, seed=5, most=6),
            blocks(),
            check(),
        ],
        transfer=connector(
            places, kv_connector="FaultyConnector", kv_connector_module_path="tests.vllm.faulty"
        ),
        in_process=True,
        num_gpu_blocks_override=45,
        max_model_len=256,
    )
    assert tokens_of(restarted) == tokens_of(failing) == expected
    assert cached(restarted) == whole
    assert {answer["reason"] for answer in failing} == {"length"}
    assert min(cached(failing)) < 160
    assert storming["aborted"] > 10
    assert all(answer == expected[number] for number, answer in storming["answered"])
    assert free["free"] == free["usable"]
    assert clean == "clean"


def test_layers_that_share_kv_restored_from_every_tier_match_plain_vllm(
    shared_layer_engines: Engines, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--all-models"):
        pytest.skip("needs --all-models")
    engines, prompts, turns, tokens = (
        shared_layer_engines,
        tiny_model.prompts(6, 180),
        tiny_model.prompts(4, 100),
        24,
    )
    whole = [160] * 6
    plain, plain_turns = engines.life([ask(prompts, tokens), talk(turns, tokens, forget=False)])
    expected = tokens_of(plain)
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    places = tiers(tmp_path / "a", 300, tiny_model.PAGE_NBYTES, "64MiB")

    cold, _, host, _, together, talked, found, clean = engines.life(
        [
            ask(prompts, tokens),
            reset(),
            ask(prompts, tokens),
            reset(),
            ask(prompts, tokens, together=True),
            talk(turns, tokens, forget=True),
            counts(),
            check(),
        ],
        transfer=connector(places),
        in_process=True,
    )
    assert "kv cache group sizes (32, 32)" in engines.log()
    assert tokens_of(cold) == tokens_of(host) == tokens_of(together) == expected
    assert cached(host) == cached(together) == whole
    assert tokens_of(talked) == tokens_of(plain_turns)
    assert min(cached(talked)[1:]) > 0
    assert found[EXTERNAL] >= sum(whole) * 2
    assert clean == "clean"

    disk, _, failing = engines.life(
        [ask(prompts, tokens), reset(), ask(prompts, tokens, together=True)],
        transfer=connector(
            places, kv_connector="FaultyConnector", kv_connector_module_path="tests.vllm.faulty"
        ),
        in_process=True,
    )
    assert tokens_of(disk) == tokens_of(failing) == expected
    assert {answer["reason"] for answer in failing} == {"length"}
    assert min(cached(disk)) < 160 == max(cached(disk))

    (restarted,) = engines.life([ask(prompts, tokens)], transfer=connector(places))
    assert tokens_of(restarted) == expected
    assert cached(restarted) == whole
