"""The tensors of a KV cache as vLLM lays them out, for a worker's half without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tierstore.page import DTYPE_NBYTES

Layout = Literal["LBNHC", "LBHNC", "LKBHND", "BLHNC"]
"""Physical order of vLLM's tensors, outermost first: L layer, B block, N token, H head, K key or value, D head
dimension, C the last two of a token beside each other. LKBHND: keys and values in planes apart."""

LAYOUTS: tuple[Layout, ...] = ("LBNHC", "LBHNC", "LKBHND", "BLHNC")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's KV cache on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def block_nbytes(self) -> int:
        """K and V of all layers."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return numbers * DTYPE_NBYTES[self.dtype]


def tensors_of(layout: Layout, shape: Shape, blocks: int, device: torch.device) -> list[torch.Tensor]:
    """A tensor a layer, in one piece of memory: vLLM's view ``[B, H, N, C]`` of the physical order, or
    ``[K, B, H, N, D]`` where the planes are apart."""
    dtype = getattr(torch, shape.dtype)
    sizes = {
        "L": shape.num_layers,
        "B": blocks,
        "K": 2,
        "H": shape.num_kv_heads,
        "N": shape.block_size,
        "D": shape.head_dim,
        "C": 2 * shape.head_dim,
    }
    whole = torch.empty([sizes[letter] for letter in layout], dtype=dtype, device=device)
    view = "LKBHND" if "K" in layout else "LBHNC"
    return list(whole.permute([layout.index(letter) for letter in view]))
