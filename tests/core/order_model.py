"""An eviction policy of one tier, with a model of the tier's pages and of the four bands that they are in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType

from tierstore.directory.lineage import ranked_unreachable
from tierstore.policy import History, Known, registry
from tierstore.types import PageKey

ORDERS = ["lru", "fifo", "priority", "gdsf", "session", "adaptive"]


def pages() -> str:
    return "abcdefg"


class Tier:
    """A tier of pages that are named by single letters, with the rank that the policy gave each page."""

    def __init__(
        self, name: str, pages: int = 4, doubling_depth: float = 8.0, code: ModuleType = registry
    ) -> None:
        self.history = History(12)
        self.policy = code.make_policy(name, Known(self.history, doubling_depth), pages)
        self.ranks: dict[str, int] = {}
        self.bands: dict[str, int] = {}

    def put(self, names: str, parents: Mapping[str, str] | None = None) -> None:
        for name in names:
            parent = (parents or {}).get(name)
            self.history.put(_key(name), None if parent is None else _key(parent))
            self.ranks[name] = self.policy.enter(_key(name))
            self.bands[name] = 0

    def hit(self, name: str) -> None:
        self.history.hit(_key(name), below=False)
        self.touch(name)

    def touch(self, names: str) -> None:
        """Touch pages as residency does: the last page first. Unreachable pages keep their rank."""
        for name in [name for name in reversed(names) if self.bands[name] > -2]:
            self.ranks[name] = self.policy.touch(_key(name), self.ranks[name])
            self.bands[name] = max(self.bands[name], 0)

    def retain(self, name: str, priority: int = 0) -> None:
        if self.bands[name] > -2:
            self.ranks[name], self.bands[name] = self.policy.retained(priority), 1 + max(0, priority)

    def unwant(self, name: str) -> None:
        if self.bands[name] > -2:
            self.ranks[name], self.bands[name] = self.policy.unwanted(), -1

    def cut_off(self, name: str) -> None:
        self.ranks[name], self.bands[name] = self.policy.unreachable(_key(name)), -2

    def rejoin(self, name: str) -> None:
        if self.bands[name] == -2:
            self.ranks[name], self.bands[name] = self.policy.enter(_key(name)), 0

    def end_retention(self, names: str) -> None:
        for name in names:
            self.ranks[name] = self.policy.ordinary(_key(name), self.ranks[name])
            self.bands[name] = min(self.bands[name], 0)

    def leave(self, name: str) -> None:
        self.policy.left(_key(name), self.ranks.pop(name))
        del self.bands[name]

    def order(self) -> str:
        return "".join(sorted(self.ranks, key=self.ranks.__getitem__))


def run(tier: Tier, steps: list[tuple[str, str]]) -> None:
    """Apply steps, each an operation and a page. After each, check that ranks are unique and in the right bands."""
    for step, name in steps:
        if step == "p" and name not in tier.ranks:
            tier.put(name)
        elif name in tier.ranks:
            act: dict[str, Callable[[str], None]] = {
                "r": tier.retain,
                "R": partial(tier.retain, priority=2),
                "h": tier.hit,
                "u": tier.unwant,
                "x": tier.leave,
                "e": tier.end_retention,
                "c": tier.cut_off,
                "b": tier.rejoin,
            }
            act.get(step, tier.hit)(name)
        ranks = tier.ranks
        assert len(set(ranks.values())) == len(ranks), "two pages have the same rank"
        bands = [tier.bands[name] for name in sorted(ranks, key=ranks.__getitem__)]
        assert bands == sorted(bands), "the order must be: unreachable, unwanted, ordinary, retained"
        assert all((ranks[name] < 0) == (tier.bands[name] < 0) for name in ranks)
        assert all(ranked_unreachable(ranks[name]) == (tier.bands[name] == -2) for name in ranks)


def _key(name: str) -> PageKey:
    return PageKey(name.encode())
