"""How long a store takes to open over a full catalogue. The records are synthetic: catalogue entries without pages."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import lmdb

from tierstore.bench.rows import Row
from tierstore.bench.tables import synthetic_pages
from tierstore.config import load_config
from tierstore.nvme import entry
from tierstore.nvme.sizing import size
from tierstore.store import TierStore
from tierstore.types import PageSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.config import StoreConfig

SPEC = PageSpec(
    num_layers=1, page_size=16, num_kv_heads=1, head_dim=64, dtype="bfloat16", model="tierstore-bench"
)
_SLACK = 64 << 20
_BATCH = 50_000
_RUNS = 2


def reopen(records: int, directory: Path) -> list[Row]:
    """``TierStore.open`` over ``records`` records, the checks of a real open included. ``directory`` must be new.

    ConfigError where the disk has no room for such a tier; the records themselves are not written.
    """
    share = size(1 << 30, SPEC.page_nbytes).record_nbytes
    config = load_config(
        {
            "hbm": {"capacity": 64 * SPEC.page_nbytes, "device": "cpu"},
            "nvme": {
                "path": str(directory),
                "capacity": int(records * share * 1.3) + _SLACK,
                "payload": "lmdb",
            },
        }
    )
    TierStore.open(config, SPEC).close()
    _fill(next(directory.glob("*/data.mdb")).parent, records, share)
    seconds = min(_open(config, records) for _ in range(_RUNS))
    return [Row(f"open with {records} records", seconds, "s", 5.0)]


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


def _fill(environment: Path, records: int, share: int) -> None:
    pages = sorted(synthetic_pages(records))
    size_of_map = 1 << 40
    with lmdb.open(
        str(environment), map_size=size_of_map, max_dbs=entry.MAX_DBS, sync=False, writemap=False
    ) as env:
        catalogue, heads = env.open_db(entry.CATALOGUE_DB), env.open_db(entry.PAGES_DB)
        for start in range(0, records, _BATCH):
            with env.begin(write=True) as txn:
                for key, parent in pages[start : start + _BATCH]:
                    row = entry.Entry(parent, share, SPEC.page_nbytes, 0)
                    txn.put(key, entry.pack(key, row), db=catalogue)
                    txn.put(key, bytes(8), db=heads)
        env.sync(True)
