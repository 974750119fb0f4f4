"""Test that the benchmark with a throttled disk runs real engines, and that all of them give the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.throttled_engine import main

pytestmark = pytest.mark.vllm


def test_engines_on_a_limited_disk_answer_as_plain_vllm(request: pytest.FixtureRequest) -> None:
    python: Path = request.config.getoption("--vllm-python")
    app = Typer()
    app.command()(main)
    words = [
        "--vllm-python",
        str(python),
        "--disk",
        "40",
        "--rounds",
        "1",
        "--asked",
        "1",
        "--json",
    ]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
    assert [row["equal"] for row in rows] == [1.0, 1.0, 1.0]
    loaded = {row["contender"]: row["external"] for row in rows}
    assert loaded["plain"] == 0.0
    assert loaded["always"] > 0.5
