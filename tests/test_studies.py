"""Test that commands of ``benchmarks/`` run in a checkout, and end with a one-line error in an installed package."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import forked

CHECKOUT = Path(__file__).parents[1]
LIBRARIES = ("torch", "lmdb", "numpy", "pydantic", "rich.console", "typer", "xxhash", "yaml")
"""Third-party libraries to import in advance. Each process imports TierStore's packages from its own folder."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages that the wheel contains, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    for package in ("tierstore", "prefetch"):
        shutil.copytree(CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def command(packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``tierstore WORDS`` with this folder's ``tierstore`` and ``prefetch``. No other copy can be imported."""
    program = (
        f"import os, sys; sys.path.insert(0, {str(packages)!r}); import prefetch, tierstore\n"
        f"assert str(tierstore.__file__).startswith({str(packages)!r})\n"
        "sys.path[:] = [place for place in sys.path if not os.path.isdir(os.path.join(place, 'tierstore'))]\n"
        "from tierstore.cli import main; main()"
    )
    return forked.run(program, *words, cwd=packages.parent, imported=LIBRARIES)


@pytest.mark.parametrize(
    ("words", "study"),
    [
        (["compare"], "compare"),
        (["bench", "engine", "--device", "cpu"], "engine"),
        (["bench", "hints"], "hints"),
    ],
)
def test_an_installed_package_refuses_a_study_in_one_line(
    installed: Path, words: list[str], study: str
) -> None:
    result = command(installed, *words, "--json")
    refusal = f"benchmarks/{study} is not part of the installed package: run this command from a checkout of TierStore"
    assert result.returncode == 2
    assert result.stderr == f"tierstore: {refusal}\n"
    assert json.loads(result.stdout) == {"error": refusal}


def test_checkout_finds_its_studies_without_being_on_the_path(installed: Path) -> None:
    """Run the command as from an editable install that exposes only the wheel's packages, not the whole checkout."""
    checkout = installed.parent / "checkout"
    shutil.copytree(installed, checkout)
    shutil.copytree(CHECKOUT / "benchmarks", checkout / "benchmarks")
    shutil.copy(CHECKOUT / "pyproject.toml", checkout)
    result = command(checkout, "bench", "hints", "--from", "disk")
    assert result.stderr == "tierstore: --from must be nvme, host, or both separated by a comma, got 'disk'\n"


def test_installed_package_measures_the_disk_tier_without_competitors(installed: Path) -> None:
    sizes = (
        "--size",
        "64KiB",
        "--page-sizes",
        "8KiB",
        "--rounds",
        "1",
        "--stall-size",
        "2MiB",
        "--idle",
        "0.01",
    )
    result = command(installed, "bench", "nvme", *sizes, "--json")
    assert result.returncode == 0, result.stderr
    assert "not measuring plain LMDB or one file per page" in result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {row["payload"] for row in rows} == {"lmdb", "extents", "raw, 4 KiB pages"}
