"""A program that tests a store in a directory on a read-only mount.

Argument: the directory, in which a store has written the pages of ``chain(6)``. Exits with 0 if all checks pass.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.pages import SPEC, chain, read, tiers, write
from tierstore.nvme.inspection import inspect, verify
from tierstore.store import TierStore


def main() -> None:
    home = Path(sys.argv[1])
    with pytest.raises(OSError, match="Read-only file system"):
        (home / "new").touch()
    config = tiers(8, 16, home, nvme_more={"read_only": True})
    warmed, new = chain(6), chain(4, "new")
    with TierStore.open(config, SPEC) as store:
        assert read(store, warmed) == 6
        write(store, new)
        assert read(store, new) == 4
        found = store.flush()
        assert (found.durable, found.failed, found.pending) == (6, 4, 0), found
        store.check()
    report = inspect(home)
    assert report.read_only
    assert [shard.records for shard in report.shards] == [6]
    assert [verdict.checked for verdict in verify(home)] == [6]


if __name__ == "__main__":
    main()
