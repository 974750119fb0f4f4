"""What calls of an open store cost: match, acquire and release, and how long the lock is held at most."""

from __future__ import annotations

import gc
from time import thread_time
from typing import TYPE_CHECKING

from tierstore.bench.catalogue import SPEC
from tierstore.bench.measurement import Row, best_of
from tierstore.bench.tables import synthetic_pages
from tierstore.config import load_config
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_RUNS = 9
_HOLD_RUNS = 3
_CHUNK = 512


def calls(pages: int) -> list[Row]:
    """Match, acquire and release of a sequence that is resident in HBM, and match of one that is in HOST."""
    keys = [key for key, _ in synthetic_pages(pages)]
    with _store(pages, pages, None) as store:
        store.put(keys, store.allocate(pages))
        store.drain(60.0)
        match = best_of(_RUNS, lambda: store.match(keys))
        lease = best_of(_RUNS, lambda: store.acquire(keys).release())
        store.evict(keys, Tier.HBM)
        below = best_of(_RUNS, lambda: store.match(keys))
        load = min(_taken_from_host(store, keys) for _ in range(_RUNS))
    return [
        Row(f"match of {pages} pages in HBM", match * 1e3, "ms", 2.0),
        Row(f"match of {pages} pages in HOST", below * 1e3, "ms", 2.0),
        Row("acquire + release", lease / pages * 1e6, "us a page"),
        Row("acquire from HOST, CPU time of the caller", load / pages * 1e6, "us a page"),
    ]


def _taken_from_host(store: TierStore, keys: list[PageKey]) -> float:
    """Seconds of the caller's CPU until all loads are started; other threads copy meanwhile."""
    store.evict(keys, Tier.HBM)
    store.drain(60.0)
    begun = thread_time()
    lease = store.acquire(keys)
    taken = thread_time() - begun
    with lease:
        lease.wait(60.0)
    return taken


def lock_holds(pages: int, directory: Path) -> list[Row]:
    """The longest hold of the lock while ``pages`` pages are put, held, saved, demoted, loaded and evicted.

    HBM holds them all, HOST half of them. Python's cyclic collector stops whoever allocates, lock or no lock, for as
    long as the whole process has objects: the goal is for what the store does, so it is off but for the last run.
    Of several runs the one that others on the machine disturbed least counts.
    """
    gc.collect()
    gc.disable()
    try:
        cpu, elapsed = min(_longest_holds(pages, directory / f"alone{i}") for i in range(_HOLD_RUNS))
    finally:
        gc.enable()
    with_gc, _ = _longest_holds(pages, directory / "collected")
    return [
        Row(f"longest lock hold, CPU time, in {cpu[1]}", cpu[0] * 1e3, "ms", 1.0),
        Row(f"longest lock hold, elapsed, in {elapsed[1]}", elapsed[0] * 1e3, "ms"),
        Row("longest lock hold, CPU time, Python's collector on", with_gc[0] * 1e3, "ms"),
    ]


def _longest_holds(pages: int, directory: Path) -> tuple[tuple[float, str], tuple[float, str]]:
    """Seconds and the step they were in: CPU time, elapsed."""
    keys = [key for key, _ in synthetic_pages(pages)]
    with _store(pages, max(1, pages // 2), directory) as store:
        steps: dict[str, Callable[[], object]] = {
            "allocate and put": lambda: store.put(keys, store.allocate(pages)),
            "acquire and release": lambda: store.acquire(keys).release(),
            "flush": store.flush,
            "demote": lambda: store.demote(keys, Tier.NVME),
            "drain": lambda: store.drain(60.0),
            "load and release": lambda: _load_in_pieces(store, keys),
            "evict": lambda: store.evict(keys),
            "flush of erases": store.flush,
        }
        worst = {"cpu": (0.0, ""), "elapsed": (0.0, "")}
        for name, step in steps.items():
            step()
            for clock, held in store.metrics.snapshot()["lock_longest_hold_seconds"].items():
                worst[clock] = max(worst[clock], (held, name), key=lambda found: found[0])
    return worst["cpu"], worst["elapsed"]


def _load_in_pieces(store: TierStore, keys: list[PageKey]) -> None:
    for start in range(0, len(keys), _CHUNK):
        with store.acquire(keys[start : start + _CHUNK]) as lease:
            lease.wait(60.0)


def _store(hbm: int, host: int, directory: Path | None) -> TierStore:
    tree: dict[str, object] = {
        "hbm": {"capacity": hbm * SPEC.page_nbytes, "device": "cpu"},
        "host": {"capacity": host * SPEC.page_nbytes},
    }
    if directory is not None:
        tree["nvme"] = {"path": str(directory), "capacity": (hbm << 14) + (64 << 20)}
    return TierStore.open(load_config(tree), SPEC)
