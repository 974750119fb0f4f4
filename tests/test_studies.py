"""Commands whose work is in ``benchmarks/`` run from a checkout; an installed package refuses them in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the packages of the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    for package in ("tierstore", "prefetch"):
        shutil.copytree(CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def command(packages: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``tierstore WORDS`` with the packages of this folder, which alone can be imported from it."""
    program = (
        f"import os, sys; sys.path.insert(0, {str(packages)!r}); import prefetch, tierstore\n"
        "sys.path[:] = [place for place in sys.path if not os.path.isdir(os.path.join(place, 'tierstore'))]\n"
        "from tierstore.cli import main; main()"
    )
    started = [sys.executable, "-P", "-c", program, *words]
    return subprocess.run(
        started, cwd=packages.parent, capture_output=True, text=True, check=False, timeout=120
    )


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


def test_a_checkout_finds_its_studies_when_it_is_not_on_the_path_itself(installed: Path) -> None:
    """As with an editable install that exposes the packages of the wheel alone."""
    checkout = installed.parent / "checkout"
    shutil.copytree(installed, checkout)
    shutil.copytree(CHECKOUT / "benchmarks", checkout / "benchmarks")
    shutil.copy(CHECKOUT / "pyproject.toml", checkout)
    result = command(checkout, "bench", "hints", "--from", "disk")
    assert result.stderr == "tierstore: --from must be nvme, host, or both separated by a comma, got 'disk'\n"


def test_an_installed_package_measures_the_disk_tier_without_its_contenders(installed: Path) -> None:
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
    assert "skipping plain LMDB and a file per page" in result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {row["payload"] for row in rows} == {"lmdb", "extents", "raw, 4 KiB pages"}
