"""LMDB's file read by hand, with ``pread`` alone: nothing here can end in a signal, whatever the file holds.

For two questions before it is mapped: how long must it be, and which pages will a walk of its trees need? Answers are
hints as far as damage goes: the walk decides. Standard library only; layouts of LMDB 0.9 on 64 bits, little endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

_HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # two halves of a size or a page number, flags (its upper part), key length
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_META = struct.Struct(f"<IIQQ{_TREE.size}s{_TREE.size}sQQ")  # magic, version, address, size, trees, last, txn
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_GAP = 4  # pages between two wanted ones that are read along with them
_MAX_DEPTH = 16


class Meta(NamedTuple):
    """The newest meta page: block size, bytes up to the end of the last page, and the tree of trees."""

    block: int
    end: int
    main: bytes
    transaction: int


def read_meta(fd: int) -> Meta | None:
    """The newest of the two meta pages, or None if one of them cannot be read."""
    start = _HEADER.size
    first = os.pread(fd, start + _META.size, 0)
    if len(first) < start + _META.size:
        return None
    block = int.from_bytes(first[start + 24 : start + 28], "little")
    if block not in _PAGE_SIZES:
        return None
    metas = []
    for raw in (first, os.pread(fd, start + _META.size, block)):
        if len(raw) < start + _META.size:
            return None
        magic, version, _, _, _, main, last, transaction = _META.unpack_from(raw, start)
        if magic != _MAGIC or version != _VERSION:
            return None
        metas.append(Meta(block, (last + 1) * block, main, transaction))
    return max(metas, key=lambda meta: meta.transaction)


def prefetch(fd: int, names: Iterable[bytes]) -> int:
    """Ask the kernel to read the pages of the named trees ahead, all at once; how many pages were asked for.

    A cold walk waits for one page at a time; asked for together they come at the disk's full rate.
    """
    meta = read_meta(fd)
    if meta is None:
        return 0
    asked = 0
    wanted = set(names)
    main = _TREE.unpack(meta.main)
    for name, tree in list(_named_trees(fd, meta.block, main[-1])):
        if name in wanted:
            asked += _prefetch_tree(fd, meta, _TREE.unpack(tree))
    return asked


def _prefetch_tree(fd: int, meta: Meta, tree: tuple[int, ...]) -> int:
    depth, root = tree[2], tree[-1]
    level, asked = [root], 0
    for below in range(min(depth, _MAX_DEPTH) - 1, -1, -1):
        level = sorted({number for number in level if 0 < number < meta.end // meta.block})
        asked += len(level)
        _will_need(fd, meta.block, level)
        if below:
            level = [child for number in level for child in _children(fd, meta.block, number)]
    return asked


def _will_need(fd: int, block: int, pages: list[int]) -> None:
    """``pages`` ascending; near ones are asked for in one piece."""
    if not pages:
        return
    first = pages[0]
    for page, following in pairwise([*pages, pages[-1] + _GAP + 2]):
        if following - page > _GAP:
            os.posix_fadvise(fd, first * block, (page - first + 1) * block, os.POSIX_FADV_WILLNEED)
            first = following


def _children(fd: int, block: int, number: int) -> Iterator[int]:
    for _, low, high, top, _ in _nodes(os.pread(fd, block, number * block)):
        yield low | high << 16 | top << 32


def _named_trees(fd: int, block: int, number: int) -> Iterator[tuple[bytes, bytes]]:
    """Name and tree of each node of the main leaf; our few names fit on one."""
    raw = os.pread(fd, block, number * block) if number < 1 << 40 else b""
    for offset, _, _, _, length in _nodes(raw):
        name = raw[offset + _NODE.size : offset + _NODE.size + length]
        tree = raw[offset + _NODE.size + length : offset + _NODE.size + length + _TREE.size]
        if len(tree) == _TREE.size:
            yield name, tree


def _nodes(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Offset and the four fields of each node of a page; none of a page that is cut or makes no sense."""
    if len(raw) < _HEADER.size:
        return
    lower = _HEADER.unpack_from(raw)[3]
    for at in range(_HEADER.size, min(lower, len(raw) - 1), 2):
        offset = int.from_bytes(raw[at : at + 2], "little")
        if offset + _NODE.size <= len(raw):
            yield (offset, *_NODE.unpack_from(raw, offset))
