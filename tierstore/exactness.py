"""Which pages still hold what was put, bit by bit. Pure metadata.

Copies are lossy in the first tier whose codec loses something and in every tier below it, which gets its pages from
there. A page that comes back from such a tier is tainted above it, and so is one that is put after a page that is not
exact: its tokens were computed over numbers that are not the model's. A doubt counts as inexact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.tier_table import TierTable
    from tierstore.types import PageKey


class Exactness:
    """Of the pages of a store. ``tables``: of its tiers. Changed by residency alone."""

    def __init__(self, tables: Mapping[Tier, TierTable]) -> None:
        self._first_lossy = min((tier for tier, table in tables.items() if table.lossy), default=None)
        first = self._first_lossy
        self._above = [
            (tier, table.copies) for tier, table in tables.items() if first is None or tier < first
        ]
        self._below = [table.copies for tier, table in tables.items() if first is not None and tier >= first]
        self._tainted: set[PageKey] = set()

    @property
    def lossless(self) -> bool:
        """Whether no tier loses anything: all pages are exact then."""
        return self._first_lossy is None

    def exact(self, key: PageKey) -> bool:
        """Whether a readable copy of the page is certainly what was put."""
        if self._first_lossy is None:
            return True
        if key in self._tainted:
            return False
        return any(key in copies and copies[key].ready for _, copies in self._above)

    def prefix(self, keys: Sequence[PageKey]) -> int:
        """How many of ``keys`` are exact before the first that is not."""
        if self._first_lossy is None:
            return len(keys)
        return next((index for index, key in enumerate(keys) if not self.exact(key)), len(keys))

    def loaded(self, keys: Sequence[PageKey], src: Tier, dst: Tier) -> None:
        """Copies are on their way from ``src`` to ``dst``: inexact ones, that may outlive an exact one above them."""
        first = self._first_lossy
        if first is not None and dst < first <= src:
            self._tainted.update(keys)

    def put(self, key: PageKey, parent: PageKey | None) -> None:
        """The page is put, after ``parent``, whose copies are still there. Before its copy counts."""
        if self._first_lossy is None:
            return
        if not self.stays_tainted(key):
            self._tainted.discard(key)
        if parent is not None and not (self.exact(parent) or self._coming(parent)):
            self._tainted.add(key)

    def _coming(self, key: PageKey) -> bool:
        """Whether it will be exact: of an engine's pages that are put together the one before is on its way out too."""
        if key in self._tainted or any(key in copies for copies in self._below):
            return False
        return any(key in copies for _, copies in self._above)

    def stays_tainted(self, key: PageKey) -> bool:
        """Whether a put would leave the page tainted: copies stay that may be what tainted it.

        One on its way into HBM does not: the put takes its place.
        """
        return key in self._tainted and any(
            key in copies and (tier != Tier.HBM or copies[key].ready) for tier, copies in self._above
        )

    def doubt(self, key: PageKey) -> None:
        """The page was computed over numbers that are not the model's, whatever its parent says."""
        if self._first_lossy is not None:
            self._tainted.add(key)

    def tainted_in(self, key: PageKey) -> list[Tier]:
        """Where there are readable copies of a tainted page above the lossy tiers, slowest first."""
        if key not in self._tainted:
            return []
        return [tier for tier, copies in self._above[::-1] if key in copies and copies[key].ready]

    def forget(self, key: PageKey) -> None:
        """No tier has the page any more."""
        self._tainted.discard(key)
