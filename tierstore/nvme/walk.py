"""The child process that looks through a catalogue before this process maps it: ``-m tierstore.nvme.walk DIRECTORY``.

A damaged tree can end in SIGBUS or SIGSEGV; here that costs a child. Exit code 0: every record of the catalogue is
intact and both trees can be walked. Anything else, a signal included: the directory is not to be opened.
"""

from __future__ import annotations

import os
import sys
from collections import deque

import lmdb
from xxhash import xxh3_64_digest

from tierstore.nvme.entry import BODY_NBYTES, CATALOGUE_DB, ENTRY_NBYTES, MAX_DBS, PAGES_DB
from tierstore.nvme.rawtree import prefetch


def walk(directory: str) -> int | str:
    """Go through the environment in ``directory``, changing nothing: its number of records, or what is wrong.

    lmdb.Error as it comes.
    """
    records = 0
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
            records = txn.stat(catalogue)["entries"]
            deque(txn.cursor(db=pages).iternext(keys=True, values=False), maxlen=0)
    return records


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
        found = walk(sys.argv[1])
    except lmdb.Error as error:
        found = str(error)
    if isinstance(found, str):
        sys.stderr.write(found)
        return 3
    sys.stdout.write(str(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
