"""Attention of many queries: gathers pages, some tokens at a time, for torch's own attention kernels.

Partial results are merged by their logarithms. So a whole layer is never gathered, and the extra memory is
bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tierstore.gpu.attention.page_table import Paging, Shape

Sdpa = Literal["flash", "cudnn"]

TOKENS_AT_ONCE = 32768
"""Tokens gathered together: 128 MiB for a layer of an 8B model. The kernels are not faster with more."""

_BLOCK = 8192


class _Piece(NamedTuple):
    """Tokens ``[first, end)`` of a sequence. If ``causal``, each query sees them only up to its own token."""

    row: int
    first: int
    end: int
    causal: bool


class Gathered:
    """The backend "gathered": computes one sequence after another on the current stream.

    It supports the shapes that ``fits`` accepts.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        sdpa: Sdpa = "cudnn",
        tokens: int = TOKENS_AT_ONCE,
        kernels: ModuleType | None = None,
    ) -> None:
        """Choose the kernels.

        Args:
            device: The card.
            sdpa: The attention kernel of torch to use.
            tokens: Most tokens to gather at a time.
            kernels: As in ``InPlace``.
        """
        if kernels is None:
            from tierstore.gpu.attention import kernels as own

            kernels = own
        self._kernels: Any = kernels
        self._device, self._sdpa, self._tokens = device, sdpa, tokens

    def plan(self, table: Paging) -> None:
        """Copy the slots to the device, and allocate memory for one piece."""
        self._page_table = table
        self._pieces = list(_pieces(table, self._tokens))
        self._table = torch.from_numpy(table.indices.astype(np.int32)).to(self._device)
        shape, size = table.shape, table.shape.page_size
        most = max((-(-p.end // size) - p.first // size for p in self._pieces), default=0) * size
        self._room = torch.empty(
            2, most, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device
        )
        widest = int(table.widths.max(initial=0))
        self._sums = torch.empty(
            widest, shape.num_qo_heads, shape.head_dim, dtype=torch.float32, device=self._device
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of device memory that ``plan`` allocated."""
        return self._room.nbytes + self._sums.nbytes

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Fill ``out`` and ``lse``. ValueError unless pages have two planes."""
        if pages.shape[1] != 2:
            raise ValueError(f'backend "gathered" needs pages of 2 planes, got {pages.shape[1]}')
        table, before = self._page_table, -1
        seen = {piece.row for piece in self._pieces}
        for row in range(table.batch):
            if row not in seen:
                rows = self._rows(row)
                out[rows].zero_()
                lse[rows].fill_(-torch.inf)
        for i, piece in enumerate(self._pieces):
            rows = self._rows(piece.row)
            last = i + 1 == len(self._pieces) or self._pieces[i + 1].row != piece.row
            found = self._attend(q[rows], self._gather(pages, piece), piece.causal)
            self._join(*found, out[rows], lse[rows], before != piece.row, last)
            before = piece.row

    def _rows(self, row: int) -> slice:
        return slice(int(self._page_table.qo_indptr[row]), int(self._page_table.qo_indptr[row + 1]))

    def _gather(self, pages: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """Return the tokens of a piece, ``[2, tokens, num_kv_heads, head_dim]``."""
        shape = self._page_table.shape
        size = shape.page_size
        first, end = piece.first // size, -(-piece.end // size)
        numbers = size * shape.num_kv_heads * shape.head_dim
        token, head = pages.stride(2), pages.stride(3)
        flat = head == shape.head_dim and token == shape.num_kv_heads * shape.head_dim
        self._kernels.gather[(end - first, 2, -(-numbers // _BLOCK))](
            pages, self._table, self._room, int(self._page_table.indptr[piece.row]) + first,
            *pages.stride()[:4], self._room.stride(0),
            HEADS=shape.num_kv_heads, DIM=shape.head_dim, TOKENS=size, FLAT=flat, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        skip = piece.first - first * size
        return self._room[:, skip : skip + piece.end - piece.first]

    def _attend(
        self, q: torch.Tensor, planes: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results ``[heads, queries, dim]`` and logarithms ``[heads, queries]``, any strides."""
        keys, values = planes.transpose(1, 2).unsqueeze(1)
        return sdpa(
            self._sdpa, q.transpose(0, 1)[None], keys, values, causal, self._page_table.shape.sm_scale
        )

    def _join(
        self,
        found: torch.Tensor,
        found_lse: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        first: bool,
        last: bool,
    ) -> None:
        heads, width, dim = found.shape
        self._kernels.join[(width, heads)](
            self._sums, lse, found, found_lse, out,
            *found.stride()[:2], *found_lse.stride(),
            HEADS=heads, DV=dim, BLOCK_V=1 << (dim - 1).bit_length(), FIRST=first, LAST=last, num_warps=1,
        )  # fmt: skip


def sdpa(
    which: Sdpa, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention by one of torch's kernels: ``[heads, queries, dim]``, and logarithms ``[heads, queries]``.

    ``q``, ``keys`` and ``values`` are ``[1, heads, tokens, dim]``. If ``causal``, the queries are those of
    the last keys; for "cudnn" there must then be as many queries as keys.
    """
    ops: Any = torch.ops.aten
    if which == "flash":
        found = ops._scaled_dot_product_flash_attention(q, keys, values, 0.0, causal, False, scale=scale)
    else:
        found = ops._scaled_dot_product_cudnn_attention(
            q, keys, values, None, True, 0.0, causal, False, scale=scale
        )
    width = q.shape[2]
    return found[0][0], found[1].view(q.shape[1], -1)[:, :width]


def fits(shape: Shape) -> bool:
    """Return whether torch's kernels support this shape."""
    plain = shape.window_left < 0 and shape.head_dim_vo == shape.head_dim
    return plain and shape.head_dim % 8 == 0 and shape.head_dim <= 128 and shape.dtype != torch.float32


def _pieces(table: Paging, tokens: int) -> Iterator[_Piece]:
    """Yield the pieces of all sequences. The last piece of a causal sequence has its queries' own tokens."""
    size = table.shape.page_size
    step = max(1, tokens // size) * size
    for row in range(table.batch):
        width, length = int(table.widths[row]), int(table.kv_lens[row])
        if not width or not length:
            continue
        before = length - width if table.shape.causal else length
        for first in range(0, before, step):
            yield _Piece(row, first, min(first + step, before), False)
        if table.shape.causal:
            yield _Piece(row, before, length, True)
