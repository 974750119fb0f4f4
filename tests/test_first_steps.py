"""Tests of what new users see first: module names, versions, and sizes in messages."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import tierstore
from tests.support import forked, lanes
from tierstore.page import PageSpec
from tierstore.types import exact_size

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB (1,024 bytes)"),
        (989560464998400, "900 TiB (989,560,464,998,400 bytes)"),
    ],
)
def test_size_in_a_message_is_short_and_exact(nbytes: int, text: str) -> None:
    assert exact_size(nbytes) == text


def test_every_message_formats_sizes_the_same_way() -> None:
    """Sizes in bytes in f-strings must be formatted by ``exact_size`` or ``format_size``, or be small constants."""
    found = []
    for package in ("tierstore", "prefetch"):
        for file in sorted({*(ROOT / package).rglob("*.py")} - {ROOT / "tierstore/types.py"}):
            for text in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(text, ast.JoinedStr):
                    where = f"{file.relative_to(ROOT)}:{text.lineno}"
                    found += [f"{where} {ast.unparse(value)}" for value in _raw_sizes(text)]
    assert found == []


def test_the_search_for_raw_sizes_finds_them() -> None:
    raw = 'f"{page.nbytes} and {7 * self.capacity} and {len(head)} bytes, not {KEY_NBYTES} bytes, {exact_size(nbytes)}"'
    text = ast.parse(raw, mode="eval").body
    assert isinstance(text, ast.JoinedStr)
    assert [ast.unparse(value) for value in _raw_sizes(text)] == [
        "page.nbytes",
        "7 * self.capacity",
        "len(head)",
    ]


def _raw_sizes(text: ast.JoinedStr) -> list[ast.expr]:
    """Return the sizes in bytes that an f-string shows unformatted.

    A value is such a size if its name ends in ``nbytes``, ``bytes`` or ``capacity``, or if " bytes" follows it.
    """
    found = []
    for part, after in zip(text.values, [*text.values[1:], None], strict=True):
        if not isinstance(part, ast.FormattedValue) or part.format_spec is not None:
            continue
        value = part.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) in _SHOWS_SIZES:
            continue
        names = [node.attr if isinstance(node, ast.Attribute) else node.id for node in _names(value)]
        told = isinstance(after, ast.Constant) and str(after.value).startswith(" bytes")
        if (told or any(_IS_SIZE.search(name) for name in names)) and not _is_small(value):
            found.append(value)
    return found


def _names(value: ast.expr) -> list[ast.Attribute | ast.Name]:
    """Return the names in an arithmetic expression."""
    if isinstance(value, ast.Attribute | ast.Name):
        return [value]
    if isinstance(value, ast.BinOp):
        return _names(value.left) + _names(value.right)
    return []


def _is_small(value: ast.expr) -> bool:
    return ast.unparse(value) in _SMALL


_SHOWS_SIZES = {"exact_size", "format_size"}
_IS_SIZE = re.compile(r"(^|_)(nbytes|capacity|bytes)$")
_SMALL = {
    "KEY_NBYTES",
    "HEAD_NBYTES",
}
"""Sizes that are easy to read without units, such as 36 bytes."""


@pytest.mark.parametrize("words", [["--version"], ["inspect", "nowhere"]])
def test_the_module_is_the_same_as_the_command(words: list[str], tmp_path: Path) -> None:
    found = []
    for program in (["-m", "tierstore"], ["-c", "import sys; from tierstore.cli import main; main()"]):
        done = subprocess.run(
            [sys.executable, *program, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=False,
        )
        found.append((done.returncode, done.stdout, done.stderr))
    assert found[0] == found[1]


def test_foreign_prefetch_package_is_named_in_the_error(tmp_path: Path) -> None:
    """A foreign module named ``prefetch`` must not run, and must not affect modules that need no prefetcher."""
    (tmp_path / "prefetch.py").write_text("raise SystemExit('foreign code has run')")
    program = (
        "import importlib, sys\n"
        "import tierstore, tierstore.store, tierstore.cli.app\n"
        "assert not {'prefetch', 'tierstore.prefetch'} & set(sys.modules)\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: print(name, type(error).__name__, error, sep='|')\n"
    )
    users = [
        file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for file in sorted((ROOT / "tierstore").rglob("*.py"))
        if re.search(r"^from tierstore\.prefetch import", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(users) >= 5
    if lanes.SEED is None:
        users.remove(
            "tierstore.adapters.huggingface.session"
        )  # importing it takes seconds, because its package imports transformers
    done = forked.run(program, *users, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, line in zip(users, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{name}|ShadowedError|TierStore needs its own package prefetch ")
        assert (
            f"but {tmp_path / 'prefetch.py'} has the same name and is found first; rename that file" in line
        )


def test_tierstore_imports_prefetch_in_one_place() -> None:
    importing = re.compile(r"^\s*(from|import) prefetch\b", re.MULTILINE)
    files = sorted((ROOT / "tierstore").rglob("*.py"))
    found = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if importing.search(file.read_text(encoding="utf-8"))
    ]
    assert found == ["tierstore/prefetch.py"]


def test_the_version_is_that_of_the_distribution() -> None:
    assert tierstore.__version__ == version("tierstore")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8"])
def test_spec_accepts_torch_dtypes(dtype: str) -> None:
    def spec(given: object) -> PageSpec:
        return PageSpec(
            num_layers=1,
            page_size=4,
            num_kv_heads=1,
            head_dim=8,
            dtype=given,  # type: ignore[arg-type]
            model="m",
        )

    assert spec(getattr(torch, dtype)) == spec(dtype)
    assert spec(getattr(torch, dtype)).fingerprint == spec(dtype).fingerprint
    with pytest.raises(ValueError, match=r"dtype must be one of .* got 'complex64'"):
        spec(torch.complex64)
