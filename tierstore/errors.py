"""Exceptions that TierStore raises. The type tells the caller what to do.

An exception of a lower layer, such as the operating system, is chained as the cause.

    TierStoreError
    ├── ConfigError (ValueError)   invalid configuration, or a call that it does not allow
    ├── ArchiveError               an archive cannot be used: foreign, newer, truncated or damaged
    ├── CapacityError              not enough slots now; nothing was changed; retry later or recompute
    ├── TransferError              a copy between two tiers failed; the source is intact
    ├── IntegrityError             stored bytes are damaged; acquire() reports the page as missing instead
    ├── LeaseError                 double release, use after release, a slot not owned: a bug in the caller
    └── StoreClosed                a call after close(), after an interrupted change, or in a forked child

A cache miss is a value (``Match``, ``Lease.missing``), not an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.types import Transfer


class TierStoreError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(TierStoreError, ValueError):
    """The configuration is invalid, or does not allow this call.

    The message names the setting, its value and what the value must be.
    """


class ArchiveError(TierStoreError):
    """An archive cannot be written or read. The message says why and what to do."""


class CapacityError(TierStoreError):
    """There are not enough slots, and no more pages can be evicted now.

    Nothing was changed. Retry later, or compute the pages instead.
    """


class TransferError(TierStoreError):
    """A copy between two tiers failed. The source is intact.

    Attributes:
        transfer: The ``Transfer`` that failed, or None if none had been started.
    """

    def __init__(self, message: str, transfer: Transfer | None = None) -> None:
        super().__init__(message)
        self.transfer = transfer


class IntegrityError(TierStoreError):
    """The header or payload of a record does not match its checksum."""


class LeaseError(TierStoreError):
    """A lease was used after its release, or a slot was used by a caller that does not own it.

    This is always a bug in the caller.
    """


class StoreClosed(TierStoreError):
    """The store cannot be used any more.

    It was closed, it was interrupted in the middle of a change, or this process is a forked child and the
    store belongs to the parent.
    """
