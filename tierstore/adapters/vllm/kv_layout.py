"""vLLM's KV tensors as pages: the bytes of a block in memory order, layer after layer.

A page is opaque to the store, so a block consists of as few pieces as its layout allows (one if all its layers are
adjacent), and any layout works. The layout is part of the page's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.page import DTYPE_NBYTES, PageSpec


@dataclass(frozen=True)
class KVLayout:
    """The geometry of a rank's pages, and the tensors that hold them."""

    spec: PageSpec
    pages: EnginePages


@dataclass(frozen=True)
class _Blocks:
    """One tensor as ``[blocks, pieces, elements]``. ``order``: its other dimensions by decreasing stride."""

    view: torch.Tensor
    order: tuple[tuple[int, int], ...]


def kv_layout(
    tensors: Sequence[torch.Tensor], *, num_blocks: int, block_size: int, identity: str, shard: int
) -> KVLayout:
    """Return the pages of all KV groups.

    Groups overlay the same bytes, so a block is the same page whichever group owns it. Tensors that view the
    same bytes count once.

    Args:
        tensors: One per layer or one for all; layers may share one. One dimension of each counts blocks.
        num_blocks: Length of that dimension, or a divisor of it.

    Raises:
        ConfigError: Tensors have different shapes and do not overlay each other, or their blocks are not a grid of at
            most two dimensions.
    """
    unique = list({(t.data_ptr(), t.shape, t.stride()): t for t in tensors}.values())
    if not unique:
        raise ConfigError("vLLM has registered no KV tensors: no layer has a KV cache")
    views = [_blocks(tensor, num_blocks) for tensor in unique]
    layers = _overlaid([v.view for v in views])
    _, pieces, elements = layers[0].shape
    dtype = _named(layers[0].dtype)
    if dtype not in DTYPE_NBYTES:
        raise ConfigError(
            f"the dtype of KV tensors must be one of {', '.join(sorted(DTYPE_NBYTES))}, got {dtype}"
        )
    orders = sha256(repr([v.order for v in views]).encode()).hexdigest()[:16]
    spec = PageSpec(
        kind="state",
        num_layers=len(layers),
        page_size=block_size,
        num_kv_heads=pieces,
        head_dim=elements,
        dtype=dtype,
        shard=shard,
        model=f"vllm {orders} {identity}",
    )
    return KVLayout(spec, EnginePages([layer.unsqueeze(1) for layer in layers], "BNHD"))


def _overlaid(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each range of a block's bytes once.

    Views with different shapes become equal views in one piece per block.
    """
    unique = list({(v.data_ptr(), v.shape, v.stride(), v.dtype): v for v in views}.values())
    if len({(v.shape, v.dtype) for v in unique}) == 1:
        return unique
    ranges = _ranges(unique)
    if len({end - start for start, end in ranges}) != 1:
        raise _unlike(unique)
    dtypes = {v.dtype for v in unique}
    dtype = unique[0].dtype if len(dtypes) == 1 else torch.uint8
    whole = torch.empty(0, dtype=torch.uint8, device=unique[0].device).set_(unique[0].untyped_storage())
    size, apart = unique[0].shape[0], unique[0].stride(0) * unique[0].element_size()
    return [
        whole.as_strided((size, 1, end - start), (apart, end - start, 1), start).view(dtype)
        for start, end in ranges
    ]


def _ranges(views: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the byte ranges of the first block in the shared storage. Adjacent ranges are joined."""
    places = {(v.untyped_storage().data_ptr(), v.stride(0) * v.element_size(), v.shape[1]) for v in views}
    if len(places) != 1 or views[0].shape[1] != 1:
        raise _unlike(views)
    ranges: list[tuple[int, int]] = []
    for start, nbytes in sorted(
        (int(v.storage_offset()) * v.element_size(), v.shape[2] * v.element_size()) for v in views
    ):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(start + nbytes, ranges[-1][1]))
        else:
            ranges.append((start, start + nbytes))
    return ranges


def _unlike(views: Sequence[torch.Tensor]) -> ConfigError:
    shapes = sorted({tuple(v.shape) for v in views})
    dtypes = sorted({_named(v.dtype) for v in views})
    return ConfigError(
        f"KV tensors must all be alike, or views of the same bytes, got blocks of {shapes}, {dtypes}"
    )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _blocks(tensor: torch.Tensor, num_blocks: int) -> _Blocks:
    at = next((d for d, size in enumerate(tensor.shape) if size and size % num_blocks == 0), None)
    if at is None:
        raise ConfigError(
            f"a KV tensor needs a dimension of {num_blocks} blocks or a multiple, got {tuple(tensor.shape)}"
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
    """Return ``[blocks, pieces, elements]`` of a tensor whose strides decrease, without copying."""
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
            f"a KV tensor {tuple(tensor.shape)} of strides {tensor.stride()} has blocks in scattered pieces: "
            "elements must be contiguous, in rows of one distance"
        )
    pieces, apart = (1, sizes[0]) if len(sizes) == 1 else (sizes[1], strides[1])
    return tensor.as_strided(
        (tensor.shape[0], pieces, sizes[0]), (tensor.stride(0), apart, 1), tensor.storage_offset()
    )
