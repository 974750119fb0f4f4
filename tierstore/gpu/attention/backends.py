"""The backends that compute attention over pages, and the choice among them.

``attend`` and ``ReferenceBackend`` are plain torch. They run on the CPU, and other backends are tested against
them. ``InPlace`` and ``Gathered`` are in separate modules. ``for_one`` and ``for_many`` choose a backend.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch

from tierstore.gpu.attention import gathered
from tierstore.gpu.attention.in_place import InPlace
from tierstore.gpu.attention.page_table import Paging


def attend(
    q: torch.Tensor, pages: torch.Tensor, table: Paging, wide: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in plain torch, gathering one sequence at a time.

    Args:
        q: Queries, ``[queries, num_qo_heads, head_dim]``.
        pages: ``[num_slots, planes, page_size, num_kv_heads, head_dim]``, any strides. Tokens that no query
            sees may contain any value, even NaN.
        table: The page table of the step.
        wide: The dtype of sums and results.

    Returns:
        The results ``[queries, num_qo_heads, head_dim_vo]``, and the natural logarithms of the sums of
        exp(scores), ``[queries, num_qo_heads]``. A query that sees no token gets 0 and -inf.
    """
    shape = table.shape
    out = torch.zeros(table.num_queries, shape.num_qo_heads, shape.head_dim_vo, dtype=wide, device=q.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=wide, device=q.device)
    for row in range(table.batch):
        rows = slice(int(table.qo_indptr[row]), int(table.qo_indptr[row + 1]))
        if table.ends[row] > table.first_seen[row] and rows.start < rows.stop:
            out[rows], lse[rows] = _attend_one(q[rows].to(wide), pages, table, row)
    return out, lse


def gather(pages: torch.Tensor, table: Paging, row: int, first: int, end: int) -> torch.Tensor:
    """Copy tokens ``[first, end)`` of the sequence with index ``row``, reading only their pages.

    Returns:
        ``[planes, end - first, num_kv_heads, head_dim]``.
    """
    size = table.shape.page_size
    start = int(table.indptr[row])
    slots = torch.from_numpy(table.indices[start + first // size : start - (-end // size)])
    rows = pages.index_select(0, slots.to(pages.device)).transpose(0, 1).flatten(1, 2)
    skip = first % size
    return rows[:, skip : skip + end - first]


def _attend_one(
    q: torch.Tensor, pages: torch.Tensor, table: Paging, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, width = table.shape, len(q)
    first, end, length = (int(x[row]) for x in (table.first_seen, table.ends, table.kv_lens))
    planes = gather(pages, table, row, first, end).to(q.dtype)
    keys, values = planes[0], planes[-1][..., : shape.head_dim_vo]
    grouped = q.view(width, shape.num_kv_heads, shape.group, shape.head_dim)
    scores = torch.einsum("qhgd,nhd->qhgn", grouped, keys) * shape.sm_scale
    if shape.causal:
        place = torch.arange(length - width, length, device=q.device)[:, None]
        token = torch.arange(first, end, device=q.device)[None]
        hidden = token > place
        if shape.window_left >= 0:
            hidden |= token < place - shape.window_left
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    floor = lse.masked_fill(lse == -torch.inf, 0.0)  # a query may see none of these tokens
    out = torch.einsum("qhgn,nhd->qhgd", torch.exp(scores - floor[..., None]), values)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: The result over each set, ``[sets, ..., head_dim_vo]``.
        lses: The natural logarithms of the sums of exp(scores), ``[sets, ...]``. -inf for a set in which the
            query sees no key.

    Returns:
        The result and the logarithms for the union, without the first dimension and with the same dtypes.
    """
    top = lses.amax(0)
    floor = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lses - floor)
    total = weights.sum(0)
    safe = total.masked_fill(total == 0, 1.0)
    out = (weights[..., None] * outs).sum(0) / safe[..., None]
    return out.to(outs.dtype), floor + torch.log(total)


Backend = Literal["auto", "reference", "triton", "gathered"]
"""``reference`` is plain torch. ``triton`` uses kernels that read pages in place.

``gathered`` gathers a limited number of pages at a time for torch's SDPA kernels. ``auto`` chooses the
fastest backend for the device and the shape.
"""

GATHERED_QUERIES = 512
GATHERED_WORK = 1 << 36
"""Thresholds above which gathering is faster, measured on an H200 (docs/benchmarks/attention.md).

Gathering is faster if at least one sequence reaches both thresholds. ``GATHERED_QUERIES`` is a number of queries.
``GATHERED_WORK`` is the product of the numbers of queries, tokens and query heads, and head_dim. Below the
thresholds, the additional launches cost more time than gathering saves.
"""


class AttentionBackend(Protocol):
    """Computes the attention of a step."""

    def plan(self, table: Paging) -> None:
        """Prepare a step. The plan is valid for any number of layers."""
        ...

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compute attention into ``out`` and ``lse`` (float32) on the current stream."""
        ...


class ReferenceBackend:
    """The plain torch backend, for any device. Sums are in float32."""

    def plan(self, table: Paging) -> None:
        """Store the page table."""
        self._page_table = table

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compute attention into ``out`` and ``lse``."""
        found = attend(q, pages, self._page_table)
        out.copy_(found[0])
        lse.copy_(found[1])


def device_of(device: torch.device | str) -> torch.device:
    """Return ``device`` as a torch device. Raises ValueError if torch does not find the GPU."""
    found = torch.device(device)
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            allowed = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
            raise ValueError(f'device must be one of {allowed} on this machine, got "{found}"')
    return found


def require_backend(device: torch.device, name: Backend) -> None:
    """Raise ValueError if the backend is unknown or does not support this type of device."""
    allowed = get_args(Backend) if device.type == "cuda" else ("auto", "reference")
    if name not in allowed:
        raise ValueError(f'backend must be one of {", ".join(allowed)} on {device.type}, got "{name}"')


def make(name: Backend, device: torch.device, max_pages: int | None = None) -> AttentionBackend:
    """Create the backend with this name. Raises ValueError in the same cases as ``require_backend``."""
    require_backend(device, name)
    if name == "reference":
        return ReferenceBackend()
    if name == "gathered":
        return gathered.Gathered(device)
    return InPlace(device, max_pages=max_pages)


def for_one(device: torch.device, asked: Backend) -> Backend:
    """Choose the backend for one query per sequence.

    Raises:
        ValueError: ``asked`` is "gathered", which would copy pages that are read only once.
    """
    if asked == "gathered":
        raise ValueError('backend "gathered" cannot decode: use "auto", "reference" or "triton"')
    if asked == "auto":
        return "triton" if device.type == "cuda" else "reference"
    return asked


def for_many(device: torch.device, asked: Backend, table: Paging) -> Backend:
    """Choose the backend for many queries per sequence.

    Raises:
        ValueError: ``asked`` is "gathered", but torch's kernels do not support the shape.
    """
    fits = gathered.fits(table)
    if asked == "gathered" and not fits:
        raise ValueError(
            'backend "gathered" needs window_left -1, a head_dim that is a multiple of 8 up to 128, the same '
            f"head_dim_vo, and a 16-bit dtype; got window_left {table.shape.window_left}, head_dim "
            f"{table.shape.head_dim}, head_dim_vo {table.shape.head_dim_vo} and {table.shape.dtype}: "
            "use another backend"
        )
    if asked != "auto":
        return asked
    if device.type != "cuda":
        return "reference"
    row = table.shape.num_qo_heads * table.shape.head_dim
    enough = (table.widths >= GATHERED_QUERIES) & (table.widths * table.ends * row >= GATHERED_WORK)
    return "gathered" if fits and bool(enough.any()) else "triton"
