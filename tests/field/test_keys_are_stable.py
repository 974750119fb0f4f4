"""The same sequence has the same keys in every process, restart and tier; a scheme that changed is told at open."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pages import PATIENCE_S, SPEC, read, tier_stats, tiers, where, write
from tierstore import keys as page_keys
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

CHECKOUT = Path(__file__).parents[2]
TOKENS = range(16)
ALL_OPTIONS = "salt=b'tenant', extra=('lora-7', b'weights-3', 41, (5, b'image'), (9, b'other image'))"
WRITER = f"""
import sys
from pathlib import Path
from tests.support.pages import SPEC, read, tiers, write
from tierstore.store import TierStore
with TierStore.open(tiers(8, 8, Path(sys.argv[1])), SPEC) as store:
    keys = store.keys(range(16), {ALL_OPTIONS})
    print(read(store, keys), keys[-1].hex())
    write(store, keys)
"""


def run_writer(home: Path, seed: str | None) -> tuple[int, str]:
    """Looks up and writes in a process of its own; pages found there, and the last key."""
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", WRITER, str(home)]
    child = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found, key = child.stdout.split()
    return int(found), key


def test_processes_of_every_hash_seed_find_the_pages_of_the_others(tmp_path: Path) -> None:
    # F071: 100 % hits after each restart, with every namespace option set
    results = [run_writer(tmp_path / "disk", seed) for seed in ("0", "1", None)]
    assert [found for found, _ in results] == [0, 4, 4]
    assert len({key for _, key in results}) == 1


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("shard", [0, 3])
def test_with_every_option_set_each_tier_alone_finds_as_many_pages_as_were_put(
    tmp_path: Path, tier: Tier, shard: int
) -> None:
    # F073
    spec = replace(SPEC, shard=shard, group=2)
    with TierStore.open(tiers(8, 8, tmp_path), spec) as store:

        def keys() -> list[PageKey]:
            extra = ("lora-7", b"weights-3", 41, (5, b"image"), (9, b"other image"))
            return store.keys(TOKENS, salt=b"tenant", extra=extra)

        write(store, keys())
        store.flush()
        for other in {Tier.HBM, Tier.HOST, Tier.NVME} - {tier}:
            store.evict(keys(), other)
        assert store.drain(PATIENCE_S)
        assert [set(where(store, key)) for key in keys()] == [{tier}] * 4
        assert store.match(keys()).tiers == (tier,) * 4
        assert read(store, keys()) == 4


def test_each_option_alone_still_separates(tmp_path: Path) -> None:
    # F073: a term that a look-up forgets would make these equal
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


def test_a_directory_of_another_key_scheme_is_told_and_set_aside_instead_of_missing_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F071: its pages would fill the budget and never be found
    config = tiers(8, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, store.keys(TOKENS))
    monkeypatch.setattr(page_keys, "SCHEME", "tierstore-keys-next")
    with caplog.at_level(logging.WARNING), TierStore.open(config, SPEC) as store:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "keys are of scheme 'tierstore-keys-1', not 'tierstore-keys-next'" in caplog.text
        assert tier_stats(store, Tier.NVME)["used_nbytes"] == 0
        write(store, store.keys(TOKENS))
    caplog.clear()
    with caplog.at_level(logging.WARNING), TierStore.open(config, SPEC) as store:
        assert not caplog.records
        assert read(store, store.keys(TOKENS)) == 4


def test_a_directory_from_before_key_schemes_were_noted_is_of_the_first_and_still_found(
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
