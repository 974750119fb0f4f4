"""Stand-ins for the few SGLang classes that ``TierStoreStorage`` uses, as in SGLang 0.5.23, and small host pools."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PAGE_SIZE = 4
TOKENS = 64 * PAGE_SIZE
CAPACITY = 4 << 20


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"
    DRAFT = "draft"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass(frozen=True)
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage:
    """Stands in for the base class of storage backends."""


ARGS = SimpleNamespace(model_path="org/name", revision=None, kv_cache_dtype="auto", dtype="auto")


PARALLEL = SimpleNamespace(dp_rank=None)


@contextmanager
def stubbed() -> Iterator[ModuleType]:
    """Yield the module ``tierstore.adapters.sglang.storage``, imported with the stand-ins instead of SGLang."""
    parts = {
        "sglang.srt.mem_cache.hicache_storage": (HiCacheStorage, PoolHitPolicy, PoolTransferResult),
        "sglang.srt.observability.metrics_collector": (StorageMetrics,),
        "sglang.srt.runtime_context": (),
    }
    packages = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability")
    stubs = {name: ModuleType(name) for name in (*packages, *parts)}
    for name, classes in parts.items():
        for each in classes:
            setattr(stubs[name], each.__name__, each)
    stubs["sglang.srt.runtime_context"].get_server_args = lambda: ARGS  # type: ignore[attr-defined]
    stubs["sglang.srt.runtime_context"].get_parallel = lambda: PARALLEL  # type: ignore[attr-defined]
    sys.modules.update(stubs)
    try:
        yield importlib.import_module("tierstore.adapters.sglang.storage")
    finally:
        for name in (*stubs, "tierstore.adapters.sglang.storage"):
            del sys.modules[name]


class PlanePool:
    """A host pool with the layout ``page_first`` and two buffers per page."""

    layout = "page_first"
    page_size = PAGE_SIZE
    size = TOKENS
    layer_num = 3
    row = (2, 16)
    """Shape of the elements of one token in one layer."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.kv_buffer = torch.zeros((2, self.size, self.layer_num, *self.row), dtype=dtype)

    @property
    def part_nbytes(self) -> int:
        return self.page_size * self.layer_num * math.prod(self.row) * self.dtype.itemsize

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        token = self.part_nbytes // self.page_size
        at = [
            self.kv_buffer[plane].data_ptr() + index * token
            for index in indices.tolist()[:: self.page_size]
            for plane in range(2)
        ]
        return at, [self.part_nbytes] * len(at)

    def page(self, index: int) -> torch.Tensor:
        return self.kv_buffer[:, index : index + self.page_size]


class HeadPool(PlanePool):
    """A host pool of K and V, like ``MHATokenToKVPoolHost``."""

    head_num = 2
    head_dim = 16


class LatentPool(PlanePool):
    """A host pool of MLA, which has no heads, like ``MLATokenToKVPoolHost``."""

    kv_cache_dim = 32


class StatePool:
    """A host pool of recurrent states, whose pages can only be copied as tensors."""

    layout = "page_first"
    page_size = 1
    dtype = torch.float32
    size = 32

    def __init__(self, temporal_dtype: torch.dtype = torch.bfloat16) -> None:
        self.temporal_dtype = temporal_dtype
        self.states = torch.zeros((self.size, 1000))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        raise NotImplementedError

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(1000)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.states[index]

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.states[index] = page

    def page(self, index: int) -> torch.Tensor:
        return self.states[index]


class AnchorPool:
    """A host pool that only counts tokens, like ``LogicalHostPool``."""

    layout = "layer_first"
    page_size = PAGE_SIZE
    dtype = torch.uint8
    size = TOKENS
    kv_buffer = None

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        return None


def storage_config(home: Path, **more: Any) -> Any:
    """Return a ``HiCacheStorageConfig``. ``extra`` adds keys to the extra config, and ``nvme`` to its section."""
    extra = {
        "backend_name": "tierstore",
        "module_path": "tierstore.adapters.sglang",
        "class_name": "TierStoreStorage",
        "interface_v1": 1,
        "staging": "1MiB",
        "config": {"nvme": {"path": str(home), "capacity": CAPACITY, **more.pop("nvme", {})}},
        **more.pop("extra", {}),
    }
    fixed = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dp_rank": 0,
        "dcp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "model_name": "served",
        "tp_lcm_size": None,
        "should_split_heads": False,
    }
    made = SimpleNamespace(**{**fixed, **more}, extra_config=extra)
    made.is_storage_writer = not made.is_mla_model or made.tp_rank == 0
    return made


@contextmanager
def opened(module: ModuleType, home: Path, kv: Any = None, **more: Any) -> Iterator[Any]:
    """Yield a storage backend, attached as in SGLang to the host pool ``kv`` and to further ``pools``."""
    pools = more.pop("pools", {})
    storage = module.TierStoreStorage(storage_config(home, **more), {})
    try:
        storage.register_mem_pool_host(HeadPool() if kv is None else kv)
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, name)
        storage.on_host_pools_registered()
        yield storage
    finally:
        storage.close()


def key(number: int) -> str:
    return f"{number:064x}"


def tokens(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the token indices of these pages of a host pool."""
    size: int = pool.page_size
    return (torch.tensor(pages, dtype=torch.int64)[:, None] * size + torch.arange(size)).reshape(-1)


def fill(pool: Any, page: int, number: int) -> torch.Tensor:
    """Fill a page of a host pool with the content of the key ``number``, and return a copy of it."""
    place = pool.page(page * pool.page_size)
    generator = torch.Generator().manual_seed(number)
    content: torch.Tensor = torch.randint(
        0, 256, (place.numel() * place.element_size(),), dtype=torch.uint8, generator=generator
    )
    place.copy_(content.view(place.dtype).reshape(place.shape))
    return content


def raw(pool: Any, page: int) -> torch.Tensor:
    """Return the bytes of a page of a host pool."""
    found: torch.Tensor = pool.page(page * pool.page_size).contiguous().view(torch.uint8).reshape(-1)
    return found
