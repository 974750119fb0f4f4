"""Test the harness itself, with the backend ``file`` of SGLang: correct runs pass, and planted faults are noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.worker import ScenarioError, Worker, together

pytestmark = pytest.mark.sglang

LAYOUTS = [
    ("mha", "kernel", "page_first"),
    ("mha", "direct", "page_first_direct"),
    ("mha", "direct", "layer_first"),
    ("mla", "kernel", "page_first"),
    ("mla", "direct", "layer_first"),
    ("swa", "kernel", "page_first"),
    ("mamba", "kernel", "page_first"),
    ("mamba", "direct", "page_first_direct"),
]


def file_in(folder: Path, **setup: Any) -> dict[str, Any]:
    return {"storage": "file", "extra": {"file_storage_path": str(folder)}, **setup}


def faulty(name: str, folder: Path, **setup: Any) -> dict[str, Any]:
    extra = {"backend_name": name, "module_path": "tests.sglang.faulty", "class_name": name}
    return {"storage": "dynamic", "extra": {**extra, "file_storage_path": str(folder)}, **setup}


def test_sglang_has_the_version_that_the_adapter_was_written_for(worker: Worker) -> None:
    assert worker.call("version") == "0.5.23"


@pytest.mark.parametrize(("model", "io", "layout"), LAYOUTS)
def test_hits_and_bytes_of_the_stock_backend_match_the_ledger(
    worker: Worker, tmp_path: Path, model: str, io: str, layout: str
) -> None:
    setup = file_in(tmp_path, model=model, io=io, layout=layout)
    counts = worker.call("walk", setup=setup, seed=1, operations=400, exact=True)
    assert counts["tokens from storage"] > 100
    assert counts["prompts with predicted hits"] > 100


@pytest.mark.parametrize("name", ["WrongPage", "FlippedBit"])
@pytest.mark.parametrize("model", ["mha", "mla", "swa", "mamba"])
def test_a_wrong_byte_from_storage_is_noticed(worker: Worker, tmp_path: Path, name: str, model: str) -> None:
    with pytest.raises(ScenarioError) as error:
        worker.call("walk", setup=faulty(name, tmp_path, model=model), seed=1, operations=1_000, exact=True)
    assert error.value.kind == "WrongBytesError"


def test_a_lost_page_is_noticed(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as error:
        worker.call("walk", setup=faulty("Forgetful", tmp_path), seed=1, operations=1_000, exact=True)
    assert error.value.kind == "WrongHitError"


def test_a_hang_is_noticed(workers: list[Worker], tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as error:
        workers[1].call(
            "walk", setup=faulty("Stuck", tmp_path), seed=1, operations=1_000, exact=True, timeout_s=40
        )
    assert error.value.kind == "Hang"


def test_two_ranks_agree_with_the_stock_backend(workers: list[Worker], tmp_path: Path) -> None:
    for model in ("mha", "mla"):
        counts = together(
            workers,
            "walk",
            file_in(tmp_path / model, model=model),
            tmp_path / f"{model}-meeting",
            seed=2,
            operations=200,
            exact=True,
        )
        assert counts[0]["tokens hit"] == counts[1]["tokens hit"] > 0
