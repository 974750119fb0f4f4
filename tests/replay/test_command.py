"""Tests of ``tierstore replay``: its output, and the arguments that it rejects before it begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.traces import chats, mooncake
from tierstore.cli.app import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the home directory with a folder of the test, because the command keeps bounds there."""
    folder = tmp_path / "home"
    monkeypatch.setattr(Path, "home", lambda: folder)
    return folder


def test_the_command_prints_a_row_a_policy_and_capacity(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "chats.jsonl", chats(3, 5))
    args = [
        "replay",
        str(file),
        "--capacity",
        "1GiB",
        "--capacity",
        "2GiB",
        "--policy",
        "lru",
        "--policy",
        "gdsf",
    ]
    result = runner.invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(r["policy"], r["capacity_bytes"]) for r in rows] == [
        ("lru", 1 << 30),
        ("gdsf", 1 << 30),
        ("lru", 2 << 30),
        ("gdsf", 2 << 30),
    ]
    assert all(r["trace"] == "chats" and 0 < r["hit_rate"] <= r["optimal_hit_rate"] for r in rows)
    assert all(r["nvme_bytes_written"] == 0 for r in rows)


def test_the_command_takes_tiers_and_policies_from_a_configuration(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "chats.jsonl", chats(3, 5))
    config = tmp_path / "c.yaml"
    config.write_text(
        "hbm: {capacity: 1GiB, device: cpu, policy: gdsf}\nhost: {capacity: 512MiB}\n"
        f"nvme: {{path: {tmp_path}, capacity: 4GiB, admission: second_hit}}\n"
    )
    result = runner.invoke(app, ["replay", str(tmp_path), "--config", str(config), "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert (found["policy"], found["admission"]) == ("gdsf/lru/lru", "second_hit")
    assert found["nvme_bytes_written"] > 0
    assert file.exists()


def test_row_shows_how_long_its_replay_took(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "chats.jsonl", chats(3, 5))
    result = runner.invoke(app, ["replay", str(file), "--policy", "lru", "--json"])
    (found,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    pages = sum(tokens // 512 for tokens, _ in chats(3, 5))
    assert found["seconds"] > 0
    assert found["pages_per_second"] * found["seconds"] == pytest.approx(pages)


def test_bounds_are_kept_in_the_cache_or_the_given_folder(tmp_path: Path, home: Path) -> None:
    file, elsewhere = mooncake(tmp_path / "chats.jsonl", chats(3, 5)), tmp_path / "elsewhere"
    for more in ([], ["--bounds", str(elsewhere)]):
        args = ["replay", str(file), "--policy", "lru", "--capacity", "1GiB", "--capacity", "2GiB", *more]
        assert runner.invoke(app, args).exit_code == 0
    for folder in (home / ".cache" / "tierstore" / "bounds", elsewhere):
        assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--capacity", "1KiB"], "hbm.capacity must be at least "),
        (["--policy", "random"], "--policy must be one of lru, fifo"),
        (["--nvme", "1GiB", "--admission", "some"], "--admission must be one of all, second_hit, cost"),
        (["--host", "0"], "--host must be a size"),
        (["--bounds", __file__], "test_command.py: no such folder"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--capacity", "lots"], "--capacity must be a size"),
        (
            ["--admission", "cost"],
            "--admission has no effect without --nvme: there is no tier to admit pages to",
        ),
        (["--plot", "no/such/folder.svg"], "the folder no/such does not exist"),
        (
            ["--config", "c.yaml", "--host", "1GiB"],
            "--host cannot be combined with --config",
        ),
        (
            ["--config", "c.yaml", "--policy", "lru"],
            "--policy cannot be combined with --config",
        ),
        (
            ["--config", "c.yaml", "--admission", "all"],
            "--admission cannot be combined with --config",
        ),
        (["nix.jsonl"], "nix.jsonl: no such file, expected a .jsonl file of requests"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_in_one_line(
    tmp_path: Path, args: list[str], complaint: str
) -> None:
    file = mooncake(tmp_path / "t.jsonl", [(512, [1])])
    result = runner.invoke(app, ["replay", str(file), *args])
    assert result.exit_code == 2
    assert complaint in result.output
    assert "rrno" not in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("terminal", [{}, {"TERM": "dumb", "FORCE_COLOR": "1"}])
def test_table_is_not_cut_in_a_narrow_terminal(tmp_path: Path, terminal: dict[str, str]) -> None:
    file = mooncake(tmp_path / ("c" * 90 + ".jsonl"), chats(3, 5))
    result = runner.invoke(
        app, ["replay", str(file), "--policy", "adaptive"], env={"COLUMNS": "40", **terminal}
    )
    header, row = result.stdout.splitlines()
    assert header.split()[-8:] == ["the", "future", "share", "of", "it", "to", "NVMe", "pages/s"]
    assert row.split()[:3] == ["c" * 90, "adaptive", "all"]


def test_folder_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = runner.invoke(app, ["replay", str(tmp_path / "empty")])
    assert (result.exit_code, "empty has no .json or .jsonl files" in result.output) == (2, True)


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = mooncake(tmp_path / "t.jsonl", chats(2, 4)), tmp_path / "out.svg"
    args = ["replay", str(file), "--capacity", "1GiB", "--capacity", "2GiB", "--plot", str(picture)]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 1000


def test_a_plot_of_an_unknown_kind_is_refused_before_anything_is_replayed(tmp_path: Path, home: Path) -> None:
    pytest.importorskip("matplotlib")
    file = mooncake(tmp_path / "t.jsonl", chats(2, 4))
    result = runner.invoke(app, ["replay", str(file), "--plot", str(tmp_path / "out.xyz")])
    assert result.exit_code == 2
    assert "out.xyz must end in one of ." in result.output
    assert ".svg" in result.output
    assert not home.exists()


def test_withdrawn_policy_is_refused_naming_its_successor(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "chats.jsonl", chats(3, 5))
    result = runner.invoke(app, ["replay", str(file), "--policy", "slru"])
    assert result.exit_code != 0
    assert "use adaptive instead" in " ".join(result.output.split())
