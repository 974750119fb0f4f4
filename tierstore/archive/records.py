"""What goes in and out of an archive, whichever store is at the other end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore.archive.file_format import CHECKSUM, Description, Item
from tierstore.codecs import record_head
from tierstore.errors import IntegrityError
from tierstore.nvme.reader import Record
from tierstore.types import PageKey

Progress = Callable[[int, int], None]
"""Called on the event loop's thread with the pages done so far and their total."""


class Taken(NamedTuple):
    """How many records of a batch are kept, from the first on. What is wrong with the next; None: there is no room."""

    kept: int
    fault: str | None = None


class Source(Protocol):
    """A store that gives pages."""

    description: Description

    def record(self, key: PageKey) -> Record | str:
        """The page as the store has it, every byte checked, or why it cannot be had. TierStoreError if none can.

        Any thread, several at once.
        """
        ...

    def release(self, record: Record) -> None:
        """The record is not used any more: its memory may hold another."""
        ...


class Sink(Protocol):
    """A store that takes pages."""

    description: Description

    def has(self, key: PageKey) -> bool:
        """Whether the page is there already. Quick: also called on the event loop's thread. Any thread."""
        ...

    def reaches(self, key: PageKey) -> bool:
        """Return whether the page and every page before it are there. As ``has``."""
        ...

    def take(self, records: Sequence[Record]) -> Taken:
        """Keep records up to the first that cannot be kept; those kept are there on return.

        No record comes before its parent. TierStoreError if no page can be kept.
        """
        ...


def checked(item: Item, raw: bytes, payload: NDArray[np.uint8], description: Description) -> Record:
    """The record of an item. IntegrityError unless head and payload are what the index says, every byte of them."""
    head = record_head.verify(
        raw,
        payload,
        fingerprint=description.fingerprint,
        key=item.key,
        generation=record_head.parse(raw).generation,
    )
    if (head.parent, head.codec, head.raw_nbytes) != (item.parent, item.codec, item.raw_nbytes):
        raise IntegrityError("another record of this page")
    if raw[CHECKSUM] != item.checksum:
        raise IntegrityError("another record of this page")
    return Record(head, raw, payload)
