"""Tests of a whole store with HBM on a GPU: its stats, all tiers, KV groups, and the state machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.gpu.card import SPEC as LARGE
from tests.gpu.card import small_tiers
from tests.store.machine import StoreMachine
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    fill,
    page_tensor,
    read_soon,
    same,
    tiers,
    write,
)
from tierstore.errors import ConfigError
from tierstore.gpu import copy_routes
from tierstore.gpu.copy_routes import SIZES, Direction, Point, Rates, Way
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

pytestmark = pytest.mark.gpu


class MachineOnCard(StoreMachine):
    shapes = [shape for shape in StoreMachine.shapes if shape[0] is not None]  # noqa: RUF012


def test_no_sequence_of_calls_breaks_an_invariant() -> None:
    run_state_machine_as_test(
        MachineOnCard, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize(
    ("pin", "copies"),
    [
        ("auto", "straight or kernel"),
        ("always", "straight or kernel"),
        ("never", "threads, as host memory"),
    ],
)
def test_pages_move_through_all_tiers_and_stats_report_the_route(
    tmp_path: Path, pin: str, copies: str
) -> None:
    keys = chain(12)
    with TierStore.open(tiers(4, 5, tmp_path, host_more={"pin": pin}), SPEC) as store:
        assert page_tensor(store).device == torch.device("cuda:0")
        for start in range(0, 12, 3):
            write(store, keys[start : start + 3])
        store.demote(keys, Tier.NVME)
        assert store.drain(PATIENCE_S)
        for start in range(0, 12, 3):
            assert read_soon(store, keys[start : start + 3]) == 3
        found = store.stats()
        hbm, host = found["hbm"], found["host"]
        assert isinstance(hbm, dict)
        assert isinstance(host, dict)
        assert hbm["device"] == "cuda:0"
        assert hbm["name"] == torch.cuda.get_device_name(0)
        assert hbm["copies"].startswith(copies)
        assert host["pinned_nbytes"] == (0 if pin == "never" else 5 * 4096)
        assert host["refused"] is None
        counters = found["counters"]
        assert isinstance(counters, dict)
        assert counters["host_pinned_bytes"] == {"bytes": host["pinned_nbytes"]}
        store.check()
    with TierStore.open(tiers(4, 5, tmp_path), SPEC) as store:
        assert read_soon(store, keys[:4]) == 4


def test_large_pages_use_dma_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rates of an idle link. Rates measured while other tests run can differ for pages of 256 KiB.
    quick, slow = ([Point(nbytes, 1e-5, nbytes / rate) for nbytes in SIZES] for rate in (5e10, 2e10))
    points: dict[tuple[Way, Direction], list[Point]] = {
        ("dma", "up"): quick,
        ("dma", "down"): quick,
        ("kernel", "up"): slow,
        ("kernel", "down"): slow,
    }
    monkeypatch.setitem(copy_routes._found, 0, Rates(points))
    with TierStore.open(small_tiers(2, 2), LARGE) as store:
        hbm = store.stats()["hbm"]
        assert isinstance(hbm, dict)
        assert hbm["copies"] == "straight or kernel, batch"
        slots = store.allocate(2)
        fill(store, chain(2), slots, LARGE)
        store.put(chain(2), slots)
        assert store.drain(PATIENCE_S)
        hbm = store.stats()["hbm"]
        assert isinstance(hbm, dict)
        assert hbm["batches"]["straight"] > 0
        assert not hbm["batches"]["kernel"]


def test_closing_unpins_the_memory_so_that_it_can_be_pinned_again() -> None:
    for _ in range(3):
        with TierStore.open(tiers(2, 64), SPEC) as store:
            write(store, chain(2))
            assert store.drain(PATIENCE_S)


def test_groups_are_copied_together() -> None:
    specs = [
        PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="m"),
        PageSpec(
            kind="mla", num_layers=3, page_size=4, num_kv_heads=1, head_dim=5, dtype="float32", model="m"
        ),
    ]
    nbytes = sum(spec.page_nbytes for spec in specs)
    keys = chain(3)
    with TierStore.open(tiers(3, 3, page_nbytes=nbytes), specs) as store:
        slots = store.allocate(3)
        pages = store.pages
        assert isinstance(pages, GroupedPages)
        for key, slot in zip(keys, slots, strict=True):
            for page, spec in zip(pages[slot], specs, strict=True):
                page.copy_(content(key, spec))
        store.put(keys, slots)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            for key, slot in zip(keys, lease.slots, strict=True):
                for page, spec in zip(pages[slot], specs, strict=True):
                    assert same(page, key, spec)


def test_hbm_beyond_free_device_memory_is_refused_with_the_free_size() -> None:
    with pytest.raises(
        ConfigError, match=r"hbm\.capacity needs .* \([0-9,]+ bytes\) of device memory"
    ) as refused:
        TierStore.open(tiers(2, 2, hbm_more={"capacity": "900TiB"}), SPEC)
    assert re.search(r"only .* \([0-9,]+ bytes\) is free", str(refused.value))


def test_missing_gpu_is_refused_with_those_present() -> None:
    with pytest.raises(ConfigError, match=r"must be one of cpu, cuda:0.*got 'cuda:31'"):
        TierStore.open(tiers(2, 2, hbm_more={"device": "cuda:31"}), SPEC)
