"""TierStore keeps the KV cache of a language model in several tiers: HBM, host memory and NVMe.

Public names are imported on first use, so ``import tierstore`` imports neither torch nor lmdb.
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
    from tierstore.types import (
        FlushResult,
        Hint,
        HintResult,
        LeaseState,
        Match,
        PageChange,
        PageKey,
        Tier,
        Traffic,
    )
    from tierstore.watch import Watch

    __version__: str
    """Version of the installed package."""

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
    "PageChange",
    "PageKey",
    "PageSpec",
    "StoreClosed",
    "StoreConfig",
    "Tier",
    "TierStore",
    "TierStoreError",
    "Traffic",
    "TransferError",
    "Watch",
    "load_config",
]

_MODULES: dict[str, tuple[str, ...]] = {
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
        "PageChange",
        "PageKey",
        "Tier",
        "Traffic",
    ),
    "tierstore.watch": ("Watch",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("tierstore")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
