"""Tests of opening a directory again: restarts, other models, other processes, and invalid configurations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, counter, read, read_soon, tier_stats, tiers, write
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Tier

CHECKOUT = Path(__file__).parents[2]


def test_flushed_pages_and_their_parents_survive_a_restart(tmp_path: Path) -> None:
    # F046
    config = tiers(4, 8, tmp_path)
    sequences = [chain(3, str(i)) for i in range(10)]
    with TierStore.open(config, SPEC) as store:
        for keys in sequences:
            write(store, keys)
        used = tier_stats(store, Tier.NVME)["used_nbytes"]
    with TierStore.open(config, SPEC) as store:
        assert tier_stats(store, Tier.NVME)["used_nbytes"] >= used
        assert all(store.match(keys).tiers == (Tier.NVME,) * 3 for keys in sequences)
        assert store.explain(sequences[4])[2]["parent"] == sequences[4][1].hex()
        assert all(read_soon(store, keys) == 3 for keys in reversed(sequences))
        store.check()


def test_evicted_pages_do_not_return_after_a_restart(tmp_path: Path) -> None:
    config = tiers(4, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, chain(3))
        store.flush()
        store.evict(chain(3)[1:])
    with TierStore.open(config, SPEC) as store:
        assert store.match(chain(3)).num_pages == 1


def test_pages_below_a_gap_are_the_first_to_leave_after_a_restart_deepest_first(tmp_path: Path) -> None:
    # F077
    config = tiers(4, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        write(store, chain(3))
        write(store, chain(1, "whole"))
        store.flush()
        store.evict(chain(1))
    with TierStore.open(config, SPEC) as store:
        store.poll()
        assert store.match(chain(3)[1:]).num_pages == 2
        assert list(store._directory.residency.tables[Tier.NVME].droppable) == [
            chain(3)[2],
            chain(3)[1],
            chain(1, "whole")[0],
        ]


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, dtype="bfloat16"),
        replace(SPEC, dtype="float32"),
        replace(SPEC, model="other weights"),
        replace(SPEC, num_kv_heads=4, head_dim=4),
        replace(SPEC, shard=1),
    ],
)
def test_other_pages_on_the_same_directory_are_clean_misses_and_both_are_kept(
    tmp_path: Path, other: PageSpec
) -> None:
    # F009, F010, F070
    config = tiers(4, 8, tmp_path, page_nbytes=max(SPEC.page_nbytes, other.page_nbytes))
    tokens = list(range(12))
    with TierStore.open(config, SPEC) as store:
        keys = store.keys(tokens)
        write(store, keys)
    with TierStore.open(config, other) as store:
        assert store.match(store.keys(tokens)).num_pages == 0
        assert store.match(keys).num_pages == 0
        assert read(store, keys, other) == 0
        assert store.keys(tokens) != keys
    with TierStore.open(config, SPEC) as store:
        assert read(store, keys) == 3


def test_directory_in_use_is_refused_naming_the_holder(tmp_path: Path) -> None:
    config = tiers(4, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        with pytest.raises(ConfigError, match=r"nvme\.path.*in use by process \d+"):
            TierStore.open(config, SPEC)
        program = (
            "import sys; from pathlib import Path\n"
            "from tests.support.pages import SPEC, tiers\n"
            "from tierstore.errors import ConfigError\n"
            "from tierstore.store import TierStore\n"
            "try: TierStore.open(tiers(4, 8, Path(sys.argv[1])), SPEC)\n"
            "except ConfigError as error: sys.exit(str(error))\n"
        )
        other = forked.run(program, tmp_path)
        assert "in use by process" in other.stderr
        write(store, chain(2))
        store.flush()
        assert read(store, chain(2)) == 2


@pytest.mark.deep  # field/test_keys_are_stable.py tests this with every option
def test_pages_written_by_another_process_hit_with_any_hash_seed(tmp_path: Path) -> None:
    # F071
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support.pages import SPEC, tiers, write\n"
        "from tierstore.store import TierStore\n"
        "with TierStore.open(tiers(4, 8, Path(sys.argv[1])), SPEC) as store:\n"
        "    write(store, store.keys(range(16), salt=b'tenant', extra=('lora', (5, b'image'))))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=CHECKOUT, env={"PYTHONHASHSEED": "1"}, timeout=240, check=True)
    with TierStore.open(tiers(4, 8, tmp_path), SPEC) as store:
        keys = store.keys(range(16), salt=b"tenant", extra=("lora", (5, b"image")))
        assert read(store, keys) == 4
        assert store.match(store.keys(range(16))).num_pages == 0


def test_missing_record_is_a_miss_and_is_written_again(tmp_path: Path) -> None:
    # F054
    bench = open_bench(tiers(4, 8, tmp_path), SPEC)
    keys = chain(3)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    bench.records.inner.submit_erase([keys[1]])
    assert bench.records.inner.sync(PATIENCE_S)
    assert read(bench.store, keys) == 1
    assert counter(bench.store, "failed_pages", "NVME,HOST,not_found") == 1
    assert bench.store.explain(keys)[1]["lost"] == "not_found"
    write(bench.store, keys)
    bench.store.flush()
    bench.store.evict(keys, Tier.HBM)
    bench.store.evict(keys, Tier.HOST)
    assert read(bench.store, keys) == 3
    bench.close()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hbm": {"capacity": SPEC.page_nbytes - 1, "device": "cpu"}}, r"hbm\.capacity.*one page"),
        (
            {"hbm": {"capacity": "1MiB", "device": "cpu"}, "host": {"capacity": 1}},
            r"host\.capacity.*one page",
        ),
        (
            {"hbm": {"capacity": "1MiB", "device": "cpu"}, "host": {"capacity": "900TiB"}},
            r"host\.capacity.*memory, but only",
        ),
        ({"hbm": {"capacity": "900TiB", "device": "cpu"}}, r"hbm\.capacity.*memory, but only"),
        ({"page_size": 8, "hbm": {"capacity": "1MiB", "device": "cpu"}}, r"page_size must be 4 .*got 8"),
        ({}, "no tier"),
        ({"hbm": {"device": "cpu", "owner": "engine"}}, "host"),
    ],
)
def test_impossible_configuration_is_one_clear_error(config: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TierStore.open(load_config(config), SPEC)


@pytest.mark.parametrize(("capacity", "named"), [("900TiB", "free disk"), (4096, "at least")])
def test_a_refused_disk_capacity_leaves_no_trace(tmp_path: Path, capacity: object, named: str) -> None:
    config = tiers(4, 8, tmp_path / "disk", nvme_more={"capacity": capacity})
    with pytest.raises(ConfigError, match=rf"nvme\.capacity.*{named}"):
        TierStore.open(config, SPEC)
    with TierStore.open(tiers(4, 8, tmp_path / "disk"), SPEC) as store:
        write(store, chain(1))


def test_a_refused_host_capacity_does_not_keep_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        TierStore.open(tiers(4, 8, tmp_path, host_more={"capacity": "900TiB"}), SPEC)
    TierStore.open(tiers(4, 8, tmp_path), SPEC).close()


def test_page_size_may_be_given_when_it_agrees() -> None:
    source = {"page_size": 4, "hbm": {"capacity": "1MiB", "device": "cpu"}}
    with TierStore.open(load_config(source), SPEC) as store:
        assert store.stats()["page_size"] == 4
