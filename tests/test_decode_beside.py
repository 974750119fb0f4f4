"""Test the benchmark that decodes an answer while pages are restored, with a simulated link and a real copy engine."""

from __future__ import annotations

import json

from typer import Typer
from typer.testing import CliRunner

from benchmarks.decode_beside import main


def test_documents_arrive_no_sooner_than_the_link_can_copy_them() -> None:
    app = Typer()
    app.command()(main)
    found = CliRunner().invoke(app, ["--pages", "256", "--launches", "20", "--documents", "2", "--json"])
    assert found.exit_code == 0, found.output
    row = json.loads(found.output)
    assert row["restore_ms"] >= row["link_ms"] > 9
    assert 4 <= row["launches"] <= 8, "a launch copies at most 64 pages, and a transfer has 32"
    assert row["blocked_alone_ms"] < row["alone_ms"]
