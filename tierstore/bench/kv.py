"""KV pages to compress: of a real model where one is prepared, else synthetic ones, and words for which they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore.types import PageSpec

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from tierstore.bench.reading import Reader


@dataclass(frozen=True, slots=True)
class Sample:
    """Pages of one spec, flat uint8 each. ``source``: what they are."""

    spec: PageSpec
    pages: list[NDArray[np.uint8]]
    source: str


def synthetic(tokens: int, page_size: int) -> Sample:
    """bfloat16 pages of SmolLM2-135M's shape: normal numbers of a scale that each channel has. The same every time."""
    spec = PageSpec(
        num_layers=30, page_size=page_size, num_kv_heads=3, head_dim=64, dtype="bfloat16", model="synthetic"
    )
    chance = np.random.default_rng(0)
    scales = np.exp2(chance.normal(size=(30, 2, 1, 3, 64))).astype(np.float32)
    pages = []
    for _ in range(max(1, tokens // page_size)):
        drawn = chance.standard_normal(spec.shape, dtype=np.float32) * scales
        pages.append((drawn.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8))
    return Sample(spec, pages, "synthetic bfloat16: normal numbers, a scale a channel")


def sample(reader: Reader, name: str, text: str, tokens: int, page_size: int) -> Sample:
    """The full pages of what ``reader`` makes of the first ``tokens`` tokens of ``text``. OSError if there is none."""
    ids = reader.tokens(text, tokens)
    spec, pages = paged(reader.read(ids), page_size, reader.name)
    if not pages:
        raise OSError(f"{name} has {ids.shape[1]} tokens; a page takes {page_size}")
    return Sample(spec, pages, f"{reader.name}, {name}, {len(pages) * page_size} tokens")


def paged(kv: torch.Tensor, page_size: int, model: str) -> tuple[PageSpec, list[NDArray[np.uint8]]]:
    """The full pages of ``kv``, bfloat16 ``[layers, 2, heads, tokens, head_dim]``."""
    import torch

    numbers = (
        kv.transpose(2, 3).contiguous().view(torch.int16).numpy()
    )  # [layers, 2, tokens, heads, head_dim]
    spec = PageSpec(
        num_layers=numbers.shape[0],
        page_size=page_size,
        num_kv_heads=numbers.shape[3],
        head_dim=numbers.shape[4],
        dtype="bfloat16",
        model=model,
    )
    starts = range(0, numbers.shape[2] - page_size + 1, page_size)
    return spec, [
        np.ascontiguousarray(numbers[:, :, start : start + page_size]).reshape(-1).view(np.uint8)
        for start in starts
    ]


def unpaged(spec: PageSpec, pages: list[NDArray[np.uint8]]) -> torch.Tensor:
    """The tensor that ``paged`` was given, of full pages."""
    import torch

    numbers = np.concatenate([page.view(np.int16).reshape(spec.shape) for page in pages], axis=2)
    return torch.from_numpy(numbers).view(torch.bfloat16).transpose(2, 3).contiguous()
