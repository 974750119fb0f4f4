"""How many pages may be on their way into HBM at once, and when more may start. No clock."""

from __future__ import annotations

from math import inf

from prefetch.planner import PIECE_PAGES

_NEXT_AT = 0.6
"""Share of a half's time on the link after which the other half may start. Much earlier, both would join one wave."""


class LoadWindow:
    """The pages on their way into HBM, in two halves: the second is started while the first crosses the link.

    Pages that go up by layer groups end together, at the end of a wave (``tierstore.gpu.copy_queue``). If pages
    were started only when others end, the link would idle until the next wave begins.
    """

    def __init__(self) -> None:
        self._begins = -inf
        self._pages = 0

    def room(self, now: float, arriving: int, most: int, page_s: float) -> int:
        """Return how many pages may be started now.

        Args:
            now: The time in seconds.
            arriving: Pages on their way.
            most: Most pages on their way at once.
            page_s: Seconds per page on the link, 0 if unknown.
        """
        if most < 2 * PIECE_PAGES:
            return most - arriving
        took = self._pages * page_s
        if not arriving:
            self._begins, self._pages = now, 0
        elif now >= self._begins + _NEXT_AT * took:
            self._begins, self._pages = max(now, self._begins + took), 0
        return min(most // 2 - self._pages, most - arriving)

    def started(self, pages: int) -> None:
        """Note that pages were started."""
        self._pages += pages
