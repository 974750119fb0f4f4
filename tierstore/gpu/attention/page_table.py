"""The page table of a step, in host memory: which queries, pages and visible tokens each sequence has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = torch.Tensor | NDArray[np.integer] | Sequence[int]
"""A one-dimensional sequence of integers.

A tensor on a GPU is copied to the host, which blocks until the copy completes.
"""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes of queries, pages and results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of attention in one layer.

    Attributes:
        num_qo_heads: Number of query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Number of heads of K and V.
        head_dim: Size of a query head and of a key head.
        head_dim_vo: Size of a value head and of a result head, at most ``head_dim``. If pages have one plane
            (MLA), the value is the first ``head_dim_vo`` elements of the key.
        page_size: Tokens per page.
        sm_scale: Factor applied to the scores before softmax.
        causal: Whether each query sees only the tokens up to its own.
        window_left: Number of keys that a query sees before its own position, or -1 for all. Any value other
            than -1 requires ``causal``.
        dtype: The dtype of queries and pages.
        out_dtype: The dtype of results.

    Raises:
        ValueError: A value is invalid.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int
    page_size: int
    sm_scale: float
    causal: bool
    window_left: int
    dtype: torch.dtype
    out_dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            _require(_is_integer(value) and value >= 1, name, value, "an integer of at least 1")
        heads, kv_heads = self.num_qo_heads, self.num_kv_heads
        _require(heads % kv_heads == 0, "num_qo_heads", heads, f"a multiple of num_kv_heads ({kv_heads})")
        allowed = f"1 to head_dim ({self.head_dim})"
        _require(1 <= self.head_dim_vo <= self.head_dim, "head_dim_vo", self.head_dim_vo, allowed)
        window = self.window_left
        _require(_is_integer(window) and window >= -1, "window_left", window, "an integer of -1 or more")
        _require(self.window_left < 0 or self.causal, "causal", self.causal, "True if window_left is not -1")
        for name in ("dtype", "out_dtype"):
            found = getattr(self, name)
            _require(found in DTYPES, name, found, "one of " + ", ".join(str(x) for x in DTYPES))

    @property
    def group(self) -> int:
        """Return the number of query heads per head of K and V."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Paging:
    """The page table for a batch of sequences, as int64 arrays in host memory.

    Sequence ``i`` has ``kv_lens[i]`` tokens. The first ``ends[i]`` of them are in the pages
    ``indices[indptr[i]:indptr[i + 1]]``. Its queries have the indices ``qo_indptr[i]`` (inclusive) to ``qo_indptr[i
    + 1]`` (exclusive) and belong to its last tokens. ``ends`` is less than ``kv_lens`` only if attention over the
    other tokens is computed separately (see ``streamed``).
    """

    qo_indptr: NDArray[np.int64]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    kv_lens: NDArray[np.int64]
    ends: NDArray[np.int64]
    shape: Shape

    @classmethod
    def of(
        cls,
        qo_indptr: Numbers | None,
        indptr: Numbers,
        indices: Numbers,
        last_page_len: Numbers,
        shape: Shape,
    ) -> Paging:
        """Validate the arguments and return the page table.

        Args:
            qo_indptr: First query of each sequence, ``[batch + 1]``. None for one query per sequence.
            indptr: First page of each sequence in ``indices``, ``[batch + 1]``.
            indices: Slots of the pages.
            last_page_len: Number of tokens in the last page of each sequence, ``[batch]``. Ignored for a
                sequence without pages.
            shape: The shape of attention in every layer.

        Raises:
            ValueError: The arguments are inconsistent, or a causal sequence has more queries than tokens.
        """
        starts, pages = _integers("indptr", indptr), _integers("indices", indices)
        last = _integers("last_page_len", last_page_len)
        batch = len(last)
        queries = np.arange(batch + 1) if qo_indptr is None else _integers("qo_indptr", qo_indptr)
        _require_starts("indptr", starts, batch, len(pages))
        _require_starts("qo_indptr", queries, batch, None)
        counts = np.diff(starts)
        size = shape.page_size
        wrong = (counts > 0) & ((last < 1) | (last > size))
        for i in np.flatnonzero(wrong)[:1]:
            raise ValueError(f"last_page_len must be 1 to page_size ({size}), got {last[i]} in sequence {i}")
        lens = np.where(counts > 0, (counts - 1) * size + last, 0)
        widths = np.diff(queries)
        if shape.causal and qo_indptr is not None:
            for i in np.flatnonzero(widths > lens)[:1]:
                raise ValueError(
                    f"a causal sequence must have no more queries than tokens, "
                    f"got {widths[i]} queries for {lens[i]} tokens in sequence {i}"
                )
        return cls(queries, starts, pages, lens, lens, shape)

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return len(self.kv_lens)

    @property
    def num_queries(self) -> int:
        """Return the total number of queries."""
        return int(self.qo_indptr[-1])

    @property
    def widths(self) -> NDArray[np.int64]:
        """Return the number of queries of each sequence."""
        return np.diff(self.qo_indptr)

    @property
    def first_seen(self) -> NDArray[np.int64]:
        """Return, for each sequence, the first token that any of its queries sees.

        Pages that contain only earlier tokens are never read.
        """
        if self.shape.window_left < 0:
            return np.zeros(self.batch, dtype=np.int64)
        first_query = self.kv_lens - np.maximum(self.widths, 1)
        return np.maximum(first_query - self.shape.window_left, 0)

    def require(self, q: torch.Tensor, pages: torch.Tensor) -> None:
        """Raise ValueError unless the queries and a layer's pages match the plan. Slots are not checked."""
        shape = self.shape
        want = (self.num_queries, shape.num_qo_heads, shape.head_dim)
        _require(tuple(q.shape) == want, "the shape of q", tuple(q.shape), str(want))
        page = (shape.page_size, shape.num_kv_heads, shape.head_dim)
        fits = pages.ndim == 5 and pages.shape[1] in (1, 2) and tuple(pages.shape[2:]) == page
        allowed = "(num_slots, 1 or 2, " + ", ".join(map(str, page)) + ")"
        _require(fits, "the shape of paged_kv_cache", tuple(pages.shape), allowed)
        if pages.shape[1] == 2:
            same = shape.head_dim_vo == shape.head_dim
            _require(same, "head_dim_vo", shape.head_dim_vo, f"{shape.head_dim} if pages have two planes")
        for name, tensor in (("q", q), ("paged_kv_cache", pages)):
            _require(tensor.dtype == shape.dtype, f"the dtype of {name}", tensor.dtype, str(shape.dtype))
        _require(pages.stride(4) == 1, "the last stride of paged_kv_cache", pages.stride(4), "1")

    def require_fits(self, max_pages: int, before: tuple[int, Shape] | None) -> None:
        """Raise ValueError unless this table fits buffers for ``max_pages`` pages and one query per sequence.

        ``before`` contains the batch size and the shape that the buffers were allocated for. This table must have
        the same batch size and shape. ``before`` is None before the first plan.
        """
        if len(self.indices) > max_pages:
            raise ValueError(
                f"a plan must have at most max_pages ({max_pages}) pages, got {len(self.indices)}"
            )
        if int(self.widths.max(initial=0)) > 1:
            raise ValueError("with max_pages, each sequence must have one query, got several")
        if before is not None and before != (self.batch, self.shape):
            found = [field.name for field in fields(Shape)]
            found = [name for name in found if getattr(self.shape, name) != getattr(before[1], name)]
            raise ValueError(
                f"with max_pages, every plan must have the shape and the batch size ({before[0]}) of the first plan, "
                f"got a batch of {self.batch}" + "".join(f" and a different {name}" for name in found)
            )


def _require(right: bool, name: str, found: object, allowed: str) -> None:
    if not right:
        raise ValueError(f"{name} must be {allowed}, got {found}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _integers(name: str, numbers: Numbers) -> NDArray[np.int64]:
    if isinstance(numbers, torch.Tensor):
        _require(not numbers.is_floating_point(), name, numbers.dtype, "integers")
        numbers = numbers.cpu().numpy()
    found = np.asarray(numbers)
    _require(not found.size or found.dtype.kind in "iu", name, found.dtype, "integers")
    return found.astype(np.int64).reshape(-1)


def _require_starts(name: str, starts: NDArray[np.int64], batch: int, end: int | None) -> None:
    right = len(starts) == batch + 1 and starts[0] == 0 and bool((np.diff(starts) >= 0).all())
    if right and end is not None:
        right = int(starts[-1]) == end
    ending = "" if end is None else f" and ending with {end} (len(indices))"
    _require(
        right, name, starts.tolist(), f"{batch + 1} integers that never decrease, starting with 0{ending}"
    )
