"""Where page records are kept: in LMDB beside the catalogue, here, or in extent files. The writer's thread, or at open.

Both answer the same calls of a ``Catalogue``: ``write`` before its transaction, ``replaced``, then ``entry`` or
``erased`` of a key within it, then ``settle`` if it was committed, ``undo`` if not, ``doubt`` if nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.nvme.allocator import Place
from tierstore.nvme.entry import Entry
from tierstore.types import PageKey


class Page(NamedTuple):
    """One page to store; ``payload`` flat uint8. ``head``: of a record that is stored as it is, payload and codec."""

    key: PageKey
    parent: PageKey | None
    payload: NDArray[np.uint8]
    head: codec.Head | None = None


class Written(NamedTuple):
    """Where a page's bytes are already. Nothing of it means anything in LMDB, which gets them in the transaction."""

    place: Place = Place(0, 0, 0)
    generation: int = 0
    stored_nbytes: int = 0


class Records(Protocol):
    """What a catalogue asks of the place of its records."""

    def write(self, pages: Sequence[Page]) -> Sequence[Written | None]:
        """Put the bytes on disk, durably, before any entry says so; None for a page for which there is no place.

        If it raises nothing is kept.
        """
        ...

    def entry(self, txn: lmdb.Transaction[memoryview], page: Page, written: Written) -> Entry:
        """The entry of a page."""
        ...

    def replaced(self, key: PageKey, old: bytes | None) -> None:
        """The transaction will replace or remove this entry, or make one where there is none. OSError: it must not."""
        ...

    def erased(self, txn: lmdb.Transaction[memoryview], key: PageKey) -> None:
        """The transaction removes this record."""
        ...

    def settle(self) -> None:
        """The transaction is committed."""
        ...

    def undo(self) -> None:
        """The transaction is certainly not committed."""
        ...

    def doubt(self) -> None:
        """The transaction raised: it may be committed or not."""
        ...

    def in_doubt(self, key: PageKey) -> bool:
        """Whether something is kept for a record since its last transaction raised, until the next one with it."""
        ...

    def close(self) -> None:
        """End its thread. No call may follow."""
        ...
