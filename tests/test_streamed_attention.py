"""Test the benchmark of streamed attention at tiny sizes on the CPU. No test checks a duration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.streamed_attention import main

TINY = (
    "--device", "cpu", "--layers", "2", "--page-size", "16", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
    "--ring", "16384", "--slab", "4096", "--link-nbytes", "1000", "--steps", "2",
)  # fmt: skip


def run(*words: str) -> tuple[int, str]:
    app = Typer()
    app.command()(main)
    found = CliRunner().invoke(app, [*TINY, *words, "--json"])
    return found.exit_code, found.output


def test_every_part_is_as_exact_as_attention_over_pages_in_hbm() -> None:
    code, output = run("--part", "one,int8", "--context", "1000", "--hbm", "300")
    assert code == 0, output
    report = json.loads(output.splitlines()[-1])
    one, int8 = report["one"], report["int8"]
    assert one["worst_error"] < 1e-5 < int8["worst_error"] < 2e-2
    assert max(one["error_to_float64"], int8["in_hbm_error_to_float64"]) < 1e-5 < int8["error_to_float64"]
    # 300 tokens are 18 pages, of which the ring takes 4. All other pages of the 63 are streamed.
    assert one["streamed_tokens"] == 49 * 16
    assert one["streamed_gb"] == 49 * 4096 / 1e9
    assert 0.5 < int8["streamed_gb"] / one["streamed_gb"] < 0.6
    assert one["restarts"] == 0
    assert len(one["steps_ms"]) == 2


QUESTIONS = ("--part", "questions", "--context", "640", "--hbm", "300", "--counts", "1,3")


def test_questions_share_what_is_streamed() -> None:
    code, output = run(*QUESTIONS)
    assert code == 0, output
    rows = json.loads(output.splitlines()[-1])["questions"]["rows"]
    # HBM has room for 14 pages besides the ring, one of which each question needs itself.
    assert [(row["questions"], row["streamed_tokens"]) for row in rows] == [(1, 27 * 16), (3, 29 * 16)]
    for row in rows:
        assert max(row["error"], row["shared_error"]) < 1e-5
        assert row["of_apart"] == pytest.approx(row["apart_ms"] / row["streamed_ms"], abs=1e-3)


def test_throughput_is_plotted_against_the_number_of_questions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "questions.svg"
    code, output = run(*QUESTIONS, "--plot", str(plot))
    assert code == 0, output
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


def test_unknown_parts_are_refused() -> None:
    code, output = run("--part", "two")
    assert code == 2
    assert "must be one of one, questions, long, int8" in output
