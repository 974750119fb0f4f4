"""How many pages may be on their way into HBM at once, and when the next of them may start. No clock."""

from __future__ import annotations

from math import inf

from prefetch.planner import PIECE_PAGES

_NEXT_AT = 0.6
"""Of a half's time on the link: what starts later than at a half of it does not join the same wave."""


class LoadWindow:
    """The way into HBM, filled half by half: the second half is started while the first one crosses the link.

    Pages that go up layer group by layer group end together, a wave at its end (``tierstore.gpu.copy_queue``). Were a
    window filled up only when pages have ended, the link would stand still from then until the next wave has begun.
    """

    def __init__(self) -> None:
        self._begins = -inf
        self._pages = 0

    def room(self, now: float, arriving: int, most: int, page_s: float) -> int:
        """Pages that may be started now. ``arriving``: under way; ``most``: at once; ``page_s``: seconds of one on the
        link, 0 while that is not known.
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
        """So many of them were."""
        self._pages += pages
