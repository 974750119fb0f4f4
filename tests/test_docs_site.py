"""Tests of the documentation site: generated pages are up to date, all pages are listed, all commands exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import markdown  # type: ignore[import-untyped]
import pytest
import typer
import yaml

from docs import reference
from tierstore.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
PAGES = sorted(page for page in PAGES if "history" not in page.parts)


def command_lines(text: str) -> Iterator[str]:
    """Yield the lines of code blocks and inline code on a page. Join continuation lines and remove shell prompts."""
    blocks = re.findall(r"```(?:sh|text|console)?\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def tierstore_calls(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every call to ``tierstore`` on a page, without comments and brackets."""
    for line in command_lines(text):
        found = re.match(r"(?:\.venv/bin/)?tierstore +([a-z-].*)$", re.sub(r"\s#.*", "", line))
        if found:
            yield shlex.split(re.sub(r"[][]", " ", found[1]).replace("...", " "))


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def unknown(arguments: list[str]) -> str | None:
    """Return the first command or option of a call that the command line does not know, or None if it knows all."""
    command = command_line()
    words = list(arguments)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[0]
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return next((option for option in options if option not in {*known, "--help"}), None)


def make_targets(text: str) -> set[str]:
    """Return the targets of every ``make`` call on a page."""
    return {
        found[1] for line in command_lines(text) if (found := re.match(r"make ([a-z][a-z-]*)(?: |$)", line))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_exists_with_its_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = {" ".join(call): found for call in tierstore_calls(text) if (found := unknown(call))}
    assert wrong == {}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {target for target in make_targets(text) if f"\n{target}:" not in makefile} == set()


def test_the_search_for_commands_finds_unknown_ones() -> None:
    page = "Run `tierstore plan --config FILE --modle NAME` or:\n\n```sh\n$ tierstore bench dsik \\\n  --dir X\n```\n"
    assert [unknown(call) for call in tierstore_calls(page)] == ["dsik", "--modle"]
    assert make_targets("`make lint`, ```x``` and `make no-such`") == {"lint", "no-such"}


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist(file: str) -> None:
    listed = set(re.findall(r"`((?:vllm:)?tierstore_\w+)`", reference.metrics()))
    listed |= {f"{name}_bucket" for name in listed if name.endswith("_seconds")}
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    tree = json.loads(text) if file.endswith("json") else yaml.safe_load(text)
    expressions = list(values(tree, "expr"))
    asked = {name for each in expressions for name in re.findall(r"(?:vllm:)?tierstore_\w+", each)}
    for each in expressions:
        for name in re.findall(r"\$\{prefix\}(\w+)", each):
            asked |= {f"tierstore_{name}", f"vllm:tierstore_{name}"}
    assert len(expressions) > 5
    assert asked - listed == set()


def values(tree: object, key: str) -> Iterator[str]:
    """Yield the text under ``key`` wherever it occurs in nested mappings and lists."""
    if isinstance(tree, dict):
        yield from (str(value) for name, value in tree.items() if name == key)
        tree = list(tree.values())
    if isinstance(tree, list):
        for each in tree:
            yield from values(each, key)


def test_generated_pages_are_fresh() -> None:
    assert reference.stale() == [], "run `python -m docs.reference` and commit the result"


def test_a_changed_page_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "metrics.md"
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    page.write_text(text.replace("tierstore_pages", "tierstore_sheets"), encoding="utf-8")
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(reference, "PAGES", {"metrics.md": reference.metrics})
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert page.read_text(encoding="utf-8") == text


def test_every_configuration_key_has_a_meaning() -> None:
    rows = [row.split(" | ") for row in re.findall(r"^\| `.*", reference.configuration(), re.MULTILINE)]
    assert len(rows) > 20
    assert [key for key, *_, meaning in rows if len(meaning.rstrip(" |")) < 10] == []


def test_every_public_name_has_a_section_in_the_reference() -> None:
    assert reference.missing_names() == []


def shown_as_text(page: str) -> list[str]:
    """Return lines of a page that are written as list items, table rows or fences, but that the site shows as text."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    extensions = [each if isinstance(each, str) else next(iter(each)) for each in site["markdown_extensions"]]
    shown = re.sub(r"<pre>.*?</pre>", "", markdown.markdown(page, extensions=extensions), flags=re.DOTALL)
    return [
        line for line in shown.splitlines() if re.match(r"\s*(- \S|\|.*\|(</p>)?$|<p><code>\w+$|.*```)", line)
    ]


@pytest.mark.parametrize(
    "page",
    [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))],
)
def test_the_site_shows_every_list_and_table_of_a_page(page: str) -> None:
    assert shown_as_text((ROOT / page).read_text(encoding="utf-8")) == []


def test_the_search_for_lists_shown_as_text_finds_them() -> None:
    assert shown_as_text("- One.\n\n    More.\n- Two.\n\n1. Three:\n\n    ```sh\n    ls\n    ```\n") == [
        "- Two.</p>",
        "<p><code>sh",
    ]
    assert shown_as_text("Text\n| a | b |\n|---|---|\n") == ["| a | b |", "|---|---|</p>"]
    assert shown_as_text("Text\n\n- One.\n- Two.\n\n| a | b |\n|---|---|\n| c | d |\n") == []


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed - there == set()
    assert {page for page in there - listed if not re.match(r"history/|decisions/\d", page)} == set()
