"""vLLM's KV tensors as pages: the bytes of a block in the order in which they lie in memory, layer after layer.

A page is opaque to the store: so a block is as few pieces as its layout allows, one where all layers of a block are
neighbours, and any layout works. Which one it is belongs to the page's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.gpu.pool import EnginePages
from tierstore.types import DTYPE_NBYTES, PageSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Geometry:
    """What a rank's pages are, and where they lie."""

    spec: PageSpec
    pages: EnginePages


@dataclass(frozen=True)
class _Blocks:
    """One tensor as ``[blocks, pieces, elements]``; ``order``: its other dimensions by falling stride."""

    view: torch.Tensor
    order: tuple[tuple[int, int], ...]


def geometry(
    tensors: Sequence[torch.Tensor], *, num_blocks: int, block_size: int, identity: str, shard: int
) -> Geometry:
    """The pages of one KV group: ``tensors``, one a layer or one for all, each once however many layers share it.

    A dimension of each counts blocks, ``num_blocks`` or a multiple of it. ConfigError for tensors of different shapes,
    and for those whose blocks are no grid of at most two dimensions.
    """
    unique = list({(t.data_ptr(), t.shape, t.stride()): t for t in tensors}.values())
    if not unique:
        raise ConfigError("vLLM has registered no KV tensors; allowed: at least one layer with a KV cache")
    views = [_blocks(tensor, num_blocks) for tensor in unique]
    shapes = {tuple(v.view.shape) for v in views}
    dtypes = {str(v.view.dtype).removeprefix("torch.") for v in views}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ConfigError(f"KV tensors of blocks {sorted(shapes)}, {sorted(dtypes)}; allowed: all alike")
    ((_, pieces, elements),) = shapes
    (dtype,) = dtypes
    if dtype not in DTYPE_NBYTES:
        raise ConfigError(f"KV tensors of {dtype}; allowed: {', '.join(sorted(DTYPE_NBYTES))}")
    orders = sha256(repr([v.order for v in views]).encode()).hexdigest()[:16]
    spec = PageSpec(
        kind="state",
        num_layers=len(views),
        page_size=block_size,
        num_kv_heads=pieces,
        head_dim=elements,
        dtype=dtype,
        shard=shard,
        model=f"vllm {orders} {identity}",
    )
    layers = [v.view.unsqueeze(1) for v in views]
    return Geometry(spec, EnginePages(layers, "BNHD"))


def _blocks(tensor: torch.Tensor, num_blocks: int) -> _Blocks:
    at = next((d for d, size in enumerate(tensor.shape) if size and size % num_blocks == 0), None)
    if at is None:
        raise ConfigError(
            f"a KV tensor {tuple(tensor.shape)} has no dimension of blocks; allowed: one of {num_blocks} or a multiple"
        )
    if tensor.shape[at] != num_blocks:
        sizes = (num_blocks, tensor.shape[at] // num_blocks)
        tensor = tensor.unflatten(at, sizes)  # type: ignore[no-untyped-call]
    others = [d for d in range(tensor.ndim) if d != at]
    strides = tensor.stride()
    others.sort(key=lambda d: -strides[d])
    order = tuple((d, tensor.shape[d]) for d in others)
    return _Blocks(_collapsed(tensor.permute(at, *others)), order)


def _collapsed(tensor: torch.Tensor) -> torch.Tensor:
    """``[blocks, pieces, elements]`` of a tensor whose dimensions fall in stride, without copying."""
    sizes, strides = [1], [1]
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size == 1:
            continue
        if stride == sizes[-1] * strides[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2 or strides[0] != 1:
        raise ConfigError(
            f"a KV tensor {tuple(tensor.shape)} of strides {tensor.stride()} has blocks in scattered pieces; "
            "allowed: elements side by side, in rows of one distance"
        )
    pieces, apart = (1, sizes[0]) if len(sizes) == 1 else (sizes[1], strides[1])
    return tensor.as_strided(
        (tensor.shape[0], pieces, sizes[0]), (tensor.stride(0), apart, 1), tensor.storage_offset()
    )
