"""Replaces the parts that SGLang needs and that a CPU lacks: transfer kernels, page-locking, torchvision.

Everything else is SGLang's own code. Call ``install`` before the first import of ``sglang``.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Make ``sglang`` importable and its host pools usable without a GPU."""
    _add_torchvision()
    common = import_module("sglang.srt.mem_cache.pool_host.common")
    modules = [
        import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for name in ("base", "mha", "mla", "mamba", "dsa")
    ]
    for module in (common, *modules):
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if hasattr(module, name):
                setattr(module, name, lambda *_: None)
    for module in modules[1:]:
        for name, kernel in KERNELS.items():
            setattr(module, name, kernel)
    indexer = import_module("sglang.srt.mem_cache.pool_host.dsa").DSAIndexerPoolHost
    indexer.__init__.__kwdefaults__["pin_memory"] = False  # a CPU build of torch has no page-locked memory


def _add_torchvision() -> None:
    """Add a module with the one name of torchvision that SGLang uses at import.

    torchvision's wheels are built for CUDA builds of torch, and do not load with a CPU build.
    """
    utils = import_module("transformers.utils")
    utils.is_torchvision_available()  # the answer is cached: transformers does without torchvision

    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    root, transforms, functional = (types.ModuleType(name) for name in names)
    interpolation_mode = enum.Enum("interpolation_mode", [("BICUBIC", "bicubic")])
    vars(transforms).update(InterpolationMode=interpolation_mode, functional=functional)
    vars(functional).update(InterpolationMode=interpolation_mode)
    vars(root).update(transforms=transforms)
    sys.modules.update(zip(names, (root, transforms, functional), strict=True))


def _rows(pool: Tensor) -> Tensor:
    """View a pool as bytes, one row per index of its first dimension."""
    return pool.view(pool.shape[0], -1).view(torch.uint8)


def _at(pointer: int, rows: int, row_bytes: int) -> Tensor:
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)


def _copy(source: Tensor, target: Tensor, source_indices: Tensor, target_indices: Tensor) -> None:
    target[target_indices.long()] = source[source_indices.long()]


def _per_layer(
    *,
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    **_: int,
) -> None:
    _copy(_rows(src_k), _rows(dst_k), src_indices, dst_indices)
    _copy(_rows(src_v), _rows(dst_v), src_indices, dst_indices)


def _per_layer_mla(*, src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: int) -> None:
    _copy(_rows(src), _rows(dst), src_indices, dst_indices)


def _per_layer_mla_pf_lf(
    *,
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    **_: int,
) -> None:
    columns = slice(layer_id * item_size, (layer_id + 1) * item_size)
    _copy(_rows(src)[:, columns], _rows(dst), src_indices, dst_indices)


def _per_layer_pf_lf(*, src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, **rest: Any) -> None:
    _per_layer_mla_pf_lf(src=src_k, dst=dst_k, **rest)
    _per_layer_mla_pf_lf(src=src_v, dst=dst_v, **rest)


def _all_layer_mla(
    *,
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        _copy(
            _at(source, int(src_indices.max()) + 1, item_size),
            _at(target, int(dst_indices.max()) + 1, item_size),
            src_indices,
            dst_indices,
        )


def _all_layer(
    *, src_k_layers: Tensor, dst_k_layers: Tensor, src_v_layers: Tensor, dst_v_layers: Tensor, **rest: Any
) -> None:
    _all_layer_mla(src_layers=src_k_layers, dst_layers=dst_k_layers, **rest)
    _all_layer_mla(src_layers=src_v_layers, dst_layers=dst_v_layers, **rest)


def _all_layer_mla_lf_pf(
    *, src_layers: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: int
) -> None:
    for layer, source in enumerate(src_layers.tolist()):
        columns = slice(layer * item_size, (layer + 1) * item_size)
        _copy(
            _at(source, int(src_indices.max()) + 1, item_size),
            _rows(dst)[:, columns],
            src_indices,
            dst_indices,
        )


def _all_layer_lf_pf(
    *, src_k_layers: Tensor, dst_k: Tensor, src_v_layers: Tensor, dst_v: Tensor, **rest: Any
) -> None:
    _all_layer_mla_lf_pf(src_layers=src_k_layers, dst=dst_k, **rest)
    _all_layer_mla_lf_pf(src_layers=src_v_layers, dst=dst_v, **rest)


def _mamba_lf_pf(*, src_ptrs: Tensor, **rest: Any) -> None:
    _all_layer_mla_lf_pf(src_layers=src_ptrs, **rest)


def _direct(
    *,
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def _pages(indices: Tensor, page_size: int) -> Tensor:
    return indices.long()[::page_size] // page_size


def _per_layer_direct_pf_lf(
    *,
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy from host pools of the shape (page, layer, token, ...) into one layer's rows."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        tokens = source[_pages(src_indices, page_size), layer_id].flatten(0, 1)
        target[dst_indices.long()] = tokens


def _all_layer_direct_lf_pf(
    *,
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy from the layers' rows (all of the first pool, then all of the second) into host pools."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target, layer = dst_ptrs[number // layers], number % layers
        tokens = source[src_indices.long()]
        target[_pages(dst_indices, page_size), layer] = tokens.view(-1, page_size, *tokens.shape[1:])


KERNELS = {
    "transfer_kv_direct": _direct,
    "transfer_kv_per_layer_direct_pf_lf": _per_layer_direct_pf_lf,
    "transfer_kv_all_layer_direct_lf_pf": _all_layer_direct_lf_pf,
    "transfer_kv_per_layer": _per_layer,
    "transfer_kv_per_layer_pf_lf": _per_layer_pf_lf,
    "transfer_kv_per_layer_mla": _per_layer_mla,
    "transfer_kv_per_layer_mla_pf_lf": _per_layer_mla_pf_lf,
    "transfer_kv_all_layer": _all_layer,
    "transfer_kv_all_layer_lf_pf": _all_layer_lf_pf,
    "transfer_kv_all_layer_mla": _all_layer_mla,
    "transfer_kv_all_layer_mla_lf_pf": _all_layer_mla_lf_pf,
    "transfer_kv_mamba_pf_lf": _per_layer_mla_pf_lf,
    "transfer_kv_mamba_lf_pf": _mamba_lf_pf,
}
"""The copy operations of ``sgl_kernel.kvcacheio`` and of SGLang's Triton code, with torch on the CPU."""
