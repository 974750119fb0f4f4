"""Tests that loads do not overwrite pages in HBM, partial pages have no key, and page sizes are checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.bench import open_bench
from tests.support.engine import SLOTS, page_major
from tests.support.pages import PATIENCE_S, SPEC, chain, content, page_tensor, read, same, tiers, write
from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

ENGINE: dict[str, object] = {"owner": "engine"}
POISON = 7


@pytest.mark.parametrize("held", [0, 1, 2, 3])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_pages_resident_in_hbm_are_not_written_by_the_load_of_the_rest(
    tmp_path: Path, tier: Tier, held: int
) -> None:
    # F058: other bytes in the resident pages survive the load of the later pages
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        keys = chain(4)
        write(store, keys)
        store.flush()
        store.demote(keys, tier)
        assert store.drain(PATIENCE_S)
        with store.acquire(keys[:held]) as first:
            assert first.wait(PATIENCE_S) is LeaseState.READY
            pages = page_tensor(store)
            for slot in first.slots:
                pages[slot].fill_(POISON)
            with store.acquire(keys) as lease:
                assert lease.wait(PATIENCE_S) is LeaseState.READY
                assert lease.slots[:held] == first.slots
                assert all(bool((pages[slot] == POISON).all()) for slot in lease.slots[:held])
                for slot, key in zip(lease.slots[held:], keys[held:], strict=True):
                    assert same(pages[slot], key)


@pytest.mark.parametrize("held", [1, 3])
def test_engine_holding_the_prefix_loads_only_the_rest(held: int) -> None:
    # F058: the engine acquires pages from its first missing page on, and no other slot is touched
    engine = page_major()
    bench = open_bench(tiers(SLOTS, 8, hbm_more=ENGINE), SPEC)
    bench.store.register(engine.pages)
    keys = chain(4)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, range(4))
    assert bench.store.drain(PATIENCE_S)
    poison = chain(SLOTS, "poison")
    for slot, key in enumerate(poison):
        engine.fill(slot, key)
    with bench.store.acquire(keys[held:], into=range(held, 4)) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 4 - held
        for slot in range(SLOTS):
            assert engine.holds(slot, keys[slot] if held <= slot < 4 else poison[slot])
    bench.close()


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 8, 11])
def test_tokens_of_a_partial_page_have_no_key_and_are_not_found(tokens: int) -> None:
    # F058, F060: numbers of tokens around multiples of the page size
    with TierStore.open(tiers(8, None), SPEC) as store:
        keys = store.keys(range(tokens))
        assert len(keys) == tokens // 4
        write(store, keys)
        longer = store.keys(range(tokens + 4))
        assert longer[: len(keys)] == keys
        assert store.match(longer).num_pages == len(keys)
        assert read(store, longer) == len(keys)


# -- F062: two page sizes ---------------------------------------------------------------------------------------

BLOCK = replace(SPEC, page_size=16)
PAGE = replace(SPEC, page_size=256)


def test_engine_with_another_block_size_is_refused() -> None:
    # F062: a load never starts in the middle of a page, because the store's page is the engine's block
    shape = (4, *BLOCK.shape)
    with (
        TierStore.open(tiers(4, 4, hbm_more=ENGINE, page_nbytes=PAGE.page_nbytes), PAGE) as store,
        pytest.raises(
            ConfigError, match=r"must hold pages of shape \(2, 256, 2, 8\).*got shape \(2, 16, 2, 8\)"
        ),
    ):
        store.register(EnginePages([torch.zeros(shape, dtype=torch.float16)], "BLKNHD"))


@pytest.mark.parametrize("first", range(16))
def test_any_block_of_a_larger_page_can_be_copied_out_of_a_lease_byte_for_byte(
    first: int, tmp_path: Path
) -> None:
    # F062: a hit that starts at token 16 k of a 256-token page is a view of the leased page
    with TierStore.open(tiers(2, 2, page_nbytes=PAGE.page_nbytes), PAGE) as store:
        keys = store.keys(range(256))
        slots = store.allocate(1)
        page_tensor(store)[slots[0]].copy_(content(keys[0], PAGE))
        store.put(keys, slots)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        mine = torch.full((*PAGE.shape[:2], 256, *PAGE.shape[3:]), POISON, dtype=torch.float16)
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            mine[:, :, 16 * first :] = page_tensor(store)[lease.slots[0]][:, :, 16 * first :]
        assert bool((mine[:, :, : 16 * first] == POISON).all())
        want = content(keys[0], PAGE)[:, :, 16 * first :].contiguous().view(torch.uint8)
        assert torch.equal(mine[:, :, 16 * first :].contiguous().view(torch.uint8), want)
