"""Records lent as they are kept, payload and codec, to whoever takes pages elsewhere."""

from __future__ import annotations

from threading import Lock

import lmdb

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.archive.records import Record
from tierstore.nvme.direct import aligned
from tierstore.nvme.reading import RecordReader, scratch_for
from tierstore.types import PageKey

NOT_FOUND = "not found"


def read_record(reader: RecordReader, key: PageKey, page_nbytes: int) -> Record | str:
    """The record of a page, every byte checked, or why it cannot be had."""
    try:
        raw, payload = reader.record(key, aligned(page_nbytes)[:page_nbytes], scratch_for(page_nbytes))
    except KeyError:
        return NOT_FOUND
    except (IntegrityError, lmdb.Error, OSError) as error:
        return str(error)
    return Record(codec.parse(raw), raw, payload)


class Lender:
    """Of an open tier: reads in the calling thread, one call at a time, until ``close``."""

    def __init__(self, reader: RecordReader, page_nbytes: int) -> None:
        self._reader = reader
        self._page_nbytes = page_nbytes
        self._lock = Lock()
        self._closed = False

    def record(self, key: PageKey) -> Record | str:
        """``read_record``, until ``close``. A disk that hangs is waited for."""
        with self._lock:
            return "the tier is closed" if self._closed else read_record(self._reader, key, self._page_nbytes)

    def close(self, timeout_s: float) -> bool:
        """Lend no more; False if a call did not end in time."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._closed = True
        self._lock.release()
        return True
