"""The command line, run as a user runs it: in a process of its own, by its output and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierstore.cli import probes
from tierstore.config import config_schema


def tierstore(*arguments: str | Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tierstore.cli import main; main()", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, input=answer, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def last_line(result: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


def test_without_a_command_it_says_what_there_is() -> None:
    result = tierstore()
    assert result.returncode == 2
    for command in ("config-schema", "doctor"):
        assert command in result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [("nonsense",), ("doctor", "--nonsense")])
def test_what_is_not_understood_ends_with_code_2(arguments: tuple[str, ...]) -> None:
    result = tierstore(*arguments)
    assert result.returncode == 2
    assert "nonsense" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [("config-schema",), ("config-schema", "--json")])
def test_config_schema_prints_the_schema_and_nothing_else(arguments: tuple[str, ...]) -> None:
    result = tierstore(*arguments)
    assert result.returncode == 0
    assert json.loads(result.stdout) == config_schema()
    assert len(result.stdout.splitlines()) == 1 or "--json" not in arguments


def test_doctor_names_what_the_machine_gives(tmp_path: Path) -> None:
    result = tierstore("doctor", "--path", tmp_path, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = last_line(result)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"] is True
    assert checks["torch"]["value"].startswith("2.")
    assert checks["disk"]["value"].startswith(str(tmp_path))
    assert {"Python", "host memory", "memlock limit", "LMDB", "O_DIRECT"} <= set(checks)
    assert all(check["why"] for check in report["checks"] if check["state"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_doctor_answers_for_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    result = tierstore("doctor", "--path", tmp_path / "a" / "b", "--json")
    assert result.returncode == 0
    disk = next(check for check in last_line(result)["checks"] if check["name"] == "disk")
    assert "not there yet" in disk["value"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_where_no_file_can_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory", encoding="utf-8")
    result = tierstore("doctor", "--path", file, "--json")
    assert result.returncode == 1
    assert last_line(result)["failed"] == ["disk", "O_DIRECT"]
    assert file.read_text(encoding="utf-8") == "not a directory"


def test_a_machine_without_a_gpu_is_told_to_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (check,) = probes.cuda()
    assert check.state == "note"
    assert "hbm.device must be cpu" in check.why


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PACKAGES", ("no-such-package-here",))
    monkeypatch.setattr(probes, "PACKAGES_OF_EXTRAS", {"no-such-package-either": "hf"})
    core, _, optional = probes.packages()
    assert (core.name, core.state) == ("no-such-package-here", "fail")
    assert (optional.name, optional.state) == ("no-such-package-either", "note")
    assert "tierstore[hf]" in optional.why
