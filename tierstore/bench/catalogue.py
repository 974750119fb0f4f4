"""How long a store takes to open over a full catalogue. The records are synthetic: catalogue entries without pages."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import lmdb

from tierstore.bench.measurement import Row
from tierstore.bench.tables import synthetic_pages
from tierstore.config import load_config
from tierstore.nvme.direct import BLOCK
from tierstore.nvme.entry import CATALOGUE_DB, MAX_DBS, PAGES_DB, Entry, pack
from tierstore.nvme.home import extent_path
from tierstore.nvme.sizing import Sizing, size, size_extents
from tierstore.store import TierStore
from tierstore.types import PageSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierstore.config import StoreConfig
    from tierstore.types import PageKey

SPEC = PageSpec(
    num_layers=1, page_size=16, num_kv_heads=1, head_dim=64, dtype="bfloat16", model="tierstore-bench"
)
_SLACK = 64 << 20
_BATCH = 50_000
_RUNS = 2


def reopen(records: int, directory: Path, payload: str = "lmdb") -> list[Row]:
    """``TierStore.open`` over ``records`` records, the checks of a real open included. ``directory`` must be new.

    ConfigError where the disk has no room for such a tier; page bytes are not written, extent files stay sparse.
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
    seconds = min(_open(config, records) for _ in range(_RUNS))
    kind = "" if payload == "lmdb" else f", {payload}"
    return [Row(f"open with {records} records{kind}", seconds, "s", 5.0)]


def _open(config: StoreConfig, records: int) -> float:
    start = perf_counter()
    store = TierStore.open(config, SPEC)
    seconds = perf_counter() - start
    try:
        keys = [key for key, _ in synthetic_pages(min(records, 128))]
        if store.match(keys).num_pages != len(keys):
            raise RuntimeError("the reopened store does not know its pages")
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
    """``value``: of each record in the tree of pages, where there is one."""
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
