"""Errors that TierStore raises. The type alone tells a caller what to do; lower exceptions are wrapped as causes.

    TierStoreError
    ├── ConfigError (ValueError)   raised at open; names the key, the value and what it must be
    ├── ArchiveError               an archive is refused as a whole: foreign, newer, truncated or damaged
    ├── CapacityError              nothing can be evicted now; state unchanged; retry later or recompute
    ├── TransferError              a copy between two tiers failed; the source is intact
    ├── IntegrityError             stored bytes are not what was written; acquire() reports the page as missing instead
    ├── LeaseError                 double release, use after release, a slot that is not yours: a bug in the caller
    └── StoreClosed                a call after close()

A cache miss is a value (``Match``, ``Lease.missing``), not an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.types import Transfer


class TierStoreError(Exception):
    """Base class of all errors of this package."""


class ConfigError(TierStoreError, ValueError):
    """The configuration cannot be used; the message names the key, the value and what the value must be."""


class ArchiveError(TierStoreError):
    """An archive cannot be written or read; the message says what was found and what to do."""


class CapacityError(TierStoreError):
    """No slot is free and nothing can be evicted now. State is unchanged: retry later, or recompute."""


class TransferError(TierStoreError):
    """A copy between two tiers failed. The source copy is intact.

    Attributes:
        transfer: The ``Transfer`` that failed, if one had been started.
    """

    def __init__(self, message: str, transfer: Transfer | None = None) -> None:
        super().__init__(message)
        self.transfer = transfer


class IntegrityError(TierStoreError):
    """The head or payload of a record does not match its checksum."""


class LeaseError(TierStoreError):
    """A lease or a slot was used by a caller that does not hold it. Always a bug in the caller."""


class StoreClosed(TierStoreError):
    """The store was closed before this call, or it ended after a fatal error."""
