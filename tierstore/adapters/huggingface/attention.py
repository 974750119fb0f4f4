"""Attention that reads K and V where they are: in the store's pages, a group of pages at a time.

Groups are merged by an online softmax, so the memory of a call is bounded whatever the length of the context, and
no copy of the context outlives a group. A prompt without a reused prefix is plain SDPA over its own K and V.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "tierstore"
"""The name to give as ``attn_implementation``."""

HANDLE = "tierstore_layer"
"""The keyword under which ``TierStoreLayer.update`` hands itself to the attention function."""

KEYS_AT_ONCE = 1024
QUERIES_AT_ONCE = 256

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class PagedLayer(Protocol):
    """One model layer's handle on a sequence in the pages of a store."""

    index: int

    @property
    def pages(self) -> torch.Tensor:
        """All pages: ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]``."""
        ...

    @property
    def start(self) -> int:
        """Tokens before those of the forward pass under way."""
        ...

    @property
    def slots(self) -> torch.Tensor:
        """The block table of the forward pass under way, int64 ``[pages]``."""
        ...

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask that hides a token."""
        ...

    def mark_read(self) -> None:
        """The attention function reads this layer from the pages."""
        ...


def attend_pages(
    query: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, layer: int, num_tokens: int, scale: float
) -> torch.Tensor:
    """Return causal attention of the last tokens of a sequence over the whole of it. Changes nothing.

    ``query``: ``[1, num_heads, q, head_dim]``, the last ``q`` of ``num_tokens`` tokens;
    ``pages``: ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]``;
    ``slots``: int64 ``[ceil(num_tokens / page_size)]``, the sequence's block table.
    Returns ``[1, q, num_heads, head_dim]``, contiguous, in the dtype of ``query``; sums are in float32 or wider.
    """
    width = query.shape[2]
    blocks = []
    for first in range(0, width, QUERIES_AT_ONCE):
        rows = query[0, :, first : first + QUERIES_AT_ONCE]
        blocks.append(_attend_block(rows, pages, slots, layer, num_tokens - width + first, scale))
    return torch.cat(blocks, dim=1).transpose(0, 1).unsqueeze(0).to(query.dtype).contiguous()


def _attend_block(
    query: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, layer: int, position: int, scale: float
) -> torch.Tensor:
    """``query`` ``[num_heads, w, head_dim]``, its first row at ``position`` of the sequence -> the same shape."""
    page_size, num_kv_heads = pages.shape[3], pages.shape[4]
    heads, width, dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (query.to(wide) * scale).reshape(num_kv_heads, -1, dim)
    top = rows.new_full((*rows.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros_like(rows)
    step = max(1, KEYS_AT_ONCE // page_size)
    for start in range(0, position + width, step * page_size):
        stop = min(start + step * page_size, position + width)
        group = slots[start // page_size : -(-stop // page_size)]
        keys, values = (_gather(pages, group, layer, plane, stop - start).to(wide) for plane in (0, 1))
        scores = rows @ keys.transpose(1, 2)
        if stop > position + 1:
            scores.masked_fill_(_future(position, width, start, stop, scores), -torch.inf)
        # The first group holds token 0, which every row sees: top is finite from there on.
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, decay = scores.sub_(new_top).exp_(), (top - new_top).exp_()
        total = total * decay + weights.sum(-1, keepdim=True)
        mixed = mixed * decay + weights @ values
        top = new_top
    return (mixed / total).reshape(heads, width, dim)


def _gather(
    pages: torch.Tensor, slots: torch.Tensor, layer: int, plane: int, num_tokens: int
) -> torch.Tensor:
    """One plane (K or V) of some pages: ``[num_kv_heads, num_tokens, head_dim]``, a view of one gathered buffer."""
    rows = pages[:, layer, plane].index_select(0, slots)
    return rows.flatten(0, 1)[:num_tokens].transpose(0, 1)


def _future(position: int, width: int, start: int, stop: int, scores: torch.Tensor) -> torch.Tensor:
    """True where a key lies after its query, for the rows of ``scores`` ``[num_kv_heads, repeats * w, keys]``."""
    where = torch.arange(position, position + width, device=scores.device)
    keys = torch.arange(start, stop, device=scores.device)
    return (keys[None] > where[:, None]).repeat(scores.shape[1] // width, 1)


def tierstore_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers as "tierstore".

    With a TierStoreCache, ``key`` and ``value`` are those of the new tokens and the rest is read from the pages.
    With another cache, or none, it is plain SDPA. Raises ValueError for what the pages cannot express.
    """
    layer: PagedLayer | None = kwargs.pop(HANDLE, None)
    if layer is None:
        mask = _sdpa_mask(query, key, attention_mask)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    present = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if present or dropout:
        raise ValueError(
            f"TierStoreCache does not support {', '.join(present) or 'dropout: call model.eval()'}"
        )
    layer.check_mask(attention_mask)
    layer.mark_read()
    if layer.start == 0:
        out, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return out, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_pages(
        query, layer.pages, layer.slots, layer.index, layer.start + query.shape[2], scale
    ), None


def _sdpa_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The 4D mask that plain SDPA needs; None where it would be causal, or all visible, by itself."""
    width, length = query.shape[2], key.shape[2]
    if mask is None and width in (1, length):
        return None
    built = sdpa_mask(query.shape[0], width, length, length - width, attention_mask=mask, device=query.device)
    assert built is None or isinstance(built, torch.Tensor)
    return built


def _pass_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Causality and lengths come from the block table: hand the 2D mask, or None, to the attention function."""
    return attention_mask


AttentionInterface.register(ATTENTION, tierstore_attention)
AttentionMaskInterface.register(ATTENTION, _pass_mask)
