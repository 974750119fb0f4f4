"""Tests of pipeline stages: each rank has its own shard, which contains the layers of the rank's stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.adapters.test_vllm_disk_prefetch import only_on_disk
from tests.adapters.vllm_engine import DOCUMENT, IN, Engine
from tests.adapters.vllm_pool import Kind
from tierstore.errors import ConfigError
from tierstore.types import Tier

PAGE = 96
"""Bytes of a page of the second stage, which has three layers. The first stage has two."""


def engine(path: Path, *, ranks: int = 4, kinds: tuple[Kind, ...] = (Kind(),)) -> Engine:
    return Engine(
        {
            "host": {"capacity": ranks * 8 * len(kinds) * PAGE, "pin": "never"},
            "nvme": {"path": path, "capacity": ranks << 20, "flush": "10ms"},
        },
        blocks=8 * len(kinds),
        ranks=ranks,
        stages=2,
        kinds=kinds,
    )


@pytest.mark.parametrize("kinds", [(Kind(),), (Kind(), Kind(window=3))], ids=["one group", "two groups"])
def test_unequal_stages_load_from_memory_and_disk_and_after_a_restart(
    kinds: tuple[Kind, ...], tmp_path: Path
) -> None:
    first = engine(tmp_path, kinds=kinds)
    assert [worker._worker.hello.spec.page_nbytes for worker in first.workers] == [64, 64, 96, 96]
    first.add(DOCUMENT, 2)
    first.run()
    first.forget()
    name = first.add(DOCUMENT, 2)
    first.run()
    assert first.taken == 8
    assert first.answers[name] == first.answers["r1"]
    first.check()
    first.close()

    again = engine(tmp_path, kinds=kinds)
    name = again.add(DOCUMENT, 2)
    again.run()
    assert again.taken == 8
    assert again.answers[name] == first.answers["r1"]
    again.close()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_load_that_fails_in_one_stage_is_computed(rank: int, tmp_path: Path) -> None:
    found = engine(tmp_path)
    only_on_disk(found, DOCUMENT)
    found.copies[rank].fail_next(IN, 1)
    name = found.add(DOCUMENT, 2)
    found.run()
    assert found.recomputed == 1
    assert found.answers[name] == found.answers["r1"]
    found.close()


def test_stage_with_the_fewest_slots_limits_the_number_of_pages(tmp_path: Path) -> None:
    found = engine(tmp_path)
    slots = [worker._worker.hello.host_slots for worker in found.workers]
    assert slots == [12, 12, 8, 8]
    for start in range(3):
        found.add([start] * 9, 1)
    found.run()
    assert len(found.half._tiers.store._directory.residency.tables[Tier.HOST].copies) <= 8
    found.close()


def test_ranks_of_one_stage_must_be_alike(tmp_path: Path) -> None:
    found = engine(tmp_path)
    hellos = [worker._worker.hello for worker in found.workers]
    other = replace(hellos[1], spec=hellos[2].spec)
    with pytest.raises(ConfigError, match="all workers of pipeline stage 0 must have the same pages, got 2"):
        found.half.meet([hellos[0], other, *hellos[2:]])
    found.close()


def test_a_stage_finds_no_pages_of_other_layers(tmp_path: Path) -> None:
    found = engine(tmp_path)
    names = {worker._worker.hello.spec.model for worker in found.workers}
    assert len(names) == 2, "equal numbers of layers do not make equal layers"
    found.close()
