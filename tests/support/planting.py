"""Bugs planted into the product's source, for tests and machines that must notice them: the one way to plant any.

A bug is a text to change, and is searched for in a package: it outlives a module's name, and a move of its code into
another module. It is planted into copies of loaded modules (``load``), into a copy that takes the loaded
module's place (``install``), into a file that is loaded by its path (``write``), into a copy of the checkout in which
tests run as processes of their own (``copy_of_checkout``, ``plant``, ``outcome``), or, where source will not do, by a
function that patches what is loaded (``Plants``). ``require_noticed`` has a machine look for one.
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
"""How a bug shows. An error of the store's that no machine expects may stand for an assertion that failed before it,
when the machine is taken down. Flaky: it went wrong once, and not when the same was tried again: threads have a part
in it. No TypeError and the like: a planted bug that does not fit the product any more would count as noticed."""

CHECKOUT = Path(__file__).parents[2]
PRODUCT = ("tierstore", "prefetch")
OURS = (*PRODUCT, "tests")
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
    """``old`` must occur exactly once in the package that the bug is planted in, whichever module has it."""

    name: str
    old: str
    new: str


def find(package: str, bug: Bug, checkout: Path = CHECKOUT) -> str:
    """Return the dotted name of the one module of the package, or of the packages in it, that has ``bug.old``.

    Raises AssertionError for an outdated bug: call it where that fails the test, not where a noticed bug is expected.
    """
    counts = {
        name: path.read_text(encoding="utf-8").count(bug.old) for name, path in _files(package, checkout)
    }
    found = [name for name, count in counts.items() if count]
    assert [counts[name] for name in found] == [1], f"not once in {package}, but in {found}: {bug.old!r}"
    return found[0]


def load(subject: ModuleType, bug: Bug | None = None, package: str | None = None) -> ModuleType:
    """Return a copy of the module, over code with the bug in it; what is loaded stays as it is.

    The bug is searched for in the package, by default the subject's. If another module than the subject has it, the
    copy of the subject uses a copy of that one, and of what is between them. Raises AssertionError as ``find``.
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
    """Put a copy of the module that has the bug, or of the subject, in that module's place, and return the copy.

    Until the patch is undone, the modules of the product and of the tests that are loaded have the copy's classes and
    functions under the names that they imported them by. The bug is searched for in the subject's package. Raises
    AssertionError as ``find``.
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
    """Write the one module that has it into ``folder``, with the bug; return the file by the module's dotted name.

    Raises AssertionError as ``find``.
    """
    name = find(package, bug)
    path = folder / "planted.py"
    path.write_text(_source(name, bug), encoding="utf-8")
    return {name: path}


def copy_of_checkout(folder: Path, *tests: str) -> None:
    """The product, what tests share, and these folders of tests, under ``folder``."""
    for package in ("tierstore", "tests/support", *(f"tests/{name}" for name in tests)):
        shutil.copytree(CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def plant(copy: Path, package: str, bug: Bug) -> None:
    """Plant the bug in a package of a copy of the checkout. Raises AssertionError as ``find``."""
    name = find(package, bug, copy)
    _file(name, copy).write_text(_source(name, bug, copy), encoding="utf-8")


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a copy of the checkout and from it; hangs are an error."""
    return subprocess.run(
        [sys.executable, *command], cwd=copy, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def outcome(copy: Path, tests: Iterable[Callable[..., object]]) -> int:
    """Exit code of pytest over tests of a copy: 1 for failures, other numbers for tests that could not be run."""
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "-o", "pythonpath=.")
    drawing = "--hypothesis-profile=ci"  # of no deadline, and the same every time; the checkout's conftest is not there
    names = {f"{test.__module__.replace('.', '/')}.py::{test.__name__}" for test in tests}
    return run(copy, "-m", "pytest", "-q", "-x", *plain, drawing, *sorted(names)).returncode


def _package(module: ModuleType) -> str:
    return module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]


def _file(name: str, checkout: Path = CHECKOUT) -> Path:
    path = checkout.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _files(package: str, checkout: Path) -> list[tuple[str, Path]]:
    """Every module of a package, or the one module that is no package, with its file."""
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
    """The changed module and those that import it, among what the subject imports, each after what it imports."""
    uses: dict[str, bool] = {}

    def visit(name: str) -> bool:
        if name not in uses:
            uses[name] = False  # for a module that imports itself, by way of others
            below = [visit(other) for other in _imports(name)]
            uses[name] = name == changed or any(below)
            order.append(name)
        return uses[name]

    order: list[str] = []
    visit(subject)
    return [name for name in order if uses[name]]


@cache
def _imports(name: str) -> tuple[str, ...]:
    """Modules of the product that a module imports as it is loaded."""
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
