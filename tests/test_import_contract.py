"""Test that the import contract in pyproject.toml holds, and that it reports a forbidden import."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the code and the contract, in which tests can plant imports."""
    for package in ("tierstore", "prefetch", "benchmarks"):
        shutil.copytree(CHECKOUT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter in a separate process, on the code in ``tree`` instead of the installed code."""
    program = (
        f"import sys; sys.path.insert(0, {str(tree)!r})\n"
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(no_cache=True, no_logo=True))\n"
    )
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=120)


def test_the_contract_holds(tree: Path) -> None:
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


FORBIDDEN = [
    (
        "tierstore/gpu/pool.py",
        "import tierstore.host.arena",
        "tierstore.gpu is not allowed to import tierstore.host",
    ),
    ("tierstore/cli/app.py", "import benchmarks", "tierstore.cli is not allowed to import benchmarks"),
    ("tierstore/store.py", "import prefetch", "tierstore.store is not allowed to import prefetch"),
    (
        "tierstore/directory/residency.py",
        "import torch",
        "tierstore.directory is not allowed to import torch",
    ),
    (
        "tierstore/directory/residency.py",
        "import threading",
        "tierstore.directory is not allowed to import threading",
    ),
    ("tierstore/keys.py", "import torch", "tierstore.keys is not allowed to import torch"),
    ("tierstore/nvme/tier.py", "import torch", "tierstore.nvme is not allowed to import torch"),
    (
        "tierstore/directory/directory.py",
        "import tierstore.mover",
        "is not allowed to import tierstore.mover",
    ),
]


def test_a_forbidden_import_is_noticed(tree: Path) -> None:
    for room, statement, _ in FORBIDDEN:
        with open(tree / room, "a", encoding="utf-8") as file:
            file.write(f"\n{statement}\n")
    result = lint_imports(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert [broken for _, _, broken in FORBIDDEN if broken not in result.stdout] == []


def test_every_module_has_a_place_in_the_layers() -> None:
    """Check that the contract names every module, or a package that contains it. Other modules would not be checked."""
    with open(CHECKOUT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    placed = {name.strip(" ()") for layer in contracts[0]["layers"] for name in re.split(r"\s[|:]\s", layer)}
    for package in ("tierstore", "prefetch", "benchmarks"):
        for module in (CHECKOUT / package).rglob("*.py"):
            parts = module.relative_to(CHECKOUT).with_suffix("").parts
            if parts[-1] == "__init__" and len(list(module.parent.glob("*.py"))) > 1:
                continue  # the layers name the package or each of its modules
            assert any(".".join(parts[:n]) in placed for n in range(1, len(parts) + 1)), module
