"""Attention with many queries: gathers a limited number of tokens at a time for torch's attention kernels.

Partial results are merged by means of the log-sum-exps that torch's kernels return. The additional memory is
bounded, because a whole layer is never gathered.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tierstore.gpu.attention.page_table import Paging

Sdpa = Literal["flash", "cudnn"]

TOKENS_AT_ONCE = 32768
"""Maximum number of tokens to gather at a time: 128 MiB for one layer of an 8B model. More is not faster."""

_BLOCK = 8192


class _Piece(NamedTuple):
    """Tokens ``[first, end)`` of the sequence with index ``row``.

    If ``causal``, each query sees only the tokens up to its own.
    """

    row: int
    first: int
    end: int
    causal: bool


class Room:
    """Memory for gathered tokens and for sums. Backends whose runs are queued on one stream may share it."""

    def __init__(self) -> None:
        self.planes = self.sums = torch.empty(0)

    def reserve(self, planes: int, dtype: torch.dtype, sums: int, device: torch.device) -> None:
        """Make room for this number of elements. Never shrinks, unless the dtype or the device changes."""
        if self.planes.numel() < planes or (self.planes.dtype, self.planes.device) != (dtype, device):
            self.planes = torch.empty(planes, dtype=dtype, device=device)
        if self.sums.numel() < sums or self.sums.device != device:
            self.sums = torch.empty(sums, dtype=torch.float32, device=device)


class Gathered:
    """The backend "gathered". Computes one sequence after another on the current stream.

    It supports the shapes that ``fits`` accepts.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        sdpa: Sdpa = "cudnn",
        tokens: int = TOKENS_AT_ONCE,
        kernels: ModuleType | None = None,
        room: Room | None = None,
    ) -> None:
        """Choose the kernels.

        Args:
            device: The GPU.
            sdpa: The torch attention kernel to use.
            tokens: Maximum number of tokens to gather at a time. It is rounded down to whole pages, but to no
                less than one page.
            kernels: The module with the gather and join kernels. None for the package's own.
            room: Memory that other backends use too. None for memory of its own.
        """
        if kernels is None:
            from tierstore.gpu.attention import kernels as own

            kernels = own
        self._kernels: Any = kernels
        self._device, self._sdpa, self._tokens = device, sdpa, tokens
        self._memory = room or Room()

    def plan(self, table: Paging) -> None:
        """Copy the page table's slots to the device, and allocate memory for the largest piece and its results."""
        self._page_table = table
        self._pieces = list(_pieces(table, self._tokens))
        self._table = torch.from_numpy(table.indices.astype(np.int32)).to(self._device)
        shape, size = table.shape, table.shape.page_size
        most = max((-(-p.end // size) - p.first // size for p in self._pieces), default=0) * size
        self._room_shape = (2, most, shape.num_kv_heads, shape.head_dim)
        self._sums_shape = (int(table.widths.max(initial=0)), shape.num_qo_heads, shape.head_dim)
        self._memory.reserve(prod(self._room_shape), shape.dtype, prod(self._sums_shape), self._device)

    @property
    def _room(self) -> torch.Tensor:
        return self._memory.planes[: prod(self._room_shape)].view(self._room_shape)

    @property
    def _sums(self) -> torch.Tensor:
        return self._memory.sums[: prod(self._sums_shape)].view(self._sums_shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the device memory for tokens and sums."""
        return self._memory.planes.nbytes + self._memory.sums.nbytes

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compute attention into ``out`` and ``lse``. Raises ValueError unless pages have two planes."""
        if pages.shape[1] != 2:
            raise ValueError(f'backend "gathered" needs pages with 2 planes, got {pages.shape[1]}')
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
        """Gather the tokens of a piece. Return a view ``[2, tokens, num_kv_heads, head_dim]``.

        The next call overwrites the contents of the view.
        """
        shape = self._page_table.shape
        size, room = shape.page_size, self._room
        first, end = piece.first // size, -(-piece.end // size)
        numbers = size * shape.num_kv_heads * shape.head_dim
        token, head = pages.stride(2), pages.stride(3)
        flat = head == shape.head_dim and token == shape.num_kv_heads * shape.head_dim
        self._kernels.gather[(end - first, 2, -(-numbers // _BLOCK))](
            pages, self._table, room, int(self._page_table.indptr[piece.row]) + first,
            *pages.stride()[:4], room.stride(0),
            HEADS=shape.num_kv_heads, DIM=shape.head_dim, TOKENS=size, FLAT=flat, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        skip = piece.first - first * size
        return room[:, skip : skip + piece.end - piece.first]

    def _attend(
        self, q: torch.Tensor, planes: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results and the logarithms from ``sdpa``. Both tensors may have any strides."""
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
            self._sums, lse, found, found_lse, out, lse,
            *found.stride()[:2], *found_lse.stride(),
            HEADS=heads, DV=dim, BLOCK_V=1 << (dim - 1).bit_length(), FIRST=first, LAST=last, PLACED=False,
            num_warps=1,
        )  # fmt: skip


def sdpa(
    which: Sdpa, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with one of torch's kernels.

    Args:
        which: The kernel.
        q: Queries, ``[1, heads, tokens, dim]``.
        keys: ``[1, heads, tokens, dim]``.
        values: ``[1, heads, tokens, dim]``.
        causal: Whether each query sees only the keys up to its own. The queries then belong to the last keys,
            and "cudnn" requires one query per key.
        scale: Factor applied to the scores.

    Returns:
        The results ``[heads, queries, dim]``, and the natural logarithms of the sums of exp(scores),
        ``[heads, queries]``.
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


def fits(table: Paging) -> bool:
    """Return whether torch's kernels support the shape and the lengths of a step."""
    shape = table.shape
    # The causal part of a sequence must contain exactly the tokens that its queries belong to.
    before, ends = table.kv_lens - table.widths, table.ends
    if shape.causal and bool(((ends > before) & ((ends < table.kv_lens) | (before < 0))).any()):
        return False
    plain = shape.window_left < 0 and shape.head_dim_vo == shape.head_dim
    return plain and shape.head_dim % 8 == 0 and shape.head_dim <= 128 and shape.dtype != torch.float32


def _pieces(table: Paging, tokens: int) -> Iterator[_Piece]:
    """Yield the pieces of all sequences, sequence by sequence.

    The last piece of a causal sequence contains exactly the tokens that its queries belong to.
    """
    size = table.shape.page_size
    step = max(1, tokens // size) * size
    for row in range(table.batch):
        width, length, end = (int(each[row]) for each in (table.widths, table.kv_lens, table.ends))
        if not width or not end:
            continue
        before = min(length - width, end) if table.shape.causal else end
        for first in range(0, before, step):
            yield _Piece(row, first, min(first + step, before), False)
        if before < end:
            yield _Piece(row, before, end, True)
