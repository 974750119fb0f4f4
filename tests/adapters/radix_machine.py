"""A state machine of the radix index. Its reference model is a plain list of pages, searched by brute force."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.adapters.radix import RadixIndex
from tierstore.types import PageKey

# Tokens that are close in value or in their bytes, and both ends of int64.
TOKENS = (0, 1, 2, 256, 257, -1, -(1 << 63), (1 << 63) - 1)
ROOTS = (b"", b"tenant")

tokens = st.sampled_from(TOKENS)
few_tokens = st.sampled_from(TOKENS[:3])
roots = st.sampled_from(ROOTS)


@dataclass
class Page:
    """A page of the reference model. ``prefix`` holds all tokens up to the end of the page."""

    root: bytes
    prefix: tuple[int, ...]
    key: PageKey
    used: int


def key_of(root: bytes, prefix: tuple[int, ...]) -> PageKey:
    return PageKey(sha256(repr((root, prefix)).encode()).digest() + bytes(4))


class RadixMachine(RuleBasedStateMachine):
    """Calls the methods of the index in random order. ``index_type`` is the implementation under test."""

    index_type: ClassVar[type[RadixIndex]] = RadixIndex

    @initialize(page_size=st.integers(1, 3), max_pages=st.sampled_from((2, 3, 3, 4, 8, 1 << 20)))
    def start(self, page_size: int, max_pages: int) -> None:
        self.page_size, self.max_pages = page_size, max_pages
        self.index = self.index_type(page_size, max_pages)
        self.pages: list[Page] = []
        self.seen: set[PageKey] = set()
        self.clock = 0

    # -- rules --------------------------------------------------------------------------------------------------

    @rule(root=roots, ids=st.lists(few_tokens, max_size=10), spare=st.integers(0, 1))
    def insert(self, root: bytes, ids: list[int], spare: int) -> None:
        """Insert tokens. The last ``spare`` full pages get no key, as if they had not been stored."""
        self._insert(root, tuple(ids), max(0, len(ids) // self.page_size - spare))

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), back=st.sampled_from((0, 0, 1, 2, 4)), tail=st.lists(tokens, max_size=4))
    def insert_a_fork(self, data: st.DataObject, back: int, tail: list[int]) -> None:
        """Insert the tokens up to the end of a known page, with the last ``back`` of them replaced by ``tail``."""
        page = data.draw(st.sampled_from(self.pages))
        forked = (*page.prefix[: max(0, len(page.prefix) - back)], *tail)
        self._insert(page.root, forked, len(forked) // self.page_size)

    @rule(root=roots, heads=st.lists(tokens, min_size=2, max_size=6), ids=st.lists(few_tokens, max_size=2))
    def insert_siblings(self, root: bytes, heads: list[int], ids: list[int]) -> None:
        for head in heads:
            sibling = (*ids, head, *(heads[0],) * self.page_size)
            self._insert(root, sibling, len(sibling) // self.page_size)

    @rule(root=roots, ids=st.lists(few_tokens, max_size=10))
    def longest(self, root: bytes, ids: list[int]) -> None:
        self._longest(root, tuple(ids))

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), back=st.sampled_from((0, 0, 1, 2, 4)), tail=st.lists(tokens, max_size=4))
    def longest_of_a_fork(self, data: st.DataObject, back: int, tail: list[int]) -> None:
        """Look up the tokens up to the end of a known page, with the last ``back`` of them replaced by ``tail``."""
        page = data.draw(st.sampled_from(self.pages))
        self._longest(page.root, (*page.prefix[: max(0, len(page.prefix) - back)], *tail))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """Discard a page that is in the index, or one that was removed before."""
        key = data.draw(st.sampled_from(sorted(self.seen)))
        self.index.discard(key)
        gone = [page for page in self.pages if page.key == key]
        self.pages = [page for page in self.pages if not any(self._is_after(page, top) for top in gone)]

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), root=st.none() | roots, ids=st.lists(few_tokens, min_size=3, max_size=9))
    def insert_under_a_key_of_others(self, data: st.DataObject, root: bytes | None, ids: list[int]) -> None:
        """Check that inserting a page under a key of other tokens or of another root fails and changes nothing."""
        page = data.draw(st.sampled_from(self.pages))
        wanted = tuple(ids) if root is None else page.prefix
        chosen = page.root if root is None else root
        keys = self._keys(chosen, wanted)
        if page.key in keys:
            return
        keys[data.draw(st.integers(0, len(keys) - 1))] = page.key
        with pytest.raises(ValueError, match="already inserted for"):
            self.index.insert(chosen, wanted, keys)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def insert_known_tokens_under_a_new_key(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.pages))
        keys = [*self._keys(page.root, page.prefix)[:-1], PageKey(bytes(36))]
        with pytest.raises(ValueError, match="differs from the key already inserted"):
            self.index.insert(page.root, page.prefix, keys)

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def it_names_the_pages_of_the_model(self) -> None:
        assert len(self.index) == len(self.pages) <= self.max_pages
        known = {page.key for page in self.pages}
        assert {key for key in self.seen if key in self.index} == known

    # -- the reference model ------------------------------------------------------------------------------------

    def _keys(self, root: bytes, ids: tuple[int, ...]) -> list[PageKey]:
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [key_of(root, ids[:end]) for end in ends]

    def _is_after(self, page: Page, top: Page) -> bool:
        return page.root == top.root and page.prefix[: len(top.prefix)] == top.prefix

    def _find(self, root: bytes, prefix: tuple[int, ...]) -> Page | None:
        return next((page for page in self.pages if page.root == root and page.prefix == prefix), None)

    def _insert(self, root: bytes, ids: tuple[int, ...], num_pages: int) -> None:
        keys = self._keys(root, ids)[:num_pages]
        self.index.insert(root, ids, keys)
        self.seen.update(keys)
        self.clock += 1
        for index, key in enumerate(keys[: self.max_pages]):
            prefix = ids[: (index + 1) * self.page_size]
            page = self._find(root, prefix)
            if page is None:
                self.pages.append(Page(root, prefix, key, self.clock))
            else:
                page.used = self.clock
        while len(self.pages) > self.max_pages:
            leaves = [p for p in self.pages if sum(self._is_after(other, p) for other in self.pages) == 1]
            self.pages.remove(min(leaves, key=lambda page: page.used))

    def _longest(self, root: bytes, ids: tuple[int, ...]) -> None:
        found = self.index.longest(root, ids)
        size = self.page_size
        path = list[Page]()
        for end in range(size, len(ids) + 1, size):
            page = self._find(root, ids[:end])
            if page is None:
                break
            path.append(page)
        assert found.keys == tuple(page.key for page in path)
        start = len(path) * size
        agreeing = {
            page.key: _shared(page.prefix[start:], ids[start:])
            for page in self.pages
            if page.root == root and len(page.prefix) == start + size and page.prefix[:start] == ids[:start]
        }
        most = max(agreeing.values(), default=0)
        assert found.next_tokens == most < size
        assert (found.next_key is None) == (most == 0)
        assert found.next_key is None or agreeing[found.next_key] == most
        self.clock += 1
        for page in self.pages:
            if page in path or page.key == found.next_key:
                page.used = self.clock


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))
