"""Lineage: which page follows which, and which pages no request can reach.

This module handles only metadata, and each call takes bounded time.

A cache hit is a prefix of a sequence, so a request cannot reach a page whose parent is missing. Therefore
children are evicted before their parents, and unreachable pages are evicted before all others, in every tier
and with every policy.

A page is reachable if all known pages before it have a copy in some tier, readable or in flight. A page
without a known parent counts as the start of a sequence and is always reachable. An unreachable page becomes
reachable again when the missing page is put again.
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
    """A page in the tree.

    ``children`` is None, the key of the only child, or a set of at least two keys. Most pages have one child.
    """

    __slots__ = ("children", "parent")

    def __init__(self, parent: PageKey | None) -> None:
        self.parent = parent
        self.children: PageKey | set[PageKey] | None = None


class Lineage:
    """The parents and children of pages that have a copy, readable or in flight.

    A parent need not have a copy: its children still refer to it.
    """

    def __init__(self) -> None:
        self._nodes: dict[PageKey, _Node] = {}

    def link(self, key: PageKey, parent: PageKey | None) -> None:
        """Set the parent of a page. No effect if the page has a parent already, or if ``parent`` is None.

        The caller must check that the page does not precede ``parent``.
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
        """Remove a page that lost its last copy. Its own children still refer to it.

        Returns:
            The page's parent, if the parent has no children any more, else None.
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
        """Return the key of the page before this one, or None if it is unknown."""
        node = self._nodes.get(key)
        return None if node is None else node.parent

    def has_children(self, key: PageKey) -> bool:
        """Return whether a page with a copy, readable or in flight, follows this page."""
        node = self._nodes.get(key)
        return node is not None and node.children is not None

    def children(self, key: PageKey) -> tuple[PageKey, ...]:
        """Return the keys of the pages that follow this page and have a copy, readable or in flight."""
        node = self._nodes.get(key)
        if node is None or node.children is None:
            return ()
        return tuple(node.children) if isinstance(node.children, set) else (node.children,)

    def names(self, key: PageKey, child: PageKey) -> bool:
        """Return whether ``child`` is a child of ``key``."""
        node = self._nodes.get(key)
        if node is None or node.children is None:
            return False
        return child in node.children if isinstance(node.children, set) else child == node.children

    def precedes(self, key: PageKey, other: PageKey) -> bool:
        """Return whether ``key`` comes before ``other`` in the sequence of ``other``.

        Used to prevent cycles. Pages in a cycle would all have children and could never be evicted.
        """
        if not self.has_children(key):
            return False
        above = self.parent(other)
        while above is not None and above != key:
            above = self.parent(above)
        return above == key

    def without_parent_in(self, present: Container[PageKey]) -> list[PageKey]:
        """Return the keys of all pages whose parent is known but not in ``present``."""
        return [
            key for key, node in self._nodes.items() if node.parent is not None and node.parent not in present
        ]

    def links(self) -> Iterator[tuple[PageKey, PageKey]]:
        """Yield all pairs (child, parent), for checks."""
        return ((key, node.parent) for key, node in self._nodes.items() if node.parent is not None)


_AT_ONCE = 64
"""Number of later pages that are updated at once after a change. ``advance`` updates the remaining ones."""
_FOR_A_VICTIM = 512
"""Maximum number of pages to update in search of an unreachable victim, before a reachable one is evicted."""


class Orphans:
    """The set of unreachable pages. It affects only the order of eviction.

    When a page is lost or returns, the first of its descendants are updated at once, and the others in steps
    (``advance``). A page is examined only if the state of its parent has changed. The children of a page are
    examined only if the state of the page changes.
    """

    def __init__(self, pages: Residency, lineage: Lineage, queues: VictimQueues) -> None:
        self.revived: deque[PageKey] = deque()
        """Pages that became reachable again and may have to be saved. The directory empties the queue."""
        self._pages = pages
        self._lineage = lineage
        self._queues = queues
        self.keys = self._unreachable = queues.unreachable
        self._changed: OrderedDict[PageKey, Iterator[PageKey] | None] = OrderedDict()
        """Pages whose children must be examined, with an iterator over the children that remain.

        The value is None if no child has been examined yet.
        """

    def __contains__(self, key: PageKey) -> bool:
        return key in self._unreachable

    def __len__(self) -> int:
        return len(self._unreachable)

    @property
    def pending(self) -> bool:
        """Whether ``advance`` has work to do, because some descendants of a changed page are not updated yet."""
        return bool(self._changed)

    def after(self, parent: PageKey | None) -> bool:
        """Return whether a page whose parent is ``parent`` is unreachable. False if ``parent`` is None."""
        return parent is not None and (parent in self._unreachable or not self._pages.held(parent))

    def begin(self, key: PageKey, parent: PageKey | None) -> None:
        """Set the state of a page that is in no tier and is about to get its first copy."""
        if self.after(parent):
            self._unreachable.add(key)

    def recheck(self, key: PageKey, parent: PageKey | None) -> None:
        """Update the state of a page that became readable or got a parent. If it changes, update the descendants."""
        if self.after(parent) == (key in self._unreachable):
            return
        self._flip(key)
        self.advance(_AT_ONCE)

    def recheck_children(self, key: PageKey) -> None:
        """Update the reachability of the descendants of a page that got its first copy or lost its last one."""
        if self._lineage.has_children(key):
            self._push(key)
            self.advance(_AT_ONCE)

    def gone(self, key: PageKey) -> None:
        """Record that the page has no copy any more, neither readable nor in flight."""
        self._unreachable.discard(key)
        self.recheck_children(key)

    def advance(self, limit: int) -> bool:
        """Examine up to ``limit`` descendants of changed pages. Return whether any remain to be examined."""
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
        """Update the reachability of a limited number of pages. Stop once the tier's next victim is unreachable."""
        for _ in range(_FOR_A_VICTIM // _AT_ONCE):
            victim = table.droppable.first()
            if victim in self._unreachable or not self.advance(_AT_ONCE):
                return

    def load(self, roots: Iterable[PageKey]) -> None:
        """Mark ``roots`` and all their descendants as unreachable.

        ``roots`` are the pages whose parents were missing when the tier was opened.
        """
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
        # The latest change is processed first. If it reverts an earlier change, its processing ends at the last
        # descendants that the earlier change has updated.
        self._changed[key] = None
        self._changed.move_to_end(key)


def ranked_unreachable(rank: int) -> bool:
    """Return whether a copy with this rank belongs to an unreachable page."""
    return rank < -BAND
