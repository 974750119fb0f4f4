"""docs/field-reports.md names tests that are there, and of each promise one that `make test` runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPORTS = (TESTS.parent / "docs" / "field-reports.md").read_text(encoding="utf-8")
ROWS = [line for line in REPORTS.splitlines() if re.match(r"\| [FK]\d", line)]
ELSEWHERE = ("gpu/", "vllm/")
"""Tests that `make card` and `make test-vllm` run."""


@cache
def lanes(path: str) -> dict[str, bool]:
    """Every test of a file: whether `make test` runs it, in some of its cases at least."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    deep = any(ast.unparse(node) == "pytestmark = pytest.mark.deep" for node in tree.body)
    return {
        node.name: not deep and all(ast.unparse(each) != "pytest.mark.deep" for each in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def named(row: str) -> list[tuple[str, str | None]]:
    """The tests that a row names: a file and a test in it, or a file. ``::name`` is in the file named before."""
    found: list[tuple[str, str | None]] = []
    for name in re.findall(r"`((?:tests/)?[\w/]*\.py(?:::\w+)?|::\w+)`", row):
        path, _, test = name.removeprefix("tests/").partition("::")
        found.append((path or found[-1][0], test or None))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_what_a_report_is_about_is_tested(row: str) -> None:
    tests = named(row)
    assert tests
    quick: list[str] = []
    for path, test in tests:
        there = lanes(path) if (TESTS / path).is_file() else {}
        assert there, f"there are no tests in {path}"
        assert test is None or test in there, f"there is no {test} in {path}"
        quick += [name for name, runs in there.items() if runs and test in (None, name)]
    assert quick or all(path.startswith(ELSEWHERE) for path, _ in tests), "`make test` runs none of them"


@pytest.mark.parametrize("path", sorted((TESTS / "field").glob("test_*.py")), ids=lambda path: path.stem)
def test_every_promise_is_tested_by_make_test(path: Path) -> None:
    assert any(lanes(str(path.relative_to(TESTS))).values())
