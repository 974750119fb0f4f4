"""Attention over scattered pages, compared with torch's attention over contiguous K and V on the same device.

There are two benchmarks. Decoding computes one token per sequence, with all layers recorded as one CUDA graph.
Prefill computes new tokens after a long prefix, layer by layer. The ceiling is the fastest torch kernel that
supports the shape; each row names that kernel. The ceiling's time does not include gathering the pages into
contiguous tensors, whereas the store's time includes all its work.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tierstore.bench.link import device_of, settle
from tierstore.errors import ConfigError
from tierstore.gpu.attention.backends import attend
from tierstore.gpu.attention.gathered import sdpa
from tierstore.gpu.attention.page_table import Paging
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill
from tierstore.host.free_memory import available_nbytes
from tierstore.types import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    Act = Callable[[torch.Tensor, torch.Tensor], object]
    """Attention function. Takes queries ``[queries, heads, dim]`` and K and V ``[2, batch, heads, tokens, dim]``."""

_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""The measured torch kernels. The memory-efficient kernel cannot share K and V heads between query heads."""


def decoders(device: torch.device, q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    """Return torch's attention functions for decoding (one query per sequence), by kernel name.

    Kernels that do not support the shapes of ``q`` and ``planes`` are left out. On the CPU, there is a single
    function, for which torch chooses the kernel.
    """

    def plain(q: torch.Tensor, planes: torch.Tensor) -> object:
        return scaled_dot_product_attention(q[:, :, None], planes[0], planes[1], enable_gqa=True)

    def only(backend: SDPBackend) -> Act:
        def act(q: torch.Tensor, planes: torch.Tensor) -> object:
            with sdpa_kernel([backend]):
                return plain(q, planes)

        return act

    if device.type != "cuda":
        return {"sdpa": plain}
    return _willing({name: only(backend) for name, backend in _BACKENDS.items()}, q, planes)


def fillers(device: torch.device, q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    """Return torch's attention functions for prefill, by kernel name: causal attention of a sequence's last tokens.

    Kernels that do not support the shapes of ``q`` and ``planes`` are left out. cuDNN does not support the mask
    that causal attention of the last tokens needs. The function for cuDNN therefore calls it twice, once for the
    earlier tokens and once for the new ones, and does not merge the results.
    """
    scale = float(q.shape[2]) ** -0.5

    def flash(q: torch.Tensor, planes: torch.Tensor) -> object:
        return sdpa("flash", q.transpose(0, 1)[None], planes[0], planes[1], True, scale)

    def cudnn(q: torch.Tensor, planes: torch.Tensor) -> object:
        rows, before = q.transpose(0, 1)[None], planes.shape[3] - len(q)
        old, new = planes[..., :before, :], planes[..., before:, :]
        return (
            sdpa("cudnn", rows, old[0], old[1], False, scale),
            sdpa("cudnn", rows, new[0], new[1], True, scale),
        )

    def masked(q: torch.Tensor, planes: torch.Tensor) -> object:
        length = planes.shape[3]
        mask = torch.ones(len(q), length, dtype=torch.bool).tril(length - len(q))
        rows = q.transpose(0, 1)[None]
        return scaled_dot_product_attention(rows, planes[0], planes[1], attn_mask=mask, enable_gqa=True)

    if device.type != "cuda":
        return {"sdpa": masked}
    return _willing({"flash": flash, "cudnn": cudnn}, q, planes)


def _willing(acts: dict[str, Act], q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    found = {}
    for name, act in acts.items():
        try:
            act(q, planes)
        except RuntimeError:  # torch: "No available kernel"
            continue
        found[name] = act
    return found


QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Number of query heads, number of KV heads and head size of an 8B model."""
_CHECKED = 16
"""In prefill, this many queries at the start and this many at the end are compared with a float64 result."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One row of the attention benchmark. Times are medians over the pairs of runs.

    ``context`` is the number of tokens per sequence before the new tokens, and ``queries`` is the number of new
    tokens. ``ratio`` is the median of the pairwise ratios of the ceiling's time to the store's. ``rel_error`` is the
    relative error of the store's result, compared with float64 in the Frobenius norm. ``memory_layers`` is the peak
    of device memory beyond the pages, divided by the size of one layer of all pages. It is -1 on the CPU, where it
    is not measured.
    """

    what: Literal["decode", "prefill"]
    batch: int
    context: int
    queries: int
    layers: int
    ms: float
    """The store's time per layer in milliseconds."""
    ceiling_ms: float
    ratio: float
    tbps: float
    """The store's rate in TB/s (10^12 bytes/s), if each byte of K and V is counted once."""
    tflops: float
    rel_error: float
    backend: str
    ceiling: str
    ceilings_ms: Mapping[str, float]
    """Time per layer in milliseconds, by name of the torch kernel, for all kernels that support the shape."""
    memory_layers: float

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return asdict(self)


class Pool:
    """Random pages of an 8B model, laid out as in the store: bfloat16 ``[pages, layers, 2, page_size, 8, 128]``."""

    def __init__(self, device: str, tokens: int, layers: int, page_size: int) -> None:
        """Allocate pages for ``tokens`` tokens.

        Raises:
            ConfigError: The device's memory cannot hold K and V twice, once in pages and once contiguous.
        """
        self.device = device_of(device)
        self.page_size, self.layers = page_size, layers
        shape = (-(-tokens // page_size), layers, 2, page_size, KV_HEADS, HEAD_DIM)
        wanted = 2 * prod(shape) * torch.bfloat16.itemsize
        on_card = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_card else available_nbytes()
        if free is not None and wanted > free:
            raise ConfigError(
                f"K and V of {tokens} tokens in {layers} layers take {format_size(wanted)} (one copy in pages and "
                f"one contiguous copy), but only {format_size(free)} is free; use fewer tokens or layers"
            )
        self.pages = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        for first in range(0, len(self.pages), 64):
            self.pages[first : first + 64].normal_()

    def scattered(self, batch: int, tokens: int) -> NDArray[np.int64]:
        """Choose random pages for ``batch`` sequences of ``tokens`` tokens.

        Return the slots of the pages in sequence order.
        """
        number = batch * -(-tokens // self.page_size)
        return np.random.default_rng(number).permutation(len(self.pages))[:number]

    def whole(self, slots: NDArray[np.int64], batch: int, tokens: int, layer: int) -> torch.Tensor:
        """Copy one layer of these pages to a contiguous tensor ``[2, batch, heads, tokens, dim]``."""
        found = self.pages[torch.from_numpy(slots).to(self.device), layer]
        _, planes, size, heads, dim = found.shape
        found = found.view(batch, -1, planes, size, heads, dim).permute(2, 0, 4, 1, 3, 5)
        return found.reshape(planes, batch, heads, -1, dim)[:, :, :, :tokens].contiguous()

    def layer_nbytes(self, tokens: int) -> int:
        """Return the size of K and V of ``tokens`` tokens in one layer, in bytes."""
        return 2 * tokens * KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize


def decode_row(pool: Pool, batch: int, tokens: int, pairs: int) -> AttentionRow:
    """Measure decoding: attention of one query per sequence, for ``batch`` sequences of ``tokens`` tokens."""
    slots = pool.scattered(batch, tokens)
    indptr, last = _indptr(slots, batch), [(tokens - 1) % pool.page_size + 1] * batch
    way = PagedDecode(pool.device, max_pages=len(slots))
    way.plan(
        indptr, slots, last, QUERY_HEADS, KV_HEADS, HEAD_DIM, pool.page_size,
        o_data_type=torch.float32,
    )  # fmt: skip
    q = torch.randn(batch, QUERY_HEADS, HEAD_DIM, device=pool.device).to(torch.bfloat16)
    out, lse = torch.empty(q.shape, device=pool.device), torch.empty(q.shape[:2], device=pool.device)

    def ours(layer: int) -> None:
        way.run(q, pool.pages[:, layer], out=out, lse=lse)

    peak = _peak(pool, lambda: ours(0))
    error = _error(out, q, pool.pages[:, 0], way.planned, 0)
    whole = [pool.whole(slots, batch, tokens, layer) for layer in range(pool.layers)]
    kernels = {
        name: _recorded(pool, _over(act, q, whole))
        for name, act in decoders(pool.device, q, whole[0]).items()
    }
    ceilings, best = _best(pool, kernels)
    found = _pairs(pool, _recorded(pool, ours), kernels[best], pairs)
    nbytes = batch * pool.layer_nbytes(tokens)
    return _row("decode", pool, (batch, tokens, 1, pool.layers), found, nbytes, error,
                (way.backend, best), ceilings, peak / nbytes)  # fmt: skip


def prefill_row(pool: Pool, tokens: int, queries: int, layers: int, pairs: int) -> AttentionRow:
    """Measure prefill: attention of ``queries`` new tokens after ``tokens`` earlier tokens, in ``layers`` layers.

    K and V of the new tokens are already in pages.
    """
    length = tokens + queries
    slots = pool.scattered(1, length)
    way = PagedPrefill(pool.device)
    q = torch.randn(queries, QUERY_HEADS, HEAD_DIM, device=pool.device).to(torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=pool.device)

    def ours(layer: int) -> None:
        way.run(q, pool.pages[:, layer], out=out, lse=lse)

    def planned() -> None:
        _plan(way, pool, slots, queries, length)
        ours(0)

    peak = _peak(pool, planned)
    checks = sorted({0, max(0, queries - _CHECKED)})
    error = max(_error(out, q, pool.pages[:, 0], way.planned, first) for first in checks)
    whole = [pool.whole(slots, 1, length, layer) for layer in range(layers)]
    kernels = {
        name: _each(layers, _over(act, q, whole)) for name, act in fillers(pool.device, q, whole[0]).items()
    }
    ceilings, best = _best(pool, kernels)
    found = _pairs(pool, _each(layers, ours), kernels[best], pairs)
    nbytes = pool.layer_nbytes(length)
    return _row("prefill", pool, (1, tokens, queries, layers), found, nbytes, error,
                (way.backend, best), ceilings, peak / nbytes)  # fmt: skip


def _plan(way: PagedPrefill, pool: Pool, slots: NDArray[np.int64], queries: int, length: int) -> None:
    """Plan attention for one sequence of ``length`` tokens, of which the last ``queries`` are new."""
    last = [(length - 1) % pool.page_size + 1]
    heads = (QUERY_HEADS, KV_HEADS, HEAD_DIM, pool.page_size)
    way.plan([0, queries], [0, len(slots)], slots, last, *heads, causal=True)


def _row(
    what: Literal["decode", "prefill"],
    pool: Pool,
    sizes: tuple[int, int, int, int],
    found: Sequence[tuple[float, float]],
    nbytes: int,
    error: float,
    names: tuple[str, str],
    ceilings: Mapping[str, float],
    memory: float,
) -> AttentionRow:
    batch, context, queries, layers = sizes
    ours, theirs = (median(column) / layers for column in zip(*found, strict=True))
    seen = context * queries + (queries * (queries + 1) // 2 if what == "prefill" else 0)
    return AttentionRow(
        what=what,
        batch=batch,
        context=context,
        queries=queries,
        layers=layers,
        ms=ours * 1e3,
        ceiling_ms=theirs * 1e3,
        ratio=median(b / a for a, b in found),
        tbps=nbytes / ours / 1e12,
        tflops=4 * batch * seen * QUERY_HEADS * HEAD_DIM / ours / 1e12,
        rel_error=error,
        backend=names[0],
        ceiling=names[1],
        ceilings_ms={name: seconds / layers * 1e3 for name, seconds in ceilings.items()},
        memory_layers=memory if pool.device.type == "cuda" else -1.0,
    )


def _indptr(slots: NDArray[np.int64], batch: int) -> list[int]:
    return [i * (len(slots) // batch) for i in range(batch + 1)]


def _error(out: torch.Tensor, q: torch.Tensor, pages: torch.Tensor, table: Paging, first: int) -> float:
    """Return the relative error of ``out``, compared with float64.

    In decoding, all queries are compared. In prefill, only ``_CHECKED`` queries are compared, starting at ``first``.
    """
    if table.num_queries == table.batch:
        want, _ = attend(q, pages, table, torch.float64)
        return float((out.double() - want).norm() / want.norm())
    end = min(len(q), first + _CHECKED)
    size = table.shape.page_size
    length = int(table.kv_lens[0]) - len(q) + end
    slots = table.indices[: -(-length // size)]
    part = Paging.of([0, end - first], [0, len(slots)], slots, [(length - 1) % size + 1], table.shape)
    want, _ = attend(q[first:end], pages, part, torch.float64)
    return float((out[first:end].double() - want).norm() / want.norm())


def _peak(pool: Pool, act: Callable[[], None]) -> int:
    """Call ``act`` and return the peak growth of device memory in bytes. Return 0 on the CPU."""
    if pool.device.type != "cuda":
        act()
        return 0
    settle(pool.device)
    before = torch.cuda.memory_allocated(pool.device)
    torch.cuda.reset_peak_memory_stats(pool.device)
    act()
    settle(pool.device)
    return int(torch.cuda.max_memory_allocated(pool.device)) - before


def _over(act: Act, q: torch.Tensor, whole: Sequence[torch.Tensor]) -> Callable[[int], None]:
    def of_layer(layer: int) -> None:
        act(q, whole[layer])

    return of_layer


def _each(layers: int, act: Callable[[int], None]) -> Callable[[], None]:
    def run() -> None:
        for layer in range(layers):
            act(layer)

    run()  # the first call allocates memory, which must not be measured
    return run


def _recorded(pool: Pool, act: Callable[[int], None]) -> Callable[[], None]:
    """Record calls for all layers as one CUDA graph, and return a function that replays it.

    On the CPU, return a function that makes the calls.
    """
    run = _each(pool.layers, act)
    if pool.device.type != "cuda":
        return run
    settle(pool.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def _best(pool: Pool, kernels: Mapping[str, Callable[[], None]]) -> tuple[dict[str, float], str]:
    times = {name: _seconds(pool, run) for name, run in kernels.items()}
    return times, min(times, key=lambda name: times[name])


def _pairs(
    pool: Pool, ours: Callable[[], None], theirs: Callable[[], None], pairs: int
) -> list[tuple[float, float]]:
    return [(_seconds(pool, ours), _seconds(pool, theirs)) for _ in range(pairs)]


def _seconds(pool: Pool, act: Callable[[], None]) -> float:
    settle(pool.device)
    if pool.device.type != "cuda":
        start = perf_counter()
        act()
        return perf_counter() - start
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    marks[0].record()
    act()
    marks[1].record()
    marks[1].synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3
