"""Find the cached page that begins like the rest of a prompt: the longest prefix by tokens, for adapters.

Metadata only.

The store's keys say which full pages of a prompt it has. A prompt that leaves a cached sequence inside a page has
another key for that page and would recompute all of it. This index names the page that agrees with the prompt for
its first t tokens: the adapter leases it, copies it into a slot of its own and continues after t tokens.

An entry says what a page *would* hold, not that the store has it. A stale entry is harmless, because ``acquire``
decides: the adapter then calls ``discard`` and asks again. Only tokens and the root distinguish pages: a page that
also depends on something at a token offset (an image) belongs under another root, or not into the index.

The tree of prefixes is SGLang's radix cache with one page per edge, which needs one key per node.
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
    """``keys`` are the full pages of the prompt, from its first one on.

    The first ``next_tokens`` tokens (1 to page_size - 1) of the page ``next_key`` continue the prompt; None and 0 if no
    page begins like its rest.
    """

    keys: tuple[PageKey, ...]
    next_key: PageKey | None
    next_tokens: int


class _Node:
    """A page, or a root. ``label`` leads here from the parent: the root's name or the page's packed tokens."""

    __slots__ = ("above", "below", "key", "label")

    def __init__(self, label: bytes, key: PageKey, above: _Node | None) -> None:
        self.label = label
        self.key = key
        self.above = above
        self.below: list[_Node] = []  # sorted by label


_label = attrgetter("label")


class RadixIndex:
    """An index of pages by the tokens before and in them.

    Beyond ``max_pages`` the least recently used leaf is dropped.

    ``insert`` and ``longest`` count as use of every page they name. Finding or adding a page costs O(log siblings),
    dropping the oldest O(1), besides moving the tail of a sorted list. Not thread-safe: the caller serialises.

    Memory, measured on CPython 3.11: 290 bytes per page and 8 per token, so 800 bytes for a page of 64 tokens.
    """

    def __init__(self, page_size: int, max_pages: int = 1 << 20) -> None:
        """``page_size`` is in tokens. ValueError if either is less than 1."""
        if page_size < 1 or max_pages < 1:
            raise ValueError(f"page_size and max_pages must be at least 1, got {page_size} and {max_pages}")
        self._stride = page_size * _TOKEN_NBYTES
        self._max_pages = max_pages
        self._roots: dict[bytes, _Node] = {}
        # Least recently used first, and every page before the one above it: so the first is always a leaf.
        self._pages: OrderedDict[PageKey, _Node] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of pages in the index."""
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        """Return whether the index has this page. Does not count as use."""
        return key in self._pages

    def insert(self, root: bytes, token_ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """Add the pages of a sequence: ``keys[i]`` is the page of tokens ``[i * page_size, (i + 1) * page_size)``.

        Tokens beyond the keys are ignored. Of more than ``max_pages`` keys the first stay. Known pages count as
        used.

        Args:
            root: Opaque; identifies everything that the keys depend on besides the tokens (salt, extras).

        Raises:
            ValueError: There are more keys than full pages, a key is repeated or known by other tokens or another
                root, tokens have another key (``root`` lacks something), or a token is beyond int64. Nothing changes.
            TypeError: ``token_ids`` is not a sequence of integers. Nothing changes.
        """
        labels, _ = self._cut(token_ids)
        if len(keys) > len(labels):
            raise ValueError(f"{len(keys)} keys for {len(labels)} full pages")
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
        """Return the longest known prefix of ``token_ids`` under ``root``. Changes only what was used last.

        If several pages continue the prompt equally far, returns any of them. Raises like ``insert``.
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
        """Remove a page and every page after it, if it is known."""
        top = self._pages.get(key)
        if top is None:
            return
        doomed = [top]
        for node in doomed:  # grows during the loop: parents come before their children
            doomed.extend(node.below)
        for node in reversed(doomed):
            self._remove_leaf(node)

    def _cut(self, token_ids: Sequence[int]) -> tuple[list[bytes], bytes]:
        """Return the packed tokens of each full page, and those of the rest."""
        if isinstance(token_ids, str | bytes | bytearray):
            raise TypeError(f"token_ids must be a sequence of integers, got {type(token_ids).__name__}")
        try:
            # The machine's byte order is sufficient: labels of equal length that share most bytes share most tokens.
            packed = array("q", token_ids).tobytes()
        except OverflowError as error:
            raise ValueError("a token id is beyond int64") from error
        stride = self._stride
        full = len(packed) - len(packed) % stride
        return [packed[start : start + stride] for start in range(0, full, stride)], packed[full:]

    def _descend(self, root: bytes, labels: Sequence[bytes]) -> list[_Node]:
        """Return the known pages from the first one on."""
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
            raise ValueError("a key is given twice")
        for index, key in enumerate(keys):
            if index < len(path):
                if path[index].key != key:
                    raise ValueError(
                        f"keys[{index}] differs from the key known by these tokens and this root"
                    )
            elif key in self._pages:
                raise ValueError(f"keys[{index}] is known by other tokens or another root")

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
    """Return the sibling that shares most leading tokens with ``wanted``, and their number; (None, 0) if none does.

    Siblings are sorted, so it is one of the two next to the position of ``wanted``.
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
