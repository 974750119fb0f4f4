"""Tests of engines that only store, only load, or have no prefix caching, and requests that must not use cached KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import tiny_model
from tests.vllm.conftest import Oracle
from tests.vllm.damage import flip_every
from tests.vllm.runner import (
    Engines,
    ask,
    blocks,
    check,
    connector,
    counts,
    files,
    held,
    prompt_logprobs,
    reset,
    rest,
)
from tests.vllm.test_connector import EXTERNAL, cached, tiers, tokens_of
from tierstore.nvme.inspection import inspect

pytestmark = pytest.mark.vllm


def test_a_producer_only_stores_and_a_consumer_only_loads(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path
) -> None:
    every, tokens = tiny_model.prompts(12, 180), 8
    of_all = small_oracle(every, tokens)
    prompts, others, expected, of_others = every[:6], every[6:], of_all[:6], of_all[6:]
    (plain,) = small_engines.life([prompt_logprobs(prompts)], in_process=True)
    config = tiers(tmp_path / "a", 100, tiny_model.PAGE_NBYTES, "64MiB")

    cold, _, again, _, found, clean = small_engines.life(
        [ask(prompts, tokens), reset(), ask(prompts, tokens), rest(), counts(), check()],
        transfer=connector(config, kv_role="kv_producer"),
        in_process=True,
    )
    assert tokens_of(cold) == tokens_of(again) == expected
    assert cached(again) == [0] * 6
    assert found[EXTERNAL] == 0
    assert clean == "clean"

    before, hit, _, logprobs, new, _, _, forgotten, _, found, free, clean, after = small_engines.life(
        [
            files(tmp_path / "a"),
            ask(prompts, tokens),
            reset(),
            prompt_logprobs(prompts),
            ask(others, tokens),
            rest(),
            reset(),
            ask(others, tokens),
            rest(),
            counts(),
            blocks(),
            check(),
            files(tmp_path / "a"),
        ],
        transfer=connector(config, kv_role="kv_consumer"),
        in_process=True,
    )
    assert [each["cached"] for each in logprobs] == [0] * 6
    assert all(len(each["logprobs"]) == 179 for each in logprobs)
    assert [each["logprobs"] for each in logprobs] == [each["logprobs"] for each in plain]
    assert tokens_of(hit) == expected
    assert cached(hit) == [160] * 6
    assert tokens_of(new) == tokens_of(forgotten) == of_others
    assert cached(forgotten) == [0] * 6
    assert found[EXTERNAL] == 6 * 160
    assert free["free"] == free["usable"]
    assert clean == "clean"
    assert _data(before) == _data(after)


def _data(digests: dict[str, str]) -> dict[str, str]:
    """Remove the digests of LMDB lock files, which change whenever a process opens the directory."""
    return {name: digest for name, digest in digests.items() if Path(name).name != "lock.mdb"}


def test_model_without_prefix_caching_answers_unchanged_and_logs_why_nothing_hits(
    mla_engines: Engines, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.prompts(4, 180), 24
    (plain,) = mla_engines.life([ask(prompts, tokens)], in_process=True)
    cold, again, found, clean = mla_engines.life(
        [ask(prompts, tokens), ask(prompts, tokens), counts(), check()],
        transfer=connector(tiers(tmp_path / "a", 100, tiny_model.PAGE_NBYTES, "64MiB")),
        in_process=True,
        enable_prefix_caching=False,
    )
    assert len({tuple(answer) for answer in tokens_of(plain)}) == len(prompts)
    assert tokens_of(cold) == tokens_of(again) == tokens_of(plain)
    assert found[EXTERNAL] == 0
    assert mla_engines.log().count("TierStoreConnector offers no hits and stores no pages") == 1
    assert clean == "clean"


def test_mla_of_two_ranks_is_stored_once_and_restored_as_by_the_cache_of_vllm(
    mla_engines: Engines, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.prompts(4, 161), 8  # a single token follows the hit: see cached_mla
    home = tmp_path / "a"
    two: dict[str, Any] = {
        "transfer": connector(tiers(home, 200, tiny_model.PAGE_NBYTES, "64MiB")),
        "in_process": True,
        "first": "tests.vllm.cached_mla",
        "tensor_parallel_size": 2,
        "block_size": 16,
    }
    # Decoding rounds differently from a prefill, so answers are compared with those after hits in vLLM's own cache.
    cold, own, none, _, host, _, leaks, found = mla_engines.life(
        [
            ask(prompts, tokens),
            ask(prompts, tokens),
            counts(),
            reset(),
            ask(prompts, tokens),
            rest(),
            held(),
            counts(),
        ],
        **two,
    )
    assert len({tuple(answer) for answer in tokens_of(own)}) == len(prompts)
    assert tokens_of(host) == tokens_of(own)
    assert cached(host) == cached(own) == [160] * 4
    assert (none[EXTERNAL], found[EXTERNAL]) == (0, 160 * 4)
    assert not any(leaks.values()), leaks
    records = [shard.records for shard in inspect(home).shards]
    assert len(records) == 2
    assert all(records)
    assert sum(map(int, filter(None, records))) == 10 * 4, "a page is stored by both ranks"

    restarted, clean = mla_engines.life([ask(prompts, tokens), check()], **two)
    assert tokens_of(restarted) == tokens_of(own)
    assert cached(restarted) == [160] * 4
    assert clean == "clean"

    page_nbytes = 2 * 16 * 576 * 4
    assert all(flip_every(home, 1, page_nbytes, rank) for rank in (0, 1))
    damaged, again, clean = mla_engines.life([ask(prompts, tokens), ask(prompts, tokens), check()], **two)
    assert cached(damaged) == [0] * 4
    assert tokens_of(damaged) == tokens_of(cold)
    assert tokens_of(again) == tokens_of(own)
    assert clean == "clean"
