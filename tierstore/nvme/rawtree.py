"""LMDB's file read by hand, with ``pread`` alone: nothing here can end in a signal, whatever the file holds.

For two questions before it is gone through: how long must it be, and which pages of its trees will be needed? Answers
are hints as far as damage goes: ``pagecount`` decides. Standard library only; layouts of LMDB 0.9 on 64 bits, little
endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, Self

HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
NODE = struct.Struct("<HHHH")  # two halves of a size or a page number, flags (its upper part), key length
NO_PAGE = (1 << 64) - 1

_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
TREE_NBYTES = _TREE.size

_META = struct.Struct(f"<IIQQ{TREE_NBYTES}s{TREE_NBYTES}sQQ")
"""Magic, version, address, size, free list and tree of trees, last page, transaction."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_GAP = 4  # pages between two wanted ones that are read along with them
_MAX_DEPTH = 16


class Tree(NamedTuple):
    """What LMDB knows of a tree; ``pad`` is the block size in the free list's, ``root`` NO_PAGE in an empty one's."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    large: int
    entries: int
    root: int

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """From its TREE_NBYTES bytes."""
        return cls._make(_TREE.unpack(raw))


class Meta(NamedTuple):
    """The newest meta page: block size, bytes up to the end of the last page, the tree of trees and the free list."""

    block: int
    end: int
    main: bytes
    free: bytes
    transaction: int


def read_meta(fd: int) -> Meta | None:
    """The newest of the two meta pages, or None if one of them cannot be read."""
    start = HEADER.size
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
        magic, version, _, _, free, main, last, transaction = _META.unpack_from(raw, start)
        if magic != _MAGIC or version != _VERSION:
            return None
        metas.append(Meta(block, (last + 1) * block, main, free, transaction))
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
    for name, tree in list(_named_trees(fd, meta.block, Tree.of(meta.main).root)):
        if name in wanted:
            asked += _prefetch_tree(fd, meta, Tree.of(tree))
    return asked


def _prefetch_tree(fd: int, meta: Meta, tree: Tree) -> int:
    level, asked = [tree.root], 0
    for below in range(min(tree.depth, _MAX_DEPTH) - 1, -1, -1):
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
        name = raw[offset + NODE.size : offset + NODE.size + length]
        tree = raw[offset + NODE.size + length : offset + NODE.size + length + TREE_NBYTES]
        if len(tree) == TREE_NBYTES:
            yield name, tree


def _nodes(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Offset and the four fields of each node of a page; none of a page that is cut or makes no sense."""
    if len(raw) < HEADER.size:
        return
    lower = HEADER.unpack_from(raw)[3]
    for at in range(HEADER.size, min(lower, len(raw) - 1), 2):
        offset = int.from_bytes(raw[at : at + 2], "little")
        if offset + NODE.size <= len(raw):
            yield (offset, *NODE.unpack_from(raw, offset))
