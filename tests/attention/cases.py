"""Attention problems with scattered pages, NaN in every token that no query may see, and a reference result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from tierstore.gpu.attention.backends import AttentionBackend, attend
from tierstore.gpu.attention.page_table import Paging, Shape

LAYERS = 3
SPARE_SLOTS = 3

TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 3e-3}
"""Relative Frobenius error. Weights are rounded to the pages' dtype before they are multiplied by the values."""


@dataclass(frozen=True)
class Case:
    """The sizes of a problem: ``lens`` in tokens and ``widths`` in queries, for each sequence.

    If ``widths`` is None, each sequence has one query and the rules of ``PagedDecode`` apply.
    """

    lens: Sequence[int]
    widths: Sequence[int] | None = None
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window_left: int = -1
    layout: str = "BLKNHD"
    seed: int = 0
    out_dtype: torch.dtype = field(default=torch.float32)

    @property
    def shape(self) -> Shape:
        return Shape(
            num_qo_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_vo=self.value_dim or self.head_dim,
            page_size=self.page_size,
            sm_scale=0.7 * self.head_dim**-0.5,
            causal=self.causal,
            window_left=self.window_left,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
        )


@dataclass(frozen=True)
class Scene:
    """A case with tensors. ``pages`` holds one layer, with the strides of the case's layout."""

    table: Paging
    q: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def of(cls, case: Case, device: str = "cpu") -> Scene:
        chance = torch.Generator().manual_seed(case.seed)
        counts = [-(-length // case.page_size) for length in case.lens]
        total = sum(counts)
        slots = torch.randperm(total + SPARE_SLOTS, generator=chance)[:total].tolist()
        starts = np.concatenate([[0], np.cumsum(counts)])
        last = [(length - 1) % case.page_size + 1 if length else 0 for length in case.lens]
        queries = None if case.widths is None else np.concatenate([[0], np.cumsum(case.widths)])
        table = Paging.of(queries, starts, slots, last, case.shape)
        pages = _pages(case, total + SPARE_SLOTS, chance, device)
        _poison(pages, table)
        # Pages before the window are never read, so their indices may be invalid.
        for row, first in enumerate(table.first_seen):
            table.indices[starts[row] : starts[row] + int(first) // case.page_size] = -(10**8)
        heads = case.shape.num_qo_heads
        q = torch.randn(table.num_queries, heads, case.head_dim, generator=chance)
        return cls(table, q.to(device, case.dtype), pages)

    def run(self, way: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan and run the attention, with NaN in the output buffers. Return the results and their log-sum-exps."""
        way.plan(self.table)
        return self.run_again(way)

    def run_again(self, way: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """Run once more with the current plan."""
        shape = self.table.shape
        size = (len(self.q), shape.num_qo_heads, shape.head_dim_vo)
        out = torch.full(size, torch.nan, dtype=shape.out_dtype, device=self.q.device)
        lse = torch.full(size[:2], torch.nan, device=self.q.device)
        way.run(self.q, self.pages, out, lse)
        return out, lse

    def require_right(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Raise AssertionError unless ``out`` and ``lse`` match the reference up to rounding."""
        want, want_lse = attend(self.q, self.pages, self.table, torch.float64)
        blind = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, blind)
        assert not out[blind].any()
        tolerance = TOLERANCE[self.table.shape.dtype]
        error = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
        assert float(error) <= max(tolerance, TOLERANCE[out.dtype]), f"relative error {float(error):.2e}"
        torch.testing.assert_close(lse[~blind].double(), want_lse[~blind], rtol=1e-5, atol=1e-4)


def _pages(case: Case, slots: int, chance: torch.Generator, device: str) -> torch.Tensor:
    planes = 2 if case.value_dim is None else 1
    sizes = {"B": slots, "L": LAYERS, "K": planes, "N": case.page_size, "H": case.num_kv_heads}
    sizes["D"] = case.head_dim
    whole = torch.randn([sizes[x] for x in case.layout], generator=chance).to(device, case.dtype)
    return whole.permute([case.layout.index(x) for x in "LBKNHD"])[1]


def _poison(pages: torch.Tensor, table: Paging) -> None:
    """Write NaN into unused slots, after each sequence's last token, and before the first token that a query sees."""
    size = pages.shape[2]
    kept = pages.clone()
    pages.fill_(torch.nan)
    for row in range(table.batch):
        token = np.arange(table.first_seen[row], table.kv_lens[row])
        slot = torch.from_numpy(table.indices[table.indptr[row] + token // size])
        place = torch.from_numpy(token % size)
        pages[slot, :, place] = kept[slot, :, place]


LAYOUTS = ("BLKNHD", "LKBNHD", "LBHNKD")


@st.composite
def cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype], many: bool, largest: int = 150) -> Case:
    """Draw small cases of every kind. With ``many``, a sequence can have many queries."""
    lens = draw(st.lists(st.integers(0, largest), min_size=1, max_size=4))
    causal = draw(st.booleans()) if many else True
    widths = None
    if many:
        widths = [draw(st.integers(0, min(length, 40) if causal else 40)) for length in lens]
    head_dim = draw(st.sampled_from([16, 24, 64]))
    latent = draw(st.booleans())
    return Case(
        lens=lens,
        widths=widths,
        num_kv_heads=1 if latent else draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 3, 4, 20])),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from([head_dim, 16])) if latent else None,
        page_size=draw(st.sampled_from([16, 32, 64, 24])),
        dtype=draw(st.sampled_from(list(dtypes))),
        causal=causal,
        window_left=draw(st.sampled_from([-1, 0, 1, 37])) if causal else -1,
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 1000)),
    )
