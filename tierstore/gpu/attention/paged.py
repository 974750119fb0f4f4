"""The two ways in: one query a sequence, or many. Names and meaning of arguments are FlashInfer's, layout "NHD".

Other than FlashInfer's: logarithms are natural, ``out`` may be wider than ``q``, and queries are always those of the
last tokens, whose K and V are in the pages already.
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
    """Plans and runs by one of the ways. One thread at a time."""

    def __init__(self) -> None:
        self._page_table: Paging | None = None
        self._way: AttentionBackend | None = None
        self.backend: Backend = "auto"
        """The one that the last plan chose."""

    @property
    def planned(self) -> Paging:
        """What the last plan said. ValueError before one."""
        if self._page_table is None:
            raise ValueError("nothing is planned yet")
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
    """One query a sequence: FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(
        self, device: torch.device | str, *, backend: Backend = "auto", max_pages: int | None = None
    ) -> None:
        """``backend`` "auto": ``triton`` on a card, else ``reference``. Allocates nothing yet.

        ``max_pages``: of all sequences together, for CUDA graphs: the first ``plan`` then makes buffers for its batch
        and so many pages, which later plans of the same batch and shape fill in place. A graph that captured ``run``
        after one plan computes, replayed, what the last plan says. ValueError for a plan that does not fit them.
        A row of a batch that is not in use is a sequence without pages. ValueError for a device that is not there, or
        a backend that is not there on it; "gathered" never decodes.
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
        """Once a step, for all layers of one shape. ValueError names what does not fit; the plan before then stays.

        Sequence ``i`` reads pages ``indices[indptr[i]:indptr[i + 1]]``, of the last one ``last_page_len[i]`` tokens;
        a sequence without pages gives 0. Integers on the host; on a card they are copied back first.
        ``sm_scale`` None: ``head_dim ** -0.5``. ``head_dim_vo``: other than ``head_dim`` only for pages of one plane
        (MLA): a value is the first numbers of its key. ``window_left``: keys seen before the query's own, -1: all;
        pages behind every window are not read, and their indices may be anything.
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
        """One layer, on the current stream; nothing waits.

        ``q``: ``[batch, num_qo_heads, head_dim]``. ``paged_kv_cache``: the layer's pages in place, a view
        ``[num_slots, planes, page_size, num_kv_heads, head_dim]`` of any strides with the last 1, such as
        ``store.pages[:, layer]``. Returns ``[batch, num_qo_heads, head_dim_vo]`` of ``o_data_type`` (None: that of
        ``q``), or ``out``; with ``return_lse`` the float32 natural logarithms too, ``[batch, num_qo_heads]``, -inf for
        a query that sees nothing. Sums are float32. Tokens after ``last_page_len`` may hold anything, NaN too.
        """
        return self._run(q, paged_kv_cache, out, lse, return_lse)


class PagedPrefill(_Paged):
    """Many queries a sequence: FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, device: torch.device | str, *, backend: Backend = "auto") -> None:
        """``backend`` "auto": on a card whichever was measured to win for the plan's shape, else ``reference``.

        ValueError for a device that is not there, or a backend that is not there on it.
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
        """As ``PagedDecode.plan``. Sequence ``i`` has the queries ``qo_indptr[i]`` to ``qo_indptr[i + 1]``.

        They are those of its last tokens, whose K and V must be in the pages by the time of ``run``. ``causal``: each
        sees tokens up to its own; else all. A window needs ``causal``.
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
        """As ``PagedDecode.run``; ``q``: ``[queries, num_qo_heads, head_dim_qk]``, all sequences' one after another."""
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
        raise ValueError(f"{name} is {tuple(given.shape)} {given.dtype}; allowed: contiguous {shape} {dtype}")
    return given
