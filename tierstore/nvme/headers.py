"""The page headers of large values in LMDB's file, mended before LMDB frees what they name.

LMDB frees as many pages as the header of a value says, from the page that it says; one that changed on disk ends that
in transactions that fail for good, in a signal, or in a live page that is written over. Nothing else reads these
headers, and what they must say follows from the catalogue's entry, which has a checksum of its own and agrees with
LMDB's tree: ``walk`` saw to it. So a wrong one is written anew.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from tierstore.nvme.home import DATA_FILE

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<QHHI")  # page number, pad, flags, pages
_LARGE = 4


class PageHeaders:
    """Of the environment in ``directory``, with pages of ``block`` bytes. By one thread, within its write transactions.

    ``num_mended``: how many were wrong.
    """

    def __init__(self, directory: Path, block: int) -> None:
        self.num_mended = 0
        self._path, self._block = directory / DATA_FILE, block
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def mend(self, page_number: int, nbytes: int) -> None:
        """See that the header is right of a value of ``nbytes`` at this page, which is committed and will be freed.

        Nobody writes to such a page but this. OSError if it cannot be read or written; then it must not be freed.
        """
        right = _HEADER.pack(page_number, 0, _LARGE, -(-(_HEADER.size + nbytes) // self._block))
        if os.pread(self._fd, _HEADER.size, page_number * self._block) == right:
            return
        if os.pwrite(self._fd, right, page_number * self._block) < _HEADER.size:
            raise OSError(f"the header of page {page_number} cannot be written")
        self.num_mended += 1
        _log.warning("the header of page %d in %s was damaged, and is mended", page_number, self._path)

    def close(self) -> None:
        """No call may follow."""
        os.close(self._fd)
