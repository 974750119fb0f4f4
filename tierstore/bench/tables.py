"""What the metadata alone costs: time of a reserve and commit, memory of a resident page. No bytes, no thread."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING

from tierstore.bench.measurement import Row, best_of
from tierstore.directory.residency import Residency, TierTable
from tierstore.policy import make_policy
from tierstore.types import PageKey, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHAIN = 128
_RUNS = 3


def synthetic_key(number: int) -> PageKey:
    """A key that spreads like a digest: equal for equal numbers."""
    return PageKey((number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4 + bytes(4))


def synthetic_pages(number: int) -> Iterator[tuple[PageKey, PageKey | None]]:
    """Keys with their parents, in sequences of 128 pages; every key an object of its own."""
    parent: PageKey | None = None
    for i in range(number):
        key = synthetic_key(i)
        yield key, parent if i % _CHAIN else None
        parent = key


def reserve_and_commit(pages: int) -> list[Row]:
    """Copies from HBM to HOST as the store makes them: reserve with a pinned source, unpin, commit."""
    keys = [key for key, _ in synthetic_pages(2 * pages)]
    old, new = keys[:pages], keys[pages:]
    free, dropping = [], []
    for _ in range(_RUNS):
        residency = Residency({tier: _slots(pages) for tier in (Tier.HBM, Tier.HOST)})
        _put(residency, old)
        free.append(best_of(1, partial(_copy_to_host, residency, old)))
        for key in old:
            residency.evict(key, Tier.HBM)
        _put(residency, new)
        dropping.append(best_of(1, partial(_copy_to_host, residency, new)))
    return [
        Row("reserve + commit into a free slot", min(free) / pages * 1e6, "us a page", 10.0),
        Row("reserve + commit that drops a victim", min(dropping) / pages * 1e6, "us a page", 10.0),
    ]


def memory(pages: int) -> list[Row]:
    """Bytes of Python objects that one resident page costs, its key included."""
    return [
        Row("Python memory of a page on NVMe", _traced(pages, _load_nvme) / pages, "bytes a page", 400.0),
        Row("Python memory of a page in HOST", _traced(pages, _fill_host) / pages, "bytes a page", 400.0),
    ]


def _slots(number: int) -> TierTable:
    return TierTable(make_policy("lru"), num_slots=number)


def _put(residency: Residency, keys: list[PageKey]) -> None:
    parent: PageKey | None = None
    for key in keys:
        residency.adopt(key, Tier.HBM, residency.take(Tier.HBM), parent)
        parent = key
    residency.dropped.clear()


def _copy_to_host(residency: Residency, keys: list[PageKey]) -> None:
    parent: PageKey | None = None
    for key in keys:
        slot = residency.reserve(key, Tier.HOST, 0, Tier.HBM)
        residency.unpin(key, Tier.HBM, residency.tables[Tier.HBM].copies[key].slot)
        residency.commit(key, Tier.HOST, slot, 0, parent)
        parent = key


def _load_nvme(pages: int) -> Residency:
    residency = Residency({Tier.NVME: TierTable(make_policy("lru"), budget_nbytes=pages)})
    residency.runs.load(Tier.NVME, ((key, parent, 1) for key, parent in synthetic_pages(pages)))
    return residency


def _fill_host(pages: int) -> Residency:
    nvme = TierTable(make_policy("lru"), budget_nbytes=pages)
    residency = Residency({Tier.HOST: _slots(pages), Tier.NVME: nvme})
    for key, parent in synthetic_pages(pages):
        slot = residency.reserve(key, Tier.HOST)
        residency.commit(key, Tier.HOST, slot, 0, parent)
    return residency


def _traced(pages: int, build: Callable[[int], Residency]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        residency = build(pages)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        del residency
