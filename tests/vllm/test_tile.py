"""Tests with more documents than the engine's pool holds, in an order without LRU hits, beside vLLM's own tiers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.nvme.rig import on_disk
from tests.vllm.conftest import Oracle
from tests.vllm.prompts import documents
from tests.vllm.runner import Engines, ask, connector, counts, tiers

pytestmark = pytest.mark.vllm

PAGE = 30 * 32 * 2 * 3 * 64 * 4
"""Bytes of a block: layers x tokens x 2 (K and V) x heads x head dimension x bytes per element."""

DOCUMENTS = documents(12, 48)
TOKENS = 8
POOL = 3 * 26
"""Number of blocks in the engine's pool: enough for three documents and their answers."""

HOST = 6 * 25
"""Number of pages in host memory: enough for half of the documents."""


def test_twelve_documents_hit_from_their_second_round_on_and_from_the_first_after_a_restart(
    engines: Engines, oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = oracle(DOCUMENTS, TOKENS)
    ours = {
        "host": {"capacity": HOST * PAGE},
        "nvme": {"path": str(tmp_path / "ours"), "capacity": "1GiB", "payload": "extents"},
    }
    fs = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    lines = {
        "ours": (connector(ours), tmp_path / "ours"),
        "vLLM's fs tier": (tiers(HOST, PAGE, fs), tmp_path / "fs"),
    }
    rows = {name: _played(engines, expected, line, home) for name, (line, home) in lines.items()}
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{name}: {json.dumps(row)}" for name, row in rows.items()) + "\n")
    assert rows["ours"]["hit rate, round 2"] >= 0.95
    assert rows["ours"]["hit rate, restarted"] >= 0.95
    assert rows["ours"]["on disk"] <= 1 << 30


def _played(
    engines: Engines, expected: list[list[int]], line: dict[str, Any], home: Path
) -> dict[str, float]:
    first, before, second, after = engines.life(
        [ask(DOCUMENTS, TOKENS), counts(), ask(DOCUMENTS, TOKENS), counts()],
        transfer=line,
        num_gpu_blocks_override=POOL,
    )
    restarted, again = engines.life(
        [ask(DOCUMENTS, TOKENS), counts()], transfer=line, num_gpu_blocks_override=POOL
    )
    for answers in (first, second, restarted):
        assert [answer["tokens"] for answer in answers] == expected
        assert min(answer["prompt"] for answer in answers) >= 700
    return {
        "first token, cold": _first(first),
        "first token, round 2": _first(second),
        "first token, restarted": _first(restarted),
        "hit rate, round 2": _rate(before, after),
        "hit rate, restarted": _rate({}, again),
        "on disk": on_disk(home),
    }


def _first(answers: list[dict[str, Any]]) -> float:
    return round(float(median(answer["first_token_s"] for answer in answers)), 4)


def _rate(before: dict[str, float], after: dict[str, float]) -> float:
    hits, queries = (after[name] - before.get(name, 0.0) for name in (_HITS, _QUERIES))
    return round(hits / queries, 4)


_HITS = "vllm:external_prefix_cache_hits"
_QUERIES = "vllm:external_prefix_cache_queries"
