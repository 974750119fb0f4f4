"""What the README shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierstore.config import load_config

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert isinstance(text, str)
    return text


def test_the_example_runs(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", block("python")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Match(num_pages=6" in result.stdout
    assert "6 [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in result.stdout


def test_the_configuration_loads(tmp_path: Path) -> None:
    (tmp_path / "store.yaml").write_text(block("yaml"), encoding="utf-8")
    assert load_config(tmp_path / "store.yaml").page_size == 64


def test_every_key_of_the_configuration_is_explained() -> None:
    config = load_config(Path(__file__).parents[1] / "configs" / "h100.yaml")
    for section, values in config.effective().items():
        for key in values if isinstance(values, dict) else [""]:
            name = f"{section}.{key}".strip(".")
            assert f"`{name}`" in README, name


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_every_make_target_exists(target: str) -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"\n{target}:" in makefile
