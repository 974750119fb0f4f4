"""The prefetcher: reads hints and promotes pages before the scheduler needs them.

``Prefetcher.attach(store)`` starts a prefetcher. A store without a prefetcher works, but rejects ``will_need`` hints
(``HintResult.REJECTED``). Give hints with ``TierStore.hint``, or use a helper that gives hints for many requests:
``Waiting`` (a queue), ``ahead`` (a list of documents) or ``Sessions`` (the turns of chats). ``prefetch.planner``
computes the plans. Importing this package is cheap, because its modules are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefetch.prefetcher import Prefetcher as Prefetcher
    from prefetch.sources import Sessions as Sessions
    from prefetch.sources import Waiting as Waiting
    from prefetch.sources import ahead as ahead
    from prefetch.types import Compute as Compute

__all__ = ["Compute", "Prefetcher", "Sessions", "Waiting", "ahead"]

_MODULES = {
    "Compute": "types",
    "Prefetcher": "prefetcher",
    "Sessions": "sources",
    "Waiting": "sources",
    "ahead": "sources",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'prefetch' has no attribute {name!r}")
    return getattr(import_module(f"prefetch.{_MODULES[name]}"), name)
