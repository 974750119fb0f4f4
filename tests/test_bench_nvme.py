"""Test ``bench nvme`` at tiny sizes: it prints every row and a JSON line, and leaves no file behind."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.contenders import FilePerPage
from tierstore.bench import nvme
from tierstore.bench.nvme import stalls_during
from tierstore.cli.app import app
from tierstore.cli.bench import PAYLOADS

TINY = [
    "--size",
    "192KiB",
    "--page-sizes",
    "8KiB,64KiB",
    "--rounds",
    "2",
    "--stall-size",
    "4MiB",
    "--idle",
    "0.05",
]


def test_bench_nvme_prints_every_row_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "nvme", *TINY, "--dir", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    ways = [*PAYLOADS, "raw, 4 KiB pages", "plain LMDB", "file per page"]
    assert [(row["payload"], row["op"], row["page_bytes"]) for row in report["rows"]] == [
        (way, op, nbytes) for nbytes in (8192, 65536) for way in ways for op in ("write", "read")
    ]
    for row in report["rows"]:
        assert row["gbps"] > 0
        assert row["ceiling_gbps"] > 0
        assert row["cpu_s_per_gib"] >= 0
        low, high = row["spread"]
        assert 0 < low <= row["ratio"] <= high
    assert set(report["stall_ms"]) == {"p50", "p999", "max"}
    assert set(report["stalls_ms"]) == {"idle", *PAYLOADS}
    assert len(report["load_average"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("--page-sizes", "5000"), ("--page-sizes", "4KiB,x"), ("--size", "-1"), ("--size", "0")],
)
def test_sizes_that_cannot_be_measured_are_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["bench", "nvme", option, value])
    assert result.exit_code == 2
    assert f"{option} must be " in result.output
    assert f"got {value.split(chr(44))[-1]!r}" in result.output


class Forgetful(FilePerPage):
    """A contender that changes one byte of the last page of each read."""

    def read(self, out: nvme.Bytes) -> None:
        super().read(out)
        out[-1, 5] ^= 1


def test_method_that_returns_other_bytes_gives_no_result(tmp_path: Path) -> None:
    ways: dict[str, nvme.Make] = {"forgetful": Forgetful}
    rows = nvme.disk_rows(8192, nbytes=65536, rounds=1, readers=2, ways=ways, place=tmp_path)
    with pytest.raises(OSError, match="Forgetful: a page that was read back differs"):
        list(rows)


def test_the_median_of_the_paired_ratios_is_shown_with_minimum_and_maximum() -> None:
    load = nvme._load(4096, 8192, 2)
    pairs = [
        {"write": (nvme.Run(1.0 * way, 0.5, 0), nvme.Run(raw, 0.1, 0))}
        for way, raw in ((1, 0.5), (2, 2.0), (4, 1.0))
    ]
    row = nvme._row("way", "write", load, pairs)
    assert (row.ratio, row.spread) == (0.5, (0.25, 1.0))
    assert row.gbps == pytest.approx(8192 / 2.0 / 1e9)
    assert row.ceiling_gbps == pytest.approx(8192 / 1.0 / 1e9)
    assert row.cpu_s_per_gib == pytest.approx(0.5 * (1 << 30) / 8192)


def test_pages_are_read_in_another_order_and_each_once() -> None:
    load = nvme._load(4096, 64 * 4096, 2)
    assert sorted(load.order) == list(range(64))
    assert load.order != sorted(load.order)
    assert len({page.tobytes() for page in load.pages}) == 64
    assert all(page.ctypes.data % 4096 == 0 for page in load.pages)
    assert load.pages.dtype == np.uint8


def test_thread_that_holds_the_gil_is_detected() -> None:
    held: list[float] = []

    def hold() -> None:
        begin = perf_counter()
        sum(range(20_000_000))  # one call into C that never releases the GIL
        held.append(perf_counter() - begin)

    begin = perf_counter()
    stalls = stalls_during(hold)
    assert 1e3 * (perf_counter() - begin) >= stalls.max > 1e3 * held[0] / 2
