"""Test that the tests named in the documentation exist, and that `make test` runs at least one for each promise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
ROWS = re.findall(r"^\| [FK]\d.*$", (DOCS / "field-reports.md").read_text(encoding="utf-8"), re.MULTILINE)
ELSEWHERE = ("gpu/", "vllm/", "sglang/")
"""Folders of tests that `make card`, `make test-vllm` and `make test-sglang` run instead of `make test`."""


def named_tests(text: str) -> Iterator[tuple[str, str]]:
    """Yield each test that ``text`` names as (path below tests/, function); the function is "" for a whole file.

    A bare ``::test_name`` belongs to the file named before it.
    """
    path = ""
    for named, function in re.findall(r"`(?:tests/)?((?:\w+/)*\w+\.py)?(?:::(\w+))?`", text):
        path = named or path
        if named or function:
            yield path, function


@cache
def lanes(path: str) -> dict[str, bool]:
    """Return, for each test in a file, whether `make test` runs at least one of its cases."""
    file = TESTS / path
    tree = ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")
    assigned = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    deep = "pytestmark = pytest.mark.deep" in assigned
    return {
        node.name: not deep and all(ast.unparse(each) != "pytest.mark.deep" for each in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("page", ["field-reports.md", "guarantees.md"])
def test_tests_named_in_the_documentation_exist(page: str) -> None:
    named = list(named_tests((DOCS / page).read_text(encoding="utf-8")))
    assert page == "guarantees.md" or any(function for _, function in named)
    assert [test for test in named if not lanes(test[0]) or test[1] not in ("", *lanes(test[0]))] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_make_test_runs_a_test_of_every_report(row: str) -> None:
    tests = list(named_tests(row))
    assert tests
    quick = [
        name for path, test in tests for name, runs in lanes(path).items() if runs and test in ("", name)
    ]
    assert quick or all(path.startswith(ELSEWHERE) for path, _ in tests), "`make test` runs none of them"


@pytest.mark.parametrize("path", sorted((TESTS / "field").glob("test_*.py")), ids=lambda path: path.stem)
def test_every_promise_is_tested_by_make_test(path: Path) -> None:
    assert any(lanes(str(path.relative_to(TESTS))).values())


@pytest.mark.parametrize(
    "page",
    [path.relative_to(TESTS.parent).as_posix() for path in (*TESTS.parent.glob("*.md"), *DOCS.rglob("*.md"))],
)
def test_every_code_block_begins_and_ends_on_separate_lines(page: str) -> None:
    text = (TESTS.parent / page).read_text(encoding="utf-8")
    # An indented fence does not count: the site shows it as text.
    fences = [line.rstrip() for line in text.splitlines() if "```" in line]
    assert [line for line in fences if not re.fullmatch(r"```(\w+)?", line)] == []
    assert all(fence == "```" for fence in fences[1::2])
    assert len(fences) % 2 == 0
