"""The soak run plays its clients: a few seconds of it, so that the long run is known to work."""

from __future__ import annotations

from pathlib import Path

from tests.soak import client, soak


def test_a_client_reads_back_what_an_earlier_one_left(tmp_path: Path) -> None:
    client(tmp_path / "store", seed=1, seconds=1.0)
    client(tmp_path / "store", seed=2, seconds=0.5)


def test_a_short_soak_counts_its_clients() -> None:
    summary = soak(minutes=0.05, seconds_a_client=0.5)
    assert summary["ok"] is True
    assert summary["clients"]
