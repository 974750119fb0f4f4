"""Tests that a sequence has the same keys in all processes and tiers, and that another key scheme is reported."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import lanes
from tests.support.pages import PATIENCE_S, SPEC, read, tier_stats, tiers, where, write
from tierstore import keys as page_keys
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

CHECKOUT = Path(__file__).parents[2]
TOKENS = range(16)
ALL_OPTIONS: dict[str, Any] = {
    "salt": b"tenant",
    "extra": ("lora-7", b"weights-3", 41, (5, b"image"), (9, b"other image")),
}
WRITER = f"""
import sys
from pathlib import Path
from tests.support.pages import SPEC, read, tiers, write
from tierstore.store import TierStore
with TierStore.open(tiers(8, 8, Path(sys.argv[1])), SPEC) as store:
    keys = store.keys(range(16), **{ALL_OPTIONS!r})
    print(read(store, keys), keys[-1].hex())
    write(store, keys)
"""


def run_writer(home: Path, seed: str | None) -> tuple[int, str]:
    """Look up and write pages in a new process. Return the number of pages found, and the last key in hex."""
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", WRITER, str(home)]
    child = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found, key = child.stdout.split()
    return int(found), key


def test_processes_of_every_hash_seed_find_the_pages_of_the_others(tmp_path: Path) -> None:
    # F071: all pages are hits after each restart, with all namespace options set. This process uses another seed.
    seeds: list[str | None] = ["1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"]
    if lanes.SEED is not None:
        seeds += ["2", None]
    results = [run_writer(tmp_path / "disk", seed) for seed in seeds]
    assert [found for found, _ in results] == [0, 4, 4][: len(seeds)]
    with TierStore.open(tiers(8, 8, tmp_path / "disk"), SPEC) as store:
        keys = store.keys(TOKENS, **ALL_OPTIONS)
        assert read(store, keys) == 4
    assert {key for _, key in results} == {keys[-1].hex()}


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("shard", [0, 3])
def test_with_every_option_set_each_tier_finds_all_pages(tmp_path: Path, tier: Tier, shard: int) -> None:
    # F073
    spec = replace(SPEC, shard=shard, group=2)
    with TierStore.open(tiers(8, 8, tmp_path), spec) as store:

        def keys() -> list[PageKey]:
            return store.keys(TOKENS, **ALL_OPTIONS)

        write(store, keys())
        store.flush()
        for other in {Tier.HBM, Tier.HOST, Tier.NVME} - {tier}:
            store.evict(keys(), other)
        assert store.drain(PATIENCE_S)
        assert [set(where(store, key)) for key in keys()] == [{tier}] * 4
        assert store.match(keys()).tiers == (tier,) * 4
        assert read(store, keys()) == 4


def test_each_key_option_alone_separates_pages(tmp_path: Path) -> None:
    # F073: some of these keys would be equal if a lookup ignored one of the options
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        full = store.keys(TOKENS, salt=b"s", extra=("a", (0, b"i")))
        write(store, full)
        without = [
            store.keys(TOKENS),
            store.keys(TOKENS, salt=b"s"),
            store.keys(TOKENS, extra=("a", (0, b"i"))),
            store.keys(TOKENS, salt=b"s", extra=("a",)),
            store.keys(TOKENS, salt=b"s", extra=((0, b"i"),)),
        ]
        assert [store.match(keys).num_pages for keys in without] == [0] * 5
        assert store.match(full).num_pages == 4


def test_a_directory_of_another_key_scheme_is_set_aside_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F071: otherwise its pages would use up the budget, although they are never found
    config = tiers(8, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, store.keys(TOKENS))
    monkeypatch.setattr(page_keys, "SCHEME", "tierstore-keys-next")
    with caplog.at_level(logging.WARNING), TierStore.open(config, SPEC) as store:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "keys use scheme 'tierstore-keys-1', not 'tierstore-keys-next'" in caplog.text
        assert tier_stats(store, Tier.NVME)["used_nbytes"] == 0
        write(store, store.keys(TOKENS))
    caplog.clear()
    with caplog.at_level(logging.WARNING), TierStore.open(config, SPEC) as store:
        assert not caplog.records
        assert read(store, store.keys(TOKENS)) == 4


def test_directory_without_a_key_scheme_uses_the_first_one(
    tmp_path: Path,
) -> None:
    # F071
    config = tiers(8, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        keys = store.keys(TOKENS)
        write(store, keys)
    marker = next(tmp_path.glob("*/tierstore-shard.json"))
    fields = json.loads(marker.read_text())
    assert fields.pop("key_scheme") == "tierstore-keys-1"
    marker.write_text(json.dumps(fields))
    with TierStore.open(config, SPEC) as store:
        assert read(store, keys) == 4
