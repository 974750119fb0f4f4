"""Test a store whose pages are in extent files."""

from __future__ import annotations

from pathlib import Path

from tests.nvme.rig import extent_files
from tests.support.pages import SPEC, chain, read_soon, tiers, write_each
from tierstore.store import TierStore


def test_pages_are_served_from_extents_after_a_reopen(tmp_path: Path) -> None:
    config = tiers(4, 8, tmp_path / "disk", nvme_more={"payload": "extents"})
    assert config.nvme is not None
    keys = chain(40)
    with TierStore.open(config, SPEC) as store:
        write_each(store, keys)
        store.flush()
    assert extent_files(tmp_path / "disk", SPEC.fingerprint)
    with TierStore.open(config, SPEC) as store:
        assert store.match(keys).num_pages == 40
        assert sum(read_soon(store, [keys[index]]) for index in (0, 19, 39)) == 3
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert (nvme["payload"], nvme["read_integrity"]) == ("extents", 0)
        assert nvme["disk_nbytes"] <= config.nvme.capacity
        store.check()
