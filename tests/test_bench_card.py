"""The benchmarks of the link and of the arena at tiny sizes, on the CPU. No time is asserted."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tierstore.bench import copies, link
from tierstore.cli.app import app
from tierstore.types import Transfer


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *words, "--json"])
    return result.exit_code, result.stdout.splitlines()[-1]


def test_bench_copy_tells_a_row_for_each_size_and_way() -> None:
    sizes = ("--pieces", "8KiB,4KiB", "--batch", "1MiB", "--contiguous", "32KiB", "--pairs", "2")
    code, line = run("copy", "--device", "cpu", *sizes)
    assert code == 0
    report = json.loads(line)
    assert "cores" in report["device"]
    told = [(row["direction"], row["piece_bytes"], row["num_pieces"]) for row in report["rows"]]
    whole = 1 << 20
    # each size twice: as pages of our own, and as the layers of an engine's pages
    sizes_twice = (8192, 8192, 4096, 4096)
    assert told == [(way, size, whole // size) for size in sizes_twice for way in ("h2d", "d2h", "both")]
    for row in report["rows"]:
        assert row["path"] == "threads"
        assert min(row["gbps"], row["ceiling_gbps"], row["ratio"]) > 0


def test_bench_copy_refuses_what_cannot_be_measured() -> None:
    code, line = run("copy", "--device", "cpu", "--pieces", "5000")
    assert code == 2
    assert "multiple of 4096" in json.loads(line)["error"]


def test_bytes_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = link.Rig.run

    def wrong(self: link.Rig, transfers: list[Transfer]) -> tuple[float, float]:
        found = right(self, transfers)
        self.pages[1].flatten()[5] += 1
        return found

    monkeypatch.setattr(link.Rig, "run", wrong)
    with pytest.raises(RuntimeError, match="bytes differ"):
        copies.copy_rows("cpu", 4096, 8 * 4096, 1, "straight", link.Ceiling("cpu", 4096))


def test_bench_arena_tells_how_soon_memory_can_be_used() -> None:
    code, line = run("arena", "--device", "cpu", "--size", "16MiB")
    assert code == 0
    rows = json.loads(line)["rows"]
    assert [row["what"] for row in rows] == [
        "touching as much once, before anything else",
        "first GiB usable",
        "0.02 GiB usable",
    ]
    assert all(row["value"] > 0 for row in rows)
