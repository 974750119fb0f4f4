"""The ways to compute attention over pages, and which to take."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch

from tierstore.gpu.attention import gathered, reference
from tierstore.gpu.attention.in_place import InPlace
from tierstore.gpu.attention.paging import Paging

Backend = Literal["auto", "reference", "triton", "gathered"]
"""``triton``: kernels that read pages in place. ``gathered``: pages are gathered, some at a time, for SDPA."""

GATHERED_QUERIES = 512
GATHERED_WORK = 1 << 36
"""Gathering wins from so many queries of a sequence, and products of queries, tokens, heads and their numbers: below,
launches take longer than it saves. Measured on an H200: docs/measurements.md."""


class Way(Protocol):
    """How a step's attention is computed."""

    def plan(self, paging: Paging) -> None:
        """Prepares for any number of layers."""
        ...

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Fills ``out`` and ``lse``, float32, on the current stream."""
        ...


class Reference:
    """Plain torch, sums in float32, on any device."""

    def plan(self, paging: Paging) -> None:
        """Keeps it."""
        self._paging = paging

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Fills ``out`` and ``lse``."""
        found = reference.attend(q, pages, self._paging)
        out.copy_(found[0])
        lse.copy_(found[1])


def device_of(device: torch.device | str) -> torch.device:
    """ValueError for a card that torch does not find."""
    found = torch.device(device)
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            allowed = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
            raise ValueError(f'device is "{found}", which torch does not find; allowed here: {allowed}')
    return found


def require_backend(device: torch.device, name: Backend) -> None:
    """ValueError for a name that is none, or of a way that needs a card."""
    allowed = get_args(Backend) if device.type == "cuda" else ("auto", "reference")
    if name not in allowed:
        raise ValueError(f'backend is "{name}"; allowed on {device.type}: {", ".join(allowed)}')


def make(name: Backend, device: torch.device, max_pages: int | None = None) -> Way:
    """The way of that name. ValueError for one that is none, or that needs a card."""
    require_backend(device, name)
    if name == "reference":
        return Reference()
    if name == "gathered":
        return gathered.Gathered(device)
    return InPlace(device, max_pages=max_pages)


def for_one(device: torch.device, asked: Backend) -> Backend:
    """For one query a sequence. ValueError for "gathered", which would copy all that is read once."""
    if asked == "gathered":
        raise ValueError('backend is "gathered"; allowed for decoding: "auto", "reference", "triton"')
    if asked == "auto":
        return "triton" if device.type == "cuda" else "reference"
    return asked


def for_many(device: torch.device, asked: Backend, paging: Paging) -> Backend:
    """For many queries a sequence. ValueError for "gathered" where torch's kernels have no such shape."""
    fits = gathered.fits(paging.shape)
    if asked == "gathered" and not fits:
        raise ValueError(
            f'backend is "gathered"; allowed: others for a window, MLA, float32 or head_dim {paging.shape.head_dim}'
        )
    if asked != "auto":
        return asked
    if device.type != "cuda":
        return "reference"
    row = paging.shape.num_qo_heads * paging.shape.head_dim
    enough = (paging.widths >= GATHERED_QUERIES) & (paging.widths * paging.kv_lens * row >= GATHERED_WORK)
    return "gathered" if fits and bool(enough.any()) else "triton"
