"""Test ``TierStoreConnector`` together with NIXL: one engine prefills and another one decodes, over loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vllm import tiny_model
from tests.vllm.conftest import Oracle
from tests.vllm.runner import Engines, ask, connector, counts, nixl, remote, reset, reset_both, several
from tests.vllm.test_connector import EXTERNAL, cached, tiers, tokens_of

pytestmark = pytest.mark.vllm


def test_two_engines_prefill_and_decode_over_nixl_with_tiers_in_both(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path
) -> None:
    found = subprocess.run([small_engines.python, "-c", "import nixl"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("this Python has no nixl: make test-vllm installs it")
    prompts, tokens = tiny_model.prompts(6, 180), 8
    expected = small_oracle(prompts, tokens)
    ours = connector(tiers(tmp_path / "p", 100, tiny_model.PAGE_NBYTES, "64MiB"))
    theirs = connector(tiers(tmp_path / "d", 100, tiny_model.PAGE_NBYTES, "64MiB"))
    first, _, again, _, alone, counted = small_engines.life(
        [
            remote(prompts, tokens),
            reset_both(),
            remote(prompts, tokens),
            reset(),
            ask(prompts, tokens),
            counts(),
        ],
        prefill=several(ours, nixl("kv_producer")),
        transfer=several(nixl("kv_consumer"), theirs),
    )
    assert tokens_of(first) == tokens_of(again) == tokens_of(alone) == expected
    assert [answer["prefiller_cached"] for answer in first] == [0] * 6
    assert [answer["prefiller_cached"] for answer in again] == [160] * 6, "from the tiers of the first engine"
    assert cached(alone) == [160] * 6
    assert counted[EXTERNAL] == 6 * (180 + 180 + 160), (
        "twice over NIXL, once from the tiers of the second engine"
    )
