"""The child process that looks through a catalogue before this process maps it.

``-m tierstore.nvme.walk DIRECTORY lmdb|extents``. Every page of LMDB's file is accounted for, every record of the
catalogue is intact, and each has a place of its own: a value that LMDB keeps under its key, or a slot in the extent
files. Exit code 0 says so; anything else, a signal included: the directory is not to be opened.

All is read by hand: LMDB's own cursor reads the first page of each value, a disk access each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_digest

from tierstore.nvme.entry import (
    BODY_NBYTES,
    CATALOGUE_DB,
    LOCATION,
    NBYTES,
    PAGE_NUMBER,
    PAGES_DB,
    STORED_NBYTES,
    slot_blocks,
)
from tierstore.nvme.home import DATA_FILE, extent_sizes
from tierstore.nvme.pagecount import KEY_NBYTES, NO_TREE, Damaged, PageCount, Value
from tierstore.nvme.rawtree import prefetch, read_meta

_BLOCK = 4096
_HEAD_NBYTES = 4080  # of a record in LMDB: codec.HEAD_NBYTES, whose module imports numpy
_SUMMED = KEY_NBYTES + BODY_NBYTES


def walk(directory: str, payload: str) -> int | str:
    """Go through the environment in ``directory``, changing nothing: its number of records, or what is wrong."""
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
    values = _Values(count.values(pages, "pages"))
    if payload == "extents":
        _check_slots(records, directory)
    else:
        _check_values(records, values)
    values.check_ended()
    for name, tree in trees.items():
        count.small(tree, name.decode(errors="replace"))
    count.free_list()
    return catalogue.entries


def _intact(records: Iterator[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Key and entry of each record, which is not damaged."""
    digest = xxh3_64_digest  # a million turns: no attribute look-ups
    for record in records:
        if digest(record[:_SUMMED]) != record[_SUMMED:]:
            raise Damaged(f"catalogue record of {record[:KEY_NBYTES].hex()} differs from its checksum")
        yield record[:KEY_NBYTES], record[KEY_NBYTES:]


class _Values:
    """What LMDB keeps under keys, to be asked for in their order."""

    def __init__(self, values: Iterator[Value]) -> None:
        self._values = values
        self._next = next(values, None)

    def of(self, key: bytes) -> Value | None:
        """The value under ``key``. Damaged if there is one under a key before it that nobody asked for."""
        found = self._next
        if found is None or found.key > key:
            return None
        if found.key < key:
            raise Damaged(f"the page of {found.key.hex()} has no catalogue record")
        self._next = next(self._values, None)
        return found

    def check_ended(self) -> None:
        """Damaged if there are more."""
        if self._next is not None:
            raise Damaged(f"the page of {self._next.key.hex()} has no catalogue record")


def _check_values(records: Iterator[tuple[bytes, bytes]], values: _Values) -> None:
    """Every entry names the page where LMDB keeps the value under its key, if it names one."""
    for key, raw in records:
        if any(raw[LOCATION]):
            raise Damaged(f"catalogue record of {key.hex()} names an extent file where there are none")
        value = values.of(key)
        number = int.from_bytes(raw[PAGE_NUMBER], "little")
        stored = int.from_bytes(raw[STORED_NBYTES], "little")
        if number and (value is None or value[1:] != (_HEAD_NBYTES + stored, number)):
            raise Damaged(f"catalogue record of {key.hex()} names a page that is not its own")


def _check_slots(records: Iterator[tuple[bytes, bytes]], directory: Path) -> None:
    """Every entry names a slot of its own."""
    spans = []
    for key, raw in records:
        first = int.from_bytes(raw[LOCATION], "little")
        blocks = slot_blocks(int.from_bytes(raw[NBYTES], "little"))
        if (blocks - 1) * _BLOCK < int.from_bytes(raw[STORED_NBYTES], "little"):
            raise Damaged(f"catalogue record of {key.hex()} has a slot that is too short")
        spans.append((first, first + blocks))
    _check_apart(spans, directory)


def _check_apart(spans: list[tuple[int, int]], directory: Path) -> None:
    """That these blocks (extent << 32 | block), first and end, are there, and no two are the same."""
    spans.sort()
    ends = {number: (number << 32) + nbytes // _BLOCK for number, nbytes in extent_sizes(directory).items()}
    before = 0
    for first, end in spans:
        block, number = first & 0xFFFFFFFF, first >> 32
        if first < before:
            raise Damaged(f"two records at block {block} of extent file {number}")
        before = end
        if end > ends.get(first >> 32, 0):
            raise Damaged(f"a record at block {block} of extent file {number}, which is missing or cut")


def main() -> int:
    """Exit code 0 with the number of records on stdout, or another with the fault at the end of stderr.

    Whatever goes wrong after the first line of stdout is the directory's fault, before it this program's.
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
