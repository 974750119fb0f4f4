"""Test a store in a process that can start no thread or open no file: failed opens leave nothing behind."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from tests.support.pages import SPEC, chain, read, tiers, write
from tests.support.waiting import wait_for
from tierstore.errors import ConfigError
from tierstore.nvme import directory_layout
from tierstore.store import TierStore


class Threads:
    """Lets only ``left`` further threads start, as in a container with a limit."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        start = threading.Thread.start

        def begin(thread: threading.Thread) -> None:
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            start(thread)

        patch.setattr(threading.Thread, "start", begin)


def living() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tierstore")}


def test_a_store_whose_threads_cannot_be_started_is_refused_and_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, config = chain(2), tiers(4, 4, tmp_path)
    before = living()
    threads = Threads(monkeypatch)
    threads.left = 20
    with TierStore.open(config, SPEC):
        needed = 20 - threads.left
    new = tiers(4, 4, tmp_path / "new" / "home")
    for allowed in range(needed):
        for each in (config, new):
            threads.left = allowed
            with pytest.raises(ConfigError, match="can't start new thread"):
                TierStore.open(each, SPEC)
            wait_for(lambda: living() <= before)  # threads of other tests may end meanwhile
        assert not (tmp_path / "new").exists()
    threads.left = 20
    store = TierStore.open(config, SPEC)
    with store:
        write(store, keys)
        store.flush()
    threads.left = 20
    with TierStore.open(config, SPEC) as store:
        assert read(store, keys) == 2


def test_stats_work_without_a_free_file_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        write(store, chain(2))
        store.flush()
        found = store.stats()["nvme"]
        monkeypatch.setattr(directory_layout, "disk_nbytes", refused)
        without = store.stats()["nvme"]
        assert isinstance(found, dict)
        assert isinstance(without, dict)
        assert without["disk_nbytes"] == found["disk_nbytes"] > 0
