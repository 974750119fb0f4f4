"""Bugs planted into a module's source, for machines that must notice them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from hypothesis import Phase, Verbosity, settings

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


class Bug(NamedTuple):
    """``old`` must occur exactly once in the module's source."""

    name: str
    old: str
    new: str


def load(module: ModuleType, bug: Bug | None = None) -> ModuleType:
    """A copy of the module with the bug in it; the loaded one stays as it is.

    AssertionError for an outdated bug: call it where that fails the test, not where a noticed bug is expected.
    """
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    if bug is not None:
        assert source.count(bug.old) == 1, f"the source no longer has, once: {bug.old!r}"
        source = source.replace(bug.old, bug.new)
    copy = ModuleType(module.__name__)
    exec(compile(source, module.__file__, "exec"), copy.__dict__)
    return copy
