"""Test the benchmarks of copies, overlap and the host arena at tiny sizes on the CPU. No test checks a duration."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tierstore.bench import copy, link, overlap
from tierstore.cli.app import app
from tierstore.gpu.pool import CpuPool
from tierstore.types import Transfer


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *words, "--json"])
    return result.exit_code, result.stdout.splitlines()[-1]


def test_bench_copy_prints_a_row_for_each_size_and_direction() -> None:
    sizes = ("--pieces", "8KiB,4KiB", "--batch", "1MiB", "--contiguous", "32KiB", "--pairs", "2")
    code, line = run("copy", "--device", "cpu", *sizes)
    assert code == 0
    report = json.loads(line)
    assert "cores" in report["device"]
    told = [(row["direction"], row["piece_bytes"], row["num_pieces"]) for row in report["rows"]]
    whole = 1 << 20
    # each size occurs twice: for the store's own pages, and for the layers of an engine's pages
    sizes_twice = (8192, 8192, 4096, 4096)
    assert told == [(way, size, whole // size) for size in sizes_twice for way in ("h2d", "d2h", "both")]
    for row in report["rows"]:
        assert row["path"] == "threads"
        assert min(row["gbps"], row["ceiling_gbps"], row["ratio"]) > 0


def test_bench_copy_refuses_what_cannot_be_measured() -> None:
    code, line = run("copy", "--device", "cpu", "--pieces", "5000")
    assert code == 2
    assert "must be a multiple of 4 KiB (4,096 bytes), got" in json.loads(line)["error"]


@pytest.mark.parametrize("codec", [(), ("--codec", "int8")])
def test_bench_copy_refuses_more_than_the_memory_that_is_available(codec: tuple[str, ...]) -> None:
    code, line = run("copy", "--device", "cpu", "--batch", "1PB", "--contiguous", "32KiB", *codec)
    assert code == 2
    error = json.loads(line)["error"]
    assert "--batch 909.5 TiB, --contiguous 32 KiB would need" in error
    assert "choose smaller sizes" in error


def test_bench_copy_with_a_codec_compares_it_with_raw_pages() -> None:
    sizes = ("--pieces", "256KiB,4KiB", "--batch", "1MiB", "--pairs", "1", "--contiguous", "32KiB")
    code, line = run("copy", "--device", "cpu", "--codec", "int8", *sizes)
    assert code == 0
    rows = json.loads(line)["rows"]
    assert [(row["direction"], row["piece_bytes"], row["num_pieces"]) for row in rows] == [
        ("h2d", 256 << 10, 4),
        ("d2h", 256 << 10, 4),
    ]
    for row in rows:
        assert row["payload_bytes"] == (256 << 10) * 66 // 128
        assert 0 < row["rel_error"] < 0.02
        assert min(row["gbps"], row["plain_gbps"], row["ratio"], row["ceiling_gbps"]) > 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--codec", "int8+zstd", "--pieces", "256KiB"), "--codec must be a codec of host memory ("),
        (("--codec", "int8", "--pieces", "4KiB"), "multiples of 128 KiB (131,072 bytes)"),
    ],
)
def test_bench_copy_refuses_codecs_and_sizes_unsupported_in_host_memory(
    words: tuple[str, ...], what: str
) -> None:
    code, line = run("copy", "--device", "cpu", "--contiguous", "32KiB", *words)
    assert code == 2
    assert what in json.loads(line)["error"]


def test_payloads_that_differ_from_the_cpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = link.Ends.run

    def wrong(self: link.Ends, transfers: list[Transfer]) -> tuple[float, float]:
        found = right(self, transfers)
        self.arena.memory[::4096] += 1
        return found

    monkeypatch.setattr(link.Ends, "run", wrong)
    with pytest.raises(RuntimeError, match="a payload of int8 differs from the one that the CPU encodes"):
        copy.coded_rows("cpu", "int8", 128 << 10, 1 << 20, 1, link.Ceiling("cpu", 4096))


def test_bytes_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = link.Rig.run

    def wrong(self: link.Rig, transfers: list[Transfer]) -> tuple[float, float]:
        found = right(self, transfers)
        self.pages[1].flatten()[5] += 1
        return found

    monkeypatch.setattr(link.Rig, "run", wrong)
    with pytest.raises(RuntimeError, match="were not copied correctly"):
        copy.copy_rows("cpu", 4096, 8 * 4096, 1, "straight", link.Ceiling("cpu", 4096))


def test_bench_arena_prints_when_memory_is_usable() -> None:
    code, line = run("arena", "--device", "cpu", "--size", "16MiB")
    assert code == 0
    rows = json.loads(line)["rows"]
    assert [row["what"] for row in rows] == [
        "first touch of as much memory, before the measurement",
        "first GiB usable",
        "0.02 GiB usable",
    ]
    assert all(row["value"] > 0 for row in rows)


def test_bench_overlap_restores_by_layers_and_runs_kernels_beside_every_route() -> None:
    sizes = ("--restored", "512KiB", "--page-size", "1", "--matrix", "16", "--rounds", "1")
    beside = ("--read", "64KiB", "--times", "3", "--batch", "8MiB", "--compute", "0.5,2")
    code, line = run("overlap", "--device", "cpu", *sizes, *beside, "--layers", "16")
    assert code == 0
    report = json.loads(line)
    less, more, *rows = report["rows"]
    assert (less["wanted"], more["wanted"]) == (0.5, 2.0)
    for hidden in (less, more):
        assert (hidden["what"], hidden["groups"], hidden["num_pages"]) == ("overlap", 16, 4)
        assert hidden["ideal"] == 1 - 1 / 16
        assert min(hidden["compute_ms"], hidden["copy_ms"], hidden["both_ms"]) > 0
        assert hidden["first_layer_ms"] <= hidden["copy_ms"]
    told = [(row["kernel"], row["way"], row["direction"]) for row in rows]
    ways = [
        ("contiguous", ("h2d", "d2h", "both")),
        ("threads", ("h2d", "d2h", "both")),
        ("threads", ("h2d", "d2h")),
    ]
    assert told == [(kernel, way, d) for way, some in ways for kernel in ("read", "copy") for d in some]
    assert all(row["gbps"] > 0 and 0 < row["share"] < 1 for row in rows)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--compute", "1,0"), "--compute must be numbers above 0"),
        (("--compute", "nan"), "--compute must be numbers above 0"),
        (("--compute", "much"), "--compute must be numbers above 0"),
        (("--layers", "24"), "--layers must be a power of two"),
        (
            ("--restored", "1PB"),
            "--restored 909.5 TiB would need 1.8 PiB of memory",
        ),
        (
            ("--restored", "1MiB", "--read", "4KiB", "--batch", "1PB"),
            "--read 4 KiB, --batch 909.5 TiB would need",
        ),
    ],
)
def test_bench_overlap_refuses_what_cannot_be_measured(words: tuple[str, ...], what: str) -> None:
    code, line = run("overlap", "--device", "cpu", *words)
    assert code == 2
    assert what in json.loads(line)["error"]


def test_a_layer_computed_before_its_bytes_are_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPool, "write_part", lambda self, slot, page, part: None)
    with pytest.raises(RuntimeError, match="before its bytes had arrived"):
        overlap.overlap_rows("cpu", overlap.pages_of(2, 1), 256 << 10, 1, 8, [1.0])
