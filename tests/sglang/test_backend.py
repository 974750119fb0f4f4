"""Test ``TierStoreStorage`` under SGLang's real cache controllers, radix trees and host pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.test_harness import LAYOUTS
from tests.sglang.worker import ScenarioError, Worker, together

pytestmark = pytest.mark.sglang


TIERS = {
    "memory and disk": {"host": {"capacity": "32MiB"}, "nvme": {"capacity": "512MiB"}},
    "little memory and disk": {"host": {"capacity": "64KiB"}, "nvme": {"capacity": "512MiB"}},
    "memory": {"host": {"capacity": "32MiB"}},
}
"""Configurations with host memory of TierStore, without the path."""


def ours(folder: Path, *, zero_copy: bool = True, tiers: str | None = None, **setup: Any) -> dict[str, Any]:
    config: dict[str, dict[str, str]] = {"nvme": {"capacity": "512MiB"}} if tiers is None else TIERS[tiers]
    if "nvme" in config:
        config = {**config, "nvme": {**config["nvme"], "path": str(folder / "nvme")}}
    extra = {
        "backend_name": "tierstore",
        "module_path": "tierstore.adapters.sglang",
        "class_name": "TierStoreStorage",
        "interface_v1": int(zero_copy),
        "staging": "8MiB",
        "config": config,
    }
    return {"storage": "dynamic", "extra": extra, "durable": "nvme" in config, **setup}


@pytest.mark.parametrize(("model", "io", "layout"), LAYOUTS)
@pytest.mark.parametrize("zero_copy", [True, False], ids=["zero-copy", "generic"])
def test_hits_and_bytes_match_the_ledger(
    worker: Worker, tmp_path: Path, model: str, io: str, layout: str, zero_copy: bool
) -> None:
    setup = ours(tmp_path, zero_copy=zero_copy, model=model, io=io, layout=layout)
    counts = worker.call("walk", setup=setup, seed=3, operations=400, exact=True)
    assert counts["tokens from storage"] > 100
    assert counts["prompts with predicted hits"] > 100


@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
@pytest.mark.parametrize("tiers", TIERS)
def test_hits_and_bytes_match_the_ledger_with_host_memory(
    worker: Worker, tmp_path: Path, model: str, tiers: str
) -> None:
    setup = ours(tmp_path, model=model, tiers=tiers)
    counts = worker.call("walk", setup=setup, seed=9, operations=400, exact=True)
    assert counts["tokens from storage"] > 100
    assert counts["prompts with predicted hits"] > 100


def test_a_page_in_the_wrong_place_is_noticed(worker: Worker, tmp_path: Path) -> None:
    setup = ours(tmp_path)
    setup["extra"] |= {"module_path": "tests.sglang.faulty", "class_name": "SwappedSlots"}
    with pytest.raises(ScenarioError) as error:
        worker.call("walk", setup=setup, seed=3, operations=1_000, exact=True)
    assert error.value.kind == "WrongBytesError"


@pytest.mark.parametrize("model", ["mha", "mla"])
def test_hits_and_bytes_match_the_ledger_with_write_back(worker: Worker, tmp_path: Path, model: str) -> None:
    setup = ours(tmp_path, model=model, write_policy="write_back")
    counts = worker.call("walk", setup=setup, seed=4, operations=400, exact=True)
    assert counts["tokens hit"] > 100


@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
@pytest.mark.parametrize("prefetch_policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_requests_in_flight_get_right_bytes_under_every_policy(
    worker: Worker, tmp_path: Path, model: str, prefetch_policy: str, write_policy: str
) -> None:
    setup = ours(tmp_path, model=model, prefetch_policy=prefetch_policy, write_policy=write_policy)
    counts = worker.call("walk", setup=setup, seed=5, operations=1_000, exact=False)
    assert counts["tokens hit"] > 0
    assert counts["abort waiting"] > 0


@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
def test_everything_is_found_after_a_restart(worker: Worker, tmp_path: Path, model: str) -> None:
    hits = worker.call("restarts", setup=ours(tmp_path, model=model, pages=128), prompts=8)
    assert hits == [[0, 24]] * 8


@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
def test_requests_can_be_aborted_in_every_state(worker: Worker, tmp_path: Path, model: str) -> None:
    reached = worker.call("aborts", setup=ours(tmp_path, model=model), rounds=5, delay_s=0.02)
    assert reached == {"queued": 5, "reading": 5, "read": 5, "admitted": 5, "checked": 5}


@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
def test_two_ranks_agree_on_hits(workers: list[Worker], tmp_path: Path, model: str) -> None:
    first, second = together(
        workers, "walk", ours(tmp_path, model=model), tmp_path / "meeting", seed=6, operations=300, exact=True
    )
    assert first["tokens hit"] == second["tokens hit"] > 100
    assert first["tokens from storage"] > 20


@pytest.mark.parametrize("model", ["mha", "mla"])
def test_two_ranks_agree_on_hits_with_host_memory(workers: list[Worker], tmp_path: Path, model: str) -> None:
    setup = ours(tmp_path, model=model, tiers="memory and disk")
    first, second = together(
        workers, "walk", setup, tmp_path / "meeting", seed=10, operations=200, exact=True
    )
    assert first["tokens hit"] == second["tokens hit"] > 100


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
def test_injected_failures_cause_no_wrong_byte_with_host_memory(
    worker: Worker, tmp_path: Path, model: str, tiers: str
) -> None:
    setup = ours(tmp_path, model=model, tiers=tiers)
    more = {"delay_s": 0.003, "failures": 0.1, "timeout_s": 1_800}
    counts = worker.call("walk", setup=setup, seed=11, operations=1_000, exact=False, **more)
    assert counts["tokens from storage"] > 0


@pytest.mark.parametrize(
    ("model", "operations"), [("mha", 10_000), ("mla", 2_000), ("swa", 2_000), ("mamba", 2_000)]
)
def test_injected_failures_and_delays_cause_no_wrong_byte_and_no_hang(
    worker: Worker, tmp_path: Path, model: str, operations: int
) -> None:
    counts = worker.call(
        "walk",
        setup=ours(tmp_path, model=model),
        seed=7,
        operations=operations,
        exact=False,
        delay_s=0.003,
        failures=0.1,
        timeout_s=1_800,
    )
    assert counts["tokens from storage"] > 100


def test_two_ranks_agree_when_failures_are_injected(workers: list[Worker], tmp_path: Path) -> None:
    counts = together(
        workers,
        "walk",
        ours(tmp_path),
        tmp_path / "meeting",
        seed=8,
        operations=1_000,
        exact=False,
        delay_s=0.003,
        failures=0.1,
    )
    assert counts[0]["tokens hit"] == counts[1]["tokens hit"]
