"""Test TierStore's NVMe tier below vLLM's own CPU tier, in real engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Oracle
from tests.vllm.damage import flip_every
from tests.vllm.hybrid_engines import Hybrid
from tests.vllm.prompts import documents
from tests.vllm.runner import Engines, ask, beside, counts, reset, talk, tiers
from tests.vllm.test_connector import cached, tokens_of

pytestmark = pytest.mark.vllm

CHUNK = 30 * 32 * 2 * 3 * 64 * 4
"""Bytes of a block: layers x tokens x 2 (K and V) x heads x head dimension x bytes per element."""

PROMPTS = documents(6, 12)
TOKENS = 24
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 512}


STATES_CHUNK = 128 * 2 * 2 * 32 * 4
"""Bytes of a block of Nemotron-H, whose states have blocks of the same size as attention."""


def secondary(home: Path, **more: object) -> dict[str, object]:
    return {
        "type": "TierStoreTier",
        "module_path": "tierstore.adapters.vllm_tier",
        "config": {"nvme": {"path": str(home), "capacity": "256MiB", "payload": "extents"}},
        **more,
    }


def test_secondary_tier_answers_like_plain_vllm_hits_after_a_restart_and_recomputes_damage(
    engines: Engines, oracle: Oracle, tmp_path: Path
) -> None:
    expected = oracle(PROMPTS, TOKENS)
    home = tmp_path / "nvme"
    line = tiers(20, CHUNK, secondary(home))

    cold, again, _, third, found = engines.life(
        [ask(PROMPTS, TOKENS), ask(PROMPTS, TOKENS), reset(), ask(PROMPTS, TOKENS), counts()],
        transfer=line,
        **SMALL,
    )
    for answers in (cold, again, third):
        assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in again] == [192] * len(PROMPTS)
    assert found["vllm:kv_offload_tiering_read_bytes"] >= len(PROMPTS) * 6 * CHUNK
    assert found['vllm:kv_offload_tiering_chunk_hits{"tier": "1:TierStoreTier"}'] > 0

    assert flip_every(home, 13, CHUNK) > 0
    answers, second, found = engines.life(
        [
            ask(PROMPTS, TOKENS),
            beside(engines.case([ask(PROMPTS[:1], 1)], transfer=line, **SMALL), tmp_path / "second"),
            counts(),
        ],
        transfer=line,
        in_process=True,
        **SMALL,
    )
    assert [answer["tokens"] for answer in answers] == expected
    cached = [answer["cached"] for answer in answers]
    assert max(cached) == 192
    assert min(cached) < 192
    assert found["vllm:kv_offload_tiering_promotion_job_failures"] > 0
    assert second["code"] != 0
    assert re.search(r"nvme\.path|in use", second["said"])

    (after,) = engines.life([ask(PROMPTS, TOKENS)], transfer=line, in_process=True, **SMALL)
    assert [(answer["tokens"], answer["cached"]) for answer in after] == [
        (tokens, 192) for tokens in expected
    ]


def test_secondary_tier_restores_recurrent_states_and_recomputes_damage(
    hybrid: Callable[[str], Hybrid], tmp_path: Path
) -> None:
    model = hybrid("Nemotron-H")
    prompts, expected, whole = model.prompts, model.plain.answers, [model.whole] * 4
    home = tmp_path / "nvme"
    dtypes = {"state_dtypes": ["float32", "auto", "auto"]}
    line = tiers(200, STATES_CHUNK, secondary(home, **dtypes))
    with pytest.raises(AssertionError, match="state_dtypes is missing"):
        model.life(ask(prompts, 1), transfer=tiers(200, STATES_CHUNK, secondary(home)))

    cold, _, host, written = model.life(
        ask(prompts, TOKENS), reset(), ask(prompts, TOKENS), counts(), transfer=line
    )
    assert tokens_of(cold) == tokens_of(host) == expected
    assert cached(host) == whole
    assert written["vllm:kv_offload_tiering_write_bytes"] >= 4 * STATES_CHUNK * len(prompts)

    disk, _, turns, found = model.life(
        ask(prompts, TOKENS), reset(), talk(model.turns, TOKENS, forget=True), counts(), transfer=line
    )
    assert tokens_of(disk) == expected
    assert cached(disk) == whole
    assert found["vllm:kv_offload_tiering_read_bytes"] >= 4 * STATES_CHUNK * len(prompts)
    assert tokens_of(turns) == tokens_of(model.plain.turns)
    assert cached(turns) == cached(model.plain.turns)

    assert flip_every(home, 3, STATES_CHUNK) > 0
    damaged, found = model.life(ask(prompts, TOKENS), counts(), transfer=line)
    assert tokens_of(damaged) == expected
    assert min(cached(damaged)) < model.whole
    assert found["vllm:kv_offload_tiering_promotion_job_failures"] > 0
