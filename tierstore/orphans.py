"""Pages that lost the page before them: no request can reach them, so they go first. Pure metadata, bounded calls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.lineage import Lineage
    from tierstore.settling import Settling
    from tierstore.types import PageKey
    from tierstore.whereabouts import Whereabouts


class Orphans:
    """Of all tiers. It changes the order of victims, never where a page is."""

    def __init__(self, pages: Whereabouts, lineage: Lineage, settling: Settling) -> None:
        self.found: deque[PageKey] = deque()
        """Pages that lost their parent and are not yet at the front of the victim order."""
        self._pages = pages
        self._lineage = lineage
        self._settling = settling

    def demote(self, limit: int) -> int:
        """Puts up to ``limit`` unreachable pages before all others in the victim order; how many are left.

        Retained ones too, which are retained again once they are used.
        """
        for _ in range(min(limit, len(self.found))):
            key = self.found.popleft()
            parent = self._lineage.parent(key)
            if parent is None or (
                self._pages.where(parent) is not None and not self._settling.unwanted(parent)
            ):
                continue
            self._settling.put_first(key)
            self.found.extend(self._lineage.children(key))
        return len(self.found)
