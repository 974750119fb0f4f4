"""Which page follows which: parents and children of every page that is in a tier or in flight. Pure metadata.

A hit is a prefix, so a page without its parent cannot be reached. Eviction therefore goes leaf first, and what lost
its parent goes before everything else. One node a page that has a parent or children; a lone root has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from tierstore.types import PageKey


class _Node:
    """``children`` is None, the only child, or a set of at least two: most pages have one."""

    __slots__ = ("children", "parent")

    def __init__(self, parent: PageKey | None) -> None:
        self.parent = parent
        self.children: PageKey | set[PageKey] | None = None


class Lineage:
    """Links among pages that have a copy somewhere, readable or in flight. A parent may be absent; its children
    remember it.
    """

    def __init__(self) -> None:
        self._nodes: dict[PageKey, _Node] = {}

    def link(self, key: PageKey, parent: PageKey | None) -> None:
        """The page got its first copy. ``parent`` None: it starts a sequence, or its parent is unknown.

        The caller has seen to it that ``key`` does not ``precede`` its parent.
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
        """The page lost its last copy; it forgets its parent, its children still name it.

        Returns the parent if this was its last child.
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
        """The page before this one, if known."""
        node = self._nodes.get(key)
        return None if node is None else node.parent

    def has_children(self, key: PageKey) -> bool:
        """Whether a page with a copy, readable or in flight, follows this one."""
        node = self._nodes.get(key)
        return node is not None and node.children is not None

    def children(self, key: PageKey) -> tuple[PageKey, ...]:
        """The pages that follow this one and have a copy."""
        node = self._nodes.get(key)
        if node is None or node.children is None:
            return ()
        return tuple(node.children) if isinstance(node.children, set) else (node.children,)

    def names(self, key: PageKey, child: PageKey) -> bool:
        """Whether ``child`` is among the pages that follow ``key``."""
        node = self._nodes.get(key)
        if node is None or node.children is None:
            return False
        return child in node.children if isinstance(node.children, set) else child == node.children

    def precedes(self, key: PageKey, other: PageKey) -> bool:
        """Whether ``other`` descends from ``key``: a ring of pages would have no leaf and could never leave."""
        if not self.has_children(key):
            return False
        above = self.parent(other)
        while above is not None and above != key:
            above = self.parent(above)
        return above == key

    def without_parent_in(self, present: Container[PageKey]) -> list[PageKey]:
        """The pages whose parent is known and not ``present``."""
        return [
            key for key, node in self._nodes.items() if node.parent is not None and node.parent not in present
        ]

    def links(self) -> Iterator[tuple[PageKey, PageKey]]:
        """Every (child, parent) pair; for checks."""
        return ((key, node.parent) for key, node in self._nodes.items() if node.parent is not None)
