"""TierStore: the KV cache of a language model in tiers (HBM, host memory, NVMe), behind one table.

The names load on first use, so ``import tierstore`` imports neither torch nor lmdb.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.config import StoreConfig, load_config
    from tierstore.errors import (
        ArchiveError,
        CapacityError,
        ConfigError,
        IntegrityError,
        LeaseError,
        StoreClosed,
        TierStoreError,
        TransferError,
    )
    from tierstore.gpu.engine_pages import EnginePages
    from tierstore.lease import Lease
    from tierstore.page import PageSpec
    from tierstore.store import TierStore
    from tierstore.types import FlushResult, Hint, HintResult, LeaseState, Match, PageKey, Tier

__all__ = [
    "ArchiveError",
    "CapacityError",
    "ConfigError",
    "EnginePages",
    "FlushResult",
    "Hint",
    "HintResult",
    "IntegrityError",
    "Lease",
    "LeaseError",
    "LeaseState",
    "Match",
    "PageKey",
    "PageSpec",
    "StoreClosed",
    "StoreConfig",
    "Tier",
    "TierStore",
    "TierStoreError",
    "TransferError",
    "load_config",
]

_ROOMS: dict[str, tuple[str, ...]] = {
    "tierstore.config": ("StoreConfig", "load_config"),
    "tierstore.errors": (
        "ArchiveError",
        "CapacityError",
        "ConfigError",
        "IntegrityError",
        "LeaseError",
        "StoreClosed",
        "TierStoreError",
        "TransferError",
    ),
    "tierstore.gpu.engine_pages": ("EnginePages",),
    "tierstore.page": ("PageSpec",),
    "tierstore.lease": ("Lease",),
    "tierstore.store": ("TierStore",),
    "tierstore.types": (
        "FlushResult",
        "Hint",
        "HintResult",
        "LeaseState",
        "Match",
        "PageKey",
        "Tier",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
