"""Which page follows which, and which pages no request can reach. Pure metadata, bounded calls.

A hit is a prefix, so a page without its parent cannot be reached. Eviction therefore goes leaf first, and pages that
lost their parent go before everything else, in every tier and with every policy.

A page is reachable while every page before it, as far as its parents are known, has a copy in some tier, readable or
in flight. A page without a parent begins a sequence and is always reachable. An unreachable page comes back into the
order when the missing page returns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from tierstore.policy.orders import BAND

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from tierstore.directory.eviction import VictimQueues
    from tierstore.directory.residency import Residency, TierTable
    from tierstore.types import PageKey


class _Node:
    """A page in the tree. ``children`` is None, the only child, or a set of at least two: most pages have one."""

    __slots__ = ("children", "parent")

    def __init__(self, parent: PageKey | None) -> None:
        self.parent = parent
        self.children: PageKey | set[PageKey] | None = None


class Lineage:
    """Links between pages that have a copy somewhere, readable or in flight.

    A parent may be absent; its children remember it.
    """

    def __init__(self) -> None:
        self._nodes: dict[PageKey, _Node] = {}

    def link(self, key: PageKey, parent: PageKey | None) -> None:
        """Add a page that got its first copy. ``parent`` None: it starts a sequence, or its parent is unknown.

        The caller has checked that ``key`` does not ``precede`` its parent.
        """
        if parent is None or parent == key:
            return
        nodes = self._nodes
        node = nodes.get(key)
        if node is None:
            nodes[key] = _Node(parent)
        elif node.parent is None:
            node.parent = parent
        elif node.parent != parent:
            return
        above = nodes.get(parent)
        if above is None:
            above = nodes[parent] = _Node(None)
        if above.children is None:
            above.children = key
        elif isinstance(above.children, set):
            above.children.add(key)
        elif above.children != key:
            above.children = {above.children, key}

    def unlink(self, key: PageKey) -> PageKey | None:
        """Remove a page that lost its last copy. Its children still name it.

        Returns:
            The parent, if this was its last child.
        """
        node = self._nodes.get(key)
        if node is None:
            return None
        parent, node.parent = node.parent, None
        if node.children is None:
            del self._nodes[key]
        if parent is None:
            return None
        above = self._nodes[parent]
        if isinstance(above.children, set):
            above.children.discard(key)
            if len(above.children) == 1:
                above.children = above.children.pop()
            return None
        above.children = None
        if above.parent is None:
            del self._nodes[parent]
        return parent

    def parent(self, key: PageKey) -> PageKey | None:
        """Return the page before this one, if known."""
        node = self._nodes.get(key)
        return None if node is None else node.parent

    def has_children(self, key: PageKey) -> bool:
        """Return whether a page with a copy, readable or in flight, follows this one."""
        node = self._nodes.get(key)
        return node is not None and node.children is not None

    def children(self, key: PageKey) -> tuple[PageKey, ...]:
        """Return the pages that follow this one and have a copy."""
        node = self._nodes.get(key)
        if node is None or node.children is None:
            return ()
        return tuple(node.children) if isinstance(node.children, set) else (node.children,)

    def names(self, key: PageKey, child: PageKey) -> bool:
        """Return whether ``child`` is among the pages that follow ``key``."""
        node = self._nodes.get(key)
        if node is None or node.children is None:
            return False
        return child in node.children if isinstance(node.children, set) else child == node.children

    def precedes(self, key: PageKey, other: PageKey) -> bool:
        """Return whether ``other`` descends from ``key``. A cycle of pages would have no leaf, and could never be
        evicted.
        """
        if not self.has_children(key):
            return False
        above = self.parent(other)
        while above is not None and above != key:
            above = self.parent(above)
        return above == key

    def without_parent_in(self, present: Container[PageKey]) -> list[PageKey]:
        """Return the pages whose parent is known and not ``present``."""
        return [
            key for key, node in self._nodes.items() if node.parent is not None and node.parent not in present
        ]

    def links(self) -> Iterator[tuple[PageKey, PageKey]]:
        """Yield every (child, parent) pair, for checks."""
        return ((key, node.parent) for key, node in self._nodes.items() if node.parent is not None)


_AT_ONCE = 64
"""Pages that one change marks at once; what follows them is marked by the next calls of ``advance``."""
_FOR_A_VICTIM = 512
"""Pages that are marked at most before a reachable page is chosen as a victim."""


class Orphans:
    """Keep the set of unreachable pages of all tiers up to date. It changes the order of victims, never residency.

    A change reaches the first pages below it at once and travels down a large tree in steps. A page is looked at only
    if its parent's state has changed, and what follows it only if its own state changes.
    """

    def __init__(self, pages: Residency, lineage: Lineage, queues: VictimQueues) -> None:
        self.revived: deque[PageKey] = deque()
        """Pages that became reachable again since this was last emptied: they may have to be saved now."""
        self._pages = pages
        self._lineage = lineage
        self._queues = queues
        self.keys = self._unreachable = queues.unreachable
        self._changed: OrderedDict[PageKey, Iterator[PageKey] | None] = OrderedDict()
        """Pages whose children have to be looked at, with those that are left; None: all of them."""

    def __contains__(self, key: PageKey) -> bool:
        return key in self._unreachable

    def __len__(self) -> int:
        return len(self._unreachable)

    @property
    def pending(self) -> bool:
        """Whether ``advance`` has something to do. Until then some pages below a change have their previous mark."""
        return bool(self._changed)

    def after(self, parent: PageKey | None) -> bool:
        """Return whether a page after ``parent`` is unreachable."""
        return parent is not None and (parent in self._unreachable or not self._pages.held(parent))

    def begin(self, key: PageKey, parent: PageKey | None) -> None:
        """Mark a page that no tier holds and that is about to get its first copy, in flight."""
        if self.after(parent):
            self._unreachable.add(key)

    def recheck(self, key: PageKey, parent: PageKey | None) -> None:
        """Update the marks of a page that became readable or whose parent became known, and of those after it."""
        if self.after(parent) == (key in self._unreachable):
            return
        self._flip(key)
        self.advance(_AT_ONCE)

    def recheck_children(self, key: PageKey) -> None:
        """Update the marks after a page that has come or gone."""
        if self._lineage.has_children(key):
            self._push(key)
            self.advance(_AT_ONCE)

    def gone(self, key: PageKey) -> None:
        """Note that no tier holds the page any more, readable or in flight."""
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
            self._queues.cut_off(key)
            waiting.extend(self._lineage.children(key))

    def _flip(self, key: PageKey) -> None:
        if key in self._unreachable:
            self._queues.rejoin(key)
            self.revived.append(key)
        else:
            self._queues.cut_off(key)
        if self._lineage.has_children(key):
            self._push(key)

    def _push(self, key: PageKey) -> None:
        # The newest change is followed first: it overtakes an older one that it undoes, and stops there.
        self._changed[key] = None
        self._changed.move_to_end(key)


def ranked_unreachable(rank: int) -> bool:
    """Return whether a copy of this rank waits among the unreachable ones."""
    return rank < -BAND
