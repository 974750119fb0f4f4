"""Test ``TierStoreConnector`` in real engines: for every kind of hit, answers equal those without a connector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import tiny_model
from tests.vllm.conftest import Oracle
from tests.vllm.damage import flip_every
from tests.vllm.prompts import documents
from tests.vllm.runner import (
    Engines,
    Prompt,
    Step,
    ask,
    beside,
    blocks,
    check,
    connector,
    counts,
    first_tokens,
    kill,
    reset,
    settle,
    sleep,
    storm,
)

pytestmark = pytest.mark.vllm

PAGE = 30 * 32 * 2 * 3 * 64 * 4
"""Bytes of a block: layers x tokens x 2 (K and V) x heads x head dimension x bytes per element."""

PROMPTS = documents(6, 12)
TOKENS = 24
WHOLE = 192
"""Number of tokens in the full blocks of a prompt."""

EXTERNAL = "vllm:external_prefix_cache_hits"


def tiers(home: Path, host_pages: int, page_nbytes: int = PAGE, disk: str = "256MiB") -> dict[str, Any]:
    return {
        "host": {"capacity": host_pages * page_nbytes},
        "nvme": {"path": str(home), "capacity": disk, "payload": "extents"},
    }


def tokens_of(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached(answers: Sequence[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


def test_hits_of_every_tier_answer_like_plain_vllm(engines: Engines, oracle: Oracle, tmp_path: Path) -> None:
    expected, all_of_it = oracle(PROMPTS, TOKENS), [WHOLE] * len(PROMPTS)

    cold, own, none, _, settled, host, after = engines.life(
        [
            ask(PROMPTS, TOKENS),
            ask(PROMPTS, TOKENS),
            counts(),
            reset(),
            settle(),
            ask(PROMPTS, TOKENS),
            counts(),
        ],
        transfer=connector(tiers(tmp_path / "a", 100)),
    )
    assert settled is None
    for answers, hits in ((cold, [0] * len(PROMPTS)), (own, all_of_it), (host, all_of_it)):
        assert tokens_of(answers) == expected
        assert cached(answers) == hits
    assert none[EXTERNAL] == 0
    assert after[EXTERNAL] == sum(all_of_it)

    restarted, found, free, clean = engines.life(
        [ask(PROMPTS, TOKENS), counts(), blocks(), check()],
        transfer=connector(tiers(tmp_path / "a", 10)),
        in_process=True,
    )
    assert tokens_of(restarted) == expected
    assert cached(restarted) == all_of_it
    assert found[EXTERNAL] == sum(all_of_it)
    assert free["free"] == free["usable"]
    assert clean == "clean"

    assert flip_every(tmp_path / "a", 13, PAGE) > 0
    damaged, again, free, clean = engines.life(
        [ask(PROMPTS, TOKENS), ask(PROMPTS, TOKENS), blocks(), check()],
        transfer=connector(tiers(tmp_path / "a", 10)),
        in_process=True,
        num_gpu_blocks_override=24,
        max_model_len=512,
    )
    assert tokens_of(damaged) == expected
    assert min(cached(damaged)) < WHOLE <= max(cached(damaged))
    assert tokens_of(again) == expected
    assert cached(again) == all_of_it
    assert free["free"] == free["usable"]


def differences(plain: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> list[float]:
    """Return, for each prompt, the largest log-probability difference among ``plain``'s five likeliest first tokens."""
    found = []
    for one, other in zip(plain, answers, strict=True):
        likeliest = sorted(one["logprobs"], key=one["logprobs"].__getitem__)[-5:]
        assert likeliest[-1] == max(other["logprobs"], key=other["logprobs"].__getitem__)
        found.append(max(abs(one["logprobs"][token] - other["logprobs"][token]) for token in likeliest))
    return found


def test_int8_keeps_almost_twice_as_many_pages_in_memory_and_answers_stay_close(
    engines: Engines, tmp_path: Path
) -> None:
    page, every, all_of_it = PAGE // 2, len(PROMPTS) * WHOLE // 32, [WHOLE] * len(PROMPTS)

    def life(codec: str, host_pages: int, *steps: Step) -> list[Any]:
        config = tiers(tmp_path / "a", host_pages, page)
        config["host"]["codec"] = codec
        return engines.life(steps, transfer=connector(config), in_process=True, dtype="bfloat16")

    plain, *_ = life("none", 20, first_tokens(PROMPTS), settle())
    assert cached(plain) == [0] * len(PROMPTS)

    cold, _, host, _, found, clean = life(
        "int8", 20, first_tokens(PROMPTS), reset(), first_tokens(PROMPTS), settle(), counts(), check()
    )
    assert cached(cold) == [0] * len(PROMPTS)  # the pages of the first engine are not loaded
    assert differences(plain, cold) == [0.0] * len(PROMPTS)
    assert cached(host) == all_of_it
    assert 0 < max(differences(plain, host)) < 0.25
    in_memory = found['vllm:tierstore_pages{"state": "resident", "tier": "HOST"}']
    free = found['vllm:tierstore_pages{"state": "free", "tier": "HOST"}']
    assert in_memory == found['vllm:tierstore_hits_pages{"tier": "HOST"}'] == every == 36
    assert in_memory + free == 20 * 128 // 66  # 38 encoded pages in the space of 20
    assert clean == "clean"

    restarted, found, clean = life("int8", 6, first_tokens(PROMPTS), counts(), check())
    assert cached(restarted) == all_of_it
    assert differences(host, restarted) == [0.0] * len(PROMPTS)
    assert clean == "clean"

    exact, *_ = life("none", 6, first_tokens(PROMPTS))
    assert cached(exact) == all_of_it
    assert differences(plain, exact) == [0.0] * len(PROMPTS)  # the encoded pages are not loaded


def test_aborts_and_preemptions_leak_nothing(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    requests = 1000 if request.config.getoption("--all-models") else 300
    prompts, tokens = tiny_model.prompts(12, 180), 40
    expected = small_oracle(prompts, tokens)
    first, free, clean, found, answers, free_again, clean_again = small_engines.life(
        [
            storm(prompts, requests=requests, tokens=tokens, seed=1, most=8),
            blocks(),
            check(),
            counts(),
            ask(prompts, tokens),
            blocks(),
            check(),
        ],
        transfer=connector(tiers(tmp_path / "a", 40, tiny_model.PAGE_NBYTES, "8MiB"), load="if_faster"),
        in_process=True,
        num_gpu_blocks_override=20,
        max_num_seqs=8,
        max_model_len=256,
        max_num_batched_tokens=256,
    )
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    assert first["aborted"] >= requests * 0.4
    assert found["vllm:num_preemptions"] > requests / 50
    assert found[EXTERNAL] > 0
    for number, answer in first["answered"]:
        assert answer == expected[number]
    assert tokens_of(answers) == expected
    assert free["free"] == free["usable"] == free_again["free"]
    assert clean == clean_again == "clean"


def test_two_ranks_answer_like_one_and_find_their_pages_after_a_restart(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.prompts(12, 180), 40
    expected = small_oracle(prompts, tokens)
    line = connector(tiers(tmp_path / "a", 200, tiny_model.PAGE_NBYTES, "64MiB"))
    cold, _, host, found = small_engines.life(
        [ask(prompts, tokens), reset(), ask(prompts, tokens), counts()], transfer=line, tensor_parallel_size=2
    )
    assert tokens_of(cold) == tokens_of(host) == expected
    assert found[EXTERNAL] == 12 * 160 == sum(cached(host))
    assert flip_every(tmp_path / "a", 13, tiny_model.PAGE_NBYTES // 2, rank=1) > 0
    restarted, again = small_engines.life(
        [ask(prompts, tokens), ask(prompts, tokens)], transfer=line, tensor_parallel_size=2
    )
    assert tokens_of(restarted) == tokens_of(again) == expected
    assert min(cached(restarted)) < 160 <= max(cached(restarted))
    assert cached(again) == [160] * 12


def test_second_engine_is_refused_and_pages_of_a_killed_one_are_found_until_sleep(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.prompts(12, 180), 40
    expected = small_oracle(prompts, tokens)
    line = connector(tiers(tmp_path / "a", 20, tiny_model.PAGE_NBYTES, "64MiB"))
    second_case = small_engines.case([ask(prompts[:1], 1)], transfer=line)
    cold, second, _, after = small_engines.life(
        [ask(prompts, tokens), beside(second_case, tmp_path / "b"), reset(), ask(prompts, tokens), kill()],
        transfer=line,
        in_process=True,
    )
    assert second["code"] != 0
    assert "nvme.path" in second["said"]
    assert "in use" in second["said"]
    assert tokens_of(cold) == tokens_of(after) == expected
    assert cached(after) == [160] * 12

    restarted, _, computed, _, stored, clean = small_engines.life(
        [ask(prompts, tokens), sleep(), ask(prompts, tokens), reset(), ask(prompts, tokens), check()],
        transfer=line,
        in_process=True,
    )
    assert tokens_of(restarted) == tokens_of(computed) == tokens_of(stored) == expected
    assert sum(cached(restarted)) > 0
    assert cached(computed) == [0] * 12
    assert cached(stored) == [160] * 12
    assert clean == "clean"


def test_prompts_of_any_length_hit_and_tenants_never_share(
    small_engines: Engines, small_oracle: Oracle, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.of_many_lengths(), 40
    expected = small_oracle(prompts, tokens)
    ours: list[Prompt] = [{"prompt_token_ids": prompt, "cache_salt": "ours"} for prompt in prompts]
    theirs: list[Prompt] = [{"prompt_token_ids": prompt, "cache_salt": "theirs"} for prompt in prompts]
    cold, other, _, hit, _, none = small_engines.life(
        [
            ask(ours, tokens),
            ask(theirs, tokens),
            reset(),
            ask(ours, tokens),
            reset(),
            ask(prompts, tokens),
        ],
        transfer=connector(tiers(tmp_path / "a", 300, tiny_model.PAGE_NBYTES, "64MiB")),
        in_process=True,
    )
    for answers in (cold, other, hit, none):
        assert tokens_of(answers) == expected
    assert sum(cached(other)) == sum(cached(none)) == 0
    assert min(cached(hit)[:3]) >= 160
    assert cached(hit)[3:] == [192] * 3 + [0] * 3


def test_failed_loads_are_recomputed(small_engines: Engines, small_oracle: Oracle, tmp_path: Path) -> None:
    prompts, tokens = tiny_model.prompts(12, 180), 40
    expected = small_oracle(prompts, tokens)
    line = connector(
        tiers(tmp_path / "a", 200, tiny_model.PAGE_NBYTES, "64MiB"),
        kv_connector="FaultyConnector",
        kv_connector_module_path="tests.vllm.faulty",
    )
    cold, _, failing, together, found, free, clean = small_engines.life(
        [
            ask(prompts, tokens),
            reset(),
            ask(prompts, tokens),
            storm(prompts, requests=60, tokens=tokens, seed=3, most=4),
            counts(),
            blocks(),
            check(),
        ],
        transfer=line,
        in_process=True,
        num_gpu_blocks_override=40,
    )
    assert tokens_of(cold) == tokens_of(failing) == expected
    assert {answer["reason"] for answer in failing} == {"length"}
    for number, answer in together["answered"]:
        assert answer == expected[number]
    assert "Recovered from KV load failure" in small_engines.log()
    assert found[EXTERNAL] > 0
    assert free["free"] == free["usable"]
    assert clean == "clean"


def test_two_unequal_pipeline_stages_answer_like_one_and_find_their_pages_after_a_restart(
    staged_engines: Engines, tmp_path: Path
) -> None:
    prompts, tokens = tiny_model.prompts(6, 180), 24
    (plain,) = staged_engines.life([ask(prompts, tokens)], in_process=True)
    expected = tokens_of(plain)
    line = connector(
        tiers(tmp_path / "a", 200, tiny_model.PAGE_NBYTES, "64MiB"),
        kv_connector_module_path="tests.vllm.staged",
    )
    cold, _, host, found = staged_engines.life(
        [ask(prompts, tokens), reset(), ask(prompts, tokens, together=True), counts()],
        transfer=line,
        pipeline_parallel_size=2,
    )
    assert tokens_of(cold) == tokens_of(host) == expected
    assert found[EXTERNAL] == 6 * 160 == sum(cached(host))
    assert flip_every(tmp_path / "a", 13, tiny_model.PAGE_NBYTES // 2, rank=1) > 0
    restarted, again = staged_engines.life(
        [ask(prompts, tokens), ask(prompts, tokens)], transfer=line, pipeline_parallel_size=2
    )
    assert tokens_of(restarted) == tokens_of(again) == expected
    assert min(cached(restarted)) < 160 <= max(cached(restarted))
    assert cached(again) == [160] * 6
