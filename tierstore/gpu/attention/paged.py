"""The public classes: ``PagedDecode`` for one query per sequence, and ``PagedPrefill`` for many.

Argument names and meanings are those of FlashInfer with layout "NHD", with three differences: ``lse`` is a
natural logarithm (FlashInfer: base 2), ``out`` may have a wider dtype than ``q``, and the queries of a sequence
always belong to its last tokens, whose K and V are already in the pages.
"""

from __future__ import annotations

import torch

from tierstore.gpu.attention import backends
from tierstore.gpu.attention.backends import (
    AttentionBackend,
    Backend,
    device_of,
    for_many,
    for_one,
    make,
    require_backend,
)
from tierstore.gpu.attention.page_table import Numbers, Paging, Shape

merge_states = backends.merge_states


class _Paged:
    """Plans and runs attention with a backend. Not thread-safe."""

    def __init__(self) -> None:
        self._page_table: Paging | None = None
        self._way: AttentionBackend | None = None
        self.backend: Backend = "auto"
        """The backend chosen by the last plan."""

    @property
    def planned(self) -> Paging:
        """Return the page table of the last plan. Raises ValueError before the first plan."""
        if self._page_table is None:
            raise ValueError("no plan yet: call plan() before run()")
        return self._page_table

    def _run(
        self,
        q: torch.Tensor,
        pages: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        table, way = self.planned, self._way
        assert way is not None
        table.require(q, pages)
        want = (*q.shape[:2], table.shape.head_dim_vo)
        out = place_for("out", out, want, table.shape.out_dtype, q.device)
        lse = place_for("lse", lse, want[:2], torch.float32, q.device)
        way.run(q, pages, out, lse)
        return (out, lse) if return_lse else out


class PagedDecode(_Paged):
    """Attention with one query per sequence, like FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(
        self, device: torch.device | str, *, backend: Backend = "auto", max_pages: int | None = None
    ) -> None:
        """Choose the backend. Nothing is allocated before the first ``plan``.

        Args:
            device: The device of queries and pages.
            backend: "auto" chooses "triton" on a GPU and "reference" on a CPU. "gathered" is not supported for
                decoding.
            max_pages: For CUDA graphs: the maximum number of pages of all sequences together. The first
                ``plan`` allocates buffers for its batch size and this many pages. Later plans must have the
                same batch size and shape. They overwrite the buffers in place, so a graph that captured
                ``run`` uses the most recent plan when it is replayed. Pad the batch with sequences without
                pages. With None, a plan allocates new buffers if it needs them.

        Raises:
            ValueError: The device is not available, or does not support the backend.
        """
        super().__init__()
        self._max_pages = max_pages
        self._device, self._backend = device_of(device), backend
        require_backend(self._device, for_one(self._device, backend))

    def plan(
        self,
        indptr: Numbers,
        indices: Numbers,
        last_page_len: Numbers,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        """Plan a step for all layers with the same shape.

        Blocks if an argument is on a GPU, because it is copied to the host first.

        Args:
            indptr: ``[batch + 1]``. Sequence ``i`` reads the pages ``indices[indptr[i]:indptr[i + 1]]``.
            indices: Slots of the pages. The entry of a page that lies entirely before the window may be any
                integer, because the page is never read.
            last_page_len: ``[batch]``. Number of tokens in the last page of each sequence; 0 for a sequence
                without pages.
            num_qo_heads: Number of query heads.
            num_kv_heads: Number of heads of K and V.
            head_dim: Size of a query head and of a key head.
            page_size: Tokens per page.
            head_dim_vo: Size of a value head. None for ``head_dim``. Another size needs pages with one plane
                (MLA), where a value is the first ``head_dim_vo`` elements of its key.
            window_left: Number of keys that a query sees before the key at its own position, or -1 for all.
            sm_scale: Factor applied to the scores. None for ``head_dim ** -0.5``.
            q_data_type: The dtype of queries and pages.
            o_data_type: The dtype of results. None for ``q_data_type``.

        Raises:
            ValueError: An argument is invalid. The previous plan remains valid.
        """
        shape = shape_of(
            num_qo_heads, num_kv_heads, head_dim, page_size, head_dim_vo, True, window_left, sm_scale,
            q_data_type, o_data_type,
        )  # fmt: skip
        table, before = Paging.of(None, indptr, indices, last_page_len, shape), self._page_table
        if self._max_pages is not None:
            table.require_fits(self._max_pages, None if before is None else (before.batch, before.shape))
        if self._way is None:
            self.backend = for_one(self._device, self._backend)
            self._way = make(self.backend, self._device, self._max_pages)
        self._way.plan(table)
        self._page_table = table

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of one layer on the current stream, without blocking.

        Args:
            q: Queries, ``[batch, num_qo_heads, head_dim]``.
            paged_kv_cache: The layer's pages in place, ``[num_slots, planes, page_size, num_kv_heads,
                head_dim]``, for example ``store.pages[:, layer]``. The last stride must be 1; the others are
                arbitrary. Tokens after ``last_page_len`` may contain any value, even NaN.
            out: A contiguous tensor to store the results in. None to allocate one.
            lse: A contiguous tensor to store the logarithms in (see below). None to allocate one.
            return_lse: Whether to return ``lse`` too.

        Returns:
            ``out``: ``[batch, num_qo_heads, head_dim_vo]`` in ``o_data_type``, accumulated in float32. With
            ``return_lse``, also ``lse``: the natural logarithms of the sums of exp(scores), float32 ``[batch,
            num_qo_heads]``. For a query that sees no token, ``out`` is 0 and ``lse`` is -inf.

        Raises:
            ValueError: A tensor does not have the planned shape or dtype, or ``plan`` was not called.
        """
        return self._run(q, paged_kv_cache, out, lse, return_lse)


class PagedPrefill(_Paged):
    """Attention with many queries per sequence, like FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, device: torch.device | str, *, backend: Backend = "auto") -> None:
        """Choose the backend. Nothing is allocated before the first ``plan``.

        Args:
            device: The device of queries and pages.
            backend: "auto" chooses "reference" on a CPU. On a GPU it chooses, for each plan, the backend that
                measurements found faster for the plan's shape and lengths.

        Raises:
            ValueError: The device is not available, or does not support the backend.
        """
        super().__init__()
        self._device, self._backend = device_of(device), backend
        require_backend(self._device, backend)
        self._ways: dict[Backend, AttentionBackend] = {}

    def plan(
        self,
        qo_indptr: Numbers,
        paged_kv_indptr: Numbers,
        paged_kv_indices: Numbers,
        paged_kv_last_page_len: Numbers,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        """Plan a step for all layers with the same shape. See ``PagedDecode.plan`` for the other arguments.

        Args:
            qo_indptr: ``[batch + 1]``. Sequence ``i`` has the queries ``qo_indptr[i]`` (inclusive) to
                ``qo_indptr[i + 1]`` (exclusive). They belong to its last tokens, whose K and V must be in the
                pages when ``run`` is called.
            causal: Whether each query sees only the tokens up to its own. Required if ``window_left`` is not -1.
        """
        shape = shape_of(
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo, causal, window_left, sm_scale,
            q_data_type, o_data_type,
        )  # fmt: skip
        table = Paging.of(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape)
        name = for_many(self._device, self._backend, table)
        if name not in self._ways:
            self._ways[name] = make(name, self._device)
        self._way = self._ways[name]
        self._way.plan(table)
        self._page_table = table
        self.backend = name

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of one layer. See ``PagedDecode.run``.

        ``q`` contains the queries of all sequences, one after another: ``[queries, num_qo_heads, head_dim_qk]``.
        """
        return self._run(q, paged_kv_cache, out, lse, return_lse)


def shape_of(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    head_dim_vo: int | None,
    causal: bool,
    window_left: int,
    sm_scale: float | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
) -> Shape:
    """Return the shape that the arguments of ``plan`` describe. Raises ValueError if one is invalid."""
    return Shape(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_vo=head_dim if head_dim_vo is None else head_dim_vo,
        page_size=page_size,
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        causal=causal,
        window_left=window_left,
        dtype=dtype,
        out_dtype=out_dtype or dtype,
    )


def place_for(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return ``given``, or a new tensor if it is None. Raises ValueError if ``given`` does not fit."""
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or not given.is_contiguous():
        found = "a contiguous" if given.is_contiguous() else "a non-contiguous"
        raise ValueError(
            f"{name} must be a contiguous tensor of shape {shape} and dtype {dtype}, "
            f"got {found} one of shape {tuple(given.shape)} and dtype {given.dtype}"
        )
    return given
