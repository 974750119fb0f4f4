"""Locates the contents of a closed directory's data.mdb: its trees by name, its free list, and stale pages.

Parses the bytes of the file in memory. The layouts are those of LMDB 0.9 on little-endian 64-bit machines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

DATA = "data.mdb"
BLOCK = 4096

_HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # two halves of a size or page number, flags (or its top bits), key length
_TREE = struct.Struct("<IHHQQQQQ")  # the last field is the root page
_META_AT = 16
_TREES_AT = _META_AT + 24
_TXN_AT = _TREES_AT + 2 * _TREE.size + 8
_BRANCH, _LEAF = 1, 2
_BIG, _SUBTREE = 1, 2
_NONE = (1 << 64) - 1


class Span(NamedTuple):
    """A range of bytes in a file of the directory. ``name`` is the name of the file."""

    name: str
    offset: int
    length: int


def tree_regions(raw: bytes, records: set[int]) -> dict[str, list[Span]]:
    """Return the LMDB pages of data.mdb by region, without the pages in ``records``, which hold page records."""
    metas = [raw[page * BLOCK : (page + 1) * BLOCK] for page in (0, 1)]
    newest = max(metas, key=lambda meta: int.from_bytes(meta[_TXN_AT : _TXN_AT + 8], "little"))
    free, main = (_root(newest[at : at + _TREE.size]) for at in (_TREES_AT, _TREES_AT + _TREE.size))
    pages = {"meta pages": {0, 1}, "free list": set(_walk(raw, free)), "names": set(_walk(raw, main))}
    for name, tree in _subtrees(raw, pages["names"]):
        pages[name] = set(_walk(raw, _root(tree), overflow=False))
    known = set[int]().union(records, *pages.values())
    pages["stale"] = set(range(len(raw) // BLOCK)) - known
    return {
        name: [Span(DATA, number * BLOCK, BLOCK) for number in sorted(numbers)]
        for name, numbers in pages.items()
        if numbers
    }


def large_values(raw: bytes, name: str) -> dict[bytes, int]:
    """Return, by key, the number of the first LMDB page of each large value in the tree ``name``.

    A value is large if LMDB stores it in separate pages.
    """
    metas = [raw[page * BLOCK : (page + 1) * BLOCK] for page in (0, 1)]
    newest = max(metas, key=lambda meta: int.from_bytes(meta[_TXN_AT : _TXN_AT + 8], "little"))
    main = _root(newest[_TREES_AT + _TREE.size : _TREES_AT + 2 * _TREE.size])
    found = {}
    for found_name, tree in _subtrees(raw, set(_walk(raw, main))):
        if found_name == name:
            for number in _walk(raw, _root(tree), overflow=False):
                if _HEADER.unpack_from(raw, number * BLOCK)[2] & _LEAF:
                    for _, _, flags, key, rest in _nodes(raw, number):
                        if flags & _BIG:
                            found[key] = int.from_bytes(rest[:8], "little")
    return found


def _root(tree: bytes) -> int:
    root: int = _TREE.unpack(tree)[-1]
    return root


def _walk(raw: bytes, number: int, *, overflow: bool = True) -> Iterator[int]:
    """Yield the number of every page of a tree and, if ``overflow``, of every page of its large values."""
    if number == _NONE:
        return
    yield number
    flags = _HEADER.unpack_from(raw, number * BLOCK)[2]
    for low, high, top, _, rest in _nodes(raw, number):
        if flags & _BRANCH:
            yield from _walk(raw, low | high << 16 | top << 32, overflow=overflow)
        elif top & _BIG and overflow:
            first = int.from_bytes(rest[:8], "little")
            _, _, _, lower, upper = _HEADER.unpack_from(raw, first * BLOCK)
            yield from range(first, first + (lower | upper << 16))


def _subtrees(raw: bytes, numbers: set[int]) -> Iterator[tuple[str, bytes]]:
    for number in numbers:
        if _HEADER.unpack_from(raw, number * BLOCK)[2] & _LEAF:
            for _, _, flags, name, rest in _nodes(raw, number):
                if flags & _SUBTREE:
                    yield name.decode(), rest[: _TREE.size]


def _nodes(raw: bytes, number: int) -> Iterator[tuple[int, int, int, bytes, bytes]]:
    """Yield the first three header fields of each node of a page, its key, and the bytes after the key."""
    page = raw[number * BLOCK : (number + 1) * BLOCK]
    lower = _HEADER.unpack_from(page)[3]
    for at in range(_HEADER.size, lower, 2):
        offset = int.from_bytes(page[at : at + 2], "little")
        low, high, flags, length = _NODE.unpack_from(page, offset)
        data = offset + _NODE.size
        yield low, high, flags, page[data : data + length], page[data + length :]
