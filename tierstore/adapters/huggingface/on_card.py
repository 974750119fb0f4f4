"""Attention of a forward pass by the card's kernels: planned once for all layers of a shape, run for each."""

# torch leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tierstore.adapters.huggingface.batch import Span
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill
from tierstore.gpu.attention.paging import DTYPES
from tierstore.gpu.attention.ways import Backend

NEW_FROM = 4096
"""Tokens of a prompt without a prefix from which the kernels' cuDNN is the faster one. Not tuned."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What layers that share a plan have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    dtype: torch.dtype


@dataclass(slots=True)
class _Planned:
    """The wrappers of one kind of layer, and which of them is planned for the pass under way."""

    decode: PagedDecode
    prefill: PagedPrefill
    now: PagedDecode | PagedPrefill | None = None


@dataclass(slots=True)
class Plans:
    """Of one cache. For one thread at a time."""

    device: torch.device
    backend: Backend = "auto"
    """Other than "auto" for tests without a card."""
    _kinds: dict[_Kind, _Planned] = field(default_factory=dict)

    def renew(self) -> None:
        """Another forward pass begins: what was planned is over."""
        for planned in self._kinds.values():
            planned.now = None

    def suits(self, dtype: torch.dtype) -> bool:
        """Whether kernels compute this here."""
        return (self.device.type == "cuda" or self.backend != "auto") and dtype in DTYPES

    def takes_new(self, query: torch.Tensor, window: int | None) -> bool:
        """Whether kernels are as good as torch's for a prompt without a prefix, ``[num_heads, q, head_dim]``: on
        Hopper torch takes the slower of its two by itself."""
        half = query.dtype in (torch.bfloat16, torch.float16)
        wide = query.shape[1] >= NEW_FROM and query.shape[2] <= 128
        return half and wide and window is None and self.suits(query.dtype)

    def attend(
        self,
        queries: Sequence[torch.Tensor],
        spans: Sequence[Span],
        pages: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> list[torch.Tensor]:
        """Return causal attention of each row's new tokens over its pages, ``[q, num_heads, head_dim]`` each.

        ``queries``: ``[num_heads, q, head_dim]`` of each row, q at least 1; ``spans``: the same in all layers of a
        pass that have this shape and window. ``pages``: one layer of all pages.
        """
        first = queries[0]
        kind = _Kind(first.shape[0], pages.shape[3], first.shape[2], window, scale, first.dtype)
        planned = self._kinds.get(kind)
        if planned is None:
            planned = _Planned(
                PagedDecode(self.device, backend=self.backend),
                PagedPrefill(self.device, backend=self.backend),
            )
            self._kinds[kind] = planned
        if planned.now is None:
            planned.now = _plan(planned, spans, kind, pages.shape[2])
        rows = [query.transpose(0, 1) for query in queries]
        found = planned.now.run(rows[0] if len(rows) == 1 else torch.cat(rows), pages)
        assert isinstance(found, torch.Tensor)
        return list(found.split([len(row) for row in rows]))


def _plan(
    planned: _Planned, spans: Sequence[Span], kind: _Kind, page_size: int
) -> PagedDecode | PagedPrefill:
    tables = [span.pages[: -(-span.stop // page_size)] for span in spans]
    indptr = np.cumsum([0, *map(len, tables)])
    last = np.array([(span.stop - 1) % page_size + 1 for span in spans])
    shape = (kind.num_heads, kind.num_kv_heads, kind.head_dim, page_size)
    left, widths = -1 if kind.window is None else kind.window - 1, [span.stop - span.start for span in spans]
    indices = np.concatenate(tables)
    if max(widths) == 1:
        planned.decode.plan(
            indptr, indices, last, *shape,
            window_left=left, sm_scale=kind.scale, q_data_type=kind.dtype,
        )  # fmt: skip
        return planned.decode
    planned.prefill.plan(
        np.cumsum([0, *widths]), indptr, indices, last, *shape,
        causal=True, window_left=left, sm_scale=kind.scale, q_data_type=kind.dtype,
    )  # fmt: skip
    return planned.prefill
