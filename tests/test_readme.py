"""What the README shows works as it stands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.tiny import random_prompt, tiny_llama
from tierstore.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    text = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[number]
    assert isinstance(text, str)
    return text


def run(program: str, directory: Path, *options: str) -> str:
    result = subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_example_runs(tmp_path: Path) -> None:
    printed = run(block("python"), tmp_path, "-W", "error")
    assert "Match(num_pages=6" in printed
    assert "6 [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in printed


def test_the_transformers_example_reuses_what_the_first_prompt_left(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    program = f"""
import torch
path = "model"
prompts = [torch.tensor([{random_prompt(40)}]), torch.tensor([{[*random_prompt(40), 5, 6, 7]}])]
{block("python", 1)}
"""
    result = run(program, tmp_path)
    assert result.splitlines()[-2:] == ["0 of 40 tokens reused", "32 of 43 tokens reused"]


def test_the_engine_example_copies_pages_out_and_in(tmp_path: Path) -> None:
    printed = run(block("python", 2), tmp_path, "-W", "error")
    assert printed.splitlines() == ["[1, 3, 4, 15]", "4 True"]


def test_the_configuration_loads(tmp_path: Path) -> None:
    (tmp_path / "store.yaml").write_text(block("yaml"), encoding="utf-8")
    assert load_config(tmp_path / "store.yaml").page_size == 64


def test_every_key_of_the_configuration_is_explained() -> None:
    config = load_config(ROOT / "configs" / "h100.yaml")
    for section, values in config.effective().items():
        for key in values if isinstance(values, dict) else [""]:
            name = f"{section}.{key}".strip(".")
            assert f"`{name}`" in README, name


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_every_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{target}:" in makefile
