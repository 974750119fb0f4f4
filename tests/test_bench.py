"""Test ``bench core`` at tiny sizes: it prints every figure, and its last line is JSON. No test checks a duration."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from tests.support import forked
from tierstore.bench.measurement import Row, at_rest


def test_bench_core_prints_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    sizes = ("--pages", "40", "--put-pages", "60", "--records", "500", "--restore-pages", "40")
    result = forked.run(forked.TIERSTORE, "bench", "core", *sizes, "--dir", tmp_path, "--json")
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
        "vLLM's scheduler, 40 blocks stored in free slots",
        "vLLM's scheduler, 40 blocks stored in place of others",
        "lock hold",
        "memory of a page",
        "open with 500 records",
        "open with 500 records, extents",
    ):
        assert what in told
    assert list(tmp_path.iterdir()) == []


def test_a_missed_goal_is_reported() -> None:
    assert not Row("anything", 2.0, "ms", 1.0).ok
    assert Row("anything", 1.0, "ms", 1.0).ok
    assert Row("anything", 2.0, "ms").ok


def test_objects_that_are_frozen_before_a_measurement_stay_frozen() -> None:
    gc.freeze()
    with at_rest():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0
