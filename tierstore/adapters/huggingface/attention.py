"""Attention that reads K and V where they are: in the store's pages, a group of pages at a time.

On a card by its kernels (``on_card``). Elsewhere groups are merged by an online softmax, so the memory of a call is
bounded whatever the length of the context, and no copy of the context outlives a group. A prompt without a reused
prefix is plain SDPA over its own K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from tierstore.adapters.huggingface.batch import Span
from tierstore.adapters.huggingface.on_card import Plans

ATTENTION = "tierstore"
"""The name to give as ``attn_implementation``."""

HANDLE = "tierstore_layer"
"""The keyword under which ``TierStoreLayer.update`` hands itself to the attention function."""

KEYS_AT_ONCE = 1024
QUERIES_AT_ONCE = 256

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class PagedLayer(Protocol):
    """One model layer's handle on the pages of a request."""

    @property
    def layer_pages(self) -> torch.Tensor:
        """This layer of all pages: ``[num_slots, 2, page_size, num_kv_heads, head_dim]``."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens a query sees, its own included; None: all before it."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """Of each row: which tokens the forward pass under way computes, and its block table."""
        ...

    @property
    def plans(self) -> Plans:
        """The card's kernels, as planned for the forward pass under way."""
        ...

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask that hides anything but the padding this request was opened with."""
        ...

    def mark_read(self) -> None:
        """The attention function reads this layer from the pages."""
        ...


def attend_pages(
    query: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return causal attention of the last tokens of one sequence over what it sees of itself. Changes nothing.

    ``query``: ``[num_heads, q, head_dim]``, the last ``q`` of ``num_tokens`` tokens;
    ``pages``: one layer of all pages, ``[num_slots, 2, page_size, num_kv_heads, head_dim]``;
    ``slots``: int64 ``[ceil(num_tokens / page_size)]`` or longer, the sequence's block table;
    ``window``: tokens a query sees, its own included; None: all. Pages behind every window are not touched.
    Returns ``[q, num_heads, head_dim]`` in the dtype of ``query``; sums are in float32 or wider.
    """
    width = query.shape[1]
    blocks = []
    for first in range(0, width, QUERIES_AT_ONCE):
        rows = query[:, first : first + QUERIES_AT_ONCE]
        blocks.append(_attend_block(rows, pages, slots, num_tokens - width + first, scale, window))
    return torch.cat(blocks, dim=1).transpose(0, 1).to(query.dtype)


def _attend_block(
    query: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    position: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """``query`` ``[num_heads, w, head_dim]``, its first row at ``position`` of the sequence -> the same shape."""
    page_size, num_kv_heads = pages.shape[2], pages.shape[3]
    heads, width, dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (query.to(wide) * scale).reshape(num_kv_heads, -1, dim)
    top = rows.new_full((*rows.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros_like(rows)
    step = max(1, KEYS_AT_ONCE // page_size)
    seen = 0 if window is None else max(0, position - window + 1) // page_size * page_size
    for start in range(seen, position + width, step * page_size):
        stop = min(start + step * page_size, position + width)
        group = slots[start // page_size : -(-stop // page_size)]
        keys, values = (_gather(pages, group, plane, stop - start).to(wide) for plane in (0, 1))
        scores = rows @ keys.transpose(1, 2)
        hidden = _hidden(position, width, start, stop, window, scores)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that sees nothing yet (its window begins in a later group) has no finite maximum.
        floor = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights, decay = scores.sub_(floor).exp_(), (top - floor).exp_()
        total = total * decay + weights.sum(-1, keepdim=True)
        mixed = mixed * decay + weights @ values
        top = new_top
    return (mixed / total).reshape(heads, width, dim)


def _gather(pages: torch.Tensor, slots: torch.Tensor, plane: int, num_tokens: int) -> torch.Tensor:
    """One plane (K or V) of some pages: ``[num_kv_heads, num_tokens, head_dim]``, a view of one gathered buffer."""
    rows = pages[:, plane].index_select(0, slots)
    return rows.flatten(0, 1)[:num_tokens].transpose(0, 1)


def _hidden(
    position: int, width: int, start: int, stop: int, window: int | None, scores: torch.Tensor
) -> torch.Tensor | None:
    """True where a query does not see a key, ``[repeats * w, keys]`` as in ``scores``; None if it sees all."""
    oldest = 0 if window is None else position + width - window
    if stop <= position + 1 and start >= oldest:
        return None
    queries = torch.arange(position, position + width, device=scores.device)[:, None]
    keys = torch.arange(start, stop, device=scores.device)[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden.repeat(scores.shape[1] // width, 1)


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
        mask = _sdpa_mask(query, key, attention_mask, kwargs.get("sliding_window"))
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    present = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if present or dropout:
        raise ValueError(
            f"TierStoreCache does not support {', '.join(present) or 'dropout: call model.eval()'}"
        )
    if kwargs.get("sliding_window") != layer.window:
        raise ValueError(
            f"the layer attends within {kwargs.get('sliding_window')} tokens, its configuration says {layer.window}"
        )
    layer.check_mask(attention_mask)
    layer.mark_read()
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    over_pages: list[tuple[int, Span]] = []
    for row, span in enumerate(layer.spans):
        count = span.stop - span.start
        new = slice(query.shape[2] - count, None)
        plain = span.start == 0 and (layer.window is None or count <= layer.window)
        if count and plain and not layer.plans.takes_new(query[row, :, new], layer.window):
            out[row, new] = _attend_new(
                module, query[row, :, new], key[row, :, new], value[row, :, new], scale
            )
        elif count:
            over_pages.append((row, span))
    if over_pages:
        _attend_old(query, layer, over_pages, scale, out)
    return out, None


def _attend_old(
    query: torch.Tensor,
    layer: PagedLayer,
    rows: Sequence[tuple[int, Span]],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Rows with tokens before those that are fed: their pages are read, by the card's kernels where there is one."""
    spans = [span for _, span in rows]
    news = [slice(query.shape[2] - (span.stop - span.start), None) for span in spans]
    queries = [query[row, :, new] for (row, _), new in zip(rows, news, strict=True)]
    if layer.plans.suits(query.dtype):
        found = layer.plans.attend(queries, spans, layer.layer_pages, scale, layer.window)
    else:
        found = [
            attend_pages(q, layer.layer_pages, span.slots, span.stop, scale, layer.window)
            for q, span in zip(queries, spans, strict=True)
        ]
    for (row, _), new, each in zip(rows, news, found, strict=True):
        out[row, new] = each


def _attend_new(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """A prompt without a reused prefix: plain causal SDPA over its own K and V, ``[heads, q, dim]`` each."""
    out, _ = sdpa_attention_forward(module, query[None], key[None], value[None], None, scaling=scale)
    return out[0]


def _sdpa_mask(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, window: int | None
) -> torch.Tensor | None:
    """The 4D mask that plain SDPA needs; None where it would be causal, or all visible, by itself."""
    width, length = query.shape[2], key.shape[2]
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is None and width in (1, length) and (window is None or length <= window):
        return None
    # A sliding cache hands over the last keys only, the mask is that of all tokens.
    before = 0 if mask is None else mask.shape[1] - length
    more: dict[str, Any] = {}
    if window is not None:
        more = {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    built = sdpa_mask(
        query.shape[0],
        width,
        length,
        before + length - width,
        before,
        attention_mask=mask,
        device=query.device,
        **more,
    )
    assert built is None or isinstance(built, torch.Tensor)
    return built


def _pass_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Causality and lengths come from the block table: hand the 2D mask, or None, to the attention function."""
    return attention_mask


AttentionInterface.register(ATTENTION, tierstore_attention)
AttentionMaskInterface.register(ATTENTION, _pass_mask)
