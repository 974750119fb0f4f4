"""The pages that no request can reach, because a page before them is gone. Pure metadata, bounded calls.

A hit is a prefix: a page is reachable while every page before it, as far as its parents are known, has a copy in some
tier, readable or in flight. A page without a parent begins a sequence and is always reachable. Pages that are not
reachable leave first, in every tier and with every policy, and come back into the order when the missing page returns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from tierstore.policy.orders import BAND

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tierstore.directory.residency import TierTable, Whereabouts
    from tierstore.lineage import Lineage
    from tierstore.settling import Settling
    from tierstore.types import PageKey

_AT_ONCE = 64
"""Pages that one change marks at once; what follows them is marked by the next calls of ``advance``."""
_FOR_A_VICTIM = 512
"""Pages that are marked at most before a reachable page is chosen as a victim."""


class Orphans:
    """Keep the set of unreachable pages of all tiers up to date. It changes the order of victims, never residency.

    A change reaches the first pages below it at once and travels down a large tree in steps. A page is looked at only
    if its parent's state has changed, and what follows it only if its own state changes.
    """

    def __init__(self, pages: Whereabouts, lineage: Lineage, settling: Settling) -> None:
        self.revived: deque[PageKey] = deque()
        """Pages that became reachable again since this was last emptied: they may have to be saved now."""
        self._pages = pages
        self._lineage = lineage
        self._settling = settling
        self.keys = self._unreachable = settling.unreachable
        self._changed: OrderedDict[PageKey, Iterator[PageKey] | None] = OrderedDict()
        """Pages whose children have to be looked at, with those that are left; None: all of them."""

    def __contains__(self, key: PageKey) -> bool:
        return key in self._unreachable

    def __len__(self) -> int:
        return len(self._unreachable)

    @property
    def pending(self) -> bool:
        """Whether ``advance`` has something to do: until then some pages below a change are marked as before it."""
        return bool(self._changed)

    def after(self, parent: PageKey | None) -> bool:
        """Return whether a page after ``parent`` is unreachable."""
        return parent is not None and (parent in self._unreachable or not self._pages.held(parent))

    def begin(self, key: PageKey, parent: PageKey | None) -> None:
        """A page that no tier holds is about to get its first copy, in flight."""
        if self.after(parent):
            self._unreachable.add(key)

    def recheck(self, key: PageKey, parent: PageKey | None) -> None:
        """The page has become readable, or its parent known: marks it, and what follows it, as they are now."""
        if self.after(parent) == (key in self._unreachable):
            return
        self._flip(key)
        self.advance(_AT_ONCE)

    def recheck_children(self, key: PageKey) -> None:
        """The page has come or gone."""
        if self._lineage.has_children(key):
            self._push(key)
            self.advance(_AT_ONCE)

    def gone(self, key: PageKey) -> None:
        """No tier holds the page any more, readable or in flight."""
        self._unreachable.discard(key)
        self.recheck_children(key)

    def advance(self, limit: int) -> bool:
        """Look at up to ``limit`` pages below earlier changes. Return whether some are left."""
        changed = self._changed
        while changed and limit > 0:
            above = next(reversed(changed))
            left = changed[above]
            if left is None:
                left = changed[above] = iter(self._lineage.children(above))
            limit -= 1
            cut = above in self._unreachable or not self._pages.held(above)
            for child in left:
                if cut != (child in self._unreachable) and self._lineage.parent(child) == above:
                    self._flip(child)
                limit -= 1
                if limit <= 0:
                    break
            else:
                del changed[above]
        return bool(changed)

    def look_for_victims(self, table: TierTable) -> None:
        """Mark pages, a bounded number, until an unreachable one is the next victim of the tier."""
        for _ in range(_FOR_A_VICTIM // _AT_ONCE):
            victim = table.droppable.first()
            if victim in self._unreachable or not self.advance(_AT_ONCE):
                return

    def load(self, roots: Iterable[PageKey]) -> None:
        """Mark ``roots``, whose parents a tier did not have at open, and all that follows them."""
        waiting = deque(roots)
        while waiting:
            key = waiting.popleft()
            self._settling.cut_off(key)
            waiting.extend(self._lineage.children(key))

    def _flip(self, key: PageKey) -> None:
        if key in self._unreachable:
            self._settling.rejoin(key)
            self.revived.append(key)
        else:
            self._settling.cut_off(key)
        if self._lineage.has_children(key):
            self._push(key)

    def _push(self, key: PageKey) -> None:
        # The newest change is followed first: it overtakes an older one that it undoes, and stops there.
        self._changed[key] = None
        self._changed.move_to_end(key)


def ranked_unreachable(rank: int) -> bool:
    """Return whether a copy of this rank waits among the unreachable ones."""
    return rank < -BAND
