"""Test that an engine that has slept computes its pages again, and gives the same answers as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import tiny_model
from tests.vllm.conftest import Oracle
from tests.vllm.runner import Engines, ask, check, connector, reset, sleep

pytestmark = pytest.mark.vllm


def test_engine_recomputes_and_stores_again_after_sleep(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.prompts(6, 180), 8
    expected = small_oracle(prompts, tokens)
    config = {
        "host": {"capacity": 100 * tiny_model.PAGE_NBYTES},
        "nvme": {"path": str(tmp_path / "nvme"), "capacity": "64MiB", "payload": "extents"},
    }
    cold, _, after, _, hit, clean = small_engines.life(
        [
            ask(prompts, tokens),
            sleep(),
            ask(prompts, tokens),
            reset(),
            ask(prompts, tokens),
            check(),
        ],
        transfer=connector(config),
        in_process=True,
    )
    for answers in (cold, after, hit):
        assert [answer["tokens"] for answer in answers] == expected
    assert [answer["cached"] for answer in after] == [0] * len(prompts)
    assert [answer["cached"] for answer in hit] == [160] * len(prompts)
    assert clean == "clean"
