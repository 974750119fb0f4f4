"""Test decode context parallelism with the scheduler of real vLLM. The ranks have no model: see ``context_ranks``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import tiny_model
from tests.vllm.runner import Engines, ask, blocks, connector, counts, fail_loads, reset, storm
from tests.vllm.test_connector import EXTERNAL, cached, tiers, tokens_of

pytestmark = pytest.mark.vllm

PAGE_NBYTES = 2 * 32 * 2 * 8 * 4
"""Bytes of a rank's part of a page: layers x tokens x 2 (K and V) x head dimension x bytes per element."""


def divided(ranks: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "distributed_executor_backend": f"tests.vllm.context_ranks.{ranks}",
        "tensor_parallel_size": size,
        "decode_context_parallel_size": size,
        "cp_kv_cache_interleave_size": 4,
        "in_process": True,
        **more,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_all_ranks_loaded_from_every_tier_match_plain_vllm(
    size: int, single_head_engines: Engines, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if size > 2 and not request.config.getoption("--all-models"):
        pytest.skip("needs --all-models")
    engines, engine = single_head_engines, divided("Ranks", size)
    prompts, tokens = tiny_model.prompts(8, 180), 12
    hit = 179 // (32 * size) * 32 * size
    (plain,) = engines.life([ask(prompts, tokens)], **engine)
    expected = tokens_of(plain)
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    places = tiers(tmp_path / "a", 300 * size, PAGE_NBYTES, "64MiB")

    cold, _, host, found = engines.life(
        [ask(prompts, tokens), reset(), ask(prompts, tokens), counts()], transfer=connector(places), **engine
    )
    assert tokens_of(cold) == tokens_of(host) == expected
    assert cached(host) == [hit] * 8
    assert found[EXTERNAL] == 8 * hit

    _, restarted, _, _, failing, storming, free = engines.life(
        [
            fail_loads(0),
            ask(prompts, tokens),
            reset(),
            fail_loads(3),
            ask(prompts, tokens, together=True),
            storm(prompts, requests=60, tokens=tokens, seed=5, most=6),
            blocks(),
        ],
        transfer=connector(
            places, kv_connector="FaultyConnector", kv_connector_module_path="tests.vllm.faulty"
        ),
        **engine | {"num_gpu_blocks_override": 24, "max_model_len": 256},
    )
    assert tokens_of(restarted) == tokens_of(failing) == expected
    assert cached(restarted) == [hit] * 8
    assert {answer["reason"] for answer in failing} == {"length"}
    assert "Recovered from KV load failure" in engines.log()
    assert storming["aborted"] > 10
    assert all(answer == expected[number] for number, answer in storming["answered"])
    assert free["free"] == free["usable"]

    (other,) = engines.life(
        [ask(prompts, tokens)], transfer=connector(places), **engine | {"cp_kv_cache_interleave_size": 8}
    )
    assert tokens_of(other) == expected
    assert cached(other) == [0] * 8, "these pages were distributed in pieces of another size"


def test_layers_that_vllm_does_not_distribute_have_smaller_blocks(
    single_head_engines: Engines, tmp_path: Path
) -> None:
    engines, engine = single_head_engines, divided("RanksWithReplicatedLayers")
    prompts, tokens = tiny_model.prompts(8, 180), 12
    (plain,) = engines.life([ask(prompts, tokens)], **engine)
    assert "kv cache group sizes (64, 32)" in engines.log()
    expected = tokens_of(plain)

    cold, _, host, storming, free = engines.life(
        [
            ask(prompts, tokens),
            reset(),
            ask(prompts, tokens),
            storm(prompts, requests=60, tokens=tokens, seed=5, most=6),
            blocks(),
        ],
        transfer=connector(tiers(tmp_path / "a", 600, PAGE_NBYTES, "64MiB")),
        **engine | {"num_gpu_blocks_override": 48, "max_model_len": 256},
    )
    assert tokens_of(cold) == tokens_of(host) == expected
    assert cached(host) == [128] * 8
    assert storming["aborted"] > 10
    assert all(answer == expected[number] for number, answer in storming["answered"])
    assert free["free"] == free["usable"]
