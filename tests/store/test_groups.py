"""Tests of KV groups: the groups of a page share its key and its slot, and always move together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import pages as support
from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, content, same, tier_stats, tiers, where
from tests.support.stalls import IN
from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

FULL = SPEC
LATENT = PageSpec(
    kind="mla", num_layers=3, page_size=4, num_kv_heads=1, head_dim=5, dtype="float32", group=1, model="test"
)
GROUPS = (FULL, LATENT)
PAGE_NBYTES = FULL.page_nbytes + LATENT.page_nbytes


def grouped(store: TierStore) -> GroupedPages:
    pages = store.pages
    assert isinstance(pages, GroupedPages)
    return pages


def write(store: TierStore, keys: list[PageKey]) -> list[int]:
    slots = store.allocate(len(keys))
    for key, slot in zip(keys, slots, strict=True):
        for page, spec in zip(grouped(store)[slot], GROUPS, strict=True):
            page.copy_(content(key, spec))
    return store.put(keys, slots)


def right(store: TierStore, slot: int, key: PageKey) -> bool:
    pages = grouped(store)[slot]
    return all(same(page, key, spec) for page, spec in zip(pages, GROUPS, strict=True))


def test_a_slot_is_a_tuple_of_one_tensor_a_group(tmp_path: Path) -> None:
    with TierStore.open(tiers(3, 4, tmp_path, page_nbytes=PAGE_NBYTES), GROUPS) as store:
        first, second = grouped(store)[2]
        assert (tuple(first.shape), first.dtype) == (FULL.shape, torch.float16)
        assert (tuple(second.shape), second.dtype) == (LATENT.shape, torch.float32)
        assert len(grouped(store)) == 3
        assert store.stats()["page_nbytes"] == PAGE_NBYTES
        assert tier_stats(store, Tier.HBM)["num_slots"] == 3
        assert second.data_ptr() % 4096 == first.data_ptr() % 4096 == 0


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_all_groups_of_a_page_move_together(tmp_path: Path, tier: Tier) -> None:
    # F067, F076
    with TierStore.open(tiers(4, 4, tmp_path, page_nbytes=PAGE_NBYTES), GROUPS) as store:
        keys = chain(3)
        write(store, keys)
        store.demote(keys, tier)
        assert store.drain(PATIENCE_S)
        assert store.match(keys).tiers == (tier,) * 3
        mine = store.allocate(4)
        for slot in mine:
            for page in grouped(store)[slot]:
                page.fill_(7)
        support.settle()  # all work launched on the slots must end before they are freed
        store.free(mine)
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 3
            assert lease.ready(2) is None
            with pytest.raises(ValueError, match=r"layer must be .*got 3"):
                lease.ready(3)
            assert all(right(store, slot, key) for slot, key in zip(lease.slots, keys, strict=True))


def test_a_page_that_fails_is_missing_in_all_groups() -> None:
    bench = open_bench(tiers(4, 4, page_nbytes=PAGE_NBYTES), GROUPS)
    keys = chain(2)
    write(bench.store, keys)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    bench.copies.fail_next(IN, 0)
    with bench.store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
    assert Tier.HBM not in where(bench.store, keys[0])
    bench.close()


def test_a_reopened_store_finds_the_groups_and_other_groups_find_nothing(tmp_path: Path) -> None:
    config = tiers(4, 4, tmp_path, page_nbytes=PAGE_NBYTES)
    with TierStore.open(config, GROUPS) as store:
        keys = store.keys(range(12))
        write(store, keys)
    with TierStore.open(config, GROUPS) as store:
        assert store.match(keys).tiers == (Tier.NVME,) * 3
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert all(right(store, slot, key) for slot, key in zip(lease.slots, keys, strict=True))
    for other in ((LATENT, FULL), (FULL,), (FULL, replace(LATENT, model="other"))):
        with TierStore.open(config, other) as store:
            assert store.match(keys).num_pages == 0
            assert store.keys(range(12)) != keys


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ((), "spec"),
        ((FULL, replace(LATENT, page_size=8)), "page_size"),
        ((FULL, replace(LATENT, shard=1)), "shard"),
    ],
)
def test_groups_that_cannot_share_a_page_are_refused(groups: tuple[PageSpec, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TierStore.open(tiers(4, 4, page_nbytes=PAGE_NBYTES), groups)


def test_engines_register_one_set_of_tensors_a_group() -> None:
    config = tiers(4, 4, page_nbytes=PAGE_NBYTES, hbm_more={"owner": "engine"})
    with TierStore.open(config, GROUPS) as store:
        full = torch.zeros(3, *FULL.shape, dtype=torch.float16, device=support.DEVICE)
        latent = [torch.zeros(3, 4, 1, 5, device=support.DEVICE) for _ in range(3)]
        store.register(EnginePages([full], "BLKNHD"), EnginePages(latent, "BNHD"))
        key = chain(1)[0]
        full[2].copy_(content(key, FULL))
        for layer, page in zip(latent, content(key, LATENT), strict=True):
            layer[2].copy_(page[0])
        store.put([key], [2])
        assert store.drain(PATIENCE_S)
        with store.acquire([key], into=[0]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert same(full[0], key, FULL)
        assert same(torch.stack([layer[0] for layer in latent]).unsqueeze(1), key, LATENT)


def test_groups_with_different_numbers_of_slots_are_refused() -> None:
    config = tiers(4, 4, page_nbytes=PAGE_NBYTES, hbm_more={"owner": "engine"})
    with TierStore.open(config, GROUPS) as store:
        full = torch.zeros(3, *FULL.shape, dtype=torch.float16, device=support.DEVICE)
        latent = [torch.zeros(2, 4, 1, 5, device=support.DEVICE) for _ in range(3)]
        with pytest.raises(ConfigError, match="same number"):
            store.register(EnginePages([full], "BLKNHD"), EnginePages(latent, "BNHD"))
