"""The pages of a store as this adapter reads and writes them: a tensor for each KV group, in place."""

from __future__ import annotations

import torch

from tierstore.gpu.pool import GroupedPages
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState


class PageGroups:
    """``groups[g]``: ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]`` of KV group ``g``."""

    def __init__(self, store: TierStore) -> None:
        """ValueError unless every group has K and V per head."""
        pages = store.pages
        self.groups = pages.groups if isinstance(pages, GroupedPages) else (pages,)
        if any(group.ndim != 6 or group.shape[2] != 2 for group in self.groups):
            raise ValueError(
                "every KV group of the store must have K and V per head (PageSpecs of kind 'mha')"
            )

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return int(self.groups[0].shape[3])

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.groups[0].device

    @property
    def num_layers(self) -> int:
        """Of all groups together."""
        return sum(int(group.shape[1]) for group in self.groups)

    def reach(self, lease: Lease, timeout_s: float) -> LeaseState:
        """Wait up to ``timeout_s`` until work launched from now on may read the pages of ``lease``.

        On a card the host waits for copies only: the caller's current stream waits for pages that are still being
        written, such as those an earlier request has just sealed.
        """
        if self.device.type != "cuda":
            return lease.wait(timeout_s)
        state = lease.wait(timeout_s, written=False)
        event = None if state is LeaseState.PENDING else lease.ready(0)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)  # type: ignore[arg-type]
        return state

    def copy(self, src: int, dst: int) -> None:
        """Copy a page, all groups of it, into another slot."""
        for group in self.groups:
            group[dst].copy_(group[src])

    def copy_layer(self, group: int, index: int, src: int, dst: int) -> None:
        """Copy layer ``index`` of KV group ``group`` of a page into another slot."""
        pages = self.groups[group]
        pages[dst, index].copy_(pages[src, index])
