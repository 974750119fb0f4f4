"""Every error TierStore raises. Callers act on the type alone; lower exceptions are wrapped as causes.

    TierStoreError
    ├── ConfigError (ValueError)   at open only; names the key, the value and what is allowed
    ├── ArchiveError               a file of pages is refused whole: foreign, newer, cut or damaged
    ├── CapacityError              nothing can be evicted now; state unchanged; retry later or recompute
    ├── TransferError              one edge failed; the source is intact; carries the Transfer
    ├── IntegrityError             not what was written; never reaches acquire(): the page is missing
    ├── LeaseError                 double release, use after it, a slot not yours: a bug, always raised
    └── StoreClosed                a call after close()

A miss is a value (``Match``, ``Lease.missing``), not an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.types import Transfer


class TierStoreError(Exception):
    """Base of all errors of this package."""


class ConfigError(TierStoreError, ValueError):
    """The configuration cannot be used as it is; the message names key, value and what is allowed."""


class ArchiveError(TierStoreError):
    """A file of pages cannot be written or used as it is; the message says what was found and what is allowed."""


class CapacityError(TierStoreError):
    """There is no room and nothing can be evicted now. State is unchanged."""


class TransferError(TierStoreError):
    """One edge failed. The source copy is intact."""

    def __init__(self, message: str, transfer: Transfer | None = None) -> None:
        super().__init__(message)
        self.transfer = transfer


class IntegrityError(TierStoreError):
    """A record's head or payload is not what was written."""


class LeaseError(TierStoreError):
    """A lease or a slot was used by someone who does not hold it. Always a bug of the caller."""


class StoreClosed(TierStoreError):
    """The store was closed before this call."""
