"""What a test draws in the lane it runs in.

`make test` draws a few examples, the same every time. `make test-all` draws many, other ones in each run: it runs
pytest with ``--seed``, which tests/conftest.py notes here before any test module is imported.
"""

from __future__ import annotations

SEED: int | None = None
"""Of a run that draws new examples."""


def examples(few: int, many: int) -> int:
    """Return how many examples a test draws: ``few`` in `make test`, ``many`` in `make test-all`."""
    return few if SEED is None else many


def seeds(few: int, many: int) -> range:
    """Return the seeds of so many random walks: from 0 in `make test`, from the run's own in `make test-all`."""
    return range(few) if SEED is None else range(SEED, SEED + many)
