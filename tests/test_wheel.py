"""Tests of an installed wheel: package data, metadata, and messages that do not refer to the repository."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that is built without network access, from a copy of the files that the build reads."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("tierstore", "prefetch", "configs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    into = tmp_path_factory.mktemp("wheel")
    words = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, *words, "--wheel-dir", str(into), str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (found,) = into.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the wheel's files, without the repository."""
    folder = tmp_path_factory.mktemp("installed")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_every_configuration_of_the_repository_is_in_the_wheel_and_loads(installed: Path) -> None:
    program = (
        "import importlib.resources, tierstore, tierstore.config\n"
        "folder = importlib.resources.files('tierstore') / 'configs'\n"
        "print(tierstore.__file__)\n"
        "for file in sorted(folder.iterdir(), key=lambda file: file.name):\n"
        "    tierstore.load_config(str(file)); print(file.name)\n"
    )
    done = run(installed, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(installed / "tierstore" / "__init__.py"),
        *(file.name for file in CONFIGS),
    ]
    for file in CONFIGS:
        assert (installed / "tierstore" / "configs" / file.name).read_bytes() == file.read_bytes()


def test_no_file_of_the_repository_is_a_symbolic_link() -> None:
    """Some archives and copies replace a symbolic link by a file that contains the path of the link's target."""
    tracked = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("this copy of the repository has no git directory")
    assert [line for line in tracked.stdout.splitlines() if line.startswith("120000")] == []


def test_the_metadata_names_the_author_and_the_licence(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Author"] == "The TierStore maintainers"
    assert found["License-Expression"] == "Apache-2.0"


def test_long_description_has_no_broken_links_on_a_package_index(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    text = found.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# TierStore\n")
    assert "```python" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if not link.startswith(("https://", "http://"))] == []


def test_the_module_runs_from_a_wheel(installed: Path) -> None:
    done = run(installed, "-m", "tierstore", "plan", "--config", "nowhere.yaml", "--model", "llama-3.1-8b")
    assert done.returncode == 2
    assert (
        done.stderr
        == "tierstore: nowhere.yaml: cannot read the configuration file: No such file or directory\n"
    )


def test_messages_and_help_name_no_files_missing_from_the_wheel() -> None:
    """Only messages of commands that need a checkout may name repository paths, make targets or editable installs."""
    found = []
    for package in ("tierstore", "prefetch"):
        for file in sorted((ROOT / package).rglob("*.py")):
            where = file.relative_to(ROOT).as_posix()
            found += [f"{where}: {text}" for text in _texts(file) if _REPOSITORY.search(text)]
    assert [each for each in found if not each.startswith("tierstore/cli/output.py: ")] == []
    assert found, "the search finds the texts of commands that need the checkout"


def _texts(file: Path) -> list[str]:
    """Return the texts that users can see: strings, and the docstrings of commands, which are their help."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    unseen = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unseen
    ]
    if file.parent.name == "cli" or file.name == "command.py":
        public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
        texts += [ast.get_docstring(node) or "" for node in public]
    return texts


_REPOSITORY = re.compile(
    r"\b(docs|configs|benchmarks|tests)/|\bmake (demo|test|docs|card|bench|compare)\b|pip install -e|README"
)
