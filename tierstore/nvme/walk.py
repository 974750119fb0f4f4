"""The child process that looks through a catalogue before this process maps it.

``-m tierstore.nvme.walk DIRECTORY lmdb|extents``. A damaged tree can end in SIGBUS or SIGSEGV; here it costs a child.
Exit code 0: every record of the catalogue is intact, both trees can be walked, and each record has a place of its own
in the extent files, if it is kept there. Anything else, a signal included: the directory is not to be opened.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path

import lmdb
from xxhash import xxh3_64_digest

from tierstore.nvme.entry import (
    BODY_NBYTES,
    CATALOGUE_DB,
    ENTRY_NBYTES,
    LOCATION,
    MAX_DBS,
    NBYTES,
    PAGES_DB,
    STORED_NBYTES,
    slot_blocks,
)
from tierstore.nvme.home import extent_sizes
from tierstore.nvme.rawtree import prefetch

_BLOCK = 4096


def walk(directory: str, payload: str) -> int | str:
    """Go through the environment in ``directory``, changing nothing: its number of records, or what is wrong.

    lmdb.Error as it comes.
    """
    records = 0
    spans: list[tuple[int, int]] = []
    _warm(directory)
    with lmdb.open(
        directory, readonly=True, lock=False, create=False, readahead=False, max_dbs=MAX_DBS
    ) as env:
        if env.stat()["entries"] == 0:
            return 0
        catalogue = env.open_db(CATALOGUE_DB, create=False)
        pages = env.open_db(PAGES_DB, create=False)
        body, length, digest = (
            BODY_NBYTES,
            ENTRY_NBYTES,
            xxh3_64_digest,
        )  # a million turns: no attribute look-ups
        with env.begin() as txn:
            for key, raw in txn.cursor(db=catalogue):
                if digest(key + raw[:body]) != raw[body:] or len(raw) != length:
                    return f"catalogue record of {key.hex()} differs from its checksum"
                if payload == "extents":
                    first = int.from_bytes(raw[LOCATION], "little")
                    blocks = slot_blocks(int.from_bytes(raw[NBYTES], "little"))
                    stored = int.from_bytes(raw[STORED_NBYTES], "little")
                    if (blocks - 1) * _BLOCK < stored:
                        return f"catalogue record of {key.hex()} has a slot that is too short"
                    spans.append((first, first + blocks))
                elif any(raw[LOCATION]):
                    return f"catalogue record of {key.hex()} names an extent file where there are none"
            records = txn.stat(catalogue)["entries"]
            deque(txn.cursor(db=pages).iternext(keys=True, values=False), maxlen=0)
    return _misplaced(spans, Path(directory)) or records


def _misplaced(spans: list[tuple[int, int]], directory: Path) -> str | None:
    """What is wrong with records at these blocks (extent << 32 | block), first and end."""
    spans.sort()
    ends = {number: (number << 32) + nbytes // _BLOCK for number, nbytes in extent_sizes(directory).items()}
    before = 0
    for first, end in spans:
        if first < before:
            return f"two records at block {first & 0xFFFFFFFF} of extent file {first >> 32}"
        before = end
        if end > ends.get(first >> 32, 0):
            return f"a record at block {first & 0xFFFFFFFF} of extent file {first >> 32}, which is missing or cut"
    return None


def _warm(directory: str) -> None:
    fd = os.open(os.path.join(directory, "data.mdb"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        prefetch(fd, (CATALOGUE_DB, PAGES_DB))
    finally:
        os.close(fd)


def main() -> int:
    """Exit code 0 with the number of records on stdout, or another with the fault at the end of stderr.

    Whatever goes wrong after the first line of stdout is the directory's fault, before it this program's.
    """
    sys.stdout.write("walking\n")
    sys.stdout.flush()
    try:
        found = walk(sys.argv[1], sys.argv[2])
    except lmdb.Error as error:
        found = str(error)
    if isinstance(found, str):
        sys.stderr.write(found)
        return 3
    sys.stdout.write(str(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
