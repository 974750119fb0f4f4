"""Test that the store continues to work while the disk refuses writes, and that no call waits for the disk."""

from __future__ import annotations

from pathlib import Path

from tests.nvme.rig import data_file_is_read_only
from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, tiers, write
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.store import TierStore
from tierstore.types import Tier

SPILL = (Tier.HBM, Tier.NVME)


def test_call_handles_past_failures_but_not_those_during_the_call(tmp_path: Path) -> None:
    """Writes to a disk that refuses them fail immediately, and are due again immediately.

    A call that waited until no write is due would never return.
    """
    pages, writes = 512, 5000
    config = tiers(hbm=pages, host=None, nvme=tmp_path / "disk", nvme_more={"flush": 1e-6}, nvme_pages=600)
    bench = open_bench(config, SPEC, spill=True)
    for _ in range(writes):
        bench.records.fail_next(SPILL, *range(BATCH_PAGES))
    bench.records.hold(SPILL)
    bench.store.put(chain(pages), bench.store.allocate(pages))
    assert bench.records.waiting(SPILL) > 4
    bench.records.holding.clear()
    bench.records.let_go(SPILL)
    bench.store.poll()
    assert bench.store.stats()["failing"] == ["NVME"]
    assert len(bench.records.failing[SPILL]) > writes - 100
    bench.records.failing.clear()
    bench.close()


def test_pages_that_cannot_be_saved_free_space_at_once_however_much_is_wanted(tmp_path: Path) -> None:
    wanted = 5 * BATCH_PAGES
    # No timed spill: pages that a spill is writing cannot be evicted, and ``allocate`` does not wait.
    config = tiers(
        hbm=wanted + 40, host=None, nvme=tmp_path / "disk", nvme_pages=400, nvme_more={"flush": 3600}
    )
    with TierStore.open(config, SPEC) as store, data_file_is_read_only(tmp_path / "disk", SPEC.fingerprint):
        for name in ("old", "new"):
            keys = chain(wanted // 2 + 20, name)
            store.put(keys, store.allocate(len(keys)))
        store.flush()
        assert store.stats()["failing"] == ["NVME"]
        slots = store.allocate(wanted, timeout_s=0)
        assert len(slots) == wanted
        assert store.match(chain(wanted, "new")).num_pages == 40  # the old sequence was evicted first
        store.check()
        store.free(slots)


def test_a_page_whose_successor_was_saved_frees_its_slot_although_the_disk_refuses_writes(
    tmp_path: Path,
) -> None:
    config = tiers(hbm=4, host=None, nvme=tmp_path / "disk", nvme_pages=40)
    bench = open_bench(config, SPEC)
    store = bench.store
    sequences = [chain(2, name) for name in ("a", "b")]
    for keys in sequences:
        write(store, keys)
        assert store.demote(keys[1:], Tier.NVME) == 1
        assert store.drain(PATIENCE_S)
        assert store.match(keys).tiers == (Tier.HBM, Tier.NVME)
    for _ in range(1000):
        bench.records.fail_next(SPILL, *range(BATCH_PAGES))
    slots = store.allocate(4, timeout_s=PATIENCE_S)
    assert [store.match(keys).num_pages for keys in sequences] == [0, 0]
    store.check()
    store.free(slots)
    bench.records.failing.clear()
    bench.close()
