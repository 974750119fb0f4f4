"""Attention over scattered pages compared with torch's own over contiguous K and V, on the same device.

Decoding is one CUDA graph over all layers, each with pages and tensors of its own; the figure is bandwidth.
New tokens over a long prefix run layer by layer. The ceiling is the fastest of torch's kernels, which is
named. Its time does not include gathering the pages; ours includes everything.
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
from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.gpu.attention.backends import attend
from tierstore.gpu.attention.gathered import sdpa
from tierstore.gpu.attention.page_table import Paging
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill
from tierstore.host.free_memory import available_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    Act = Callable[[torch.Tensor, torch.Tensor], object]
    """Called with queries ``[queries, heads, dim]`` and planes ``[2, batch, heads, tokens, dim]``."""

_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Without the memory-efficient kernel, which does not support heads that share K and V."""


def decoders(device: torch.device, q: torch.Tensor, planes: torch.Tensor) -> dict[str, Act]:
    """Return the kernels that support one query per sequence of this shape; on the CPU, torch's own choice."""

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
    """Return the kernels that support the last tokens' queries of one sequence, causally.

    cuDNN has no such mask: it gets the earlier and the new tokens separately, and its two results are not
    merged.
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
        except RuntimeError:  # "No available kernel"
            continue
        found[name] = act
    return found


QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Heads of an 8B model."""
_CHECKED = 16
"""If there are many queries, this many at each end are compared with float64."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Medians of the pairs.

    ``ratio`` is the ceiling's time divided by ours, ``rel_error`` is against float64 (Frobenius).

    ``memory_layers`` is the peak of device memory besides the pages, as a share of one layer of all pages; -1 on
    the CPU, where it is not measured.
    """

    what: Literal["decode", "prefill"]
    batch: int
    context: int
    queries: int
    layers: int
    ms: float
    """Time per layer."""
    ceiling_ms: float
    ratio: float
    tbps: float
    """Bandwidth, with K and V counted once."""
    tflops: float
    rel_error: float
    backend: str
    ceiling: str
    ceilings_ms: Mapping[str, float]
    """Time per layer of each of torch's kernels that supports the shape."""
    memory_layers: float

    def plain(self) -> dict[str, object]:
        """Return the row for JSON."""
        return asdict(self)


class Pool:
    """Random pages of an 8B model as the store holds them: ``[pages, layers, 2, page_size, 8, 128]`` bfloat16."""

    def __init__(self, device: str, tokens: int, layers: int, page_size: int) -> None:
        """Allocate pages for ``tokens`` tokens. ConfigError unless they fit twice (scattered, contiguous)."""
        self.device = device_of(device)
        self.page_size, self.layers = page_size, layers
        shape = (-(-tokens // page_size), layers, 2, page_size, KV_HEADS, HEAD_DIM)
        wanted = 2 * prod(shape) * torch.bfloat16.itemsize
        on_card = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_card else available_nbytes()
        if free is not None and wanted > free:
            raise ConfigError(
                f"{tokens} tokens of {layers} layers take {format_size(wanted)}, as pages and in one piece, "
                f"but only {format_size(free)} are free"
            )
        self.pages = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        for first in range(0, len(self.pages), 64):
            self.pages[first : first + 64].normal_()

    def scattered(self, batch: int, tokens: int) -> NDArray[np.int64]:
        """Return the pages of ``batch`` sequences of ``tokens`` tokens each, one sequence after another."""
        number = batch * -(-tokens // self.page_size)
        return np.random.default_rng(number).permutation(len(self.pages))[:number]

    def whole(self, slots: NDArray[np.int64], batch: int, tokens: int, layer: int) -> torch.Tensor:
        """Return the K and V of these pages contiguously, ``[2, batch, heads, tokens, dim]``."""
        found = self.pages[torch.from_numpy(slots).to(self.device), layer]
        _, planes, size, heads, dim = found.shape
        found = found.view(batch, -1, planes, size, heads, dim).permute(2, 0, 4, 1, 3, 5)
        return found.reshape(planes, batch, heads, -1, dim)[:, :, :, :tokens].contiguous()

    def layer_nbytes(self, tokens: int) -> int:
        """Return the bytes of one layer of ``tokens`` tokens."""
        return 2 * tokens * KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize


def decode_row(pool: Pool, batch: int, tokens: int, pairs: int) -> AttentionRow:
    """Measure one token of each of ``batch`` sequences of ``tokens`` tokens."""
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
    """Measure ``queries`` new tokens over ``tokens`` earlier ones, all in pages, through ``layers`` layers."""
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
    """Plan one sequence of ``length`` tokens, the last of which are new."""
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
    """Return the error of some queries from ``first`` on; with one per sequence, of all."""
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
    """Return the peak of device memory that a call needs or keeps."""
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

    run()  # allocations of the first call are not measured
    return run


def _recorded(pool: Pool, act: Callable[[int], None]) -> Callable[[], None]:
    """Record all layers as one CUDA graph."""
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
