"""Plants bugs in the product's source, for tests and state machines that must notice them.

A bug is a piece of source text and its replacement. The text is searched for in a package, so a bug stays valid if
its module is renamed or its code moves to another module. There are several ways to plant a bug:

- into copies of loaded modules (``load``),
- into a copy that takes the place of the loaded module (``install``),
- into a file that is loaded by its path (``write``),
- into a copy of the checkout, in which tests run in separate processes (``copy_of_checkout``, ``plant``, ``outcome``),
- by a function that patches loaded objects, if a change of the source is not possible (``Plants``).

``require_noticed`` runs a state machine that must notice a bug.
"""

from __future__ import annotations

import ast
import gc
import importlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache
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
"""Exceptions by which a state machine notices a bug.

An unexpected error of the store counts: it may hide a failed assertion when the machine is torn down. Flaky counts: the
machine failed once but not when it was repeated, because threads are involved. TypeError and the like do not count,
because an outdated bug that breaks the product would be taken for a noticed one.
"""

CHECKOUT = Path(__file__).parents[2]
PRODUCT = ("tierstore", "prefetch")
OURS = (*PRODUCT, "tests")
PATIENCE_S = 280.0

# Large limits, because the first failure ends a run. The random choices are the same in every run.
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
    """A list of bugs that patch loaded objects. Each is a function, named for what goes wrong.

    The decorator ``bug`` adds a function to the list, so that no function is forgotten.
    """

    def bug(self, plant: Plant) -> Plant:
        """Add a bug to the list. Used as a decorator."""
        self.append(plant)
        return plant


def require_noticed(
    machine: type[RuleBasedStateMachine],
    given: settings = SEARCH,
    noticed: tuple[type[BaseException], ...] = NOTICED,
) -> None:
    """Run a state machine, and assert that it fails with one of the exceptions ``noticed``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the failed run had open leases
        with pytest.raises(noticed):
            run_state_machine_as_test(machine, settings=given)
        gc.collect()


class Bug(NamedTuple):
    """A bug: source text and its replacement. ``old`` must occur exactly once in the package, in any of its modules."""

    name: str
    old: str
    new: str


def find(package: str, bug: Bug, checkout: Path = CHECKOUT) -> str:
    """Return the dotted name of the only module in the package or its sub-packages whose source has ``bug.old``.

    Raises AssertionError for an outdated bug. Do not call it where an AssertionError means that the bug was noticed.
    """
    counts = {
        name: path.read_text(encoding="utf-8").count(bug.old) for name, path in _files(package, checkout)
    }
    found = [name for name, count in counts.items() if count]
    assert [counts[name] for name in found] == [1], (
        f"the source text of the bug must occur once in {package}, but occurs in {found}: {bug.old!r}"
    )
    return found[0]


def load(subject: ModuleType, bug: Bug | None = None, package: str | None = None) -> ModuleType:
    """Return a copy of the subject that runs the code with the bug. Loaded modules do not change.

    The code that the bug replaces is looked up in ``package``, by default the package of the subject. If this code is
    not in the subject's own module, the copy of the subject uses a changed copy of the module that contains it, and
    copies of the modules through which the subject imports that module.
    Raises AssertionError as ``find`` does.
    """
    planted = None if bug is None else find(package or _package(subject), bug)
    copies = {name: _empty_copy(name) for name in _using(planted or subject.__name__, subject.__name__)}
    assert subject.__name__ in copies, f"{subject.__name__} does not use {planted}"
    with pytest.MonkeyPatch.context() as patch:
        for name, copy in copies.items():
            patch.setitem(sys.modules, name, copy)
            parent, _, last = name.rpartition(".")
            if parent:
                patch.setattr(sys.modules[parent], last, copy, raising=False)
        for name, copy in copies.items():
            source = _source(name, bug if name == planted else None)
            exec(compile(source, str(_file(name)), "exec"), copy.__dict__)
    return copies[subject.__name__]


def install(patch: pytest.MonkeyPatch, subject: ModuleType, bug: Bug | None = None) -> ModuleType:
    """Replace the module that has the bug, or the subject if there is no bug, with a copy, and return the copy.

    Until the patch is undone, all loaded modules of the product and the tests use the copy's classes and functions in
    place of those that they have imported. The bug is searched for in the subject's package. Raises AssertionError as
    ``find`` does.
    """
    name = subject.__name__ if bug is None else find(_package(subject), bug)
    real = importlib.import_module(name)
    copy = load(real, bug, name)
    instead = {
        id(value): vars(copy)[own]
        for own, value in vars(real).items()
        if getattr(value, "__module__", None) == name and own in vars(copy)
    }
    instead[id(real)] = copy
    for user in [module for loaded, module in sys.modules.items() if loaded.partition(".")[0] in OURS]:
        for its, value in list(vars(user).items()):
            if user is not real and id(value) in instead:
                patch.setattr(user, its, instead[id(value)])
    return copy


def write(package: str, bug: Bug, folder: Path) -> dict[str, Path]:
    """Plant the bug in a copy of its module, in ``folder``. Return {dotted name of the module: path of the copy}.

    Raises AssertionError as ``find`` does.
    """
    name = find(package, bug)
    path = folder / "planted.py"
    path.write_text(_source(name, bug), encoding="utf-8")
    return {name: path}


def copy_of_checkout(folder: Path, *tests: str) -> None:
    """Copy the product, ``tests/support`` and these folders of tests to ``folder``."""
    for package in ("tierstore", "tests/support", *(f"tests/{name}" for name in tests)):
        shutil.copytree(CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def plant(copy: Path, package: str, bug: Bug) -> None:
    """Plant the bug in a package of a copy of the checkout. Raises AssertionError as ``find`` does."""
    name = find(package, bug, copy)
    _file(name, copy).write_text(_source(name, bug, copy), encoding="utf-8")


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a copy of the checkout, so that it imports the copy's modules.

    Raises subprocess.TimeoutExpired if the process hangs.
    """
    return subprocess.run(
        [sys.executable, *command], cwd=copy, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def outcome(copy: Path, tests: Iterable[Callable[..., object]]) -> int:
    """Run these tests in a copy of the checkout, and return the exit code of pytest.

    The code is 0 if all tests pass, 1 if a test fails, and another number if the tests could not be run.
    """
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "-o", "pythonpath=.")
    drawing = "--hypothesis-profile=ci"  # no deadline, deterministic; the copy has no conftest.py
    names = {f"{test.__module__.replace('.', '/')}.py::{test.__name__}" for test in tests}
    return run(copy, "-m", "pytest", "-q", "-x", *plain, drawing, *sorted(names)).returncode


def _package(module: ModuleType) -> str:
    return module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]


def _file(name: str, checkout: Path = CHECKOUT) -> Path:
    path = checkout.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _files(package: str, checkout: Path) -> list[tuple[str, Path]]:
    """Return the names and files of all modules of a package, or of a single module."""
    top = _file(package, checkout)
    paths = sorted(top.parent.rglob("*.py")) if top.name == "__init__.py" else [top]
    return [(_name(path, checkout), path) for path in paths]


def _name(path: Path, checkout: Path) -> str:
    return ".".join(path.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__")


def _source(name: str, bug: Bug | None, checkout: Path = CHECKOUT) -> str:
    source = _file(name, checkout).read_text(encoding="utf-8")
    return source if bug is None else source.replace(bug.old, bug.new)


def _empty_copy(name: str) -> ModuleType:
    copy = ModuleType(name)
    path = getattr(importlib.import_module(name), "__path__", None)
    if path is not None:
        vars(copy)["__path__"] = path
    return copy


def _using(changed: str, subject: str) -> list[str]:
    """Return the modules to copy: the changed module, and the modules by which the subject imports it.

    Each module comes after the modules that it imports.
    """
    uses: dict[str, bool] = {}

    def visit(name: str) -> bool:
        if name not in uses:
            uses[name] = False  # ends the recursion if modules import each other
            below = [visit(other) for other in _imports(name)]
            uses[name] = name == changed or any(below)
            order.append(name)
        return uses[name]

    order: list[str] = []
    visit(subject)
    return [name for name in order if uses[name]]


@cache
def _imports(name: str) -> tuple[str, ...]:
    """Return the modules of the product that a module imports when it is loaded."""
    found: list[str] = []
    for node in _at_load(ast.parse(_source(name, None)).body):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(
        other
        for other in dict.fromkeys(found)
        if other.partition(".")[0] in PRODUCT and other != name and _file(other).is_file()
    )


def _at_load(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_load(node.orelse)
        elif isinstance(node, ast.If | ast.Try):
            yield from _at_load([*node.body, *node.orelse])
        else:
            yield node
