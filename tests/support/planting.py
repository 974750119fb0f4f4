"""Bugs planted into the product's source, for tests and machines that must notice them: the one way to plant any.

Into a copy of a loaded module (``load``), into a file that is loaded by its path (``write``), into a copy of the
checkout in which tests run as processes of their own (``copy_of_checkout``, ``plant``, ``outcome``), or, where source
will not do, by a function that patches what is loaded (``Plants``). ``require_noticed`` has a machine look for one.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from hypothesis import Phase, Verbosity, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tierstore.errors import TierStoreError

Plant = Callable[[pytest.MonkeyPatch], None]
NOTICED = (AssertionError, TierStoreError, LookupError, Flaky)
"""How a bug shows. An error of the store's that no machine expects may stand for an assertion that failed before it,
when the machine is taken down. Flaky: it went wrong once, and not when the same was tried again: threads have a part
in it. No TypeError and the like: a planted bug that does not fit the product any more would count as noticed."""

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 280.0

# As many and as long as it takes; the first failure ends a run, and the choices are the same every time.
SEARCH = settings(
    max_examples=4000,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    verbosity=Verbosity.quiet,
)


class Plants(list[Plant]):
    """Bugs that patch what is loaded, named for what goes wrong. ``bug`` takes one in: none is written and left out."""

    def bug(self, plant: Plant) -> Plant:
        """For use as a decorator."""
        self.append(plant)
        return plant


def require_noticed(
    machine: type[RuleBasedStateMachine],
    given: settings = SEARCH,
    noticed: tuple[type[BaseException], ...] = NOTICED,
) -> None:
    """The machine meets what is planted now, and it is the bug that shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a walk that the bug ended had leases
        with pytest.raises(noticed):
            run_state_machine_as_test(machine, settings=given)
        gc.collect()


class Bug(NamedTuple):
    """``old`` must occur exactly once in the source."""

    name: str
    old: str
    new: str


def planted(source: str, bug: Bug) -> str:
    """The source with the bug in it.

    AssertionError for an outdated bug: call it where that fails the test, not where a noticed bug is expected.
    """
    assert source.count(bug.old) == 1, f"the source no longer has, once: {bug.old!r}"
    return source.replace(bug.old, bug.new)


def load(module: ModuleType, bug: Bug | None = None) -> ModuleType:
    """A copy of the module with the bug in it; the loaded one stays as it is. AssertionError as ``planted``."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    copy = ModuleType(module.__name__)
    exec(compile(source if bug is None else planted(source, bug), module.__file__, "exec"), copy.__dict__)
    return copy


def write(source: str, bug: Bug, folder: Path) -> Path:
    """A file in ``folder`` with the source and the bug in it. AssertionError as ``planted``."""
    path = folder / "planted.py"
    path.write_text(planted(source, bug), encoding="utf-8")
    return path


def copy_of_checkout(folder: Path, *tests: str) -> None:
    """The product, what tests share, and these folders of tests, under ``folder``."""
    for package in ("tierstore", "tests/support", *(f"tests/{name}" for name in tests)):
        shutil.copytree(CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def plant(copy: Path, room: str, bug: Bug) -> None:
    """Puts the bug into a file of the product in a copy of the checkout. AssertionError as ``planted``."""
    path = copy / "tierstore" / room
    path.write_text(planted(path.read_text(encoding="utf-8"), bug), encoding="utf-8")


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a copy of the checkout and from it; hangs are an error."""
    return subprocess.run(
        [sys.executable, *command], cwd=copy, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def outcome(copy: Path, tests: Iterable[str]) -> int:
    """Exit code of pytest over tests of a copy: 1 for failures, other numbers for tests that could not be run."""
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "-o", "pythonpath=.")
    drawing = "--hypothesis-profile=ci"  # of no deadline, and the same every time; the checkout's conftest is not there
    return run(copy, "-m", "pytest", "-q", "-x", *plain, drawing, *sorted(set(tests))).returncode
