"""Tests that the checks of eviction policies in ``order_model`` detect planted bugs."""

from __future__ import annotations

import random

import pytest

from tests.core.order_model import ORDERS, Tier, pages, run
from tests.support.planting import Bug, load
from tierstore.policy import registry

pytestmark = pytest.mark.deep

BUGS = [
    (
        "lru",
        Bug(
            "unreachable pages count as unwanted",
            "return -BAND - 1 - next(self._next)",
            "return self.unwanted()",
        ),
    ),
    ("lru", Bug("unwanted pages count as ordinary", "next(self._next) - BAND", "next(self._next)")),
    (
        "lru",
        Bug(
            "retained pages count as ordinary",
            "return next(self._next) + (1 + max(0, priority)) * BAND",
            "return next(self._next)",
        ),
    ),
    (
        "lru",
        Bug(
            "use ends a retention",
            "        return next(self._next) + band(rank)\n\n\nclass Priority",
            "        return next(self._next)\n\n\nclass Priority",
        ),
    ),
    (
        "gdsf",
        Bug(
            "equal values share a rank",
            "self._history.get(key)) << SHIFT) + next(self._next)",
            "self._history.get(key)) << SHIFT)",
        ),
    ),
    (
        "gdsf",
        Bug(
            "use of a scored page ends its retention",
            "self.enter(key) + band(rank)",
            "self.enter(key)",
        ),
    ),
    (
        "fifo",
        Bug(
            "use does not make an unwanted page ordinary",
            "return rank if rank >= 0 else next(self._next)",
            "return rank",
        ),
    ),
    (
        "fifo",
        Bug(
            "the end of a retention has no effect",
            "return self.enter(key) if rank >= BAND else rank",
            "return rank",
        ),
    ),
    (
        "priority",
        Bug(
            "use forgets a priority",
            "return next(self._next) + max(0, rank // _LEVEL * _LEVEL)",
            "return next(self._next)",
        ),
    ),
    (
        "gdsf",
        Bug("priorities are ignored", "(1 + max(0, priority)) * BAND", "BAND"),
    ),
]


def _search(tier: type[Tier], name: str, code: object) -> None:
    rng = random.Random(1)
    for _ in range(400):
        steps = [(rng.choice("pprRhhuxecb"), rng.choice(pages())) for _ in range(60)]
        run(tier(name, code=code), steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_planted_bug_is_noticed(name: str, bug: Bug) -> None:
    changed = load(registry, bug)
    with pytest.raises(AssertionError):
        _search(Tier, name, changed)


@pytest.mark.parametrize("name", ORDERS)
def test_without_a_bug_nothing_is_noticed(name: str) -> None:
    _search(Tier, name, registry)
