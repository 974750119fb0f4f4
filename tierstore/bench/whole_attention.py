"""Torch's attention kernels over K and V in one piece: the ceilings of attention over pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tierstore.gpu.attention.gathered import sdpa

if TYPE_CHECKING:
    from collections.abc import Callable

    Act = Callable[[torch.Tensor, torch.Tensor], object]
    """Of queries ``[queries, heads, dim]`` and planes ``[2, batch, heads, tokens, dim]``."""

_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""The memory-efficient kernel takes no heads that share K and V."""


def decoders(device: torch.device, q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    """Those that take one query a sequence of this shape; on the CPU torch's own choice."""

    def plain(q: torch.Tensor, planes: torch.Tensor) -> object:
        return scaled_dot_product_attention(q[:, :, None], planes[0], planes[1], enable_gqa=True)

    def only(backend: SDPBackend) -> Act:
        def act(q: torch.Tensor, planes: torch.Tensor) -> object:
            with sdpa_kernel([backend]):
                return plain(q, planes)

        return act

    if device.type != "cuda":
        return {"sdpa": plain}
    return _willing({name: only(backend) for name, backend in _BACKENDS.items()}, q, planes)


def fillers(device: torch.device, q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    """Those that take the last tokens' queries of one sequence, causal.

    cuDNN's has no such mask: it gets the tokens before and the new ones apart, and its two results are not merged.
    """
    scale = float(q.shape[2]) ** -0.5

    def flash(q: torch.Tensor, planes: torch.Tensor) -> object:
        return sdpa("flash", q.transpose(0, 1)[None], planes[0], planes[1], True, scale)

    def cudnn(q: torch.Tensor, planes: torch.Tensor) -> object:
        rows, before = q.transpose(0, 1)[None], planes.shape[3] - len(q)
        old, new = planes[..., :before, :], planes[..., before:, :]
        return (
            sdpa("cudnn", rows, old[0], old[1], False, scale),
            sdpa("cudnn", rows, new[0], new[1], True, scale),
        )

    def masked(q: torch.Tensor, planes: torch.Tensor) -> object:
        length = planes.shape[3]
        mask = torch.ones(len(q), length, dtype=torch.bool).tril(length - len(q))
        rows = q.transpose(0, 1)[None]
        return scaled_dot_product_attention(rows, planes[0], planes[1], attn_mask=mask, enable_gqa=True)

    if device.type != "cuda":
        return {"sdpa": masked}
    return _willing({"flash": flash, "cudnn": cudnn}, q, planes)


def _willing(acts: dict[str, Act], q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    found = {}
    for name, act in acts.items():
        try:
            act(q, planes)
        except RuntimeError:  # "No available kernel"
            continue
        found[name] = act
    return found
