"""One model layer's handle on the pages of a request: what transformers takes for a layer of a cache."""

# transformers leaves its own base classes untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from tierstore.adapters.huggingface.attention import HANDLE, Handed, Plans
from tierstore.adapters.huggingface.batch import Span


class LayerOwner(Protocol):
    """The cache that a layer belongs to."""

    spans: Sequence[Span]
    plans: Plans
    unread: bool
    handed: tuple[int, Handed] | None
    """The layer that was written last, and what its ``update`` returned."""

    def write(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Place new K/V."""
        ...

    def check_padding(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask of other padding."""
        ...

    @property
    def columns(self) -> int:
        """Columns fed so far."""
        ...


class TierStoreLayer(CacheLayerMixin):
    """One model layer's handle. ``keys`` and ``values`` stay None for ever."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        owner: LayerOwner,
        position: int,
        pages: torch.Tensor,
        place: tuple[int, int],
        window: int | None,
    ) -> None:
        """Layer ``position`` of the model, in ``place``: of a KV group, with these ``pages``, a layer."""
        super().__init__()
        self.position = position
        self.place = place
        self.window = window
        self._owner = owner
        self._pages = pages

    @property
    def layer_pages(self) -> torch.Tensor:
        """This layer of all pages: ``[num_slots, 2, page_size, num_kv_heads, head_dim]``."""
        return self._pages[:, self.place[1]]

    @property
    def spans(self) -> Sequence[Span]:
        """What the forward pass under way computes, row by row."""
        return self._owner.spans

    @property
    def plans(self) -> Plans:
        """The card's kernels, as planned for the forward pass under way."""
        return self._owner.plans

    @property
    def handed(self) -> Handed | None:
        """What the last ``update`` of this layer returned; None once another layer has been written."""
        last = self._owner.handed
        return None if last is None or last[0] != self.position else last[1]

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask that hides anything but the padding."""
        self._owner.check_padding(mask)

    def mark_read(self) -> None:
        """The attention function says that it reads this layer from the pages."""
        self._owner.unread = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the new tokens, ``[rows, num_kv_heads, q, head_dim]`` each, into the pages; return them.

        Puts this handle into the attention call's keywords, so that "tierstore" attention reads the rest itself. It
        reads pages: so it refuses any K and V but the objects returned here (``handed``).
        Raises ValueError for wrong use, CapacityError if HBM has no room; then nothing was written.
        """
        attention: dict[str, Any] | None = kwargs.get("kwargs")
        if attention is None:
            raise ValueError(
                "this model does not hand its attention keywords to the cache: TierStoreCache cannot serve it"
            )
        self._owner.write(self, key_states, value_states, attention.get("position_ids"))
        attention[HANDLE] = self
        handed = Handed.of(key_states, value_states)
        self._owner.handed = self.position, handed
        return handed.keys, handed.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist."""

    def get_seq_length(self) -> int:
        """Columns in the cache: tokens, and the padding before them."""
        return self._owner.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of K/V for a mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum of its own; HBM's capacity ends in CapacityError."""
        return -1
