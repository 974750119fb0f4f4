"""Chooses the examples and cases that a test runs in `make test` and in `make test-all`.

`make test` draws a few examples, the same in every run. `make test-all` draws many examples, different ones in every
run. It runs pytest with ``--seed``; tests/conftest.py sets ``SEED`` to it before any test module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

SEED: int | None = None
"""The seed of a run of `make test-all`. None in `make test`."""


def examples(few: int, many: int) -> int:
    """Return how many examples a test draws: ``few`` in `make test`, ``many`` in `make test-all`."""
    return few if SEED is None else many


def seeds(few: int, many: int) -> range:
    """Return ``few`` seeds from 0 on in `make test`, and ``many`` seeds from ``SEED`` on in `make test-all`."""
    return range(few) if SEED is None else range(SEED, SEED + many)


def some(cases: Iterable[Any], chosen: Callable[..., object]) -> list[Any]:
    """Return the cases of a parametrized test. Cases that `make test` should skip are marked as deep.

    Args:
        cases: Values, or tuples of values.
        chosen: Called with each case, unpacked if it is a tuple. Returns whether `make test` should run it too.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if chosen(*values) else pytest.mark.deep))
    return found
