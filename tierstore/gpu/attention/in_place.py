"""Attention with kernels that read pages in place.

The work is split over keys, so that a few long sequences can fill a GPU. If the keys of a sequence are split,
each of its queries has one partial result (a part) per split, and a second kernel merges these parts. ``divide``
splits the attention of a step into work items. It runs on the CPU and can be tested without a GPU. ``InPlace``
plans once per step and launches the kernels for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.gpu.attention.page_table import Paging

if TYPE_CHECKING:
    from types import ModuleType

    from tierstore.gpu.attention.page_table import Shape

FIELDS = 9
"""Number of int32 fields per work item.

In order: the index of the sequence's first page in ``indices``, the sequence's number of tokens, the item's
first token, one past the item's last token, the sequence's first query, the sequence's number of queries, the
item's first row, the index of the item's part for the sequence's first query, and the number of parts per query.
"""

_START_TILES = 2
"""Cost of starting and finishing a program, in units of the cost of one tile."""
_PARTS_NBYTES = 64 << 20
_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Room:
    """Limits for ``divide``.

    Attributes:
        programs: Number of programs that the GPU runs at once.
        items: Maximum number of items. None for no limit.
    """

    programs: int
    items: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step, divided into items.

    Attributes:
        items: int32 ``[items, FIELDS]``. The kernel runs one program per item and head of K and V.
        queries: int32 ``[queries, 2]``: the first part and the number of parts of each query.
        num_parts: Total number of parts that need memory. If a query has exactly one part, that part needs no
            memory, because the program that computes it stores the result directly.
        merges: Whether any query has a number of parts other than one.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    num_parts: int
    merges: bool


def divide(table: Paging, block_m: int, block_n: int, room: Room) -> Work:
    """Return the work items for every sequence that has queries and visible tokens, and the parts to merge.

    An item has at most ``block_m`` rows, where a row is one query with one of the heads in a group. A tile has
    ``block_n`` tokens.
    """
    blocks = -(-table.widths * table.shape.group // block_m)
    start = table.first_seen // block_n * block_n
    tiles = np.where(blocks > 0, np.maximum(-(-(table.ends - start) // block_n), 0), 0)
    step = _tiles_each(table, blocks, tiles, room)
    splits = -(-tiles // step)
    parts = np.where(splits > 1, splits * table.widths, 0)
    first_part = np.cumsum(parts) - parts
    items = _items(table, blocks, splits, block_m, start, step * block_n)
    items[:, 7] += first_part[np.repeat(np.arange(table.batch), blocks * splits)]
    return Work(
        items.astype(np.int32),
        _queries(table, splits, first_part),
        int(parts.sum()),
        bool((splits[table.widths > 0] != 1).any()),
    )


def most_items(batch: int, blocks: int, kv_heads: int, programs: int) -> int:
    """Return the maximum number of items for ``batch`` sequences with ``blocks`` blocks of rows each."""
    return blocks * (batch + 2 * -(-programs // kv_heads))


def _tiles_each(table: Paging, blocks: NDArray[np.int64], tiles: NDArray[np.int64], room: Room) -> int:
    """Return the number of tiles per split for which the GPU is expected to finish the step soonest."""
    most = int(tiles.max(initial=1))
    steps = (
        np.unique(np.geomspace(1, most, _CANDIDATES).astype(np.int64)) if most > 1 else np.ones(1, np.int64)
    )
    exact = -(-most // np.arange(1, min(most, 256) + 1))  # also try equal splits of the longest sequence
    steps = np.unique(np.concatenate([steps, exact]))
    splits = -(-tiles[None] // steps[:, None])
    items = (splits * blocks[None]).sum(1)
    shape = table.shape
    waves = -(-items * shape.num_kv_heads // room.programs)
    cost = (waves * (steps + _START_TILES)).astype(np.float64)
    parts = (np.where(splits > 1, splits, 0) * table.widths[None]).sum(1)
    fits = parts * shape.num_qo_heads * shape.head_dim_vo * 4 <= _PARTS_NBYTES
    if room.items is not None:
        fits &= items <= room.items
    fits[-1] = True
    return int(steps[np.argmin(np.where(fits, cost, np.inf))])


def _items(
    table: Paging,
    blocks: NDArray[np.int64],
    splits: NDArray[np.int64],
    block_m: int,
    start: NDArray[np.int64],
    step: int,
) -> NDArray[np.int64]:
    """Return the work items of all sequences. Items for the same block of rows are adjacent."""
    number = blocks * splits
    of = np.repeat(np.arange(table.batch), number)
    local = np.arange(len(of)) - np.repeat(np.cumsum(number) - number, number)
    block, split = local // splits[of], local % splits[of]
    group = table.shape.group
    length, width = table.kv_lens[of], table.widths[of]
    end = np.minimum(start[of] + (split + 1) * step, table.ends[of])
    if table.shape.causal:
        last_row = np.minimum((block + 1) * block_m, width * group) - 1
        end = np.minimum(end, length - width + last_row // group + 1)
    first = np.maximum(start[of] + split * step, table.first_seen[of])
    fields = (
        table.indptr[of], length, first, end, table.qo_indptr[of], width, block * block_m, split, splits[of]
    )  # fmt: skip
    return np.stack(fields, 1)


def _queries(table: Paging, splits: NDArray[np.int64], first_part: NDArray[np.int64]) -> NDArray[np.int32]:
    owner = np.repeat(np.arange(table.batch), table.widths)
    number = np.arange(len(owner)) - table.qo_indptr[owner]
    return np.stack([first_part[owner] + number * splits[owner], splits[owner]], 1).astype(np.int32)


_LOG2_E = 1.4426950408889634
_LARGE = (9, 10)
"""Major compute capabilities of GPUs with large shared memory."""
_SMALL = 16
"""Number of rows in the smallest block: the minimum for a matrix instruction."""


class Parts:
    """Memory for the parts of a step. Backends whose runs are queued on one stream may share it."""

    def __init__(self) -> None:
        self.results = self.logarithms = torch.empty(0, dtype=torch.float32)

    def reserve(self, rows: int, dim: int, device: torch.device) -> None:
        """Make room for ``rows`` results of ``dim`` elements and their logarithms. Never shrinks."""
        if self.logarithms.numel() < rows or self.logarithms.device != device:
            self.logarithms = torch.empty(rows, dtype=torch.float32, device=device)
        if self.results.numel() < rows * dim or self.results.device != device:
            self.results = torch.empty(rows * dim, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch parameters: rows per item, tokens per tile, warps, stages, and programs per multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int

    @classmethod
    def of(cls, shape: Shape, rows: int, large: bool = True) -> Tiles:
        """Return the fastest parameters for blocks of up to ``rows`` rows.

        The choice is based on measurements on an H200 (docs/benchmarks/attention.md). With ``large``, a program
        may use 227 KiB of shared memory, as on Hopper, otherwise 99 KiB.
        """
        block_m = min(128, max(_SMALL, _power(rows)))
        token = shape.head_dim * shape.dtype.itemsize  # bytes per key; a value usually has as many
        if shape.dtype == torch.float32:  # no matrix instructions, so products stay in registers
            return cls(min(block_m, 32 if token <= 1024 else 16), 32 if token <= 512 else 16, 4, 2, 2)
        if token > 512:
            return cls(min(block_m, 32), 32 if large else 16, 4, 2, 1)
        if not large:
            return cls(min(block_m, 64), 64 if token <= 256 else 32, 4, 2, 1)
        if block_m <= 32:
            return cls(block_m, _power(16384 // max(128, token) + 1) // 2, 4, 4, 2)
        return cls(block_m, 64, 8, 3, 1)


def constants_of(shape: Shape, tiles: Tiles, planes: int) -> dict[str, Any]:
    """Return the compile-time constants of the kernel ``attend``."""
    rest = shape.head_dim - shape.head_dim_vo
    return {
        "HEADS": shape.num_qo_heads, "GROUP": shape.group, "PAGE": shape.page_size,
        "DV": shape.head_dim_vo, "DR": rest, "BLOCK_V": max(16, _power(shape.head_dim_vo)),
        "BLOCK_R": max(16, _power(rest)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "CAUSAL": shape.causal, "WINDOW": shape.window_left >= 0, "SHARED": planes == 1, "FIELDS": FIELDS,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
    }  # fmt: skip


class InPlace:
    """The backend "triton": plans once per step, and launches one or two kernels per layer.

    Call ``plan`` and ``run`` with the same current stream.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        kernels: ModuleType | None = None,
        max_pages: int | None = None,
        tiles: Tiles | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Choose the kernels.

        Args:
            device: The GPU.
            kernels: The module with the kernels. None for the package's own, which need a GPU.
            max_pages: See ``PagedDecode``.
            tiles: The launch parameters. None to choose them by shape.
            parts: Memory for parts that other backends use too. None for memory of its own.
        """
        if kernels is None:
            from tierstore.gpu.attention import kernels as own

            kernels = own
        self._kernels: Any = kernels
        self._device, self._max_pages, self._given = device, max_pages, tiles
        self._parts = parts or Parts()
        self._numbers: torch.Tensor | None = None
        self._fixed: tuple[int, Shape] | None = None
        self._most_items = 0

    def plan(self, table: Paging) -> None:
        """Divide the step into work items, and copy these and the page table to the device.

        Raises:
            ValueError: The step does not fit the buffers for ``max_pages``. The previous plan remains valid.
        """
        shape = table.shape
        rows = int(table.widths.max(initial=1)) * shape.group
        tiles = self._given or Tiles.of(shape, rows, _is_large(self._device))
        programs = _processors(self._device) * tiles.programs
        room = Room(programs)
        if self._max_pages is not None:
            table.require_fits(self._max_pages, self._fixed)
            self._most_items = most_items(
                table.batch, -(-rows // tiles.block_m), shape.num_kv_heads, programs
            )
            room = Room(programs, self._most_items)
        work = divide(table, tiles.block_m, tiles.block_n, room)
        self._write(table, work)
        self._shape, self._tiles = shape, tiles
        self._merges = work.merges or self._max_pages is not None
        self._num_queries = table.num_queries
        if self._max_pages is not None:
            self._fixed = (table.batch, shape)

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compute attention into ``out`` and ``lse``."""
        assert self._numbers is not None
        shape, tiles = self._shape, self._tiles
        if not self._num_queries:
            return
        if q.stride(2) != 1:
            q = q.contiguous()
        constants = constants_of(shape, tiles, pages.shape[1])
        if len(self._items):
            self._kernels.attend[(shape.num_kv_heads, len(self._items))](
                q, pages, self._table, self._items, out, lse, self._parts.results, self._parts.logarithms,
                q.stride(0), q.stride(1), *pages.stride()[:4], shape.sm_scale * _LOG2_E, shape.window_left,
                **constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
        if self._merges:
            block = int(constants["BLOCK_V"])
            self._kernels.merge[(self._num_queries, shape.num_qo_heads)](
                self._parts.results, self._parts.logarithms, self._queries, out, lse,
                HEADS=shape.num_qo_heads, DV=shape.head_dim_vo, BLOCK_V=block,
                BLOCK_S=max(4, 8192 // block), num_warps=4,
            )  # fmt: skip

    def _write(self, table: Paging, work: Work) -> None:
        """Copy the items, the queries and the page table to the device in one copy.

        The device memory is only reallocated if it is too small.
        """
        fixed = self._max_pages is not None
        num_items = self._most_items if fixed else len(work.items)
        num_pages = self._max_pages if self._max_pages is not None else len(table.indices)
        lengths = (num_items * FIELDS, 2 * table.num_queries, num_pages)
        host = np.zeros(sum(lengths), dtype=np.int32)
        starts = np.cumsum((0, *lengths))
        contents = (work.items.ravel(), work.queries.ravel(), _page_numbers(table))
        for start, numbers in zip(starts, contents, strict=False):
            host[start : start + len(numbers)] = numbers
        if self._numbers is None or self._numbers.numel() < len(host):
            self._numbers = torch.empty(len(host), dtype=torch.int32, device=self._device)
        self._numbers[: len(host)].copy_(torch.from_numpy(host))
        items, queries, self._table = torch.split(self._numbers[: len(host)], list(lengths))
        self._items, self._queries = items.view(-1, FIELDS), queries.view(-1, 2)
        if self._fixed is None:
            number = max(1, num_items if fixed else work.num_parts)
            self._parts.reserve(number * table.shape.num_qo_heads, table.shape.head_dim_vo, self._device)


def _page_numbers(table: Paging) -> np.ndarray[Any, np.dtype[np.int32]]:
    return table.indices.astype(np.int32)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # for Triton's interpreter: enough that sequences are split
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_large(device: torch.device) -> bool:
    """Return whether a program can use 227 KiB of shared memory."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in _LARGE


def _power(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, int(number) - 1).bit_length()
