"""Attention over pages of which some are in HBM and the others stream from host memory, layer by layer.

``StreamedDecode`` and ``StreamedPrefill`` are planned and run like ``PagedDecode`` and ``PagedPrefill``. Each page
is in one of two pools: HBM or host memory. Pages in HBM are read in place. Pages in host memory are read in the slabs
of a ``PageStream`` as they arrive, chunk by chunk. Each page is streamed once per layer, no matter how many sequences
contain it. The partial results are merged in float32 by means of their log-sum-exps. Nothing is approximated.

``divide`` splits a step into passes. In a pass, queries of several sequences that all see the same pages are packed
as if they belonged to one sequence, so that each page is also read only once from HBM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.gpu.attention.backends import (
    AttentionBackend,
    Backend,
    ReferenceBackend,
    for_many,
    for_one,
    merge_states,
    require_backend,
)
from tierstore.gpu.attention.gathered import Gathered, Room
from tierstore.gpu.attention.in_place import InPlace, Parts
from tierstore.gpu.attention.page_table import Numbers, Paging, Shape
from tierstore.gpu.attention.paged import place_for, shape_of
from tierstore.gpu.pool import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from tierstore.gpu.attention.page_stream import PageStream


Bools = torch.Tensor | NDArray[np.bool_] | Sequence[bool]
"""A one-dimensional sequence of bools."""


class Pass(NamedTuple):
    """Attention of some queries over pages that are present at the same time.

    Attributes:
        table: The page table. Each of its sequences stands for a ``_Span``.
        queries: The indices of its queries in the step. None if they are all queries of the step, in order.
    """

    table: Paging
    queries: NDArray[np.int64] | None

    def equal(self, other: Pass) -> bool:
        """Return whether both passes compute the same thing."""
        mine, its = self.table, other.table
        pairs = (
            (mine.qo_indptr, its.qo_indptr),
            (mine.indptr, its.indptr),
            (mine.indices, its.indices),
            (mine.kv_lens, its.kv_lens),
            (mine.ends, its.ends),
            (self.queries, other.queries),
        )
        return mine.shape == its.shape and all(np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


class Division(NamedTuple):
    """A step, divided into passes.

    Attributes:
        resident: The passes over pages in HBM. Slots are those of the step.
        chunks: Host slots of the pages of each chunk. No page is in two chunks.
        streamed: For each chunk, the passes over its pages. Slot i is page i of the chunk.
    """

    resident: tuple[Pass, ...]
    chunks: tuple[NDArray[np.int64], ...]
    streamed: tuple[tuple[Pass, ...], ...]


class _Entries(NamedTuple):
    """Entries of block tables, in the order of the block tables, as arrays with one element per entry.

    Attributes:
        sequence: The index of the sequence.
        page: The index of the page in its sequence.
        slot: The slot of the page.
        whole: Whether all queries of the sequence see all tokens of the page.
    """

    sequence: NDArray[np.int64]
    page: NDArray[np.int64]
    slot: NDArray[np.int64]
    whole: NDArray[np.bool_]

    def where(self, mask: NDArray[np.bool_]) -> _Entries:
        """Return the entries for which ``mask`` is true."""
        return _Entries(self.sequence[mask], self.page[mask], self.slot[mask], self.whole[mask])


class _Span(NamedTuple):
    """Pages that the queries of some sequences see, as if these queries belonged to one sequence.

    Attributes:
        readers: Indices of the sequences.
        slots: Slots of the pages.
        kv_len: Number of tokens from the first token of these pages to the token of the last query.
        end: Number of tokens in the pages.
    """

    readers: NDArray[np.int64]
    slots: NDArray[np.int64]
    kv_len: int
    end: int


def divide(table: Paging, in_host: NDArray[np.bool_], rows: int) -> Division:
    """Divide a step into passes.

    Args:
        table: The page table of the step. Its slots are slots of one of the two pools.
        in_host: For each entry of ``table.indices``, whether it is a slot in host memory.
        rows: Maximum number of pages in a chunk.
    """
    resident, hosts = (_entries(table, np.flatnonzero(mask)) for mask in (~in_host, in_host))
    return Division(_passes(table, resident), *_divide_streamed(table, hosts, rows))


def _divide_streamed(
    table: Paging, entries: _Entries, rows: int
) -> tuple[tuple[NDArray[np.int64], ...], tuple[tuple[Pass, ...], ...]]:
    """Return the chunks and their passes. Pages are streamed in the order in which block tables contain them."""
    slots, first, inverse = np.unique(entries.slot, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(slots), dtype=np.int64)
    rank[order] = np.arange(len(slots))
    place = rank[inverse.reshape(-1)]
    slots = slots[order]
    chunks = tuple(slots[start : start + rows] for start in range(0, len(slots), rows))
    moved = entries._replace(slot=place % rows)
    passes = tuple(_passes(table, moved.where(place // rows == chunk)) for chunk in range(len(chunks)))
    return chunks, passes


def _entries(table: Paging, at: NDArray[np.intp]) -> _Entries:
    """Return the entries at these positions of ``table.indices``, without the pages that no query sees."""
    size = table.shape.page_size
    sequence = np.searchsorted(table.indptr, at, side="right") - 1
    page = at - table.indptr[sequence]
    whole = (page + 1) * size <= (table.kv_lens - table.widths)[sequence] + 1
    whole &= table.shape.window_left < 0
    found = _Entries(sequence, page, table.indices[at], whole)
    return found.where((table.widths[sequence] > 0) & ((page + 1) * size > table.first_seen[sequence]))


def _once(entries: _Entries, batch: int) -> _Entries:
    """If a sequence contains a slot several times, make all of its entries but the first not whole.

    Attention must count each entry, but a set of whole pages contains a slot only once.
    """
    _, first = np.unique(entries.slot * batch + entries.sequence, return_index=True)
    if len(first) == len(entries.slot):
        return entries
    whole = np.zeros(len(entries.slot), dtype=np.bool_)
    whole[first] = entries.whole[first]
    return entries._replace(whole=whole)


def _passes(table: Paging, entries: _Entries) -> tuple[Pass, ...]:
    """Return passes such that each query sees each of the entries' pages in exactly one pass."""
    spans = _spans(table, _once(entries, table.batch))
    spans.sort(key=lambda span: (-len(span.readers), int(span.readers[0])))
    groups: list[tuple[set[int], list[_Span]]] = []
    for span in spans:
        readers = set(span.readers.tolist())
        for taken, group in groups:
            if taken.isdisjoint(readers):
                taken |= readers
                group.append(span)
                break
        else:
            groups.append((readers, [span]))
    return tuple(_pass(table, sorted(group, key=lambda span: int(span.readers[0]))) for _, group in groups)


def _pass(table: Paging, spans: Sequence[_Span]) -> Pass:
    widths = [int(table.widths[span.readers].sum()) for span in spans]
    rows = [
        np.arange(table.qo_indptr[reader], table.qo_indptr[reader + 1])
        for span in spans
        for reader in span.readers
    ]
    queries = np.concatenate(rows)
    whole = np.array_equal(queries, np.arange(table.num_queries))
    qo_indptr, indptr = (
        np.cumsum([0, *each], dtype=np.int64) for each in (widths, [len(s.slots) for s in spans])
    )
    lens, ends = (
        np.array(each, dtype=np.int64) for each in ([s.kv_len for s in spans], [s.end for s in spans])
    )
    shape = replace(table.shape, out_dtype=torch.float32)
    slots = np.concatenate([span.slots for span in spans])
    return Pass(Paging(qo_indptr, indptr, slots, lens, ends, shape), None if whole else queries)


def _spans(table: Paging, entries: _Entries) -> list[_Span]:
    """Return spans that contain each entry once.

    Whole pages with the same readers form a span, in any order. All other pages keep their positions, and a span
    contains adjacent ones.
    """
    shared = entries.where(entries.whole)
    rest = entries.where(~entries.whole)
    runs = np.flatnonzero(np.diff(rest.sequence, prepend=-1) | (np.diff(rest.page, prepend=-2) != 1))
    alone: dict[int, NDArray[np.int64]] = {}
    empty: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    spans = []
    for readers, slots in _groups(table, shared):
        if len(readers) == 1:
            alone[int(readers[0])] = slots
        else:
            end = len(slots) * table.shape.page_size
            spans.append(_Span(readers, slots, end + int(table.widths[readers].sum()), end))
    for first, stop in pairwise([*runs, len(rest.page)]):
        sequence, page, before = int(rest.sequence[first]), int(rest.page[first]), empty
        # The position of a whole page does not matter, so whole pages can come before a run that starts no later than
        # the first query.
        if int(table.kv_lens[sequence]) - page * table.shape.page_size >= int(table.widths[sequence]):
            before = alone.pop(sequence, empty)
        spans.append(_run(table, sequence, before, rest.slot[first:stop], page))
    spans += [_run(table, sequence, slots, slots[:0], None) for sequence, slots in alone.items()]
    return spans


def _run(
    table: Paging, sequence: int, before: NDArray[np.int64], slots: NDArray[np.int64], page: int | None
) -> _Span:
    """Return the span of whole pages, and of adjacent pages of which the first is page ``page`` of the sequence."""
    size, readers = table.shape.page_size, np.array([sequence])
    whole = len(before) * size
    if page is None:
        return _Span(readers, before, whole + int(table.widths[sequence]), whole)
    left = int(table.kv_lens[sequence]) - page * size
    end = min(left, len(slots) * size)
    return _Span(readers, np.concatenate([before, slots]), whole + left, whole + end)


def _groups(table: Paging, entries: _Entries) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield sets of sequences, and the slots that exactly these sequences contain."""
    if not len(entries.slot):
        return
    slots, inverse = np.unique(entries.slot, return_inverse=True)
    contains = np.zeros((len(slots), table.batch), dtype=np.bool_)
    contains[inverse.reshape(-1), entries.sequence] = True
    bits = np.packbits(contains, axis=1)
    _, first, group = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    for number, example in enumerate(first):
        yield np.flatnonzero(contains[example]), slots[group.reshape(-1) == number]


class _Planned:
    """A pass with its backend, and the indices of its queries on the device."""

    def __init__(self, one: Pass, way: AttentionBackend, device: torch.device) -> None:
        way.plan(one.table)
        self.work = one
        self.queries = None if one.queries is None else torch.from_numpy(one.queries).to(device)
        self._way = way

    def run(self, q: torch.Tensor, pages: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of the pass's queries, ``[queries, heads, dim]``, and their log-sum-exps, in float32."""
        mine = q if self.queries is None else q.index_select(0, self.queries)
        out = torch.empty(len(mine), q.shape[1], dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        self._way.run(mine, pages, out, lse)
        return out, lse


class _Sums:
    """The attention of all queries of a step over the keys of the passes so far, in float32."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor, passes: int, kernels: ModuleType | None) -> None:
        """Set the tensors for the complete results, and the number of passes that will be added."""
        self._kernels: Any = kernels
        self._out, self._lse = out, lse
        self._sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._added, self._passes = 0, passes
        if not passes:
            out.zero_()
            lse.fill_(-torch.inf)

    def add(self, found: torch.Tensor, found_lse: torch.Tensor, queries: torch.Tensor | None) -> None:
        """Merge the attention of ``queries`` over further keys. None stands for all queries."""
        self._added += 1
        first, last = self._added == 1, self._added == self._passes
        if first and queries is not None:
            self._sums.zero_()
            self._lse.fill_(-torch.inf)
            first = False
        if self._kernels is None:
            self._merge(found, found_lse, queries, first)
        else:
            direct = last and queries is None
            self._join(found, found_lse, queries, first, direct)
            last &= not direct
        if last:
            self._out.copy_(self._sums)

    def _merge(
        self, found: torch.Tensor, found_lse: torch.Tensor, queries: torch.Tensor | None, first: bool
    ) -> None:
        rows = slice(None) if queries is None else queries
        if not first:
            states = [torch.stack(pair) for pair in ((self._sums[rows], found), (self._lse[rows], found_lse))]
            found, found_lse = merge_states(*states)
        self._sums[rows], self._lse[rows] = found, found_lse

    def _join(
        self,
        found: torch.Tensor,
        found_lse: torch.Tensor,
        queries: torch.Tensor | None,
        first: bool,
        direct: bool,
    ) -> None:
        count, heads, dim = found.shape
        self._kernels.join[(count, heads)](
            self._sums, self._lse, found, found_lse, self._out, self._lse if queries is None else queries,
            found.stride(1), found.stride(0), found_lse.stride(1), found_lse.stride(0),
            HEADS=heads, DV=dim, BLOCK_V=1 << (dim - 1).bit_length(), FIRST=first, LAST=direct,
            PLACED=queries is not None, num_warps=1,
        )  # fmt: skip


class _Stream(NamedTuple):
    """The streamed passes of a plan, and everything that determines them.

    ``positions`` and ``slots`` are those of all pages in host memory. ``entries`` are the pages that a query sees.
    """

    table: Paging
    positions: NDArray[np.intp]
    slots: NDArray[np.int64]
    entries: _Entries
    chunks: tuple[NDArray[np.int64], ...]
    passes: tuple[tuple[_Planned, ...], ...]

    def stays(self, table: Paging, positions: NDArray[np.intp], slots: NDArray[np.int64]) -> bool:
        """Return whether a plan with this table has the same streamed passes. If in doubt, return False."""
        old = self.table
        if old.shape != table.shape or not (
            np.array_equal(old.qo_indptr, table.qo_indptr)
            and np.array_equal(old.indptr, table.indptr)
            and np.array_equal(self.positions, positions)
            and np.array_equal(self.slots, slots)
        ):
            return False
        # Sequences that have grown still see all of their pages in host memory whole.
        whole = len(self.entries.slot) == len(self.slots) and bool(self.entries.whole.all())
        grown = whole and bool((table.kv_lens >= old.kv_lens).all())
        return grown or np.array_equal(old.kv_lens, table.kv_lens)


class _Streamed:
    """Plans and runs attention over pages in HBM and over streamed pages. Not thread-safe."""

    def __init__(self, stream: PageStream, backend: Backend, kernels: ModuleType | None) -> None:
        self._stream, self._device = stream, stream.device
        self.backend: Backend = "reference" if for_one(self._device, backend) == "reference" else backend
        """The backend of the passes. "auto" on a GPU: the faster one of "triton" and "gathered" for each pass."""
        if kernels is None:
            require_backend(self._device, self.backend)
            if self.backend != "reference":
                from tierstore.gpu.attention import kernels as own

                kernels = own
        self._kernels = kernels
        self._parts, self._room = Parts(), Room()
        self._page_table: Paging | None = None
        self._layers: tuple[int, ...] = ()
        self._resident: tuple[_Planned, ...] = ()
        self._streamed: _Stream | None = None
        self._released = 0

    @property
    def planned(self) -> Paging:
        """Return the page table of the last plan. Raises ValueError before the first plan."""
        if self._page_table is None:
            raise ValueError("no plan yet: call plan() before run()")
        return self._page_table

    @property
    def streamed_pages(self) -> int:
        """Return the number of pages that the last plan streams per layer."""
        return 0 if self._streamed is None else sum(map(len, self._streamed.chunks))

    def _plan(self, table: Paging, in_host: Bools, layers: Sequence[int] | None) -> None:
        mask = _mask(in_host, len(table.indices))
        self._require_alike(table.shape)
        count = self._stream.spec.num_layers
        order = tuple(range(count)) if layers is None else tuple(layers)
        if len(set(order)) < len(order) or not all(0 <= layer < count for layer in order):
            raise ValueError(f"layers must be different integers from 0 to {count - 1}, got {list(order)}")
        resident = _entries(table, np.flatnonzero(~mask))
        streamed, prepared = (
            self._again(table, np.flatnonzero(mask)),
            self._prepared(_passes(table, resident)),
        )
        # A plan without pages in host memory leaves the copies ahead for other plans alone.
        if streamed.chunks or self._follows():
            self._stream.follow(streamed.chunks, order)
        self._resident, self._streamed, self._page_table, self._layers = prepared, streamed, table, order
        self._released = self._stream.released

    def _follows(self) -> bool:
        """Return whether the stream follows the last plan of this object."""
        return self._streamed is not None and self._stream.chunks is self._streamed.chunks

    def _again(self, table: Paging, positions: NDArray[np.intp]) -> _Stream:
        """Return the streamed passes. Those of the last plan are reused if nothing that they depend on has changed."""
        old, slots = self._streamed, table.indices[positions]
        if old is not None and old.stays(table, positions, slots):
            return old
        entries = _entries(table, positions)
        chunks, passes = _divide_streamed(table, entries, self._stream.rows)
        before = () if old is None else old.passes
        prepared = tuple(
            was if was is not None and _equal(was, each) else self._prepared(each)
            for each, was in zip(passes, chain(before, repeat(None)), strict=False)
        )
        return _Stream(table, positions, slots, entries, chunks, prepared)

    def _prepared(self, passes: Sequence[Pass]) -> tuple[_Planned, ...]:
        return tuple(_Planned(one, self._make(one.table), self._device) for one in passes)

    def _make(self, table: Paging) -> AttentionBackend:
        if self.backend == "reference":
            return ReferenceBackend()
        if for_many(self._device, self.backend, table) == "gathered":
            return Gathered(self._device, kernels=self._kernels, room=self._room)
        return InPlace(self._device, kernels=self._kernels, parts=self._parts)

    def _require_alike(self, shape: Shape) -> None:
        """Raise ValueError unless the stream's pages have the planned shape."""
        spec = self._stream.spec
        want = (spec.page_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec))
        found = (shape.page_size, shape.num_kv_heads, shape.head_dim, shape.dtype)
        names = ("page_size", "num_kv_heads", "head_dim", "q_data_type")
        for name, planned, streamed in zip(names, found, want, strict=True):
            if planned != streamed:
                raise ValueError(f"{name} must be {streamed}, as in the pages of the stream, got {planned}")

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        layer: int,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of one layer. On a GPU, queue it on the current stream without blocking.

        Args:
            q: Queries, as in ``PagedDecode.run`` or ``PagedPrefill.run``.
            paged_kv_cache: The layer's pages in HBM, ``[num_slots, planes, page_size, num_kv_heads, head_dim]``.
            layer: The layer of the host pages to stream. Calls in the order of the planned ``layers`` are fastest.
            out: See ``PagedDecode.run``.
            lse: See ``PagedDecode.run``.
            return_lse: Whether to return ``lse`` too.

        Returns:
            See ``PagedDecode.run``.

        Raises:
            ValueError: A tensor does not have the planned shape or dtype, the layer was not planned, ``plan`` was not
                called, or the stream has been released since.
            RuntimeError: A copy failed.
        """
        table = self.planned
        assert self._streamed is not None
        table.require(q, paged_kv_cache)
        planes = self._stream.spec.shape[1]
        if paged_kv_cache.shape[1] != planes:
            raise ValueError(
                f"paged_kv_cache must have {planes} planes, as the pages of the stream, got {paged_kv_cache.shape[1]}"
            )
        if layer not in self._layers:
            raise ValueError(f"layer must be one of the planned layers {list(self._layers)}, got {layer}")
        if self._released != self._stream.released:
            raise ValueError("the stream was released after plan(): call plan() again before run()")
        if self._streamed.chunks and not self._follows():
            self._stream.follow(self._streamed.chunks, self._layers)
        dim = table.shape.head_dim_vo
        want = (*q.shape[:2], dim)
        out = place_for("out", out, want, table.shape.out_dtype, q.device)
        lse = place_for("lse", lse, want[:2], torch.float32, q.device)
        passes = len(self._resident) + sum(map(len, self._streamed.passes))
        sums = _Sums(out, lse, passes, self._kernels)
        for one in self._resident:
            sums.add(*one.run(q, paged_kv_cache, dim), one.queries)
        for chunk, pages in self._stream.layer(layer) if self._streamed.chunks else ():
            for one in self._streamed.passes[chunk]:
                sums.add(*one.run(q, pages, dim), one.queries)
        return (out, lse) if return_lse else out


class StreamedDecode(_Streamed):
    """``PagedDecode`` for sequences of which some pages are in host memory."""

    def __init__(
        self, stream: PageStream, *, backend: Backend = "auto", kernels: ModuleType | None = None
    ) -> None:
        """Choose the backend of the passes.

        Args:
            stream: The stream of host pages. Objects that are run in turn may share it, but copies that are queued
                ahead for one of them are discarded when another one is planned.
            backend: "auto" chooses "reference" on a CPU. On a GPU, it chooses "triton", or "gathered" for passes with
                so many queries that it was faster in measurements. "gathered" itself is not accepted.
            kernels: The module with the kernels. None for the package's own, which need a GPU.

        Raises:
            ValueError: The device does not support the backend.
        """
        super().__init__(stream, backend, kernels)

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
        in_host: Bools,
        layers: Sequence[int] | None = None,
        head_dim_vo: int | None = None,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        """Plan a step for all layers with the same shape, and start to stream its first layer.

        The pages in host memory must not change, and must stay pinned, until the event that ``PageStream.release``
        returns has completed. A later plan without them is not enough, because copies that are already queued still
        read them. In HBM, the pages of a layer must be complete when ``run`` is called for it. On a GPU, call ``plan``
        and ``run`` on the same stream.

        Args:
            indptr: See ``PagedDecode.plan``.
            indices: Slots of the pages: host slots where ``in_host`` is true, else HBM slots.
            last_page_len: See ``PagedDecode.plan``.
            num_qo_heads: See ``PagedDecode.plan``.
            num_kv_heads: See ``PagedDecode.plan``.
            head_dim: See ``PagedDecode.plan``.
            page_size: See ``PagedDecode.plan``.
            in_host: ``[len(indices)]``. Whether each page is streamed from host memory.
            layers: The layers for which ``run`` will be called in each step, in this order. None for all layers of the
                pages.
            head_dim_vo: See ``PagedDecode.plan``.
            window_left: See ``PagedDecode.plan``. Pages before the window are not streamed.
            sm_scale: See ``PagedDecode.plan``.
            q_data_type: See ``PagedDecode.plan``.
            o_data_type: See ``PagedDecode.plan``.

        Raises:
            ValueError: An argument is invalid.
        """
        shape = shape_of(
            num_qo_heads, num_kv_heads, head_dim, page_size, head_dim_vo, True, window_left, sm_scale,
            q_data_type, o_data_type,
        )  # fmt: skip
        self._plan(Paging.of(None, indptr, indices, last_page_len, shape), in_host, layers)


class StreamedPrefill(_Streamed):
    """``PagedPrefill`` with ``causal=True``, for sequences of which some pages are in host memory."""

    def __init__(
        self, stream: PageStream, *, backend: Backend = "auto", kernels: ModuleType | None = None
    ) -> None:
        """Choose the backend of the passes. See ``StreamedDecode``."""
        super().__init__(stream, backend, kernels)

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
        in_host: Bools,
        layers: Sequence[int] | None = None,
        head_dim_vo: int | None = None,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        """Plan a step for all layers with the same shape. See ``StreamedDecode.plan`` for the other arguments.

        Args:
            qo_indptr: ``[batch + 1]``. See ``PagedPrefill.plan``.
        """
        shape = shape_of(
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo, True, window_left, sm_scale,
            q_data_type, o_data_type,
        )  # fmt: skip
        table = Paging.of(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape)
        self._plan(table, in_host, layers)


def _equal(planned: Sequence[_Planned], passes: Sequence[Pass]) -> bool:
    return len(planned) == len(passes) and all(
        was.work.equal(one) for was, one in zip(planned, passes, strict=True)
    )


def _mask(in_host: Bools, length: int) -> NDArray[np.bool_]:
    found = in_host.cpu().numpy() if isinstance(in_host, torch.Tensor) else np.asarray(in_host)
    if found.shape != (length,) or (length and found.dtype != np.bool_):
        raise ValueError(
            f"in_host must be one bool for each of the {length} indices, got {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.bool_)
