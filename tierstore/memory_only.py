"""Which pages may not leave memory, and so where each page's way down ends. Pure metadata.

A page stays in memory because a caller wants it to, or because admission has refused it so far. By a caller's wish a
page is memory-only from its first copy to its last, unless a request that may use the disk names it or a page after
it: such a request has the same tokens. So no page that may be stored ever follows one that may not.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.directory.lineage import Lineage
    from tierstore.types import PageKey


class MemoryOnly:
    """The pages of a store that stay in memory. ``tiers``: those it has. Changed by residency and admission alone."""

    def __init__(self, tiers: Iterable[Tier], lineage: Lineage) -> None:
        tiers = list(tiers)
        self.lowest = max(tiers)
        self.floor = max((tier for tier in tiers if tier < Tier.NVME), default=Tier.HBM)
        """The slowest tier that is memory."""
        self.keys: set[PageKey] = set()
        self.refused: set[PageKey] = set()
        """Those of ``keys`` that stay because admission refused them, not because a caller wants it."""
        self._lineage = lineage
        self._lifting: OrderedDict[PageKey, None] = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self.keys

    def lowest_for(self, key: PageKey) -> Tier:
        """The slowest tier that may ever hold the page: every question whether it may be copied down is this one."""
        return self.floor if key in self.keys else self.lowest

    def restrict(self, key: PageKey) -> None:
        """A page that no tier holds gets its first copy and is to stay in memory.

        No effect if a page follows it that may be stored, or may once admission wants it: that one would be out of
        reach after a restart.
        """
        if all(child in self.keys and child not in self.refused for child in self._lineage.children(key)):
            self.keys.add(key)

    def refuse(self, key: PageKey) -> None:
        """Admission refuses a page that gets its first copy. No effect if a page that may be stored follows it."""
        if all(child in self.keys for child in self._lineage.children(key)):
            self.keys.add(key)
            self.refused.add(key)

    def forget(self, key: PageKey) -> None:
        """The page's last copy is gone."""
        self.keys.discard(key)
        self.refused.discard(key)
        self._lifting.pop(key, None)

    def permit(self, key: PageKey, *, at_once: bool = False) -> None:
        """The page and all before it may be stored: ``lift`` carries it out. ``at_once``: before all others."""
        if key in self.keys:
            self._lifting[key] = None
            if at_once:
                self._lifting.move_to_end(key, last=False)

    def permit_named(self, key: PageKey) -> None:
        """A request that may use the disk names the page: ends a caller's wish, not a refusal."""
        if key not in self.refused:
            self.permit(key)

    def permit_refused(self) -> None:
        """All pages that only admission keeps in memory, and those before them, may be stored."""
        self._lifting.update(dict.fromkeys(self.refused))

    def lift(self, limit: int) -> list[PageKey]:
        """Up to ``limit`` permitted pages, and pages before them, that are memory-only no more."""
        lifted: list[PageKey] = []
        for _ in range(limit):
            if not self._lifting:
                break
            key, _ = self._lifting.popitem(last=False)
            self.keys.discard(key)
            self.refused.discard(key)
            lifted.append(key)
            parent = self._lineage.parent(key)
            if parent is not None:
                self.permit(parent)
        return lifted

    @property
    def lifting(self) -> bool:
        """Whether ``lift`` has something to do."""
        return bool(self._lifting)

    def will_lift(self, key: PageKey) -> bool:
        """Whether the page is one of the next to be lifted."""
        return key in self._lifting
