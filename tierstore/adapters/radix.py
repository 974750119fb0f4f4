"""A radix tree that finds cached pages by their tokens, for adapters. It contains only metadata.

The store finds only full pages, by their keys. If a prompt diverges from a cached sequence within a page, the
prompt has another key for that page, and the whole page would be recomputed. This index finds a cached page
whose first t tokens are the next t tokens of the prompt. The adapter leases that page, copies it into a
free slot and continues after these t tokens.

An entry records the tokens of a page. It does not promise that the store still has the page. A stale entry is
harmless, because the adapter must lease the page with ``acquire``. If the store does not have the page, the
adapter calls ``discard`` and searches again.

The index compares only roots and tokens. If the K/V of a page also depend on other data, such as an image at
some position of the prompt, insert the page under another root, or not at all.

The tree is like that of SGLang's radix cache, but each edge has exactly one page, so every node has one key.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from tierstore.types import PageKey

_TOKEN_NBYTES = 8


@dataclass(frozen=True, slots=True)
class RadixMatch:
    """The result of ``RadixIndex.longest``.

    Attributes:
        keys: Keys of the full pages that match, from the start of the prompt.
        next_key: Key of a page whose first tokens are the prompt's next tokens. None if no page was found.
        next_tokens: Number of tokens of that page that match, 1 to page_size - 1. 0 if ``next_key`` is None.
    """

    keys: tuple[PageKey, ...]
    next_key: PageKey | None
    next_tokens: int


class _Node:
    """A page or a root. ``label`` is the packed tokens of a page, or the bytes that identify a root."""

    __slots__ = ("above", "below", "key", "label")

    def __init__(self, label: bytes, key: PageKey, above: _Node | None) -> None:
        self.label = label
        self.key = key
        self.above = above
        self.below: list[_Node] = []  # sorted by label


_label = attrgetter("label")


class RadixIndex:
    """An index of pages by their tokens and all tokens before them.

    If the index has more than ``max_pages`` pages, it drops the least recently used leaves. Each ``insert``
    and ``longest`` counts as a use of every page that it finds or adds. Finding a page takes O(log siblings).
    Adding or dropping a page also changes the sorted list of its siblings. Not thread-safe: callers must
    serialize access.

    Memory use, measured with CPython 3.11: 290 bytes per page plus 8 per token, about 800 bytes for a page of
    64 tokens.
    """

    def __init__(self, page_size: int, max_pages: int = 1 << 20) -> None:
        """Create an empty index.

        Args:
            page_size: Tokens per page.
            max_pages: Maximum number of pages in the index.

        Raises:
            ValueError: An argument is less than 1.
        """
        if page_size < 1 or max_pages < 1:
            raise ValueError(f"page_size and max_pages must be at least 1, got {page_size} and {max_pages}")
        self._stride = page_size * _TOKEN_NBYTES
        self._max_pages = max_pages
        self._roots: dict[bytes, _Node] = {}
        # Order: least recently used first, and every page before its parent. So the first page is a leaf.
        self._pages: OrderedDict[PageKey, _Node] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of pages in the index."""
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        """Return whether the page is in the index. Does not count as a use."""
        return key in self._pages

    def insert(self, root: bytes, token_ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """Add the pages of a sequence.

        ``keys[i]`` is the key of tokens ``[i * page_size, (i + 1) * page_size)``. Tokens after the page of
        the last key are ignored. If there are more than ``max_pages`` keys, the index keeps only the first
        ``max_pages``. Pages that are already in the index count as used.

        Args:
            root: Opaque bytes that identify everything that the keys depend on in addition to the tokens, such
                as salt and extras.
            token_ids: The tokens of the sequence.
            keys: The keys of the sequence's first full pages.

        Raises:
            ValueError: There are more keys than full pages; a key occurs twice; a key is already in the index
                with other tokens or under another root; the tokens are already in the index with another key
                (``root`` is incomplete); or a token does not fit in int64. The index is unchanged.
            TypeError: ``token_ids`` is not a sequence of integers. The index is unchanged.
        """
        labels, _ = self._cut(token_ids)
        if len(keys) > len(labels):
            raise ValueError(
                f"got {len(keys)} keys for {len(labels)} full pages of tokens: pass at most one key per full page"
            )
        path = self._descend(root, labels[: len(keys)])
        self._refuse_conflicts(keys, path)
        if not keys:
            return
        above = path[-1] if path else self._roots.setdefault(root, _Node(root, PageKey(b""), None))
        for label, key in zip(labels[len(path) : len(keys)], keys[len(path) :], strict=True):
            node = _Node(label, key, above)
            above.below.insert(bisect_left(above.below, label, key=_label), node)
            self._pages[key] = above = node
            path.append(node)
        self._use(path)
        while len(self._pages) > self._max_pages:
            self._remove_leaf(next(iter(self._pages.values())))

    def longest(self, root: bytes, token_ids: Sequence[int]) -> RadixMatch:
        """Return the longest prefix of ``token_ids`` that is in the index under ``root``.

        The pages that are returned count as used.

        If several pages match the same number of tokens after the full pages, ``next_key`` is any one of them.

        Raises:
            ValueError: A token does not fit in int64.
            TypeError: ``token_ids`` is not a sequence of integers.
        """
        labels, rest = self._cut(token_ids)
        path = self._descend(root, labels)
        keys = tuple(node.key for node in path)
        top = path[-1] if path else self._roots.get(root)
        wanted = labels[len(path)] if len(path) < len(labels) else rest
        best, num_tokens = _closest(top.below, wanted) if top is not None else (None, 0)
        if best is None:
            self._use(path)
            return RadixMatch(keys, None, 0)
        self._use([*path, best])
        return RadixMatch(keys, best.key, num_tokens)

    def discard(self, key: PageKey) -> None:
        """Remove a page, and all pages after it in any sequence. Ignores a key that is not in the index."""
        top = self._pages.get(key)
        if top is None:
            return
        doomed = [top]
        for node in doomed:  # grows during the loop: parents come before their children
            doomed.extend(node.below)
        for node in reversed(doomed):
            self._remove_leaf(node)

    def _cut(self, token_ids: Sequence[int]) -> tuple[list[bytes], bytes]:
        """Return the packed tokens of each full page, and the packed remaining tokens."""
        if isinstance(token_ids, str | bytes | bytearray):
            raise TypeError(f"token_ids must be a sequence of integers, got {type(token_ids).__name__}")
        try:
            # Any byte order works: a label that shares more leading bytes with the wanted label than another one
            # does also shares at least as many leading tokens with it.
            packed = array("q", token_ids).tobytes()
        except OverflowError as error:
            raise ValueError("token_ids must fit in int64") from error
        stride = self._stride
        full = len(packed) - len(packed) % stride
        return [packed[start : start + stride] for start in range(0, full, stride)], packed[full:]

    def _descend(self, root: bytes, labels: Sequence[bytes]) -> list[_Node]:
        """Return the pages on the path of these labels, up to the first label that is not in the index."""
        node = self._roots.get(root)
        if node is None:
            return []
        path = []
        for label in labels:
            at = bisect_left(node.below, label, key=_label)
            if at == len(node.below) or node.below[at].label != label:
                break
            node = node.below[at]
            path.append(node)
        return path

    def _refuse_conflicts(self, keys: Sequence[PageKey], path: Sequence[_Node]) -> None:
        if len(set(keys)) < len(keys):
            raise ValueError("keys must be distinct, but a key occurs twice")
        for index, key in enumerate(keys):
            if index < len(path):
                if path[index].key != key:
                    raise ValueError(
                        f"keys[{index}] differs from the key already inserted for these tokens and this root"
                    )
            elif key in self._pages:
                raise ValueError(f"keys[{index}] was already inserted for other tokens or another root")

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._pages.move_to_end(node.key)

    def _remove_leaf(self, node: _Node) -> None:
        del self._pages[node.key]
        above = node.above
        assert above is not None
        del above.below[bisect_left(above.below, node.label, key=_label)]
        if above.above is None and not above.below:
            del self._roots[above.label]


def _closest(siblings: Sequence[_Node], wanted: bytes) -> tuple[_Node | None, int]:
    """Return the sibling that shares the most leading tokens with ``wanted``, and how many it shares.

    Return (None, 0) if no sibling shares a token. Siblings are sorted, so only the neighbours on both sides
    of ``wanted`` are compared.
    """
    best, most = None, 0
    at = bisect_left(siblings, wanted, key=_label)
    for node in siblings[max(0, at - 1) : at + 1]:
        shared = _shared_tokens(node.label, wanted)
        if shared > most:
            best, most = node, shared
    return best, most


def _shared_tokens(label: bytes, wanted: bytes) -> int:
    size = min(len(label), len(wanted))
    differs = int.from_bytes(label[:size], "big") ^ int.from_bytes(wanted[:size], "big")
    return (8 * size - differs.bit_length()) // (8 * _TOKEN_NBYTES)
