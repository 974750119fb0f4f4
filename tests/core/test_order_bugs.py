"""The properties of orders notice planted bugs: each of these changes to the source breaks one of them."""

from __future__ import annotations

import random

import pytest

from tests.core import planting
from tests.core.order_model import ORDERS, Tier, pages, run
from tests.core.planting import Bug
from tierstore.policy import choosing, orders

BUGS = [
    ("lru", Bug("unwanted pages are normal ones", "next(self._next) - _BAND", "next(self._next)")),
    (
        "lru",
        Bug(
            "retained pages are normal ones", "return next(self._next) + _BAND\n", "return next(self._next)\n"
        ),
    ),
    (
        "lru",
        Bug(
            "use ends a retention",
            "        return next(self._next) + (_BAND if rank >= _BAND else 0)\n",
            "        return next(self._next)\n",
        ),
    ),
    (
        "lfu",
        Bug(
            "equal values share a rank",
            "self._history.get(key)) << _SHIFT) + next(self._next)",
            "self._history.get(key)) << _SHIFT)",
        ),
    ),
    (
        "lfu",
        Bug(
            "use of a scored page ends its retention",
            "self.enter(key) + (_BAND if rank >= _BAND else 0)",
            "self.enter(key)",
        ),
    ),
    (
        "fifo",
        Bug("an unwanted page stays so", "return rank if rank >= 0 else next(self._next)", "return rank"),
    ),
    (
        "fifo",
        Bug("retention does not end", "return self.enter(key) if rank >= _BAND else rank", "return rank"),
    ),
    (
        "slru",
        Bug(
            "protection is another band",
            "rank = self._protected[key] = (1 << _SHIFT)",
            "rank = self._protected[key] = 2 * _BAND",
        ),
    ),
    (
        "slru",
        Bug(
            "who is pushed out gets a better place",
            "before, next(self._next)))",
            "before, (2 << _SHIFT) + next(self._next)))",
        ),
    ),
]


def _search(tier: type[Tier], name: str, code: object) -> None:
    rng = random.Random(1)
    for _ in range(400):
        steps = [(rng.choice("pprhhuxe"), rng.choice(pages())) for _ in range(60)]
        run(tier(name, code=code), steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_planted_bug_is_noticed(name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = planting.load(orders, bug)
    for known in ("Fifo", "Lru", "Lfu", "Slru", "Gdsf"):
        monkeypatch.setattr(choosing, known, vars(changed)[known])
    with pytest.raises(AssertionError):
        _search(Tier, name, choosing)


@pytest.mark.parametrize("name", ORDERS)
def test_without_a_bug_nothing_is_noticed(name: str) -> None:
    _search(Tier, name, choosing)
