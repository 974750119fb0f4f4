"""Storage backends with planted faults. The harness must notice each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from torch import Tensor

from tierstore.adapters.sglang.storage import TierStoreStorage


class WrongPage(HiCacheFile):  # type: ignore[misc]
    """Return, now and then, the page of another key, of the same size."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config)
        self._gets = 0
        self._others: dict[int, str] = {}

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        self._gets += 1
        other = self._others.setdefault(target_location.nbytes, key)
        asked = other if self._gets % 20 == 0 else key
        return super().get(asked, target_location, target_sizes)  # type: ignore[no-any-return]


class FlippedBit(HiCacheFile):  # type: ignore[misc]
    """Return, now and then, a page in which one bit differs."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config)
        self._gets = 0

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        page = super().get(key, target_location, target_sizes)
        self._gets += 1
        if page is not None and self._gets % 20 == 0:
            page.view(-1)[-1:].view(dtype=page.new_empty(0).char().dtype)[-1] ^= 1
        return page  # type: ignore[no-any-return]


class Forgetful(HiCacheFile):  # type: ignore[misc]
    """Say, now and then, that a page was stored, and do not store it."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config)
        self._sets = 0

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self._sets += 1
        return self._sets % 10 == 0 or bool(super().set(key, value, target_location, target_sizes))


class SwappedSlots(TierStoreStorage):
    """Put, now and then, a page of TierStore's into the host memory of another page."""

    _calls = 0

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        self._calls += 1
        if len(keys) > 1 and self._calls % 5 == 0:
            size = len(host_indices) // len(keys)
            host_indices = torch.cat(
                [host_indices[size : 2 * size], host_indices[:size], host_indices[2 * size :]]
            )
        return super().batch_get_v1(keys, host_indices, extra_info)


class SwappedSidecars(TierStoreStorage):
    """Put, now and then, a page of a pool beside the KV pool into the host memory of another page."""

    _calls = 0

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        self._calls += 1
        if self._calls % 5 == 0:
            transfers = [replace(each, host_indices=self._swapped(each)) for each in transfers]
        return super().batch_get_v2(transfers, extra_info)

    def _swapped(self, transfer: Any) -> Tensor:
        size = len(transfer.host_indices) // max(1, len(transfer.keys))
        first, second = transfer.host_indices[:size], transfer.host_indices[size : 2 * size]
        return torch.cat([second, first, transfer.host_indices[2 * size :]])


class Stuck(HiCacheFile):  # type: ignore[misc]
    """Never return from a read."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config)

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        import threading

        threading.Event().wait()
        return None


class PageOfThePromptBefore(TierStoreStorage):
    """Give, after its checksum was verified, a page of the call before in the place of each page."""

    def __init__(self, storage_config: Any, kwargs: object = None) -> None:
        super().__init__(storage_config, kwargs)
        self._before: dict[str, list[str]] = {}

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        return super().batch_get_v1(self._others("kv", keys), host_indices, extra_info)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        others = [
            replace(each, keys=self._others(str(each.name), each.keys)) if each.keys else each
            for each in transfers
        ]
        return super().batch_get_v2(others, extra_info)

    def _others(self, pool: str, keys: list[str]) -> list[str]:
        before = self._before.get(pool, [])
        self._before[pool] = [*keys]
        return [*before[: len(keys)], *keys[len(before) :]]
