"""What a copy engine is opened with: where pages are in HBM and in host memory, and who is told of an end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierstore.gpu.cpu_engine import HostBytes
from tierstore.gpu.cuda_engine import PinnedHost
from tierstore.gpu.geometry import MOST_GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.gpu.pool import EnginePool, OwnPool
    from tierstore.layout import PageLayout


class Host(HostBytes, PinnedHost, Protocol):
    """The host tier as any copy engine sees it, by threads or by DMA."""


@dataclass(frozen=True, slots=True)
class Between:
    """Slots of HBM and the host's, between which pages are copied. ``wake``: called when a thread's copy has ended.

    ``most_groups``: layer groups that loads go in at most; 1 where nobody waits for a layer: fewer pieces for the
    driver, and pages that end one by one.
    """

    pool: OwnPool | EnginePool
    host: Host
    wake: Callable[[], None]
    most_groups: int = MOST_GROUPS

    @property
    def layout(self) -> PageLayout:
        """Of the pages."""
        return self.host.held.layout
