"""Test that blocks are stored and loaded unchanged in the KV tensors that vLLM allocates for models that need a GPU."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.vllm.runner import ROOT, Engines

pytestmark = pytest.mark.vllm

V3_2, QWEN = 3 * 64 * (656 + 132), 2 * 128 * 2 * 64 * 2
PAGES = {
    "deepseek-v3.2 BLHNC": (["Kind"], 1, V3_2),
    "deepseek-v3.2 LBHNC": (["Kind"], 6, V3_2),
    "deepseek-v4 BLHNC": (["Kind", "Window", "Window"], 1, 2 * 65 * 576 + 3 * 576 + 64 * 132),
    "qwen3-next BLHNC": (["Kind", "State"], 1, 3 * QWEN - QWEN + 3 * 64 * 2 + 2 * 62 * 128 * 4),
    "qwen3-next LBHNC": (["Kind", "State"], 3, QWEN + 2 * (3 * 64 * 2 + 2 * 62 * 128 * 4)),
}


def test_every_layer_of_a_block_is_restored_in_every_vllm_layout(small_engines: Engines) -> None:
    ended = subprocess.run(
        [small_engines.python, "-m", "tests.vllm.laid_out"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    reports = json.loads(ended.stdout.splitlines()[-1])
    assert all(report["exact"] for report in reports.values())
    found = {name: (r["kinds"], r["pieces"], r["nbytes"]) for name, r in reports.items()}
    assert found == PAGES
