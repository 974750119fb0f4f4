"""Tests of restarts, kills and damage: flushed pages are found, damaged pages are misses, nothing is leaked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.field.killing import victim
from tests.field.victim import pages
from tests.nvme.rig import data_file
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    counter,
    read,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tierstore.config import StoreConfig
from tierstore.errors import ConfigError
from tierstore.nvme import record_format
from tierstore.nvme.inspection import purge
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier


def config_of(home: Path) -> StoreConfig:
    return tiers(8, 16, home, nvme_pages=100)


@pytest.mark.deep  # tests/store/test_crash.py kills a store, too
def test_pages_flushed_by_a_killed_process_are_all_found(tmp_path: Path) -> None:
    # F046: every flushed page is a hit
    with victim(tmp_path, 100, "killed", 12):
        pass
    with TierStore.open(config_of(tmp_path), SPEC) as store:
        assert sum(read(store, [key]) for key in pages("killed", 12)) == 12


def test_a_directory_can_be_wiped(tmp_path: Path) -> None:
    # F046
    keys = chain(3)
    with TierStore.open(config_of(tmp_path), SPEC) as store:
        write(store, keys)
    purge(tmp_path, "all")
    with TierStore.open(config_of(tmp_path), SPEC) as store:
        assert store.match(keys).num_pages == 0
        write(store, keys)
        assert read(store, keys) == 3


def test_killed_process_leaves_no_shared_memory_or_lock_and_others_continue(tmp_path: Path) -> None:
    # F049: the pool of a killed process was private, anonymous memory
    names: list[set[str]] = []
    for turn in range(2):
        with victim(tmp_path / "killed", 100, f"turn{turn}-", 4):
            with pytest.raises(ConfigError, match="in use by process") as refused:  # the process is alive
                TierStore.open(config_of(tmp_path / "killed"), SPEC)
            process = re.search(r"in use by process (\d+)", str(refused.value))
            assert process is not None
            maps = Path(f"/proc/{process[1]}/maps").read_text(encoding="utf-8")
            assert "[heap]" in maps
            assert "/dev/shm/" not in maps
        names.append({str(path.relative_to(tmp_path)) for path in (tmp_path / "killed").rglob("*")})
    assert names[0] == names[1]
    with victim(tmp_path / "alive", 100, "alive", 4):
        with TierStore.open(config_of(tmp_path / "killed"), SPEC) as store:
            assert sum(read(store, [key]) for key in pages("turn1-", 4)) == 4
            slots = store.allocate(8)
            assert len(slots) == 8
        with pytest.raises(ConfigError, match="in use by process"):
            TierStore.open(config_of(tmp_path / "alive"), SPEC)
    with TierStore.open(config_of(tmp_path / "alive"), SPEC) as store:
        assert sum(read(store, [key]) for key in pages("alive", 4)) == 4


def _first_byte_of_the_head(body: int) -> int:
    return body - record_format.HEAD_NBYTES


def _key_in_the_head(body: int) -> int:
    return body - record_format.HEAD_NBYTES + 48


def _padding_of_the_head(body: int) -> int:
    return body - 8


def _first_byte(body: int) -> int:
    return body


def _middle(body: int) -> int:
    return body + SPEC.page_nbytes // 2


def _last_byte(body: int) -> int:
    return body + SPEC.page_nbytes - 1


PLACES = [_first_byte_of_the_head, _key_in_the_head, _padding_of_the_head, _first_byte, _middle, _last_byte]


def flip(home: Path, key: PageKey, place: Callable[[int], int]) -> None:
    """Flip one bit of a page's record in the data file.

    ``place`` returns the position of the byte to change, given the position of the page's bytes.
    """
    path = data_file(home, SPEC.fingerprint)
    raw = path.read_bytes()
    body = content(key).numpy().tobytes()
    assert raw.count(body) == 1
    at = place(raw.index(body))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([raw[at] ^ 0x04]))


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_flipped_bit_is_a_miss_and_is_counted_removed_and_rewritten(
    tmp_path: Path, place: Callable[[int], int], running: bool
) -> None:
    # F048: in the header and in the payload, while the store is closed and while it runs
    keys, others = chain(3), chain(2, "other")
    store = TierStore.open(config_of(tmp_path), SPEC)
    for sequence in (keys, others):
        write(store, sequence)
        store.demote(sequence, Tier.NVME)
    store.flush()
    assert store.drain(PATIENCE_S)
    if not running:
        store.close()
    flip(tmp_path, keys[1], place)
    if not running:
        store = TierStore.open(config_of(tmp_path), SPEC)
    assert store.match(keys).num_pages == 3
    assert read(store, keys) == 1
    assert counter(store, "failed_pages", "NVME,HOST,integrity") == 1
    assert store.explain(keys)[1]["lost"] == "integrity"
    store.flush()
    nvme = store.stats()["nvme"]
    assert isinstance(nvme, dict)
    assert (nvme["records"], nvme["read_integrity"]) == (4, 1)
    assert read(store, others) == 2
    write(store, keys)
    store.close()
    with TierStore.open(config_of(tmp_path), SPEC) as store:
        assert read(store, keys) == 3
        assert read(store, others) == 2
        require_nothing_held(store)


def test_flipped_bit_in_the_index_loses_pages_but_never_returns_wrong_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # F048: in every copy of a key's entry in the catalogue
    keys = chain(3)
    with TierStore.open(config_of(tmp_path), SPEC) as store:
        write(store, keys)
    path = data_file(tmp_path, SPEC.fingerprint)
    raw = bytearray(path.read_bytes())
    at, changed = raw.find(keys[1]), 0
    while at >= 0:
        raw[at + len(keys[1]) + 20] ^= 0x04
        changed += 1
        at = raw.find(keys[1], at + 1)
    assert changed
    path.write_bytes(raw)
    with TierStore.open(config_of(tmp_path), SPEC) as store:
        found = store.match(keys).num_pages
        assert read(store, keys) <= found
        store.evict(keys)
        write(store, keys)
        store.flush()
        assert read(store, keys) == 3
        assert all(Tier.NVME in where(store, key) for key in keys)
    assert "starts empty" in caplog.text or found < 3
