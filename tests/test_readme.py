"""The programs, links and names in the README and the guides work as they stand."""

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
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def block(page: str, language: str, number: int = 0) -> str:
    """Return one fenced block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found[number]


def heading_ids(page: Path) -> set[str]:
    """Return the anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in heading_ids(target)):
            broken.append(link)
    assert broken == []


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
    printed = run(block("README.md", "python"), tmp_path, "-W", "error")
    assert "Match(num_pages=6" in printed
    assert "6 [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in printed


def test_the_laptop_tutorial_finds_after_a_restart_what_it_stored(tmp_path: Path) -> None:
    for number in (0, 1):
        printed = run(block("docs/laptop.md", "python", number), tmp_path, "-W", "error")
        shown = block("docs/laptop.md", "text", 3 + number)
        assert printed == shown.partition("\n")[2]


def test_the_transformers_examples_reuse_what_earlier_prompts_left(tmp_path: Path) -> None:
    """Both in one process, which takes most of its time to load transformers."""
    tiny_llama().save_pretrained(tmp_path / "model")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    prompts = f"""
import torch
path = "model"
prompts = [torch.tensor([{random_prompt(40)}]), torch.tensor([{[*random_prompt(40), 5, 6, 7]}])]
{block("docs/transformers.md", "python")}
"""
    chat = f"""
from transformers import AutoModelForCausalLM
import tierstore
from tierstore.adapters.huggingface import page_specs
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="tierstore").eval()
config = tierstore.load_config({{"hbm": {{"capacity": "8MiB", "device": "cpu"}}}})
store = tierstore.TierStore.open(config, page_specs(model, 16))
turns = [{random_prompt(40)}, [5, 6, 7]]
{block("docs/transformers.md", "python", 1)}
store.close()
"""
    both = "".join(f"exec({program!r}, {{}})\nprint('---')\n" for program in (prompts, chat))
    first, second, _ = (part.splitlines()[-2:] for part in run(both, tmp_path).split("---\n"))
    assert first == ["0 of 40 tokens reused", "40 of 43 tokens reused"]
    assert "new_tokens=40, reused_tokens=0, computed_tokens=40" in second[0]
    assert "new_tokens=3, reused_tokens=59, computed_tokens=4" in second[1]


def test_the_engine_example_copies_pages_out_and_in(tmp_path: Path) -> None:
    printed = run(block("docs/engine.md", "python"), tmp_path, "-W", "error")
    assert printed.splitlines() == ["[1, 3, 4, 15]", "4 True"]


def test_the_archive_example_takes_pages_to_another_store(tmp_path: Path) -> None:
    printed = run(block("docs/archive.md", "python"), tmp_path, "-W", "error")
    assert printed.splitlines() == ["4", "4 True 4"]


def test_the_configuration_loads(tmp_path: Path) -> None:
    (tmp_path / "store.yaml").write_text(block("docs/configuration.md", "yaml"), encoding="utf-8")
    assert load_config(tmp_path / "store.yaml").page_size == 64


def test_every_key_of_the_configuration_is_explained() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    config = load_config(ROOT / "configs" / "h100.yaml")
    for section, values in config.effective().items():
        for key in values if isinstance(values, dict) else [""]:
            name = f"{section}.{key}".strip(".")
            assert f"`{name}`" in page, name


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "test-vllm", "lint"])
def test_every_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{target}:" in makefile
