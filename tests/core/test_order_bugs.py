"""The properties of orders notice planted bugs: each of these changes to the source breaks one of them."""

from __future__ import annotations

import random

import pytest

from tests.core.order_model import ORDERS, Tier, pages, run
from tests.support.planting import Bug, load
from tierstore.policy import registry

BUGS = [
    (
        "lru",
        Bug(
            "unreachable pages are unwanted ones",
            "return -BAND - 1 - next(self._next)",
            "return self.unwanted()",
        ),
    ),
    ("lru", Bug("unwanted pages are normal ones", "next(self._next) - BAND", "next(self._next)")),
    (
        "lru",
        Bug(
            "retained pages are normal ones",
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
        "lfu",
        Bug(
            "equal values share a rank",
            "self._history.get(key)) << SHIFT) + next(self._next)",
            "self._history.get(key)) << SHIFT)",
        ),
    ),
    (
        "lfu",
        Bug(
            "use of a scored page ends its retention",
            "self.enter(key) + band(rank)",
            "self.enter(key)",
        ),
    ),
    (
        "fifo",
        Bug("an unwanted page stays so", "return rank if rank >= 0 else next(self._next)", "return rank"),
    ),
    (
        "fifo",
        Bug("retention does not end", "return self.enter(key) if rank >= BAND else rank", "return rank"),
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
        "lfu",
        Bug("priorities are one", "(1 + max(0, priority)) * BAND", "BAND"),
    ),
    (
        "slru",
        Bug(
            "protection is another band",
            "rank = self._protected[key] = (1 << SHIFT)",
            "rank = self._protected[key] = 2 * BAND",
        ),
    ),
    (
        "slru",
        Bug(
            "who is pushed out gets a better place",
            "before, next(self._next)))",
            "before, (2 << SHIFT) + next(self._next)))",
        ),
    ),
]

WINDOWED_BUGS = [
    (
        "s3-fifo",
        Bug(
            "what the window pushes out shares a rank",
            "return next(self._next)\n        self._counted",
            "return 0\n        self._counted",
        ),
    ),
    (
        "s3-fifo",
        Bug("the main part goes after the window", "_MAIN * (1 + self._round + rounds)", "2 * _WINDOW"),
    ),
    (
        "s3-fifo",
        Bug(
            "use of an unwanted page changes nothing",
            "        if rank < 0:\n            return self.enter(key)\n",
            "",
        ),
    ),
    (
        "w-tinylfu",
        Bug(
            "use in the main part ends a retention",
            "return next(self._next) + band(rank)\n        if not _MAIN",
            "return next(self._next)\n        if not _MAIN",
        ),
    ),
    (
        "w-tinylfu",
        Bug(
            "who loses protection goes after the window",
            "self._moved.append((oldest, before, self._on_probation(oldest)))",
            "self._moved.append((oldest, before, self._try_out(oldest)))",
        ),
    ),
    (
        "w-tinylfu",
        Bug(
            "pages on probation share a rank",
            "self._probation[key] = _MAIN + next(self._next)",
            "self._probation[key] = _MAIN",
        ),
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


@pytest.mark.parametrize(("name", "bug"), WINDOWED_BUGS, ids=[bug.name for _, bug in WINDOWED_BUGS])
def test_a_bug_planted_in_an_order_with_a_window_is_noticed(name: str, bug: Bug) -> None:
    changed = load(registry, bug)
    with pytest.raises(AssertionError):
        _search(Tier, name, changed)


@pytest.mark.parametrize("name", ORDERS)
def test_without_a_bug_nothing_is_noticed(name: str) -> None:
    _search(Tier, name, registry)
