"""The public classes: ``PagedDecode`` for one query per sequence, ``PagedPrefill`` for many.

Names and meanings of arguments are FlashInfer's, with its layout "NHD". There are three differences:
logarithms are natural, ``out`` may have a wider dtype than ``q``, and queries are always those of the last
tokens, whose K and V are in the pages already.
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
        """The backend that the last plan chose."""

    @property
    def planned(self) -> Paging:
        """Return the page table of the last plan. ValueError before the first one."""
        if self._page_table is None:
            raise ValueError("nothing is planned yet: call plan() before run()")
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
        out = _place("out", out, want, table.shape.out_dtype, q.device)
        lse = _place("lse", lse, want[:2], torch.float32, q.device)
        way.run(q, pages, out, lse)
        return (out, lse) if return_lse else out


class PagedDecode(_Paged):
    """Attention of one query per sequence, like FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(
        self, device: torch.device | str, *, backend: Backend = "auto", max_pages: int | None = None
    ) -> None:
        """Choose the backend. Allocates nothing yet.

        Args:
            device: The device of queries and pages.
            backend: "auto" is ``triton`` on a card, else ``reference``. "gathered" cannot decode.
            max_pages: For CUDA graphs: the most pages of all sequences together. The first ``plan`` makes
                buffers for its batch and this many pages, and later plans of the same batch and shape fill
                them in place. A graph that captured ``run`` after one plan follows the last plan when it is
                replayed. Give unused rows of the batch a sequence without pages.

        Raises:
            ValueError: The device is not available, or has no such backend.
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
        """Plan a step, for all layers of one shape. Integers on a card are copied to the host first.

        Args:
            indptr: ``[batch + 1]``. Sequence ``i`` reads pages ``indices[indptr[i]:indptr[i + 1]]``.
            indices: Slots of the pages. Pages before every window are not read, so their slots may be
                anything.
            last_page_len: ``[batch]``. Tokens in the last page of each sequence; 0 for a sequence without
                pages.
            num_qo_heads: Query heads.
            num_kv_heads: Heads of K and V.
            head_dim: Numbers of a query and of a key.
            page_size: Tokens of a page.
            head_dim_vo: Numbers of a value. It may differ from ``head_dim`` only for pages of one plane
                (MLA), where a value is the first numbers of its key.
            window_left: Number of keys that a query sees before its own, -1 for all.
            sm_scale: Factor of the scores. None for ``head_dim ** -0.5``.
            q_data_type: The dtype of queries and pages.
            o_data_type: The dtype of results. None for ``q_data_type``.

        Raises:
            ValueError: An argument is invalid. The last plan remains in force.
        """
        shape = _shape(
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
            q: Queries ``[batch, num_qo_heads, head_dim]``.
            paged_kv_cache: The layer's pages in place, ``[num_slots, planes, page_size, num_kv_heads,
                head_dim]``, such as ``store.pages[:, layer]``. Any strides, but the last must be 1. Tokens
                after ``last_page_len`` may hold anything, even NaN.
            out: A contiguous tensor for the result. None for a new tensor.
            lse: A contiguous tensor for the logarithms. None for a new tensor.
            return_lse: Whether to return the logarithms too.

        Returns:
            ``[batch, num_qo_heads, head_dim_vo]`` of ``o_data_type``, with sums in float32. With
            ``return_lse`` also the natural logarithm of the sum of exp(scores), float32 ``[batch,
            num_qo_heads]``, which is -inf for a query that sees no token.
        """
        return self._run(q, paged_kv_cache, out, lse, return_lse)


class PagedPrefill(_Paged):
    """Attention of many queries per sequence, like FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, device: torch.device | str, *, backend: Backend = "auto") -> None:
        """Choose the backend. Allocates nothing yet.

        Args:
            device: The device of queries and pages.
            backend: "auto" on a card is the backend that was measured to be faster for the plan's shape, else
                ``reference``.

        Raises:
            ValueError: The device is not available, or has no such backend.
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
        """Plan a step, for all layers of one shape. Other arguments are as in ``PagedDecode.plan``.

        Args:
            qo_indptr: ``[batch + 1]``. Sequence ``i`` has the queries from ``qo_indptr[i]`` up to, but
                without, ``qo_indptr[i + 1]``. They are those of its last tokens, whose K and V must be in the
                pages by the time of ``run``.
            causal: Whether each query sees only the tokens up to its own. A window needs ``causal``.
        """
        shape = _shape(
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
        """Compute the attention of one layer, as ``PagedDecode.run`` does.

        ``q`` has the queries of all sequences one after another, ``[queries, num_qo_heads, head_dim_qk]``.
        """
        return self._run(q, paged_kv_cache, out, lse, return_lse)


def _shape(
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


def _place(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous {shape} {dtype}, got {tuple(given.shape)} {given.dtype}")
    return given
