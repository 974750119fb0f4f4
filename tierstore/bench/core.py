"""Benchmarks of the store's metadata, without the cost of copying page bytes.

- Tables: the time of a reserve and commit, and the Python memory per page, without page bytes or threads.
- Calls of an open store: match, acquire and release, and the longest time that a call holds the store's lock.
- Catalogue: the time to open a store on a full catalogue. Its records are synthetic and have no page bytes.
- vLLM's scheduler: the time per block of the part of the connector that runs in vLLM's scheduler. There is no
  worker and no tensor; acks are simulated. If the blocks are in vLLM's own cache, all this time is spent before the
  first token of a request. In a restore, only the time until the scheduler sends the first orders to copy blocks
  delays the first token; the rest overlaps with the copies. The time to store blocks overlaps with the forward
  passes that compute them, unless the engine waits for its scheduler.
"""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import lmdb

from tierstore.adapters.vllm.kv_groups import Group, Groups
from tierstore.adapters.vllm.messages import Hello, Report
from tierstore.adapters.vllm.requests import Step
from tierstore.adapters.vllm.scheduler import SchedulerHalf, Terms
from tierstore.bench.measurement import Row, best_of
from tierstore.config import load_config
from tierstore.directory.residency import Residency, TierTable
from tierstore.nvme.catalogue_entry import CATALOGUE_DB, MAX_DBS, PAGES_DB, Entry, pack
from tierstore.nvme.direct_io import BLOCK
from tierstore.nvme.directory_layout import extent_path
from tierstore.nvme.disk_space import Sizing, size, size_extents
from tierstore.page import PageSpec
from tierstore.policy import make_policy
from tierstore.store import TierStore
from tierstore.types import Ack, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tierstore.adapters.vllm.messages import Orders
    from tierstore.config import StoreConfig

_CHAIN = 128
_TABLE_RUNS = 3


def synthetic_key(number: int) -> PageKey:
    """Return a key whose bytes are distributed like those of a digest. Equal numbers give equal keys."""
    return PageKey((number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4 + bytes(4))


def synthetic_pages(number: int) -> Iterator[tuple[PageKey, PageKey | None]]:
    """Yield ``number`` keys, each with its parent or None, as sequences of 128 pages.

    Every key is a new object, as in a real store, so that its memory is counted.
    """
    parent: PageKey | None = None
    for i in range(number):
        key = synthetic_key(i)
        yield key, parent if i % _CHAIN else None
        parent = key


def reserve_and_commit(pages: int) -> list[Row]:
    """Measure the bookkeeping of a copy from HBM to host memory, page by page, without copying bytes.

    The bookkeeping consists of a reserve, which pins the page in HBM, and a commit, which unpins it. It is measured
    for free slots in host memory, and for slots from which another page must be dropped first.
    """
    keys = [key for key, _ in synthetic_pages(2 * pages)]
    old, new = keys[:pages], keys[pages:]
    free, dropping = [], []
    for _ in range(_TABLE_RUNS):
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
    """Measure how many bytes of Python memory a page on NVMe and a page in host memory take, including the key."""
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
        [(slot, source)] = residency.reserve((key,), Tier.HOST, 0, Tier.HBM)
        residency.commit((key,), Tier.HOST, (slot,), Tier.HBM, (source,), parents=(parent,))
        parent = key


def _load_nvme(pages: int) -> Residency:
    residency = Residency({Tier.NVME: TierTable(make_policy("lru"), budget_nbytes=pages)})
    residency.load(Tier.NVME, ((key, parent, 1) for key, parent in synthetic_pages(pages)))
    return residency


def _fill_host(pages: int) -> Residency:
    nvme = TierTable(make_policy("lru"), budget_nbytes=pages)
    residency = Residency({Tier.HOST: _slots(pages), Tier.NVME: nvme})
    for key, parent in synthetic_pages(pages):
        [(slot, _)] = residency.reserve((key,), Tier.HOST)
        residency.commit((key,), Tier.HOST, (slot,), parents=(parent,))
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


SPEC = PageSpec(
    num_layers=1, page_size=16, num_kv_heads=1, head_dim=64, dtype="bfloat16", model="tierstore-bench"
)
_SLACK = 64 << 20
_BATCH = 50_000
_OPENINGS = 2


def reopen(records: int, directory: Path, payload: str = "lmdb") -> list[Row]:
    """Measure how long ``TierStore.open`` takes if the directory contains ``records`` records.

    The catalogue entries are written beforehand. Page bytes are not written, and extent files stay sparse.

    Args:
        records: Number of records.
        directory: A directory that does not exist yet.
        payload: The value of ``nvme.payload``.

    Raises:
        ConfigError: The disk does not have enough free space for a tier of this capacity.
    """
    share = size(1 << 30, SPEC.page_nbytes).record_nbytes
    capacity = int(records * share * 1.3) + _SLACK
    config = load_config(
        {
            "hbm": {"capacity": 64 * SPEC.page_nbytes, "device": "cpu"},
            "nvme": {"path": str(directory), "capacity": capacity, "payload": payload},
        }
    )
    TierStore.open(config, SPEC).close()
    environment = next(directory.glob("*/data.mdb")).parent
    if payload == "extents":
        _fill_extents(environment, records, size_extents(capacity, SPEC.page_nbytes))
    else:
        _fill(environment, records, lambda index, parent: Entry(parent, share, SPEC.page_nbytes, 0), bytes(8))
    seconds = min(_open(config, records) for _ in range(_OPENINGS))
    kind = "" if payload == "lmdb" else f", {payload}"
    return [Row(f"open with {records} records{kind}", seconds, "s", 5.0)]


def _open(config: StoreConfig, records: int) -> float:
    start = perf_counter()
    store = TierStore.open(config, SPEC)
    seconds = perf_counter() - start
    try:
        keys = [key for key, _ in synthetic_pages(min(records, 128))]
        if store.match(keys).num_pages != len(keys):
            raise RuntimeError("the reopened store does not find its pages")
    finally:
        store.close()
    return seconds


def _fill_extents(environment: Path, records: int, sizing: Sizing) -> None:
    slots = sizing.extent_nbytes // sizing.slot_nbytes
    for number in range(1, 2 + (records - 1) // slots):
        with extent_path(environment, number).open("wb") as file:
            file.truncate(sizing.extent_nbytes)
    blocks = sizing.slot_nbytes // BLOCK

    def entry(index: int, parent: PageKey | None) -> Entry:
        extent, slot = divmod(index, slots)
        return Entry(parent, sizing.record_nbytes, SPEC.page_nbytes, 0, extent + 1, slot * blocks, index)

    _fill(environment, records, entry, None)


def _fill(
    environment: Path,
    records: int,
    entry: Callable[[int, PageKey | None], Entry],
    value: bytes | None,
) -> None:
    """Write the catalogue entries of synthetic records.

    Args:
        environment: Directory of the LMDB environment.
        records: Number of records.
        entry: Returns the catalogue entry for a record's index and parent.
        value: Stored for each record in the LMDB database of page bytes, or None to store nothing there.
    """
    pages = sorted(synthetic_pages(records))
    size_of_map = 1 << 40
    with lmdb.open(
        str(environment), map_size=size_of_map, max_dbs=MAX_DBS, sync=False, writemap=False
    ) as env:
        catalogue, values = env.open_db(CATALOGUE_DB), env.open_db(PAGES_DB)
        for start in range(0, records, _BATCH):
            with env.begin(write=True) as txn:
                for index, (key, parent) in enumerate(pages[start : start + _BATCH], start):
                    txn.put(key, pack(key, entry(index, parent)), db=catalogue)
                    if value is not None:
                        txn.put(key, value, db=values)
        env.sync(True)


_CALL_RUNS = 9
_HOLD_RUNS = 3
_LOADED_AT_ONCE = 512


def calls(pages: int) -> list[Row]:
    """Measure match and acquire + release for pages in HBM, and match and acquire for pages in host memory."""
    keys = [key for key, _ in synthetic_pages(pages)]
    with _store(pages, pages, None) as store:
        store.put(keys, store.allocate(pages))
        store.drain(60.0)
        match = best_of(_CALL_RUNS, lambda: store.match(keys))
        lease = best_of(_CALL_RUNS, lambda: store.acquire(keys).release())
        store.evict(keys, Tier.HBM)
        below = best_of(_CALL_RUNS, lambda: store.match(keys))
        load = min(_taken_from_host(store, keys) for _ in range(_CALL_RUNS))
    return [
        Row(f"match of {pages} pages in HBM", match * 1e3, "ms", 2.0),
        Row(f"match of {pages} pages in HOST", below * 1e3, "ms", 2.0),
        Row("acquire + release", lease / pages * 1e6, "us a page"),
        Row("acquire from HOST, CPU time of the caller", load / pages * 1e6, "us a page"),
    ]


def _taken_from_host(store: TierStore, keys: list[PageKey]) -> float:
    """Return the CPU time, in seconds, that ``acquire`` takes in the calling thread if all pages are in HOST.

    Other threads copy the pages at the same time; their CPU time is not included.
    """
    store.evict(keys, Tier.HBM)
    store.drain(60.0)
    begun = thread_time()
    lease = store.acquire(keys)
    taken = thread_time() - begun
    with lease:
        lease.wait(60.0)
    return taken


def lock_holds(pages: int, directory: Path) -> list[Row]:
    """Measure the longest time for which the store's lock is held, in a store with ``pages`` pages.

    In each run, the pages are put, leased, saved, demoted, loaded and evicted. HBM has slots for all pages, and
    host memory for half of them.

    Python's cyclic garbage collector pauses any thread that allocates, for a time that grows with the number of
    objects in the process. Only the store's own work should be measured, so the collector is off in three runs. Of
    the longest holds of these runs, the shortest is reported, because other programs disturbed that run least. A
    fourth run, with the collector on, is reported separately.
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
    """Return the longest hold of the lock by CPU time, and the longest hold by elapsed time.

    Each is a pair: the length in seconds, and the name of the step in which the hold occurred.
    """
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
    for start in range(0, len(keys), _LOADED_AT_ONCE):
        with store.acquire(keys[start : start + _LOADED_AT_ONCE]) as lease:
            lease.wait(60.0)


def _store(hbm: int, host: int, directory: Path | None) -> TierStore:
    tree: dict[str, object] = {
        "hbm": {"capacity": hbm * SPEC.page_nbytes, "device": "cpu"},
        "host": {"capacity": host * SPEC.page_nbytes},
    }
    if directory is not None:
        tree["nvme"] = {"path": str(directory), "capacity": (hbm << 14) + (64 << 20)}
    return TierStore.open(load_config(tree), SPEC)


_BLOCK = 16
_SPEC = PageSpec(
    num_layers=32, page_size=_BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="tierstore-bench"
)
_SCHEDULED_TOKENS = 512
"""Number of blocks that one scheduler step computes, which have 8,192 tokens in total."""
_SCHEDULER_RUNS = 5
_DOCUMENTS = 4
"""Number of documents for which host memory has space."""
_HIT_GOAL_US = 1.2
_SETTLED_STEPS = 4
_MOST_STEPS = 10_000


@dataclass
class _Request:
    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    steps: list[Step] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


class _Engine:
    """A simulated engine that serves one request at a time. It calls ``SchedulerHalf`` in the same way as vLLM.
    The blocks of every request are numbered from 1.
    """

    def __init__(self, blocks: int) -> None:
        slots = _DOCUMENTS * blocks
        config = load_config({"host": {"capacity": slots * _SPEC.page_nbytes, "pin": "never"}})
        terms = Terms(config, Groups((Group(0, _BLOCK),)), load_timeout_s=600.0)
        self.half = SchedulerHalf(terms, [bytes(range(32))])
        self.half.meet([Hello(0, _SPEC, slots, slots, None)])
        self._blocks = blocks
        self._names = 0

    def request(self, document: int = 0) -> _Request:
        """Return a request with a new name. Its prompt is the document with this number, and one more token."""
        self._names += 1
        hashes = [sha256(f"{document} {i}".encode()).digest() for i in range(self._blocks)]
        return _Request(f"r{self._names}", hashes, self._blocks * _BLOCK + 1)

    def store(self, document: int) -> float:
        """Serve a request for a new document, whose blocks are then stored. Return the time in seconds.

        The engine computes the prompt chunk by chunk.
        """
        request = self.request(document)
        begin = perf_counter()
        self.half.arrived(request)
        assert self.half.offer(request, 0) == 0
        for start in range(0, self._blocks, _SCHEDULED_TOKENS):
            self._run(request, start, min(_SCHEDULED_TOKENS, self._blocks - start))
        self._end(request)
        for _ in range(_SETTLED_STEPS):
            self._carry(self.half.orders(()))
        return perf_counter() - begin

    def hit(self) -> float:
        """Serve a request whose blocks are all in the engine's cache. Return the time in seconds.
        The engine computes only the last token of the prompt.
        """
        request = self.request()
        begin = perf_counter()
        self.half.arrived(request)
        assert self.half.offer(request, self._blocks * _BLOCK) == 0
        self._run(request, self._blocks, 0, tokens=1)
        self._end(request)
        return perf_counter() - begin

    def restore(self) -> tuple[float, float]:
        """Serve a request whose blocks are all in host memory. Return two times in seconds.

        The first is the time until the first orders for the workers are ready. The second is the time of the whole
        request.
        """
        request, first, loaded = self.request(), 0.0, set[str]()
        begin = perf_counter()
        self.half.arrived(request)
        tokens = self.half.offer(request, 0)
        assert tokens == self._blocks * _BLOCK
        self.half.allocated(request, [list(range(1, self._blocks + 1))], tokens)
        for _ in range(_MOST_STEPS):
            orders = self.half.orders(())
            first = first or perf_counter() - begin
            loaded = self._carry(orders)
            if loaded:
                break
        assert loaded == {request.request_id}
        self._run(request, self._blocks, 0, tokens=1)
        self._end(request)
        return first, perf_counter() - begin

    def _run(self, request: _Request, start: int, blocks: int, tokens: int = 0) -> None:
        table = list(range(1, start + blocks + 1 + bool(tokens)))
        scheduled = tokens or blocks * _BLOCK
        first = not request.steps
        step = Step(request.request_id, start * _BLOCK, scheduled, [table], table[start:], first)
        request.steps.append(step)
        self._carry(self.half.orders([step]))

    def _end(self, request: _Request) -> None:
        last = request.steps[-1]
        self.half.finished(request.request_id, last.tables, last.computed + last.scheduled)

    def _carry(self, orders: Orders) -> set[str]:
        acks = [_ack(c) for c in (*orders.before, *orders.after) if isinstance(c, Transfer)]
        return self.half.heard(Report({0: tuple(acks)}) if acks else None)


def scheduler_rows(blocks: int) -> Sequence[Row]:
    """Measure the connector's time per block in the scheduler, for a request of ``blocks`` blocks.

    The time is measured for blocks in vLLM's own cache, for blocks restored from host memory, and for blocks stored
    in host memory, in free slots and in slots from which other pages must be dropped.
    """
    engine = _Engine(blocks)
    engine.store(0)
    hit = min(engine.hit() for _ in range(_SCHEDULER_RUNS))
    restores = [engine.restore() for _ in range(_SCHEDULER_RUNS)]
    free = [engine.store(document) for document in range(1, _DOCUMENTS)]
    full = [engine.store(document) for document in range(_DOCUMENTS, _DOCUMENTS + _SCHEDULER_RUNS)]
    engine.half.check()
    engine.half.close()
    name = f"vLLM's scheduler, {blocks} blocks"
    each = 1e6 / blocks
    return [
        Row(f"{name} in its own cache", hit * each, "us/block", _HIT_GOAL_US),
        Row(
            f"{name} restored, up to the first order", min(first for first, _ in restores) * each, "us/block"
        ),
        Row(f"{name} restored, in all", min(whole for _, whole in restores) * each, "us/block"),
        Row(f"{name} stored in free slots", min(free) * each, "us/block"),
        Row(f"{name} stored in place of others", min(full) * each, "us/block"),
    ]


def _ack(transfer: Transfer) -> Ack:
    """Return an ack that reports all pages of the transfer as copied."""
    pages = len(transfer.keys)
    sizes = (_SPEC.page_nbytes,) * pages
    return Ack(transfer.id, True, pages, pages * _SPEC.page_nbytes, 1e-3, (), sizes, ())
