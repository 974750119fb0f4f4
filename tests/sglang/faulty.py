"""Storage backends with planted faults. The harness must notice each of them."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from torch import Tensor


class WrongPage(HiCacheFile):  # type: ignore[misc]
    """Return, now and then, the page of another key."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config)
        self._gets = 0
        self._other: str | None = None

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        self._gets += 1
        asked, self._other = key, self._other or key
        if self._gets % 20 == 0:
            asked = self._other
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


class Stuck(HiCacheFile):  # type: ignore[misc]
    """Never return from a read."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config)

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        import threading

        threading.Event().wait()
        return None
