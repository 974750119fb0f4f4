"""Records lent as they are kept, payload and codec, to whoever takes pages elsewhere."""

from __future__ import annotations

from threading import Condition
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.errors import IntegrityError
from tierstore.nvme.direct_io import aligned
from tierstore.nvme.reading import RecordReader, scratch_for
from tierstore.nvme.record import MovedError
from tierstore.types import PageKey

NOT_FOUND = "not found"


class Memory:
    """Of records on their way to one taker, used again and again: fresh memory costs more than its page's read.

    Any thread.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._free: list[Lent] = []

    def take(self) -> Lent:
        """Memory for one record, the caller's until it is given back or forgotten."""
        try:
            return self._free.pop()
        except IndexError:
            return Lent(aligned(self._page_nbytes)[: self._page_nbytes], scratch_for(self._page_nbytes))

    def give_back(self, record: Record) -> None:
        """The record is not used any more."""
        if record.lent is not None:
            self._free.append(record.lent)


def read_record(reader: RecordReader, key: PageKey, memory: Memory) -> Record | str:
    """The record of a page, every byte checked, or why it cannot be had."""
    lent = memory.take()
    try:
        raw, payload = reader.record(key, *lent)
    except KeyError:
        return NOT_FOUND
    except (IntegrityError, MovedError, lmdb.Error, OSError) as error:
        return str(error)
    return Record(codec.parse(raw), raw, payload, lent)


class Lender:
    """Of an open tier: reads in the calling threads, several at once, until ``close``."""

    def __init__(self, reader: RecordReader, page_nbytes: int) -> None:
        self._reader = reader
        self._page_nbytes = page_nbytes
        self._ended = Condition()
        self._reading = 0
        self._closed = False

    def record(self, key: PageKey, memory: Memory | None = None) -> Record | str:
        """``read_record``, until ``close``; None: to memory of its own. A disk that hangs is waited for."""
        with self._ended:
            if self._closed:
                return "the tier is closed"
            self._reading += 1
        try:
            return read_record(self._reader, key, memory or Memory(self._page_nbytes))
        finally:
            with self._ended:
                self._reading -= 1
                self._ended.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Lend no more; False if a call did not end in time."""
        with self._ended:
            self._closed = True
            return self._ended.wait_for(lambda: not self._reading, timeout_s)


class Lent(NamedTuple):
    """Memory that a record is read to: as ``RecordReader.fetch`` wants it."""

    page: NDArray[np.uint8]
    scratch: NDArray[np.uint8]


class Record(NamedTuple):
    """A record, checked: ``raw`` is its head as bytes, ``payload`` flat uint8, in ``lent`` where that is not None."""

    head: codec.Head
    raw: bytes
    payload: NDArray[np.uint8]
    lent: Lent | None = None
