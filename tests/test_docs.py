"""Tests that the documentation names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def named_tests(page: str) -> Iterator[tuple[str, str]]:
    """Yield each test that ``page`` names as (path below tests/, function); the function is "" for a whole file.

    A bare ``::test_name`` belongs to the file named before it.
    """
    path = ""
    for named, function in re.findall(r"`(?:tests/)?((?:\w+/)*\w+\.py)?(?:::(\w+))?`", page):
        path = named or path
        if named or function:
            yield path, function


def test_tests_named_in_the_documentation_exist() -> None:
    pages = [
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("field-reports.md", "guarantees.md")
    ]
    named = [test for page in pages for test in named_tests(page)]
    assert any(function for _, function in named)
    missing = []
    for path, function in named:
        file = ROOT / "tests" / path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if not text or (function and not re.search(rf"^(?:async )?def {function}\(", text, re.MULTILINE)):
            missing.append(f"{path}::{function}" if function else path)
    assert missing == []
