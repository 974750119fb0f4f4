"""The benchmarks run at tiny sizes: every figure is there, and the last line is JSON. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tierstore.bench.measurement import Row


def test_bench_core_tells_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    sizes = ("--pages", "40", "--put-pages", "60", "--records", "500", "--restore-pages", "40")
    program = "from tierstore.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "core", *sizes, "--dir", str(tmp_path), "--json"]
    result = subprocess.run(
        command,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert "cores" in report["device"]
    assert all(set(row) == {"what", "value", "unit", "goal", "ok"} for row in report["rows"])
    assert all(row["value"] > 0 for row in report["rows"])
    told = " / ".join(row["what"] for row in report["rows"])
    for what in (
        "reserve + commit",
        "match of 40 pages",
        "acquire + release",
        "acquire from HOST",
        "restore of 40 pages: first layer",
        "restore of 40 pages: release",
        "restore of 40 pages, int8: kernels",
        "vLLM's scheduler, 40 blocks in its own cache",
        "vLLM's scheduler, 40 blocks restored, in all",
        "lock hold",
        "memory of a page",
        "open with 500 records",
        "open with 500 records, extents",
    ):
        assert what in told
    assert list(tmp_path.iterdir()) == []


def test_a_missed_goal_is_told() -> None:
    assert not Row("anything", 2.0, "ms", 1.0).ok
    assert Row("anything", 1.0, "ms", 1.0).ok
    assert Row("anything", 2.0, "ms").ok
