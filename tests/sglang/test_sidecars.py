"""Test pools beside the KV pool under SGLang's real controllers: those of an indexer, and those of a draft model.

Every hit is checked in all pools, byte for byte, and must be as long as the shortest of them allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.test_backend import TIERS, ours
from tests.sglang.worker import ScenarioError, Worker, together

pytestmark = pytest.mark.sglang

DSA: dict[str, Any] = {"model": "dsa", "page_size": 64}
"""The pools of DeepSeek V3.2: MLA and an indexer. Its pages must have 64 tokens."""

POOLS: list[dict[str, Any]] = [
    DSA,
    {**DSA, "io": "direct", "layout": "page_first_direct"},
    {**DSA, "io": "direct", "layout": "layer_first"},
    {**DSA, "draft": "sidecar"},
    {**DSA, "draft": "sidecar", "io": "direct", "layout": "layer_first"},
    {**DSA, "draft": "packed"},
    {**DSA, "draft": "heads"},
    {"model": "mla", "draft": "sidecar"},
    {"model": "mla", "draft": "packed"},
    {"model": "mha", "draft": "sidecar"},
    {"model": "mha", "draft": "sidecar", "io": "direct", "layout": "page_first_direct"},
    {"model": "mha", "draft": "packed"},
    {"model": "mamba", "draft": "heads"},
    {"model": "swa", "draft": "heads"},
    {"model": "swa", "draft": "window"},
]


def name(setup: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in setup.items() if key != "page_size")


@pytest.mark.parametrize("setup", POOLS, ids=name)
def test_hits_and_bytes_match_the_ledger(worker: Worker, tmp_path: Path, setup: dict[str, Any]) -> None:
    counts = worker.call("walk", setup=ours(tmp_path, **setup), seed=12, operations=300, exact=True)
    assert counts["tokens from storage"] > 100
    assert counts["prompts with predicted hits"] > 50


@pytest.mark.parametrize("setup", [DSA, {**DSA, "draft": "sidecar"}], ids=name)
def test_hits_and_bytes_match_the_ledger_without_zero_copy(
    worker: Worker, tmp_path: Path, setup: dict[str, Any]
) -> None:
    given = ours(tmp_path, zero_copy=False, **setup)
    counts = worker.call("walk", setup=given, seed=13, operations=200, exact=True)
    assert counts["tokens from storage"] > 100


@pytest.mark.parametrize("tiers", TIERS)
def test_hits_and_bytes_match_the_ledger_with_host_memory(worker: Worker, tmp_path: Path, tiers: str) -> None:
    given = ours(tmp_path, tiers=tiers, **DSA, draft="sidecar")
    given["extra"]["config"]["host"]["capacity"] = "8MiB"
    counts = worker.call("walk", setup=given, seed=14, operations=200, exact=True)
    assert counts["tokens from storage"] > 100


@pytest.mark.parametrize(
    "setup", [DSA, {"model": "mha", "draft": "sidecar"}, {"model": "swa", "draft": "window"}], ids=name
)
def test_a_page_in_the_wrong_place_is_noticed(worker: Worker, tmp_path: Path, setup: dict[str, Any]) -> None:
    given = ours(tmp_path, **setup)
    given["extra"] |= {"module_path": "tests.sglang.faulty", "class_name": "SwappedSidecars"}
    with pytest.raises(ScenarioError) as error:
        worker.call("walk", setup=given, seed=12, operations=1_000, exact=True)
    assert error.value.kind == "WrongBytesError"


@pytest.mark.parametrize(
    ("setup", "lost"),
    [
        (DSA, "indexer"),
        ({**DSA, "draft": "sidecar"}, "draft"),
        ({**DSA, "draft": "sidecar"}, "draft_indexer"),
        ({**DSA, "draft": "sidecar"}, "kv"),
        ({"model": "mha", "draft": "sidecar"}, "draft"),
        ({"model": "swa", "draft": "window"}, "draft_swa"),
        ({"model": "mamba", "draft": "heads"}, "draft"),
    ],
    ids=str,
)
def test_nothing_is_restored_without_one_of_the_pools_until_it_is_stored_again(
    worker: Worker, tmp_path: Path, setup: dict[str, Any], lost: str
) -> None:
    given = ours(tmp_path, pages=128, **setup)
    hits = worker.call("restarts", setup=given, prompts=4, later=[{}, {}], lost=lost)
    assert hits == [[0, 0, 6 * given.get("page_size", 4)]] * 4


@pytest.mark.parametrize("draft", ["sidecar", "packed"])
def test_a_draft_model_that_is_added_later_gets_its_own_pages(
    worker: Worker, tmp_path: Path, draft: str
) -> None:
    given = ours(tmp_path, model="mha", pages=128)
    later = [{"draft": draft}, {"draft": draft}, {}]
    hits = worker.call("restarts", setup=given, prompts=4, later=later)
    assert hits == [[0, 0, 24, 24]] * 4


@pytest.mark.parametrize("setup", [DSA, {**DSA, "draft": "sidecar"}, {**DSA, "draft": "packed"}], ids=name)
def test_requests_can_be_aborted_in_every_state(
    worker: Worker, tmp_path: Path, setup: dict[str, Any]
) -> None:
    reached = worker.call("aborts", setup=ours(tmp_path, **setup), rounds=3, delay_s=0.02)
    assert reached == {"queued": 3, "reading": 3, "read": 3, "admitted": 3, "checked": 3}


@pytest.mark.parametrize("prefetch_policy", ["best_effort", "timeout"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_requests_in_flight_get_right_bytes_under_every_policy(
    worker: Worker, tmp_path: Path, prefetch_policy: str, write_policy: str
) -> None:
    policies: dict[str, Any] = {"prefetch_policy": prefetch_policy, "write_policy": write_policy}
    given = ours(tmp_path, **DSA, draft="sidecar", **policies)
    counts = worker.call("walk", setup=given, seed=15, operations=1_000, exact=False)
    assert counts["tokens hit"] > 0
    assert counts["abort waiting"] > 0


@pytest.mark.parametrize(
    "setup", [{**DSA, "draft": "sidecar"}, {"model": "mha", "draft": "sidecar"}, POOLS[-1]], ids=name
)
def test_injected_failures_and_delays_cause_no_wrong_byte_and_no_hang(
    worker: Worker, tmp_path: Path, setup: dict[str, Any]
) -> None:
    more = {"delay_s": 0.003, "failures": 0.1, "timeout_s": 1_800}
    counts = worker.call(
        "walk", setup=ours(tmp_path, **setup), seed=16, operations=2_000, exact=False, **more
    )
    assert counts["tokens from storage"] > 0


@pytest.mark.parametrize("setup", [DSA, {**DSA, "draft": "sidecar"}, POOLS[9]], ids=name)
def test_two_ranks_agree_on_hits(workers: list[Worker], tmp_path: Path, setup: dict[str, Any]) -> None:
    first, second = together(
        workers, "walk", ours(tmp_path, **setup), tmp_path / "meeting", seed=17, operations=150, exact=True
    )
    assert first["tokens hit"] == second["tokens hit"] > 100
    assert first["tokens from storage"] > 20


def test_a_draft_with_heads_beside_mla_is_never_restored_on_two_ranks(
    workers: list[Worker], tmp_path: Path
) -> None:
    """SGLang writes such a draft on the first rank only. The ranks must agree to restore nothing."""
    setup = ours(tmp_path, model="mla", draft="heads")
    counts = together(workers, "walk", setup, tmp_path / "meeting", seed=18, operations=500, exact=False)
    assert counts[0]["tokens hit"] == counts[1]["tokens hit"] > 0
    assert counts[0]["tokens from storage"] == 0
