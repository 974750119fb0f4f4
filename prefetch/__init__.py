"""The prefetcher: reads hints and brings pages back before the scheduler needs them.

``Prefetcher.attach(store)`` starts it. The store works without it, and hints then answer ``HintResult.REJECTED``.
``prefetch.planner`` decides, and is pure. Importing this package loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefetch.planner import Compute as Compute
    from prefetch.prefetcher import Prefetcher as Prefetcher

__all__ = ["Compute", "Prefetcher"]


def __getattr__(name: str) -> object:
    if name == "Compute":
        from prefetch.planner import Compute

        return Compute
    if name == "Prefetcher":
        from prefetch.prefetcher import Prefetcher

        return Prefetcher
    raise AttributeError(f"module 'prefetch' has no attribute {name!r}")
