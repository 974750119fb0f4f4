"""Tests of the configuration (docs/field-reports.md, kind K19).

A size is applied, or the error names it. Open detects what the machine lacks, and stats report the settings in effect.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    nvme_capacity,
    read,
    require_nothing_held,
    tier_stats,
    tiers,
    where,
    write,
)
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.store import TierStore
from tierstore.types import Tier

PAGE = SPEC.page_nbytes


def sized(section: str, capacity: object, home: Path) -> dict[str, object]:
    """Return a configuration with this capacity in ``section``, and with valid sizes everywhere else."""
    sizes: dict[str, object] = {
        "hbm": 4 * PAGE,
        "host": 4 * PAGE,
        "nvme": nvme_capacity(20),
        section: capacity,
    }
    return {
        "hbm": {"device": "cpu", "capacity": sizes["hbm"]},
        "host": {"capacity": sizes["host"]},
        "nvme": {"path": home, "capacity": sizes["nvme"]},
    }


@pytest.mark.parametrize("section", ["hbm", "host", "nvme"])
@pytest.mark.parametrize(
    "capacity", [0, -1, "0GiB", "-1GiB", "10 apples", PAGE - 1, "900EiB", "7EiB", "4PiB"]
)
def test_a_size_that_is_too_large_is_refused_by_name_and_nothing_is_created(
    tmp_path: Path, section: str, capacity: object
) -> None:
    # F100: "secondary pool: 0 blocks"
    home = tmp_path / "disk"
    with pytest.raises(ConfigError, match=rf"{section}\.capacity"):
        TierStore.open(load_config(sized(section, capacity, home)), SPEC)
    assert not list(home.glob("*/data.mdb"))


@pytest.mark.parametrize("section", ["hbm", "host"])
@pytest.mark.parametrize(
    ("capacity", "nbytes"), [("1MB", 10**6), ("1MiB", 1 << 20), ("1e6", 10**6), (f"{PAGE}", PAGE)]
)
def test_a_size_holds_as_many_pages_as_stats_report(
    tmp_path: Path, section: str, capacity: str, nbytes: int
) -> None:
    # F100
    with TierStore.open(load_config(sized(section, capacity, tmp_path)), SPEC) as store:
        assert tier_stats(store, Tier[section.upper()])["num_slots"] == nbytes // PAGE
        told = store.stats()["config"]
        assert isinstance(told, dict)
        assert told[section]["capacity"] == nbytes
        write(store, chain(1))
        store.flush()
        assert read(store, chain(1)) == 1


def works(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    assert {tuple(where(store, key)) for key in keys} == {(Tier.NVME,)}
    assert read(store, keys) == 3
    require_nothing_held(store)


@pytest.fixture
def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate filesystems that do not support O_DIRECT."""
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """Return a directory on a filesystem in memory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no filesystem in memory here")
    with tempfile.TemporaryDirectory(prefix="tierstore-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.usefixtures("no_direct_io")
@pytest.mark.parametrize("payload", ["auto", "lmdb", "extents"])
def test_without_direct_io_pages_use_the_page_cache_and_stats_report_it(
    tmp_path: Path, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    # F102: a self-test at open detects this, also with a capacity for which open measures the disk
    config = tiers(4, 4, tmp_path, nvme_more={"payload": payload, "capacity": "1GiB"})
    with caplog.at_level(logging.WARNING), TierStore.open(config, SPEC) as store:
        told = store.stats()["nvme"]
        assert isinstance(told, dict)
        assert told["o_direct"] is False
        assert told["payload"] == ("extents" if payload == "auto" else payload)
        assert told["readers"] == 2
        works(store)
    with TierStore.open(config, SPEC) as store:
        assert read(store, chain(3)) == 3
    assert caplog.records == []


@pytest.mark.parametrize("payload", ["auto", "lmdb", "extents"])
def test_a_filesystem_in_memory_serves_as_well(memory_disk: Path, payload: str) -> None:
    # F102
    config = tiers(4, 4, memory_disk, nvme_more={"payload": payload})
    with TierStore.open(config, SPEC) as store:
        works(store)
    with TierStore.open(config, SPEC) as store:
        assert read(store, chain(3)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
@pytest.mark.parametrize(
    ("hbm", "host", "named"),
    [
        ({"device": "cuda"}, {}, "hbm.device"),
        ({"device": "cpu"}, {"pin": "always"}, "host.pin"),
    ],
)
def test_a_missing_gpu_is_refused_at_open(hbm: dict[str, str], host: dict[str, str], named: str) -> None:
    # F102
    config = load_config({"hbm": {"capacity": 4 * PAGE, **hbm}, "host": {"capacity": 4 * PAGE, **host}})
    with pytest.raises(ConfigError, match=f"{named} is .*set it to"):
        TierStore.open(config, SPEC)


@pytest.mark.parametrize("page_size", [2, 8, 128, 4096])
def test_shortest_reused_prefix_is_one_page_and_stats_report_its_length(page_size: int) -> None:
    # F104: prompts below 2,096 tokens were never reused, without any message
    specs = [
        replace(SPEC, page_size=page_size, num_layers=1, head_dim=dim, group=group)
        for group, dim in enumerate([2, 4])
    ]
    room = sum(spec.page_nbytes for spec in specs) * 5000 // page_size
    with TierStore.open(
        load_config({"hbm": {"device": "cpu", "capacity": max(room, 1 << 17)}}), specs
    ) as store:
        assert store.stats()["page_size"] == page_size
        for tokens in (1, 100, 1000, 5000):
            prompt = [tokens] * tokens
            keys = store.keys(prompt)
            assert len(keys) == tokens // page_size
            if keys:
                slots = store.allocate(len(keys), timeout_s=PATIENCE_S)
                store.put(keys, slots)
                assert store.match(store.keys([*prompt, 7])).num_pages == tokens // page_size
