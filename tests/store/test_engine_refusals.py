"""Tests of HBM that belongs to an engine: tensors, slots and calls that the store rejects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import pages
from tests.support.bench import Bench
from tests.support.engine import (
    DIM,
    HEADS,
    OWNED_BY_ENGINE,
    PLANES,
    SLOTS,
    TOKENS,
    Engine,
    open_engine_bench,
    page_major,
    save,
)
from tests.support.pages import PATIENCE_S, SPEC, chain, tiers
from tests.support.stalls import IN
from tierstore.errors import ConfigError, LeaseError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey


@pytest.fixture
def engine() -> Engine:
    return page_major()


@pytest.fixture
def bench(engine: Engine, tmp_path: Path) -> Iterator[Bench]:
    bench = open_engine_bench(engine, nvme=tmp_path / "disk")
    yield bench
    bench.store.check()
    bench.close()


@pytest.mark.parametrize(
    ("tensors", "layout", "why"),
    [
        (
            [torch.zeros(SLOTS, PLANES, TOKENS, HEADS, DIM, dtype=torch.float16)],
            "BKNHD",
            "must hold 2 layers, got 1",
        ),
        (
            [torch.zeros(SLOTS, 2, PLANES, TOKENS, HEADS, DIM, dtype=torch.float32)],
            "BLKNHD",
            "got shape .* and dtype torch.float32",
        ),
        (
            [torch.zeros(SLOTS, 2, PLANES, HEADS, TOKENS, DIM, dtype=torch.float16)],
            "BLKNHD",
            "must hold pages of",
        ),
        (
            [torch.zeros(SLOTS, 2, PLANES, TOKENS, HEADS, DIM, dtype=torch.float16)],
            "BLKNH",
            "must have 4 dimensions",
        ),
        (
            [torch.zeros(SLOTS, 2, PLANES, TOKENS, HEADS, DIM, dtype=torch.float16)],
            "BLKNHX",
            "must contain B, K, N, H and D once each",
        ),
        ([torch.zeros(SLOTS, 2, 3, dtype=torch.float16)], "BLC", "C must be 2 x head_dim, got 3"),
        ([], "BKNHD", "must hold 2 layers, got 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: list[torch.Tensor], layout: str, why: str) -> None:
    with TierStore.open(tiers(SLOTS, 2, hbm_more=OWNED_BY_ENGINE), SPEC) as store:
        with pytest.raises(ConfigError, match=why):
            store.register(EnginePages([tensor.to(pages.DEVICE) for tensor in tensors], layout))
        with pytest.raises(ConfigError, match="register"):
            store.put(chain(1), [0])


def test_more_tensors_than_kv_groups_and_a_second_register_are_refused(engine: Engine) -> None:
    with TierStore.open(tiers(SLOTS, 2, hbm_more=OWNED_BY_ENGINE), SPEC) as store:
        with pytest.raises(ConfigError, match="expected one EnginePages for each of 1 KV groups, got 2"):
            store.register(engine.pages, engine.pages)
        store.register(engine.pages)
        with pytest.raises(ConfigError, match="register was already called"):
            store.register(engine.pages)


def test_calls_that_need_hbm_of_the_store_are_refused(bench: Bench) -> None:
    store = bench.store
    for call in (lambda: store.allocate(1), lambda: store.free([0]), lambda: store.pages):
        with pytest.raises(ConfigError, match="engine"):
            call()
    assert "HBM" not in str(store.stats()["tiers"])


def test_into_is_only_for_engine_owned_hbm() -> None:
    with TierStore.open(tiers(2, 2), SPEC) as store:
        with pytest.raises(ConfigError, match="into"):
            store.acquire([], into=[])
        with pytest.raises(ConfigError, match="register"):
            store.register(page_major().pages)


@pytest.mark.parametrize("into", [None, [0], [0, 1, 2]])
def test_acquire_needs_one_slot_a_key(bench: Bench, into: list[int] | None) -> None:
    with pytest.raises(ValueError, match="one slot per key"):
        bench.store.acquire(chain(2), into=into)


@pytest.mark.parametrize("slots", [[0, SLOTS], [-1, 0], [1, 1]])
def test_slots_out_of_range_are_refused_and_nothing_changes(
    bench: Bench, engine: Engine, slots: list[int]
) -> None:
    keys = chain(2)
    with pytest.raises(LeaseError, match="slot"):
        bench.store.put(keys, slots)
    assert bench.store.match(keys).num_pages == 0
    save(bench, engine, keys, [0, 1])
    engine.wipe()
    with pytest.raises(LeaseError, match="slot"):
        bench.store.acquire(keys, into=slots)
    assert bench.store.stats()["leases"] == 0
    assert not any(engine.holds(slot, key) for slot in range(SLOTS) for key in keys)


def test_a_slot_that_is_being_loaded_into_is_refused_and_nothing_changes(
    bench: Bench, engine: Engine
) -> None:
    keys = chain(3)
    save(bench, engine, keys, [0, 1, 2])
    bench.copies.hold(IN)
    with bench.store.acquire(keys[:1], into=[3]) as lease:
        with pytest.raises(LeaseError, match="slot 3"):
            bench.store.acquire(keys, into=[4, 3, 5])
        assert bench.store.stats()["leases"] == 1
        bench.copies.open()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert engine.holds(3, keys[0])


@pytest.mark.parametrize("strange", ["a" * 36, b"a" * 35, 0])
def test_invalid_parent_is_refused_and_nothing_changes(
    bench: Bench, engine: Engine, strange: PageKey
) -> None:
    keys = chain(2)
    with pytest.raises(ValueError, match=r"a parent must be a page key of 36 bytes"):
        bench.store.put(keys, [0, 1], parents=[None, strange])
    with pytest.raises(ValueError, match=r"a parent must be a page key"):
        bench.store.put(keys, [0, 1], parent=strange)
    save(bench, engine, keys, [0, 1])
