"""Test that warnings in our code and tests fail a run, and that warnings in third-party pytest plugins do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

PLUGIN = """
import warnings
import pytest

class PluginWarning(UserWarning):
    pass

def pytest_configure(config):
    warnings.warn(PluginWarning("at configure"))
    warnings.warn(pytest.PytestDeprecationWarning("an option is unset"), stacklevel=2)

def pytest_sessionfinish(session):
    warnings.warn(PluginWarning("at the end"))

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    warnings.warn(PluginWarning("before each test"))
"""


PLANTED = """
import gc
import warnings
from threading import Thread

import pytest


def test_resource():
    open("/dev/null")
    gc.collect()


def test_unraisable():
    class Broken:
        def __del__(self):
            raise ValueError

    Broken()
    gc.collect()


def test_deprecated():
    warnings.warn("old", DeprecationWarning)


def test_raised_in_a_library():
    warnings.warn_explicit("old", UserWarning, "x.py", 1, module="torch.x")


def test_thread():
    thread = Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore:old")
def test_expected_by_a_mark():
    warnings.warn("old")
"""


def _run(folder: Path, test: str, *options: str) -> tuple[int, str]:
    (folder / "pytest_somebodys.py").write_text(PLUGIN)
    (folder / "test_one.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(CHECKOUT / "pyproject.toml"), *options]
    command += [
        "-p",
        "tests.conftest",
        "-p",
        "pytest_somebodys",
        "-p",
        "no:cacheprovider",
        str(folder / "test_one.py"),
    ]
    path = os.pathsep.join([str(folder), str(CHECKOUT)])
    ended = subprocess.run(
        command,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.deep
def test_planted_warnings_fail_their_tests_and_those_of_a_plugin_do_not_end_the_run(tmp_path: Path) -> None:
    code, said = _run(tmp_path, PLANTED, "-n", "2")
    assert code == 1, said
    assert "5 failed, 1 passed" in said, said


@pytest.mark.deep
def test_a_warning_at_import_of_a_test_is_an_error(tmp_path: Path) -> None:
    planted = "import warnings\nwarnings.warn_explicit('old', UserWarning, 'x.py', 1, module='torch.x')\n"
    code, said = _run(tmp_path, f"{planted}\ndef test_one(): pass\n")
    assert code == 2, said
    assert "UserWarning: old" in said
