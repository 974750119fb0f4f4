"""Test the benchmark of real engines on a limited disk: the limit in simulated time, and the ratios that it prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import throttled_engine
from benchmarks.throttled_engine import Round, Throttle, show


def test_reads_and_writes_share_the_limited_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(throttled_engine, "monotonic", lambda: clock)
    monkeypatch.setattr(throttled_engine, "sleep", sleep)
    for name in ("preadv", "pwritev"):  # restores them after the test
        monkeypatch.setattr(os, name, getattr(os, name))
    throttle = Throttle(128 << 10)
    throttle.install()
    data = bytes(range(256)) * 1536
    with (tmp_path / "file").open("w+b") as file:
        assert os.pwritev(file.fileno(), [data], 0) == len(data)
        assert clock == pytest.approx(103.0)
        buffer = bytearray(len(data) // 2)
        assert os.preadv(file.fileno(), [buffer], 0) == len(buffer)
    assert clock == pytest.approx(104.5)
    assert buffer == data[: len(buffer)]
    assert (throttle.read, throttle.written) == (len(buffer), len(data))


def test_each_contender_is_compared_with_plain_vllm_in_the_same_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def row(contender: str, number: int, rate: float) -> Round:
        return Round(contender, 8.0, number, rate, 0.1, 0.2, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0)

    show([row("plain", 0, 4.0), row("if_faster", 0, 5.0), row("if_faster", 1, 6.0), row("plain", 1, 3.0)])
    assert "1.25 2.00" in capsys.readouterr().out
