"""The storage backend: the calls that SGLang makes, and SGLang's host pools.

This module requires SGLang 0.5.23.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_parallel, get_server_args

from tierstore.adapters.sglang.host_cache import host_and_nvme
from tierstore.adapters.sglang.identity import identity
from tierstore.adapters.sglang.metrics import Rates, pool_metrics
from tierstore.adapters.sglang.staged_pages import CLOSE_S, LOADING_SHARE, StagedPages
from tierstore.config import parse_size
from tierstore.errors import ConfigError, StoreClosed, TierStoreError
from tierstore.host.free_memory import free_memory
from tierstore.nvme.direct_io import padded
from tierstore.nvme.follower import Follower
from tierstore.nvme.tier import NvmeTier
from tierstore.types import exact_size

_log = logging.getLogger("sglang.tierstore.adapters.sglang")  # shown next to SGLang's own log lines

_Way = Literal["read", "write"]
_KV = "kv"
_MAMBA = "mamba"
_SGLANGS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "file_storage_path",
)
_OURS = ("config", "model", "staging")
_STAGING_NBYTES = 512 << 20
_TIMEOUT_S = 10.0
"""Longest time in seconds that a call may take if there is no disk."""


class TierStoreStorage(HiCacheStorage):  # type: ignore[misc]
    """TierStore as a storage backend of SGLang's HiCache. Thread-safe, as SGLang calls it on several threads.

    Each pool of SGLang (KV, recurrent states, windows, indexer, draft) has its own directory for each rank. Only one
    process at a time can use a directory. No call takes longer than ``nvme.timeout``, or 10 s without a disk. A disk
    that hangs or is full causes misses.

    The settings are keys of ``--hicache-storage-backend-extra-config``:

    - ``config``: The path of a YAML file, or a mapping with the same contents. Only the sections ``nvme`` and ``host``
      are used, and at least one is required. ``capacity`` is divided among all ranks and pools of an engine, in
      proportion to the sizes of SGLang's host pools.
    - ``model``: A name for the weights. It must change whenever the same tokens would produce different KV. By
      default, weights are identified by SGLang's model path, revision and arguments, by samples of the weight files
      and by the configuration files, in the directory or in the local cache of the Hugging Face hub.
    - ``staging``: The size of the staging buffers of each pool, "512MiB" by default. Memory is committed as it is used.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``.
        kwargs: Further arguments that SGLang may pass. Ignored.

    Raises:
        ConfigError: The configuration is not supported.
    """

    def __init__(self, storage_config: Any, kwargs: object = None) -> None:
        settings = dict(storage_config.extra_config or {})
        unknown = sorted(set(settings) - {*_SGLANGS, *_OURS})
        if unknown:
            raise ConfigError(
                f"hicache-storage-backend-extra-config: unknown keys {', '.join(unknown)}; known keys are "
                f"{', '.join((*_SGLANGS, *_OURS))}"
            )
        model = settings.get("model")
        if model is not None and (not isinstance(model, str) or not model.strip()):
            raise ConfigError(
                f"hicache-storage-backend-extra-config: model must be a non-blank name for the weights, got "
                f"{model!r}; leave it out to identify the weights by SGLang's model path and the model's files"
            )
        if storage_config.dcp_size > 1:
            raise ConfigError(
                f"decode context parallelism is not supported: the size must be 1, got {storage_config.dcp_size}"
            )
        try:
            self._staging = parse_size(settings.get("staging", _STAGING_NBYTES))
        except ValueError as error:
            raise ConfigError(
                f"hicache-storage-backend-extra-config: staging must be {error}, got {settings['staging']!r}"
            ) from error
        if "config" not in settings:
            raise ConfigError(
                "hicache-storage-backend-extra-config: config is missing; name a YAML file with a section nvme or host"
            )
        self._host, self._nvme = host_and_nvme(settings["config"], "SGLang's host memory")
        self._timeout_s = _TIMEOUT_S if self._nvme is None else self._nvme.timeout
        self._config = storage_config
        self._model = model
        self._zero_copy = bool(settings.get("interface_v1", 0))
        self._hosts: dict[str, Any] = {}
        self._pools: dict[str, _Pool] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._exports = False
        """Whether SGLang has asked for metrics."""
        self._metrics = Rates()
        self.registered_pools: dict[str, Any] = {}

    # -- attach and detach ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Remember SGLang's host pool of KV pages."""
        self.mem_pool_host = mem_pool_host
        self._add(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Remember one of SGLang's host pools.

        If the other pools are already open, all pools are closed and opened again, because the capacity is divided
        among them.
        """
        self.registered_pools[host_pool_name] = host_pool
        self._add(_name(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the directories of all pools.

        Raises:
            ConfigError: A directory is in use, does not belong to TierStore, or the disk lacks space.
        """
        self._opened()

    def close(self) -> None:
        """Finish writes in flight and close all directories. Blocks for up to 30 s. Called when SGLang detaches.

        Raises:
            TierStoreError: The disk did not respond in time.
        """
        with self._lock:
            self._closed = True
            pools, self._pools = self._pools or {}, {}
        if self._exports:
            self._export(pools)
        try:
            _close(pools.values())
        finally:
            for name in pools if self._exports else ():
                pool_metrics().detached(name, self._rank)

    # -- pages of KV ---------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the length of the longest prefix of ``keys`` whose pages are stored. Does not access the disk.

        While the disk hangs or fails, almost all pages that are only on disk count as missing.
        """
        pool = self._pool(_KV)
        return 0 if pool is None or pool.is_logical else _run(pool.exist(_page_keys(keys)))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into SGLang's host memory, and return which pages arrived.

        Args:
            keys: SGLang's hashes of the pages.
            host_indices: Token indices in the host pool, int64 ``[len(keys) * page_size]``.
        """
        return self._move("read", _KV, keys, host_indices, self._deadline())

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copy pages out of SGLang's host memory and queue them to be written. For the arguments, see ``batch_get_v1``.

        Returns:
            Which pages are stored or queued. A queued page may still be lost, for example if the disk is full.
        """
        return self._move("write", _KV, keys, host_indices, self._deadline())

    def exists(self, key: str) -> bool:
        """Return whether the page is stored."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Read a page into the flat tensor ``target_location`` and return this tensor, or None on a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors, one for each key. The result has None for each miss."""
        pool = self._pool(_KV)
        targets = list(target_locations or [])
        if pool is None or len(targets) != len(keys):
            return [None] * len(keys)
        memory = _Tensors(targets)
        if pool.is_logical or not memory.have(pool.host.nbytes):
            return [None] * len(keys)
        found = self._copy("read", pool, keys, memory, self._deadline())
        return [target if arrived else None for target, arrived in zip(targets, found, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: object = None, target_sizes: object = None
    ) -> bool:
        """Copy the flat tensor ``value`` and queue it to be written. Return whether it is stored or queued."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Copy flat tensors and queue them to be written. Return whether all are stored or queued."""
        pool = self._pool(_KV)
        if pool is None or not pool.is_writer or values is None or len(values) != len(keys):
            return False
        memory = _Tensors(values)
        if pool.is_logical or not memory.have(pool.host.nbytes):
            return pool.is_logical
        return all(self._copy("write", pool, keys, memory, self._deadline()))

    # -- pages of all pools --------------------------------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return how long a prefix of ``keys`` can be restored, given what the pools of ``pool_transfers`` need.

        Returns:
            A ``PoolTransferResult``. ``kv_hit_pages`` is the longest restorable prefix, and
            ``restorable_prefix_pages`` lists all restorable prefixes, because a prefix that ends between two
            stored states cannot be restored.
        """
        pool = self._pool(_KV)
        if pool is None:
            return PoolTransferResult(0, {}, [])
        names = _page_keys(keys)
        kv = len(keys) if pool.is_logical and pool_transfers else _run(pool.exist(names))
        hits: dict[Any, int] = {_KV: kv} if kv else {}
        allowed = set(range(1, kv + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never limits the hit; without an entry, SGLang learns nothing about the pool
            other = self._pool(_name(transfer.name))
            held = [False] * kv if other is None else other.exist(names[:kv])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                ends = set(_window_ends(held, max(1, len(transfer.keys or ()))))
            else:
                ends = set(range(1, _run(held) + 1))
            if ends:
                hits[transfer.name] = max(ends)
            allowed &= ends
        return PoolTransferResult(max(allowed, default=0), hits, sorted(allowed))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read pages of several pools into SGLang's host memory. Return which pages arrived, for every pool."""
        deadline = self._deadline()
        return {
            each.name: self._move("read", _name(each.name), each.keys or [], each.host_indices, deadline)
            for each in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Queue pages of several pools to be written. Return which are stored or queued, for every pool."""
        deadline = self._deadline()
        return {
            each.name: self._move("write", _name(each.name), each.keys or [], each.host_indices, deadline)
            for each in transfers
        }

    # -- upkeep --------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove all pages of this rank from host memory and disk, including those that are being written."""
        for pool in self._opened().values():
            pool.clear()
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued writes have ended. Return False on a timeout. None: wait up to ``nvme.timeout``."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        return all(pool.flush(deadline) for pool in self._opened().values())

    def get_stats(self) -> Any:
        """Return SGLang's ``StorageMetrics`` since the last call, and update TierStore's own Prometheus metrics."""
        self._exports = True
        self._export(self._opened())
        pages, rates = self._metrics.take("read"), self._metrics.take("write")
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in pages],
            prefetch_bandwidth=[each.gigabytes_per_s for each in pages],
            backup_pgs=[each.pages for each in rates],
            backup_bandwidth=[each.gigabytes_per_s for each in rates],
        )

    def tier_stats(self) -> dict[str, dict[str, object]]:
        """Return sizes, counters and the state of the disk, by pool."""
        return {name: pool.stats() for name, pool in self._opened().items()}

    def check(self) -> list[str]:
        """Return a description of each broken invariant. The result is empty if all invariants hold."""
        return [f"{name}: {fault}" for name, pool in self._opened().items() for fault in pool.check()]

    # -- within --------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> str:
        """The label of this rank in metrics."""
        return f"dp{_replica(self._config)}-pp{self._config.pp_rank}-tp{self._config.tp_rank}"

    def _export(self, pools: Mapping[str, _Pool]) -> None:
        for name, pool in pools.items():
            pool_metrics().update(name, self._rank, pool.figures())

    def _add(self, name: str, host: Any) -> None:
        with self._lock:
            if self._hosts.get(name) is host:
                return
            self._hosts[name] = host
            pools, self._pools = self._pools, None
        if pools:
            _close(pools.values())
            self._opened()

    def _opened(self) -> dict[str, _Pool]:
        with self._lock:
            if self._closed:
                raise StoreClosed(
                    "this storage backend is closed; SGLang creates another when it attaches again"
                )
            if self._pools is None:
                self._pools = self._open()
            return self._pools

    def _pool(self, name: str) -> _Pool | None:
        found = self._opened().get(name)
        if found is None:
            _log.error("SGLang asked for pages of the pool %s, which it has not registered", name)
        return found

    def _open(self) -> dict[str, _Pool]:
        hosts = {name: _Host(host) for name, host in self._hosts.items()}
        shared = {name: self._is_shared(name, host) for name, host in hosts.items()}
        ranks = self._config.pp_size * self._config.attn_cp_size
        sizes = {
            name: host.pool_nbytes * ranks * (1 if shared[name] else self._config.tp_size)
            for name, host in hosts.items()
        }
        total = max(1, sum(sizes.values()))
        ours = self._host_shares(hosts)
        opened: dict[str, _Pool] = {}
        try:
            for name, host in hosts.items():
                capacity = 0 if self._nvme is None else self._nvme.capacity * host.pool_nbytes // total
                opened[name] = self._open_pool(name, host, capacity, ours[name], shared[name])
        except BaseException:
            _close(opened.values())
            raise
        found = sum(pool.num_pages for pool in opened.values())
        memory = "" if self._host is None else f"; host memory for {exact_size(sum(ours.values()))} of pages"
        where = "no NVMe tier" if self._nvme is None else f"NVMe tier at {self._nvme.path}"
        _log.info("%s: pools %s, %d pages found%s", where, ", ".join(opened), found, memory)
        return opened

    def _host_shares(self, hosts: Mapping[str, _Host]) -> dict[str, int]:
        """Return the size of the memory in which this rank keeps pages, in bytes, by pool.

        Raises:
            ConfigError: A share is less than a page, or there is not enough free memory.
        """
        if self._host is None:
            return dict.fromkeys(hosts, 0)
        every = sum(host.pool_nbytes for host in hosts.values())
        ranks = self._config.pp_size * self._config.attn_cp_size * self._config.tp_size
        shares = {
            name: self._host.capacity * host.pool_nbytes // max(1, every * ranks)
            for name, host in hosts.items()
        }
        for name, host in hosts.items():
            if shares[name] < padded(host.nbytes):
                raise ConfigError(
                    f"host.capacity must leave at least one page of {exact_size(padded(host.nbytes))} for each rank's "
                    f"pool {name}, which gets {exact_size(shares[name])} of {exact_size(self._host.capacity)}"
                )
        free, needed = free_memory(), sum(shares.values())
        if free is not None and needed > free.nbytes:
            raise ConfigError(
                f"host.capacity needs {exact_size(needed)} of memory for this rank, but {free.described()}; "
                "lower host.capacity or free memory used by other programs"
            )
        return shares

    def _open_pool(self, name: str, host: _Host, capacity: int, host_nbytes: int, shared: bool) -> _Pool:
        writer, nvme = not shared or self._config.is_storage_writer, self._nvme
        is_followed = shared and self._config.tp_size > 1 and host.nbytes > 0
        if nvme is None and is_followed:
            raise ConfigError(
                f"nvme is missing: with MLA and {self._config.tp_size} tensor parallel ranks, the first rank stores "
                f"the pages of the pool {name} for all ranks, and the others read them from disk"
            )
        if host.nbytes == 0 or nvme is None:
            return _Pool(host, None, writer, self._staging, host_nbytes)
        described = identity(
            name,
            host.pool,
            self._config,
            _server_args(),
            model=self._model,
            parts=[*host.parts] if self._zero_copy or name != _KV else "flat",
            page_nbytes=host.nbytes,
        )
        rank = 0 if shared else self._config.tp_rank
        place = _replica(self._config) * self._config.pp_size + self._config.pp_rank
        place = place * self._config.attn_cp_size + self._config.attn_cp_rank

        where: dict[str, Any] = {
            "fingerprint": sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
            "shard": place * self._config.tp_size + rank,
            "page_nbytes": padded(host.nbytes),
            "readers": None if nvme.readers == "auto" else nvme.readers,
            "timeout_s": nvme.timeout,
        }

        def open_tier(wake: Callable[[], None]) -> NvmeTier | Follower | None:
            if not writer:
                return Follower.open(nvme.path, wake=wake, **where)
            return NvmeTier.open(
                nvme.path,
                capacity=capacity,
                wake=wake,
                description=described,
                payload=nvme.payload,
                read_only=nvme.read_only,
                batch_nbytes=self._staging * (LOADING_SHARE - 1) // (2 * LOADING_SHARE),
                **where,
            )

        return _Pool(host, open_tier, writer, self._staging, host_nbytes, is_followed=is_followed)

    def _is_shared(self, name: str, host: _Host) -> bool:
        """Return whether all tensor parallel ranks have the same pages in this pool, so that one rank writes them.

        With MLA, this applies to all pools except recurrent states and pools with heads, such as those of a draft
        model with ordinary attention.
        """
        return self._config.is_mla_model and name != _MAMBA and not hasattr(host.pool, "head_num")

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _move(
        self, what: _Way, name: str, keys: Sequence[str], indices: torch.Tensor | None, deadline: float
    ) -> list[bool]:
        """Read or write the pages at these token indices. Return which pages arrived or are stored."""
        pool = self._pool(name)
        places = None if pool is None else pool.host.places(indices, len(keys))
        if pool is None or places is None:
            return [False] * len(keys)
        if pool.is_logical:
            return [True] * len(keys)
        return self._copy(what, pool, keys, pool.host.memory(places), deadline)

    def _copy(
        self, what: _Way, pool: _Pool, keys: Sequence[str], memory: _Memory, deadline: float
    ) -> list[bool]:
        names = _page_keys(keys)
        if what == "write" and not pool.is_writer:
            return pool.exist(names)
        began = time.perf_counter()
        found = (
            pool.get(names, memory.fill, deadline)
            if what == "read"
            else pool.put(names, memory.read, deadline)
        )
        if self._config.enable_storage_metrics and any(found):
            self._metrics.add(what, sum(found), pool.host.nbytes, time.perf_counter() - began)
        return found


# -- SGLang's host memory ----------------------------------------------------------------------------------


class _Host:
    """The pages of one of SGLang's host pools.

    Attributes:
        parts: Size in bytes of each buffer of a page. Empty if the pool has no buffers, and a single buffer if the
            pool cannot name its buffers and pages are copied as tensors.
        nbytes: Size of a page in bytes. 0 for a pool that only counts tokens.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_size: int = getattr(pool, "page_size", 1) or 1
        self.by_address = True
        self.parts: tuple[int, ...] = ()
        try:
            meta = pool.get_page_buffer_meta(torch.arange(self.page_size, dtype=torch.int64))
            self.parts = () if meta is None else tuple(int(nbytes) for nbytes in meta[1])
        except (NotImplementedError, ValueError):  # this layout, or a state with more tensors
            page = pool.get_dummy_flat_data_page()
            self.by_address = False
            self.parts = (page.numel() * page.element_size(),)
        self.nbytes = sum(self.parts)

    @property
    def pool_nbytes(self) -> int:
        """Size of the whole pool in bytes."""
        return self.nbytes * (int(self.pool.size) // self.page_size)

    def places(self, indices: torch.Tensor | None, count: int) -> torch.Tensor | None:
        """Return the token indices of ``count`` pages on the CPU, or None if they are not whole pages."""
        if indices is None or indices.numel() != count * self.page_size:
            _log.error(
                "SGLang passed %s token indices for %d pages of %d tokens",
                None if indices is None else indices.numel(),
                count,
                self.page_size,
            )
            return None
        pages = indices.detach().cpu().reshape(count, self.page_size)
        if count and not bool((pages == pages[:, :1] + torch.arange(self.page_size)).all()):
            _log.error("SGLang passed token indices that are not consecutive within a page")
            return None
        return pages.reshape(-1)

    def memory(self, places: torch.Tensor) -> _Buffers | _Flat:
        """Return access to the pages at these token indices."""
        if not self.by_address:
            return _Flat(self.pool, places[:: self.page_size].tolist())
        return _Buffers(lambda: self.pool.get_page_buffer_meta(places)[0], self.parts)


class _Pool(StagedPages):
    """One of SGLang's pools, and its pages."""

    def __init__(self, host: _Host, *rest: Any, **more: Any) -> None:
        super().__init__(host.nbytes, *rest, **more)
        self.host = host


_LEAST_RELEASED = 64 << 10
"""Size in bytes from which a copy releases the GIL. Getting it back can take longer than copying a smaller piece."""

_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_with_gil.restype = ctypes.c_void_p


def _copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes from the address ``source`` to the address ``target``."""
    move = _memmove_with_gil if nbytes < _LEAST_RELEASED else ctypes.memmove
    move(target, source, nbytes)


class _Buffers:
    """Pages in memory, each in several buffers."""

    def __init__(self, addresses: Callable[[], Sequence[int]], parts: Sequence[int]) -> None:
        """Remember how to find the buffers. ``addresses`` is called while the disk reads the first pages."""
        self._found, self._parts = addresses, parts

    def fill(self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy rows of ``memory`` to the pages."""
        for address, at, nbytes in self._pieces(pages, memory, rows):
            _copy_bytes(address, at, nbytes)

    def read(self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy the pages to rows of ``memory``."""
        for address, at, nbytes in self._pieces(pages, memory, rows):
            _copy_bytes(at, address, nbytes)

    def _pieces(
        self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the address of each buffer, the address in ``memory`` and the size in bytes."""
        base, row_nbytes, count = memory.ctypes.data, memory.strides[0], len(self._parts)
        for page, row in zip(pages, rows, strict=True):
            at = base + row * row_nbytes
            for address, nbytes in zip(
                self._addresses[page * count : (page + 1) * count], self._parts, strict=True
            ):
                yield address, at, nbytes
                at += nbytes

    @cached_property
    def _addresses(self) -> Sequence[int]:
        return self._found()


class _Flat:
    """Pages of a pool that copies each of them from and to a flat tensor."""

    def __init__(self, pool: Any, places: Sequence[int]) -> None:
        self._pool, self._places = pool, places

    def fill(self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy rows of ``memory`` to the pages."""
        for page, row in zip(pages, rows, strict=True):
            whole = self._pool.get_dummy_flat_data_page()
            _bytes(whole)[:] = memory[row][: whole.numel() * whole.element_size()]
            self._pool.set_from_flat_data_page(self._places[page], whole)

    def read(self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy the pages to rows of ``memory``."""
        for page, row in zip(pages, rows, strict=True):
            whole = _bytes(self._pool.get_data_page(self._places[page], flat=True))
            memory[row][: whole.nbytes] = whole


class _Tensors:
    """Pages that are flat tensors of the caller."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._pages = [
            _bytes(tensor) if tensor is not None and tensor.is_contiguous() else None for tensor in tensors
        ]

    def have(self, nbytes: int) -> bool:
        """Return whether every page is a contiguous tensor of ``nbytes`` bytes."""
        return all(page is not None and page.nbytes == nbytes for page in self._pages)

    def fill(self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy rows of ``memory`` to the pages."""
        for page, row in zip(pages, rows, strict=True):
            found = self._pages[page]
            assert found is not None
            found[:] = memory[row][: found.nbytes]

    def read(self, pages: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy the pages to rows of ``memory``."""
        for page, row in zip(pages, rows, strict=True):
            found = self._pages[page]
            assert found is not None
            memory[row][: found.nbytes] = found


_Memory = _Buffers | _Flat | _Tensors


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a view of a contiguous CPU tensor as flat bytes."""
    found: NDArray[np.uint8] = tensor.detach().contiguous().view(torch.uint8).reshape(-1).numpy()
    return found


def _close(pools: Iterable[_Pool]) -> None:
    """Close all pools within 30 s. Raises TierStoreError if the disk does not respond in time."""
    deadline = time.monotonic() + CLOSE_S
    errors = []
    for pool in pools:
        try:
            pool.close(max(0.1, deadline - time.monotonic()))
        except TierStoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# -- small parts -------------------------------------------------------------------------------------------


def _page_keys(keys: Sequence[str]) -> list[bytes]:
    """Return keys of the length that the tier uses. SGLang's keys are SHA-256 digests in hex."""
    return [_page_key(key) for key in keys]


def _page_key(key: str) -> bytes:
    if len(key) == 64:
        try:
            return bytes.fromhex(key) + bytes(4)
        except ValueError:
            pass
    return sha256(key.encode()).digest() + b"text"


def _name(pool: Any) -> str:
    """Return the name of a pool. SGLang passes a string or a member of an enumeration of strings."""
    return str(getattr(pool, "value", pool))


def _run(held: Sequence[bool]) -> int:
    """Return the number of leading pages that are held."""
    return next((index for index, each in enumerate(held) if not each), len(held))


def _window_ends(held: Sequence[bool], window: int) -> Iterator[int]:
    """Yield the lengths of prefixes whose last ``window`` pages are held, or all pages of a shorter prefix."""
    run = 0
    for length, each in enumerate(held, 1):
        run = run + 1 if each else 0
        if run >= min(window, length):
            yield length


def _replica(config: Any) -> int:
    """Return the number of the data-parallel replica.

    Without data-parallel attention, SGLang 0.5.23 sets ``config.dp_rank`` to 0 in every replica.
    """
    try:
        found = config.dp_rank or get_parallel().dp_rank
    except (AttributeError, RuntimeError, ValueError):
        return 0
    return found if isinstance(found, int) else 0


def _server_args() -> Any:
    """Return SGLang's server arguments, or None if SGLang has not published them in this process."""
    try:
        return get_server_args()
    except (RuntimeError, ValueError, AttributeError):
        return None
