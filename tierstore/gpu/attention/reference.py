"""Attention over pages in plain torch: what every other way is held against, and the way of the CPU."""

from __future__ import annotations

import torch

from tierstore.gpu.attention.paging import Paging


def attend(
    q: torch.Tensor, pages: torch.Tensor, paging: Paging, wide: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out, lse)``: ``[queries, num_qo_heads, head_dim_vo]`` and ``[queries, num_qo_heads]``, both ``wide``.

    ``lse`` is the natural logarithm of the sum of exp(scores); a query that sees nothing has out 0 and lse -inf.
    ``pages``: ``[num_slots, planes, page_size, num_kv_heads, head_dim]``, any strides. Tokens that no query sees may
    hold anything, NaN too. Gathers one sequence at a time. Changes nothing.
    """
    shape = paging.shape
    out = torch.zeros(paging.num_queries, shape.num_qo_heads, shape.head_dim_vo, dtype=wide, device=q.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=wide, device=q.device)
    for row in range(paging.batch):
        rows = slice(int(paging.qo_indptr[row]), int(paging.qo_indptr[row + 1]))
        if paging.kv_lens[row] and rows.start < rows.stop:
            out[rows], lse[rows] = _attend_one(q[rows].to(wide), pages, paging, row)
    return out, lse


def gather(pages: torch.Tensor, paging: Paging, row: int, first: int, end: int) -> torch.Tensor:
    """Tokens ``first`` to ``end`` of a sequence, ``[planes, end - first, num_kv_heads, head_dim]``: a copy.

    Reads no page but theirs.
    """
    size = paging.shape.page_size
    start = int(paging.indptr[row])
    slots = torch.from_numpy(paging.indices[start + first // size : start - (-end // size)])
    rows = pages.index_select(0, slots.to(pages.device)).transpose(0, 1).flatten(1, 2)
    skip = first % size
    return rows[:, skip : skip + end - first]


def _attend_one(
    q: torch.Tensor, pages: torch.Tensor, paging: Paging, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, width = paging.shape, len(q)
    first, end = int(paging.first_seen[row]), int(paging.kv_lens[row])
    planes = gather(pages, paging, row, first, end).to(q.dtype)
    keys, values = planes[0], planes[-1][..., : shape.head_dim_vo]
    grouped = q.view(width, shape.num_kv_heads, shape.group, shape.head_dim)
    scores = torch.einsum("qhgd,nhd->qhgn", grouped, keys) * shape.sm_scale
    if shape.causal:
        place = torch.arange(end - width, end, device=q.device)[:, None]
        token = torch.arange(first, end, device=q.device)[None]
        hidden = token > place
        if shape.window_left >= 0:
            hidden |= token < place - shape.window_left
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("qhgn,nhd->qhgd", torch.exp(scores - lse[..., None]), values)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of keys, from that over each set.

    ``outs``: ``[sets, ..., head_dim_vo]``, ``lses``: ``[sets, ...]``, natural logarithms; returns both without the
    first dimension, in their dtypes. A set in which a query saw nothing (-inf) counts nothing.
    """
    top = lses.amax(0)
    floor = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lses - floor)
    total = weights.sum(0)
    safe = total.masked_fill(total == 0, 1.0)
    out = (weights[..., None] * outs).sum(0) / safe[..., None]
    return out.to(outs.dtype), floor + torch.log(total)
