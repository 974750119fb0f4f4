"""Test TierStore's NVMe tier below vLLM's own CPU tier, in real engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Oracle
from tests.vllm.damage import flip_every
from tests.vllm.prompts import documents
from tests.vllm.runner import Engines, ask, beside, counts, reset, tiers

pytestmark = pytest.mark.vllm

CHUNK = 30 * 32 * 2 * 3 * 64 * 4
"""Bytes of a block: layers x tokens x 2 (K and V) x heads x head dimension x bytes per number."""

PROMPTS = documents(6, 12)
TOKENS = 24
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 512}


def secondary(home: Path) -> dict[str, object]:
    return {
        "type": "TierStoreTier",
        "module_path": "tierstore.adapters.vllm_tier",
        "config": {"nvme": {"path": str(home), "capacity": "256MiB", "payload": "extents"}},
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
