"""A check of LMDB's file before it is mapped, so that damage cannot kill the process with a signal.

The file is read with ``pread``.

In this module a *page* is an LMDB page, and ``block`` is its size in bytes. A page of the store is called a
*KV page*.

``python -m tierstore.nvme.lmdb_walker DIRECTORY lmdb|extents`` is the child process that ``examination``
starts. Exit code 0 means that no LMDB page has two owners, that every catalogue record is intact, that every KV
page stored in LMDB has a catalogue record, and that every extent slot that a catalogue record names exists and
belongs to no other record. Any other exit code, or a signal, means that the directory must not be opened.

LMDB trusts its file. If the free list or a node contains a wrong page number, or a node has a wrong length, a later
commit ends in SIGABRT, SIGBUS or SIGSEGV, or overwrites a live tree. This module assigns each LMDB page to the tree,
value or free list that refers to it. A page with two owners, or with a type that does not match its owner, is
damage. Pages without an owner are harmless; LMDB itself leaves some behind. For a large value in the tree of KV
pages, only the header of its first LMDB page is read, because LMDB takes the number of pages to free from this
header. These headers are requested in batches.

The module imports neither numpy nor lmdb, so that the child process starts fast. It supports the layout of LMDB 0.9
on 64-bit little-endian machines.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import NamedTuple, Self

from xxhash import xxh3_64_digest

from tierstore.nvme.catalogue_entry import (
    BODY_NBYTES,
    CATALOGUE_DB,
    ENTRY_NBYTES,
    LOCATION,
    NBYTES,
    PAGE_NUMBER,
    PAGES_DB,
    STORED_NBYTES,
    slot_blocks,
)
from tierstore.nvme.directory_layout import DATA_FILE, extent_sizes
from tierstore.types import exact_size

HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
NODE = struct.Struct("<HHHH")  # size or page number (two halves), flags (or top of page number), key length
NO_PAGE = (1 << 64) - 1

_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
TREE_NBYTES = _TREE.size

_META = struct.Struct(f"<IIQQ{TREE_NBYTES}s{TREE_NBYTES}sQQ")
"""Fields of a meta page: magic, version, address, size, free list, tree of trees, last page, transaction."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_GAP = 4  # gaps of up to this many LMDB pages between wanted pages are read, too
_MAX_DEPTH = 16


class Tree(NamedTuple):
    """LMDB's record of a tree.

    ``pad`` is the size of an LMDB page if this is the free list's record, else 0. ``root`` is NO_PAGE if the tree is
    empty.
    """

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
        """Decode a tree from its TREE_NBYTES bytes."""
        return cls._make(_TREE.unpack(raw))


class Meta(NamedTuple):
    """The newer of LMDB's two meta pages.

    ``block`` is the size of an LMDB page, and ``end`` is the file offset at which the last LMDB page ends. ``main``
    and ``free`` are the encoded ``Tree`` records of the tree of trees, which contains all named trees, and of the
    free list.
    """

    block: int
    end: int
    main: bytes
    free: bytes
    transaction: int


def read_meta(fd: int) -> Meta | None:
    """Return the newer of the two meta pages, or None if one of them is invalid or cannot be read."""
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
    """Ask the kernel to read the LMDB pages of the named trees ahead. Return the number of pages requested.

    A walk through an uncached file would otherwise wait for one LMDB page after another. If the pages are requested
    together, they are read at the disk's full throughput.
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
    """Ask the kernel to read these LMDB pages ahead.

    The numbers must be in ascending order; nearby pages share a request.
    """
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
    """Yield the name and the encoded tree of each node of a leaf. The few names in use fit on one LMDB page."""
    raw = os.pread(fd, block, number * block) if number < 1 << 40 else b""
    for offset, _, _, _, length in _nodes(raw):
        name = raw[offset + NODE.size : offset + NODE.size + length]
        tree = raw[offset + NODE.size + length : offset + NODE.size + length + TREE_NBYTES]
        if len(tree) == TREE_NBYTES:
            yield name, tree


def _nodes(raw: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the offset and the four fields of each node of an LMDB page. Skip nodes beyond the end of the page."""
    if len(raw) < HEADER.size:
        return
    lower = HEADER.unpack_from(raw)[3]
    for at in range(HEADER.size, min(lower, len(raw) - 1), 2):
        offset = int.from_bytes(raw[at : at + 2], "little")
        if offset + NODE.size <= len(raw):
            yield (offset, *NODE.unpack_from(raw, offset))


KEY_NBYTES = 36
NO_TREE = Tree(0, 0, 0, 0, 0, 0, 0, NO_PAGE)

_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUBTREE = 1, 2
_INTEGER_KEYS = 8  # flag of a tree whose keys are integers in native byte order
_DEEPEST = 32
_LEAVES_AHEAD = 32  # number of leaves whose values' headers are requested together
_FREE, _NAMES = "free list", "tree of names"
_ENTRY_NODE = NODE.pack(ENTRY_NBYTES, 0, 0, KEY_NBYTES)
_ENTRY_STEP = NODE.size + KEY_NBYTES + ENTRY_NBYTES


class Damaged(Exception):
    """The file is damaged; the message says how."""


class Value(NamedTuple):
    """A value in a tree. ``page`` is the first of the overflow pages that contain the value, or 0 if it has none."""

    key: bytes
    nbytes: int
    page: int


class _Node(NamedTuple):
    key: bytes
    nbytes: int  # length of the value; in a branch, the lower part of the child's page number
    flags: int  # in a branch, the upper part of the child's page number
    at: int  # offset of the value in the LMDB page


class _Part(NamedTuple):
    """An LMDB page of a tree.

    Its keys must be at least ``low`` and, unless ``high`` is None, less than ``high``.
    """

    page: int
    low: bytes
    high: bytes | None


class PageCount:
    """A check that every LMDB page in a file's newest transaction has at most one owner. Not thread-safe.

    To account for an LMDB page means to mark it as owned. If a page already has an owner, the file is damaged.

    Each item that a method yields or returns has been checked individually. The file as a whole is sound only
    once all trees and the free list have been walked. All methods raise Damaged if they find damage, and OSError if
    the file cannot be read.
    """

    def __init__(self, fd: int, meta: Meta) -> None:
        self._fd, self._meta, self._block = fd, meta, meta.block
        self._pages = meta.end // meta.block
        # LMDB does not write a page that it allocates and frees in one transaction. So the file may end before the last
        # page, but not before a page in use.
        self._stored = min(self._pages, os.fstat(fd).st_size // meta.block)
        self._taken = bytearray(self._pages)
        self._taken[:2] = b"\1\1"

    def trees(self) -> dict[bytes, Tree]:
        """Return the trees by name."""
        found = {}
        main = _tree(self._meta.main, 0, _NAMES)
        for key, raw, flags in self._whole(main, _NAMES):
            if flags != _SUBTREE or len(raw) != TREE_NBYTES:
                raise Damaged(f"{key.decode(errors='replace')!r} in the {_NAMES} is not a tree")
            found[key] = _tree(raw, 0, f"tree {key.decode(errors='replace')!r}")
        return found

    def free_list(self) -> None:
        """Account for the LMDB pages of the free list and for the free pages that it lists."""
        before = 0
        free = _tree(self._meta.free, _INTEGER_KEYS, _FREE, pad=self._block)
        for key, raw, flags in self._whole(free, _FREE):
            transaction = int.from_bytes(key, "big")  # ``_turned`` has reversed the little-endian key
            if len(key) != 8 or flags & ~_BIG or not before < transaction <= self._meta.transaction:
                raise Damaged(f"the {_FREE} has a record that belongs to no transaction")
            before = transaction
            self._take_free(raw)

    def small(self, tree: Tree, name: str) -> None:
        """Account for the LMDB pages of a tree and of its values. Raises Damaged if a value is itself a tree."""
        for key, _, flags in self._whole(tree, name):
            if flags & ~_BIG:
                raise Damaged(
                    f"the value of {key.decode(errors='replace')!r} in the {name} has invalid flags"
                )

    def entries(self, tree: Tree, name: str) -> Iterator[bytes]:
        """Yield the key of each record, followed by the value, as one bytes object. Records come in key order.

        A key has KEY_NBYTES bytes, and a value has ENTRY_NBYTES bytes.
        """
        count = 0
        for part in self._leaves(tree, name):
            raw, offsets, upper = self._read(part.page, _LEAF, name)
            steps = list(range(upper, self._block, _ENTRY_STEP))
            whole = len(steps) * _ENTRY_STEP == self._block - upper and sorted(offsets) == steps
            if not whole or any(raw[at : at + NODE.size] != _ENTRY_NODE for at in steps):
                raise Damaged(f"page {part.page} of the {name} has an invalid node")
            records = [raw[at + NODE.size : at + _ENTRY_STEP] for at in offsets]
            _check_order([record[:KEY_NBYTES] for record in records], part, name)
            count += len(records)
            yield from records
        _check_count(count, tree, name)

    def values(self, tree: Tree, name: str) -> Iterator[Value]:
        """Yield the values of a tree in key order. Only the headers of large values are read."""
        count = 0
        leaves = self._leaves(tree, name)
        while some := list(islice(leaves, _LEAVES_AHEAD)):
            nodes = [node for part in some for node in self._leaf(part, name)]
            large = (
                int.from_bytes(raw[at : at + 8], "little") for _, _, flags, at, raw in nodes if flags & _BIG
            )
            _will_need(self._fd, self._block, sorted(first for first in large if first < self._pages))
            for key, nbytes, flags, at, raw in nodes:
                first = 0
                if flags & ~_BIG:
                    raise Damaged(f"the value of {key.hex()} in the {name} has invalid flags")
                if flags & _BIG:
                    first = int.from_bytes(raw[at : at + 8], "little")
                    self._take_value(first, nbytes, name)
                count += 1
                yield Value(key, nbytes, first)
        _check_count(count, tree, name)

    def _whole(self, tree: Tree, name: str) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the key, value and flags of each item of a tree."""
        count = 0
        for part in self._leaves(tree, name):
            for key, nbytes, flags, at, raw in self._leaf(part, name):
                value = self._large(raw, at, nbytes, name) if flags & _BIG else raw[at : at + nbytes]
                count += 1
                yield key, value, flags
        _check_count(count, tree, name)

    def _large(self, raw: bytes, at: int, nbytes: int, name: str) -> bytes:
        """Return a value that is stored in overflow pages. The number of the first one is at ``raw[at]``."""
        first = int.from_bytes(raw[at : at + 8], "little")
        self._take_value(first, nbytes, name)
        value = os.pread(self._fd, nbytes, first * self._block + HEADER.size)
        if len(value) < nbytes:
            raise Damaged(f"a large value of the {name} is truncated")
        return value

    def _take_value(self, first: int, nbytes: int, name: str) -> None:
        """Account for all overflow pages of a large value.

        The first page's header contains the number of pages. The value may have more pages than it needs, because
        LMDB shortens values in place.
        """
        self._take(first, self._length(nbytes), name)
        header = os.pread(self._fd, HEADER.size, first * self._block)
        if len(header) < HEADER.size:
            raise Damaged(f"a large value of the {name} is truncated")
        own, _, flags, lower, upper = HEADER.unpack(header)
        more = (lower | upper << 16) - self._length(nbytes)
        if own != first or flags != _OVERFLOW or more < 0:
            raise Damaged(
                f"page {first} of the {name} is not the first overflow page of a value of {exact_size(nbytes)}"
            )
        if more:
            self._take(first + self._length(nbytes), more, name)

    def _length(self, nbytes: int) -> int:
        """Return the number of overflow pages that a large value of ``nbytes`` bytes needs."""
        return -(-(HEADER.size + nbytes) // self._block)

    def _take_free(self, raw: bytes) -> None:
        """Account for the LMDB pages that one transaction freed.

        ``raw`` contains the number of these pages, followed by the page numbers in descending order.
        """
        if not raw or len(raw) % 8:
            raise Damaged(f"the {_FREE} has a record of an impossible size, {exact_size(len(raw))}")
        count, *numbers = struct.unpack(f"<{len(raw) // 8}Q", raw)
        if count > len(numbers):
            raise Damaged(f"the {_FREE} claims {count} page numbers in a record of only {len(numbers)}")
        del numbers[count:]
        if not numbers:
            return
        if numbers[0] >= self._pages or any(this <= following for this, following in pairwise(numbers)):
            raise Damaged(f"the {_FREE} lists pages out of order or beyond the end of the file")
        if any(map(self._taken.__getitem__, numbers)):
            raise Damaged(f"the {_FREE} lists a page that is claimed twice or in use")
        deque(map(self._taken.__setitem__, numbers, repeat(1)), maxlen=0)

    def _take(self, first: int, count: int, name: str) -> None:
        end = first + count
        if self._stored < end <= self._pages:
            length, needed = os.fstat(self._fd).st_size, end * self._block
            raise Damaged(
                f"data.mdb is truncated: its length is {exact_size(length)}, but a page of the {name} ends at "
                f"{exact_size(needed)}"
            )
        if not first < end <= self._pages or self._taken.find(1, first, end) >= 0:
            raise Damaged(f"page {first} of the {name} is claimed twice, or lies beyond the end of the file")
        self._taken[first:end] = b"\1" * count

    def _leaves(self, tree: Tree, name: str) -> Iterator[_Part]:
        """Yield the leaves of a tree in key order, and account for its branches and leaves."""
        if tree.root == NO_PAGE and not tree.depth:
            return
        if not 0 < tree.depth <= _DEEPEST:
            raise Damaged(f"the {name} has an impossible depth, {tree.depth}")
        level = [_Part(tree.root, b"", None)]
        for _ in range(tree.depth - 1):
            level = [child for part in level for child in self._children(part, name)]
        for part in level:
            self._take(part.page, 1, name)
            yield part

    def _children(self, part: _Part, name: str) -> list[_Part]:
        """Return the children of a branch. The first key of a branch is ignored, as in LMDB."""
        self._take(part.page, 1, name)
        nodes, _ = self._nodes(part.page, _BRANCH, name)
        keys = [part.low, *(_turned(node.key, name) for node in nodes[1:])]
        _check_order(keys, part, name)
        highs = [*keys[1:], part.high]
        if len(nodes) < 2 and name != _FREE:  # deleting from the free list can leave such branches
            raise Damaged(f"page {part.page} of the {name} has only one child")
        pages = (node.nbytes | node.flags << 32 for node in nodes)
        return [_Part(*each) for each in zip(pages, keys, highs, strict=True)]

    def _leaf(self, part: _Part, name: str) -> Iterator[tuple[bytes, int, int, int, bytes]]:
        """Yield (key, length, flags, offset, bytes of the leaf) for each value of a leaf."""
        nodes, raw = self._nodes(part.page, _LEAF, name)
        keys = [_turned(node.key, name) for node in nodes]
        _check_order(keys, part, name)
        for key, node in zip(keys, nodes, strict=True):
            yield key, node.nbytes, node.flags, node.at, raw

    def _nodes(self, number: int, kind: int, name: str) -> tuple[list[_Node], bytes]:
        """Return the nodes and the bytes of an LMDB page.

        The nodes must fill the page to its end without gaps.
        """
        raw, offsets, upper = self._read(number, kind, name)
        nodes, ends = [], {}
        for offset in offsets:
            if not upper <= offset <= self._block - NODE.size:
                raise Damaged(f"page {number} of the {name} has a node outside the page")
            low, high, flags, length = NODE.unpack_from(raw, offset)
            at, nbytes = offset + NODE.size + length, low | high << 16
            inside = 0 if kind == _BRANCH else 8 if flags & _BIG else nbytes
            nodes.append(_Node(raw[offset + NODE.size : at], nbytes, flags, at))
            ends[offset] = at + inside + (at + inside) % 2
        if [*sorted(ends), self._block] != [upper, *sorted(ends.values())] or len(ends) != len(nodes):
            raise Damaged(f"page {number} of the {name} has nodes that overlap")
        return nodes, raw

    def _read(self, number: int, kind: int, name: str) -> tuple[bytes, tuple[int, ...], int]:
        """Return the bytes of an LMDB page, the offsets of its nodes in key order, and the lowest of these offsets."""
        raw = os.pread(self._fd, self._block, number * self._block)
        if len(raw) < self._block:
            raise Damaged(f"page {number} of the {name} is truncated")
        own, _, flags, lower, upper = HEADER.unpack_from(raw)
        if own != number or flags != kind or lower % 2 or not HEADER.size < lower <= upper < len(raw):
            raise Damaged(f"page {number} of the {name} has a header with a wrong page number, type or bound")
        return raw, struct.unpack_from(f"<{(lower - HEADER.size) // 2}H", raw, HEADER.size), upper


def _tree(raw: bytes, flags: int, name: str, *, pad: int = 0) -> Tree:
    tree = Tree.of(raw)
    if (tree.pad, tree.flags) != (pad, flags):
        raise Damaged(f"the {name} has the wrong type")
    return tree


def _turned(key: bytes, name: str) -> bytes:
    """Return a key in the byte order in which LMDB compares it.

    Keys of the free list are little-endian integers.
    """
    return key[::-1] if name == _FREE else key


def _check_order(keys: list[bytes], part: _Part, name: str) -> None:
    ascending = keys[0] >= part.low and (part.high is None or keys[-1] < part.high)
    if not ascending or any(this >= following for this, following in pairwise(keys)):
        raise Damaged(f"page {part.page} of the {name} has keys out of order")


def _check_count(count: int, tree: Tree, name: str) -> None:
    if count != tree.entries:
        raise Damaged(f"the {name} has {count} records, but its root says {tree.entries}")


_BLOCK = 4096
_HEAD_NBYTES = 4080  # the same as record_format.HEAD_NBYTES, but that module imports numpy
_SUMMED = KEY_NBYTES + BODY_NBYTES


def walk(directory: str, payload: str) -> int | str:
    """Check the environment in ``directory`` without changing it.

    Returns:
        The number of catalogue records, or a description of the damage.
    """
    fd = os.open(os.path.join(directory, DATA_FILE), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _walk(fd, Path(directory), payload)
    except Damaged as damage:
        return str(damage)
    finally:
        os.close(fd)


def _walk(fd: int, directory: Path, payload: str) -> int:
    meta = read_meta(fd)
    if meta is None:
        raise Damaged("its meta pages cannot be read")
    prefetch(fd, (CATALOGUE_DB, PAGES_DB))
    count = PageCount(fd, meta)
    trees = count.trees()
    catalogue, pages = (trees.pop(name, NO_TREE) for name in (CATALOGUE_DB, PAGES_DB))
    records = _intact(count.entries(catalogue, "catalogue"))
    values = _Values(count.values(pages, "pages tree"))
    if payload == "extents":
        _check_slots(records, directory)
    else:
        _check_values(records, values)
    values.check_ended()
    for name, tree in trees.items():
        count.small(tree, f"{name.decode(errors='replace')} tree")
    count.free_list()
    return catalogue.entries


def _intact(records: Iterator[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Verify the checksum of each catalogue record, and yield the record's key and entry."""
    digest = xxh3_64_digest  # runs a million times: avoid attribute look-ups
    for record in records:
        if digest(record[:_SUMMED]) != record[_SUMMED:]:
            raise Damaged(f"catalogue record of {record[:KEY_NBYTES].hex()} does not match its checksum")
        yield record[:KEY_NBYTES], record[KEY_NBYTES:]


class _Values:
    """The KV pages that LMDB stores as values, in key order. Call ``of`` with keys in ascending order."""

    def __init__(self, values: Iterator[Value]) -> None:
        self._values = values
        self._next = next(values, None)

    def of(self, key: bytes) -> Value | None:
        """Return the value under ``key``, or None.

        Raises Damaged if a lower key has a value that was never requested.
        """
        found = self._next
        if found is None or found.key > key:
            return None
        if found.key < key:
            raise Damaged(f"page {found.key.hex()} is stored in LMDB, but has no catalogue record")
        self._next = next(self._values, None)
        return found

    def check_ended(self) -> None:
        """Raise Damaged if values remain that were never requested."""
        if self._next is not None:
            raise Damaged(f"page {self._next.key.hex()} is stored in LMDB, but has no catalogue record")


def _check_values(records: Iterator[tuple[bytes, bytes]], values: _Values) -> None:
    """Check the length of each large value, and the number of its first LMDB page if the entry contains one."""
    for key, raw in records:
        if any(raw[LOCATION]):
            raise Damaged(f"catalogue record of {key.hex()} names an extent file, but the tier has none")
        value = values.of(key)
        number = int.from_bytes(raw[PAGE_NUMBER], "little")
        if number and (value is None or value.page != number):
            raise Damaged(
                f"catalogue record of {key.hex()} names an LMDB page that does not hold the value of this key"
            )
        stored = int.from_bytes(raw[STORED_NBYTES], "little")
        if value is not None and value.page and value.nbytes != _HEAD_NBYTES + stored:
            raise Damaged(
                f"catalogue record of {key.hex()} has a value of the wrong size, {exact_size(value.nbytes)}"
            )


def _check_slots(records: Iterator[tuple[bytes, bytes]], directory: Path) -> None:
    """Check that every entry's slot exists, is long enough and belongs to no other entry."""
    spans = []
    for key, raw in records:
        first = int.from_bytes(raw[LOCATION], "little")
        blocks = slot_blocks(int.from_bytes(raw[NBYTES], "little"))
        if (blocks - 1) * _BLOCK < int.from_bytes(raw[STORED_NBYTES], "little"):
            raise Damaged(f"catalogue record of {key.hex()} has a slot that is too short")
        spans.append((first, first + blocks))
    _check_apart(spans, directory)


def _check_apart(spans: list[tuple[int, int]], directory: Path) -> None:
    """Check that these ranges of blocks exist and do not overlap.

    A range is (first, end). Both are block numbers in the form ``extent << 32 | block``.
    """
    spans.sort()
    ends = {number: (number << 32) + nbytes // _BLOCK for number, nbytes in extent_sizes(directory).items()}
    before = 0
    for first, end in spans:
        block, number = first & 0xFFFFFFFF, first >> 32
        if first < before:
            raise Damaged(f"two records overlap at block {block} of extent file {number}")
        before = end
        if end > ends.get(first >> 32, 0):
            raise Damaged(
                f"a record is at block {block} of extent file {number}, which is missing or truncated"
            )


def main() -> int:
    """Print the number of records and return 0, or print the fault to stderr and return another exit code.

    The caller attributes a failure after the first line on stdout to damage in the directory, and an earlier failure
    to this program.
    """
    sys.stdout.write("walking\n")
    sys.stdout.flush()
    try:
        found = walk(sys.argv[1], sys.argv[2])
    except OSError as error:
        found = str(error)
    if isinstance(found, str):
        sys.stderr.write(found)
        return 3
    sys.stdout.write(str(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
