"""Test ``bench ttft``, the time to first token, at tiny sizes on the CPU. No test checks a duration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tierstore.bench.raw_disk import RawDisk
from tierstore.bench.ttft import SHAPES, Ask, Bench
from tierstore.cli.app import app
from tierstore.types import Tier

SMALL = (
    "--device", "cpu", "--shape", "tiny", "--prefix", "192", "--question", "8", "--page-size", "64",
    "--rounds", "1", "--chunk", "32,64", "--readers", "2",
)  # fmt: skip


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "ttft", *SMALL, *words, "--json"])
    return result.exit_code, result.stdout.splitlines()[-1]


def test_bench_ttft_prints_a_row_for_each_source(tmp_path: Path) -> None:
    code, line = run("--dir", str(tmp_path), "--disk-prefix", "128")
    assert code == 0
    rows = json.loads(line)["rows"]
    found = [(row["tier"], row["codec"], row["prefix"], row["question"]) for row in rows]
    assert found == [
        ("HBM", "none", 192, 8),
        ("HOST", "none", 192, 8),
        ("none", "none", 0, 200),
        ("none", "none", 0, 200),
        ("HOST", "int8", 192, 8),
        ("NVME", "none", 128, 8),
        ("NVME", "exp", 128, 8),
        ("NVME", "int8", 128, 8),
    ]
    assert [row["chunk"] for row in rows if row["tier"] == "none"] == [32, 64]
    by_way = {(row["tier"], row["codec"]): row for row in rows}
    page = 64 * 4 * 2 * 2 * 16 * 2
    assert by_way["HOST", "none"]["nbytes"] == 3 * page
    assert by_way["HOST", "int8"]["nbytes"] < 3 * page
    assert by_way["NVME", "exp"]["nbytes"] < by_way["NVME", "none"]["nbytes"]
    assert by_way["HOST", "none"]["same_token"]
    assert by_way["NVME", "none"]["rel_error"] == by_way["NVME", "exp"]["rel_error"] == 0
    assert 0 < by_way["NVME", "int8"]["rel_error"] < 0.02
    assert all(row["ratio"] > 0 and row["floor_ms"] > 0 for row in rows if row["tier"] in ("HOST", "NVME"))
    assert all(len(row["each_ms"]) == row["rounds"] for row in rows)
    assert all(row["least_ms"] <= each <= row["most_ms"] for row in rows for each in row["each_ms"])
    assert all(len(row["each_floor_ms"]) == (row["tier"] == "NVME") for row in rows)
    assert by_way["none", "none"]["tflops"] > 0
    assert not list(tmp_path.iterdir()), "something was left on the disk"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--shape", "huge"), "llama-3.1-8b"),
        (("--prefix", "5"), "--prefix must be at least 64 tokens (one page), got 5"),
        (("--disk-prefix", "5"), "--disk-prefix must be at least 64 tokens (one page), got 5"),
        (("--dir", "/nowhere/at/all"), "no such folder"),
        (("--chunk", "32,none"), "--chunk must be numbers of tokens from 1"),
        (("--chunk", "0"), "--chunk must be numbers of tokens from 1"),
    ],
)
def test_bench_ttft_refuses_what_cannot_be_measured(words: tuple[str, ...], what: str) -> None:
    code, line = run(*words)
    assert code == 2
    assert what in json.loads(line)["error"]


@pytest.mark.parametrize("option", ["--prefix", "--question", "--page-size", "--disk-prefix"])
def test_bench_ttft_refuses_more_tokens_than_can_be_created(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "ttft", "--device", "cpu", option, "100000000000000"])
    assert result.exit_code == 2
    assert option in result.output


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierstore.bench.ttft.available_nbytes", lambda: 20 << 30)
    result = CliRunner().invoke(app, ["bench", "ttft", "--device", "cpu", "--json"])
    assert result.exit_code == 2
    said = json.loads(result.stdout.splitlines()[-1])["error"]
    assert said.startswith("the weights of --shape llama-3.1-8b and the pages of --prefix 131072 need")
    assert said.endswith("20 GiB are available; use a smaller --prefix, or --shape tiny")
    assert "a model" not in result.stderr


@pytest.mark.parametrize(("gib", "chunk"), [(80, 65536), (44, 65536), (40, 16384), (0, 16384)])
def test_a_prompt_is_computed_in_chunks_that_fit_into_device_memory(
    gib: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the 8B model. Its weights and the pages of 131,072 tokens take 31 GiB together."""

    class Card:
        def available_nbytes(self) -> int | None:
            return gib << 30 or None

    monkeypatch.setattr("tierstore.bench.ttft.open_device", lambda name: Card())
    ask = Ask(device="cuda:0", shape="llama-3.1-8b", prefix=131072, question=64, page_size=64, rounds=1)
    assert ask.chunk(16384) == chunk


def test_weight_bytes_equal_those_of_the_model() -> None:
    bench = Bench(Ask(device="cpu", shape="tiny", prefix=16, question=4, page_size=16, rounds=1))
    assert bench.ask.weights_nbytes == 2 * bench.parameters


def test_pages_restored_with_other_bytes_give_no_result() -> None:
    bench = Bench(Ask(device="cpu", shape="tiny", prefix=32, question=4, page_size=16, rounds=1))
    with bench._rig(32, {"host": bench._host(32)}) as rig:
        rig.send_down(Tier.HOST)
        assert rig.answer().tiers == {Tier.HOST}
        with rig.store.acquire(rig.prefix) as lease:
            lease.wait(60.0)
            rig._pages[lease.slots[1]][0] += 1
        with pytest.raises(RuntimeError, match="restored pages differ"):
            rig.checked(lossy=False)
        rig.store.evict(rig.keys)
        with pytest.raises(RuntimeError, match="0 tokens were reused, but the prefix has 32"):
            rig.answer()


def test_operations_of_a_prompt_equal_those_of_its_matrix_products() -> None:
    """torch also counts the operations that the causal mask saves, so the test adds them to the expected number."""
    from torch.utils.flop_counter import FlopCounterMode

    bench = Bench(Ask(device="cpu", shape="tiny", prefix=16, question=48, page_size=16, rounds=1))
    sizes = SHAPES["tiny"]
    bench._model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        bench._model(bench.ask.prompt(16), logits_to_keep=1, use_cache=False)
    whole = 4.0 * sizes.layers * sizes.hidden * (64 * 64 - 64 * 65 / 2)
    assert counter.get_total_flops() == sizes.flops(0, 64) + whole


def test_raw_disk_reads_every_byte_of_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    disk = RawDisk(tmp_path / "raw", 100_000, 5000, readers=3)
    assert disk.nbytes == 12 * 8192
    assert (tmp_path / "raw").stat().st_size == disk.nbytes
    assert disk.gbps() > 0
    disk.close()
    assert not list(tmp_path.iterdir())
