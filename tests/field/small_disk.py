"""A program that tests a store on a small filesystem, which it fills with other files.

Arguments: the mount point of the filesystem, and the value of ``nvme.payload``. Exits with 0 if all checks pass.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from time import monotonic, sleep

from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    read,
    read_soon,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tierstore.config import StoreConfig
from tierstore.errors import ConfigError
from tierstore.nvme.inspection import inspect, purge, verify
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def fill(path: Path) -> None:
    """Write zeros to a file until the filesystem has no free space."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def state(store: TierStore) -> object:
    found = store.stats()["nvme"]
    assert isinstance(found, dict)
    return found["state"]


def main() -> None:
    home, payload = Path(sys.argv[1]), sys.argv[2]
    warnings = Warnings()
    logging.getLogger("tierstore").addHandler(warnings)
    config = tiers(8, 16, home / "store", nvme_pages=100, nvme_more={"payload": payload})
    before, after = chain(4, "before"), chain(4, "after")
    with TierStore.open(config, SPEC) as store:
        write(store, before)
        store.flush()
        fill(home / "others")
        deadline = monotonic() + PATIENCE_S
        number = 0
        while state(store) != "read_only":
            keys = chain(4, f"{number}")
            write(store, keys)
            assert read(store, keys) == 4
            store.flush()
            number += 1
            assert monotonic() < deadline, "the disk did not become full in time"
        for number in range(30):
            keys = chain(4, f"full{number}")
            write(store, keys)
            assert read(store, keys) == 4
        assert read_soon(store, before) == 4
        store.check()
        told = [text for text in warnings.said if "read-only" in text]
        assert len(told) == 1, warnings.said
        (home / "others").unlink()
        while state(store) != "ok":
            assert monotonic() < deadline, "the tier did not recover in time"
            sleep(0.02)
        write(store, after)
        while not all(where(store, key).get(Tier.NVME) == "ready" for key in after):
            assert monotonic() < deadline
            sleep(0.02)
        require_nothing_held(store)
    with TierStore.open(config, SPEC) as store:
        assert read(store, before) == 4
        assert read(store, after) == 4
    open_a_full_disk(home, config, before, warnings)


def open_a_full_disk(home: Path, config: StoreConfig, before: list[PageKey], warnings: Warnings) -> None:
    """Check that a store opens and serves pages on a full disk, and writes once there is space again."""
    fill(home / "others")
    warnings.said.clear()
    with TierStore.open(config, SPEC) as store:
        assert state(store) == "read_only"
        assert store.match(before).num_pages == 4
        assert read(store, before) == 4
        write(store, chain(4, "more"))
        store.flush()
        assert state(store) == "read_only"
        assert read(store, before) == 4
        assert len(warnings.said) == 1, warnings.said
        assert "read-only" in warnings.said[0]
        # the number of records is unknown while the store is open
        assert [report.records for report in inspect(home / "store").shards] == [None]
        (home / "others").unlink()
        deadline = monotonic() + PATIENCE_S
        while state(store) != "ok":
            assert monotonic() < deadline, "the tier did not recover in time"
            sleep(0.02)
        write(store, chain(4, "later"))
        store.flush()
    fill(home / "others")
    (shard,) = inspect(home / "store").shards
    assert shard.fault is None
    (verdict,) = verify(home / "store")
    assert verdict.checked == shard.records
    assert verdict.bad == ()
    with TierStore.open(config, SPEC) as store:
        assert read(store, chain(4, "later")) == 4
        assert state(store) == "read_only"
        store.evict(before)
        store.flush()
        assert read(store, before) == 0
    with TierStore.open(config, SPEC) as store:
        assert read(store, before) == 0
        assert read(store, chain(4, "later")) == 4
    try:
        TierStore.open(tiers(8, 16, home / "new", nvme_pages=100), SPEC)
    except ConfigError:
        pass
    else:
        raise AssertionError("a new directory was not refused although the disk has too little space")
    purge(home / "store", "all")
    assert list(home.glob("store/*-0")) == []
    (home / "others").unlink()
    with TierStore.open(config, SPEC) as store:
        assert state(store) == "ok"


if __name__ == "__main__":
    main()
