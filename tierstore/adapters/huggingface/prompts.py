"""Prompts as transformers passes them: a batch padded on the left, its mask, and the tokens behind the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unpadded(
    input_ids: torch.Tensor | Sequence[int], attention_mask: torch.Tensor | None
) -> tuple[list[list[int]], int]:
    """Return the tokens of each row without its padding, and the width of the batch.

    ValueError for an empty batch or row, another shape, or a mask that hides anything but columns on the left.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"the prompt is empty or has shape {tuple(ids.shape)}; allowed: [T] or [B, T]")
    if attention_mask is None:
        return ids.long().tolist(), ids.shape[1]
    mask = torch.as_tensor(attention_mask)
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, the prompts {tuple(ids.shape)}")
    seen = mask != 0
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()) or not bool(seen[:, -1].all()):
        raise ValueError("attention_mask hides more than padding on the left: pad on the left")
    rows = zip(ids.long().tolist(), seen.sum(-1).tolist(), strict=True)
    return [row[len(row) - count :] for row, count in rows], ids.shape[1]
