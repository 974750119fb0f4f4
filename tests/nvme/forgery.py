"""Functions that create records, and overwrite records on disk, without using the tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.nvme.rig import change, data_file, extent_files, key
from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.types import PageKey

Record = NDArray[np.uint8]


def parent_of(number: int) -> PageKey | None:
    return key(number - 1) if number % 3 else None


def sealed(
    number: int, fingerprint: str, payload: Record, generation: int, *, raw_nbytes: int | None = None
) -> Record:
    """Return a record with a valid head and checksum."""
    head = record_format.Head(
        fingerprint=record_format.fingerprint_digest(fingerprint),
        key=key(number),
        parent=parent_of(number),
        codec=record_format.Codec.NONE if raw_nbytes in (None, payload.nbytes) else record_format.Codec.EXP,
        raw_nbytes=raw_nbytes or payload.nbytes,
        stored_nbytes=payload.nbytes,
        generation=generation,
    )
    return np.concatenate([np.frombuffer(record_format.seal(head, payload), dtype=np.uint8), payload])


def head_of(record: Record) -> record_format.Head | None:
    """Return the head of a record, or None if it is damaged, as the head of a stale copy may be."""
    try:
        return record_format.parse(record[: record_format.HEAD_NBYTES].tobytes())
    except IntegrityError:
        return None


def overwrite(
    home: Path, name: PageKey, payload: Record, changed: Callable[[Record, record_format.Head], Record]
) -> int:
    """Replace every on-disk copy of the record of ``name`` with the result of ``changed``, cut to the old length.

    Returns the number of copies.
    """
    found = 0
    for path in (data_file(home), *extent_files(home)):
        raw = path.read_bytes()
        position = raw.find(payload.tobytes())
        while position >= 0:
            start = position - record_format.HEAD_NBYTES
            record = np.frombuffer(bytearray(raw[start : position + payload.nbytes]), dtype=np.uint8)
            head = head_of(record)
            if head is not None and head.key == name:
                change(path, start, changed(record, head)[: record.nbytes].tobytes())
                found += 1
            position = raw.find(payload.tobytes(), position + 1)
    return found
