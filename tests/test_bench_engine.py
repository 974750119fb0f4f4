"""Test the benchmark of the vLLM connector's worker at tiny sizes on the CPU. No test checks a duration."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import engine
from benchmarks.engine import LAYOUTS, EngineRig, Layout, Shape, tensors_of
from tierstore.adapters.vllm.messages import Orders
from tierstore.bench.link import Ceiling
from tierstore.cli.app import app

TINY = ("--layers", "3", "--heads", "2", "--dim", "4", "--block-size", "4", "--blocks", "70", "--pairs", "2")
SHAPE = Shape(3, 2, 4, 4)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "engine", *words, "--json"])
    return result.exit_code, result.stdout.splitlines()[-1]


def test_each_layout_prints_a_row_per_direction_and_how_its_blocks_are_divided() -> None:
    code, line = run("--device", "cpu", *TINY)
    assert code == 0
    report = json.loads(line)
    assert "cores" in report["device"]
    block, pieces = SHAPE.block_nbytes, {"LBNHC": 3, "LBHNC": 3, "LKBHND": 6, "BLHNC": 1}
    told = [
        (row["layout"], row["direction"], row["piece_bytes"], row["num_pieces"]) for row in report["rows"]
    ]
    assert told == [
        (layout, way, block // pieces[layout], 70 * pieces[layout])
        for layout in LAYOUTS
        for way in ("d2h", "h2d")
    ]
    for row in report["rows"]:
        assert row["path"] == "threads"
        assert min(row["gbps"], row["ceiling_gbps"], row["ratio"], row["worker_ms"], row["worker_share"]) > 0


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        # strides of [B, H, N, C], in elements; a token's cell has 8 elements, K next to V
        ("LBNHC", (64, 8, 16, 1)),
        ("LBHNC", (64, 32, 8, 1)),
        ("BLHNC", (3 * 64, 32, 8, 1)),
        # strides of [K, B, H, N, D]
        ("LKBHND", (5 * 32, 32, 16, 4, 1)),
    ],
)
def test_tensors_are_laid_out_as_declared(layout: Layout, strides: tuple[int, ...]) -> None:
    tensors = tensors_of(layout, SHAPE, 5, torch.device("cpu"))
    assert len(tensors) == 3
    assert {tensor.stride() for tensor in tensors} == {strides}
    assert len({tensor.data_ptr() for tensor in tensors}) == 3


def test_blocks_restored_with_changes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngineRig.run

    def wrong(self: EngineRig, orders: Sequence[Orders]) -> tuple[float, float]:
        found = right(self, orders)
        self.pages[2].view(torch.int16)[7, 0, 5] ^= 1
        return found

    monkeypatch.setattr(EngineRig, "run", wrong)
    with pytest.raises(RuntimeError, match="bytes differ"):
        engine.engine_rows("cpu", SHAPE, 70, 1, Ceiling("cpu", 4096), ["LBNHC"])


def test_layout_unknown_to_vllm_is_refused() -> None:
    code, line = run("--device", "cpu", "--layouts", "LBNHC,NHD")
    assert code == 2
    assert "each of --layouts must be one of LBNHC, LBHNC, LKBHND, BLHNC, got" in json.loads(line)["error"]


def test_more_blocks_than_the_memory_holds_are_refused() -> None:
    code, line = run("--device", "cpu", "--blocks", "1000000000")
    assert code == 2
    assert "--blocks" in json.loads(line)["error"]
