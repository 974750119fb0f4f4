"""Test the benchmark of attention at tiny sizes on the CPU. No test checks a duration."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tierstore.cli.app import app

TINY = ("--device", "cpu", "--context", "96", "--page-size", "16", "--layers", "2", "--pairs", "1")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "attention", *words, "--json"])
    return result.exit_code, result.stdout.splitlines()[-1]


def test_a_row_for_each_batch_and_each_number_of_new_tokens() -> None:
    code, line = run(*TINY, "--batches", "1,3", "--suffixes", "5,20", "--filled", "1")
    assert code == 0
    report = json.loads(line)
    assert "cores" in report["device"]
    told = [(r["what"], r["batch"], r["context"], r["queries"], r["layers"]) for r in report["rows"]]
    assert told == [
        ("decode", 1, 96, 1, 2),
        ("decode", 3, 32, 1, 2),
        ("prefill", 1, 96, 5, 1),
        ("prefill", 1, 96, 20, 1),
    ]
    for row in report["rows"]:
        assert (row["backend"], row["ceiling"], row["memory_layers"]) == ("reference", "sdpa", -1)
        assert 0 < row["rel_error"] < (1e-5 if row["what"] == "decode" else 4e-3)
        assert min(row["ms"], row["ceiling_ms"], row["ratio"], row["tbps"], row["ceilings_ms"]["sdpa"]) > 0


def test_sequences_that_end_inside_a_page_have_pages_of_their_own() -> None:
    code, line = run(*TINY, "--context", "10", "--batches", "3", "--suffixes", "4")
    assert code == 0
    assert [(r["batch"], r["context"]) for r in json.loads(line)["rows"]] == [(3, 3), (1, 10)]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--batches", "1,x"), "--batches"),
        (("--suffixes", "0"), "--suffixes"),
        (("--batches", "97"), "--batches"),
        (("--context", "100000000000"), "tokens in 2 layers"),
    ],
)
def test_invalid_sizes_are_refused(words: tuple[str, ...], what: str) -> None:
    code, line = run(*TINY, *words)
    assert code == 2
    assert what in json.loads(line)["error"]
