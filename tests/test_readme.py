"""Test that the programs, links and names in the README and the guides work."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.tiny import random_prompt, tiny_llama
from tests.support import forked
from tests.support.pages import SPEC, chain, read_soon, tiers, write_down
from tierstore.build import assemble, held_form
from tierstore.config import load_config
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.store import TierStore
from tierstore.types import Tier

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def block(page: str, language: str, number: int = 0) -> str:
    """Return one fenced code block of a page. ``number`` counts the page's blocks in this language from 0."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found[number]


def heading_ids(page: Path) -> set[str]:
    """Return the link anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in heading_ids(target)):
            broken.append(link)
    assert broken == []


def run(program: str, directory: Path) -> str:
    result = forked.run(program, cwd=directory, strict=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_example_runs(tmp_path: Path) -> None:
    first = [sys.executable, "-W", "error", "-c", block("README.md", "python")]
    printed = subprocess.run(first, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "Match(num_pages=6" in printed
    assert "6 [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in printed
    again = run(block("README.md", "python"), tmp_path)
    assert "Match(num_pages=6" in again
    assert again.count("NVME") == 6
    assert "6 [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in again


def test_laptop_tutorial_finds_its_pages_after_a_restart(tmp_path: Path) -> None:
    for number in (0, 1):
        printed = run(block("docs/laptop.md", "python", number), tmp_path)
        shown = block("docs/laptop.md", "text", 3 + number)
        assert printed == shown.partition("\n")[2]


def test_transformers_examples_reuse_pages_of_earlier_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the examples in this process, which has already imported transformers."""
    monkeypatch.chdir(tmp_path)
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
    said = []
    for program in (prompts, chat):
        exec(program, {})
        said.append(capsys.readouterr().out.splitlines()[-2:])
    first, second = said
    assert first == ["0 of 40 tokens reused", "40 of 43 tokens reused"]
    assert "new_tokens=40, reused_tokens=0, computed_tokens=40" in second[0]
    assert "new_tokens=3, reused_tokens=59, computed_tokens=4" in second[1]


def test_the_engine_example_copies_pages_out_and_in(tmp_path: Path) -> None:
    printed = run(block("docs/engine.md", "python"), tmp_path)
    assert printed.splitlines() == ["[1, 3, 4, 15]", "4 True"]


def test_the_archive_example_takes_pages_to_another_store(tmp_path: Path) -> None:
    printed = run(block("docs/archive.md", "python"), tmp_path)
    assert printed.splitlines() == ["4", "4 True 4"]


def test_the_tier_of_the_guide_stores_pages_and_returns_them(tmp_path: Path) -> None:
    guide: dict[str, Any] = {}
    exec(block("docs/adding-a-tier.md", "python"), guide)
    config, layout, wakeup = tiers(4, 8, tmp_path), PageLayout.of(SPEC), Wakeup()
    tier = guide["RemoteTier"](1 << 20, held_form(config, layout).view_nbytes, wakeup.bump)
    parts = assemble(config, layout, wakeup.bump, {Tier.REMOTE: (guide["DESCRIPTION"], tier)})
    with TierStore(config, parts, wakeup, pump=True) as store:
        keys = chain(3)
        write_down(store, keys, Tier.REMOTE)
        assert read_soon(store, keys) == 3  # read_soon compares every byte
        assert store.evict(keys) == 3
        assert store.match(keys).num_pages == 0
        store.check()


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


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "test-vllm", "test-sglang", "lint"])
def test_every_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{target}:" in makefile
