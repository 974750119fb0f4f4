"""Tests of a disk with a lossy codec: pages read back are close to the originals, and always marked as inexact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import lanes
from tests.support import pages as support
from tests.support.bench import open_bench
from tests.support.engine import page_major
from tests.support.pages import PATIENCE_S, chain, page_tensor, tier_stats, tiers
from tests.support.stalls import IN
from tierstore.codecs import LOSSY
from tierstore.config import load_config
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, PageKey, Tier

SPEC = PageSpec(num_layers=4, page_size=64, num_kv_heads=2, head_dim=64, dtype="bfloat16", model="lossy")


def open_store(home: Path, codec: str = "int8", payload: str = "lmdb", host: int = 8) -> TierStore:
    tree = {
        "hbm": {"capacity": 8 * SPEC.page_nbytes, "device": "cpu"},
        "host": {"capacity": host * SPEC.page_nbytes},
        "nvme": {"path": str(home), "capacity": 16 << 20, "codec": codec, "payload": payload},
    }
    return TierStore.open(load_config(tree), SPEC)


def content(key: PageKey) -> torch.Tensor:
    seed = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    return torch.randn(SPEC.shape, generator=seed).to(torch.bfloat16)


def put(store: TierStore, keys: Sequence[PageKey], pages: Sequence[torch.Tensor] | None = None) -> None:
    slots = store.allocate(len(keys), timeout_s=PATIENCE_S)
    for index, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        page_tensor(store)[slot] = content(key) if pages is None else pages[index]
    store.put(keys, slots)


def read(store: TierStore, keys: Sequence[PageKey], *, exact: bool = False) -> list[torch.Tensor]:
    with store.acquire(keys, exact=exact) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        return [page_tensor(store)[slot].clone() for slot in lease.slots]


def drop_memory(store: TierStore, keys: Sequence[PageKey]) -> None:
    for tier in (Tier.HBM, Tier.HOST):
        store.evict(keys, tier)


@pytest.mark.parametrize(
    ("codec", "payload"),
    lanes.some(
        product(LOSSY, ["lmdb", "extents"]), lambda codec, payload: payload == "extents" or codec == "int8"
    ),
)
def test_encoded_pages_are_smaller_within_the_error_bound_and_marked_inexact(
    tmp_path: Path, codec: str, payload: str
) -> None:
    keys = chain(4, "a")
    with open_store(tmp_path / "disk", codec, payload) as store:
        put(store, keys)
        assert store.match(keys).exact
        store.flush()
        assert store.match(keys).exact  # the pages that were put are still in HBM
        assert tier_stats(store, Tier.NVME)["used_nbytes"] < 0.75 * len(keys) * SPEC.page_nbytes
        drop_memory(store, keys)
        assert (store.match(keys).num_pages, store.match(keys).exact) == (4, False)
        found = read(store, keys)
        for key, page in zip(keys, found, strict=True):
            error = (page.float() - content(key).float()).norm() / content(key).float().norm()
            assert 0 < error < 0.2
        assert not store.match(keys).exact  # in HBM again, but not with the bytes that were put
        store.check()
    with open_store(tmp_path / "disk", codec, payload) as store:
        assert (store.match(keys).num_pages, store.match(keys).exact) == (4, False)
        for first, again in zip(found, read(store, keys), strict=True):
            assert torch.equal(first, again)


def test_exact_request_gets_only_exact_pages(tmp_path: Path) -> None:
    keys = chain(5, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys)
        store.flush()
        drop_memory(store, keys[3:])
        assert store.match(keys, exact=True).num_pages == 3
        with store.acquire(keys, exact=True) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert (lease.num_pages, lease.missing_because) == (3, "inexact")
        assert [
            torch.equal(page, content(key)) for key, page in zip(keys, read(store, keys), strict=True)
        ] == [
            True,
            True,
            True,
            False,
            False,
        ]
        assert store.match(keys, exact=True).num_pages == 3


def test_a_page_computed_from_an_inexact_page_is_inexact(tmp_path: Path) -> None:
    keys = chain(6, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys[:2])
        store.flush()
        drop_memory(store, keys[:2])
        with store.acquire(keys[:2]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            slots = store.allocate(2)
            store.put(keys[2:4], slots, lease=lease)
            store.put(keys[4:], store.allocate(2), lease=lease)
        assert store.match(keys).num_pages == 6
        assert store.match(keys, exact=True).num_pages == 0
        assert [store.match(keys[n : n + 1]).exact for n in range(6)] == [False] * 6


def test_recomputed_exact_pages_replace_inexact_ones(tmp_path: Path) -> None:
    keys = chain(3, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys)
        store.flush()
        drop_memory(store, keys)
        read(store, keys)
        assert store.match(keys, exact=True).num_pages == 0
        put(store, keys)
        assert store.match(keys, exact=True).num_pages == 3
        for key, page in zip(keys, read(store, keys, exact=True), strict=True):
            assert torch.equal(page, content(key))
        store.check()


def test_a_page_promoted_from_disk_while_an_exact_copy_exists_is_inexact_once_that_copy_is_gone(
    tmp_path: Path,
) -> None:
    keys = chain(2, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys)
        store.flush()
        store.evict(keys, Tier.HOST)
        store.take_hints()
        hint = Hint("r", 1, tuple(keys))
        store.hint(hint)
        assert store.promote(hint, keys, Tier.HOST).covered == 2
        assert store.drain(PATIENCE_S)
        store.evict(keys, Tier.HBM)
        assert not store.match(keys).exact
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert not lease.exact
            assert not any(
                torch.equal(page_tensor(store)[slot], content(key))
                for key, slot in zip(keys, lease.slots, strict=True)
            )
        assert read(store, keys, exact=True) == []
        store.check()


def test_a_leased_page_is_not_replaced(tmp_path: Path) -> None:
    keys = chain(2, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys)
        store.flush()
        drop_memory(store, keys)
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            before = [page_tensor(store)[slot].clone() for slot in lease.slots]
            put(store, keys)
            assert all(
                torch.equal(page, page_tensor(store)[slot])
                for page, slot in zip(before, lease.slots, strict=True)
            )
            assert store.match(keys, exact=True).num_pages == 0


def test_lossy_stores_share_no_keys_with_exact_or_other_lossy_ones(tmp_path: Path) -> None:
    found = {}
    for codec in ("none", "exp", "int8", "int8+zstd", "fp8", "k8v4", "int4", "int4-64"):
        with open_store(tmp_path / "disk", codec) as store:
            found[codec] = store.keys(range(128))[0]
    assert found["none"] == found["exp"]
    assert found["int8"] == found["int8+zstd"]
    assert len(set(found.values())) == 6


def test_pages_with_infinities_and_nans_are_restored_exactly(tmp_path: Path) -> None:
    keys = chain(2, "a")
    pages = [content(key) for key in keys]
    pages[0][1, 0, 3, 1, 7], pages[1][2, 1, 0, 0, 0] = float("inf"), float("nan")
    with open_store(tmp_path / "disk") as store:
        put(store, keys, pages)
        store.flush()
        drop_memory(store, keys)
        for page, back in zip(pages, read(store, keys), strict=True):
            np.testing.assert_array_equal(page.view(torch.int16).numpy(), back.view(torch.int16).numpy())


def test_every_page_of_an_exact_store_is_exact(tmp_path: Path) -> None:
    keys = chain(3, "a")
    with open_store(tmp_path / "disk", "exp") as store:
        put(store, keys)
        store.flush()
        drop_memory(store, keys)
        assert store.match(keys, exact=True).num_pages == 3
        for key, page in zip(keys, read(store, keys, exact=True), strict=True):
            assert torch.equal(page, content(key))


def test_page_computed_under_an_inexact_lease_is_inexact_regardless_of_its_parent(
    tmp_path: Path,
) -> None:
    keys = chain(4, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys[:3])
        store.flush()
        drop_memory(store, keys[:1])
        with store.acquire(keys[:3]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert [store.match([key]).exact for key in keys[:3]] == [False, True, True]
            store.put(keys[3:], store.allocate(1), lease=lease)
        assert not store.match(keys[3:]).exact


def test_a_put_under_an_exact_lease_stops_before_a_leased_inexact_page(tmp_path: Path) -> None:
    keys = chain(4, "a")
    with open_store(tmp_path / "disk") as store:
        put(store, keys[:3])
        store.flush()
        drop_memory(store, keys[1:3])
        with store.acquire(keys[:3]) as other, store.acquire(keys[:3], exact=True) as lease:
            assert other.wait(PATIENCE_S) is lease.wait(PATIENCE_S) is LeaseState.READY
            assert (other.num_pages, lease.num_pages) == (3, 1)
            mine = store.allocate(3)
            assert store.put(keys[1:], mine, lease=lease) == []
            assert store.match(keys).num_pages == 3
            store.free(mine)  # the slots still belong to the caller
        mine = store.allocate(3)
        with store.acquire(keys[:1], exact=True) as lease:
            assert store.put(keys[1:], mine, lease=lease) == mine  # unleased inexact pages are replaced
        assert store.match(keys, exact=True).num_pages == 4
        store.check()


@pytest.mark.parametrize("lossy", [Tier.HOST, Tier.NVME])
def test_put_replaces_inexact_copies_in_flight_or_stops_before_them(tmp_path: Path, lossy: Tier) -> None:
    """Put pages whose inexact copies are being loaded into HBM. The put replaces these copies.

    If HOST is not encoded, its inexact copies would have to be replaced as well. Those copies are in use, so the put
    stops before them.
    """
    keys = chain(2, "a")
    tree: dict[str, object] = {
        "hbm": {"device": support.DEVICE, "capacity": 8 * SPEC.page_nbytes},
        "host": {"capacity": 8 * SPEC.page_nbytes, "codec": "int8" if lossy is Tier.HOST else "none"},
        "nvme": {"path": str(tmp_path / "disk"), "capacity": 16 << 20, "codec": "int8"},
    }
    bench = open_bench(load_config(tree), SPEC)
    store = bench.store
    put(store, keys)
    store.flush()
    drop_memory(store, keys)
    bench.copies.hold(IN)
    with store.acquire(keys) as other, store.acquire(keys, exact=True) as lease:
        assert (other.num_pages, lease.num_pages) == (2, 0)
        bench.settle()
        mine = store.allocate(2)
        for key, slot in zip(keys, mine, strict=True):
            page_tensor(store)[slot] = content(key)
        kept = store.put(keys, mine, lease=lease)
        assert kept == (mine if lossy is Tier.HOST else [])
        assert lease.exact
        assert store.match(keys, exact=True).num_pages == len(kept)
        store.free(mine[len(kept) :])
        bench.copies.open()
        assert other.wait(PATIENCE_S) is LeaseState.READY
        assert store.drain(PATIENCE_S)
        if kept:
            assert all(
                torch.equal(page_tensor(store)[s].cpu(), content(k))
                for k, s in zip(keys, other.slots, strict=True)
            )
        assert store.match(keys, exact=True).num_pages == len(kept)
        store.check()
    bench.close()


def test_pages_that_an_engine_puts_together_are_exact_until_they_return_from_a_lossy_disk(
    tmp_path: Path,
) -> None:
    """Put all pages in one call, before the first of them has been copied out of the engine's slots."""
    engine, keys = page_major(), chain(3)
    config = tiers(6, 8, tmp_path, hbm_more={"owner": "engine"}, nvme_more={"codec": "int8"})
    with open_bench(config, support.SPEC).store as store:
        store.register(engine.pages)
        store.put(keys, [0, 1, 2])
        assert store.drain(PATIENCE_S)
        assert store.match(keys, exact=True).num_pages == 3
        store.flush()
        store.evict(keys, Tier.HOST)
        with store.acquire(keys, into=[3, 4, 5]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert not lease.exact
        store.put(chain(4)[3:], [0], parent=keys[-1])
        assert store.drain(PATIENCE_S)
        assert store.match(chain(4)).num_pages == 4
        assert store.match(chain(4)[3:], exact=True).num_pages == 0, (
            "a page computed from inexact pages is not exact"
        )


def test_engine_page_computed_under_an_inexact_lease_is_inexact_regardless_of_its_parent(
    tmp_path: Path,
) -> None:
    engine, keys = page_major(), chain(3)
    config = tiers(6, 8, tmp_path, hbm_more={"owner": "engine"}, nvme_more={"codec": "int8"})
    with open_bench(config, support.SPEC).store as store:
        store.register(engine.pages)
        store.put(keys[:1], [0])
        store.flush()
        store.evict(keys[:1], Tier.HOST)
        with store.acquire(keys[:1], into=[1]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            store.evict(keys[:1])
            store.put(keys[:1], [0])  # as if another request had computed this page from its tokens
            store.put(keys[1:], [2, 3], lease=lease)
            windows = chain(2, "w")
            store.put(windows, [4, 5], lease=lease, parents=[None, None])
            assert store.drain(PATIENCE_S)
        assert store.match(windows).num_pages == 2
        assert [store.match([key], exact=True).num_pages for key in windows] == [0, 0]
        assert store.explain(keys[1:2])[0]["parent"] == keys[0].hex()
        assert store.match(keys).num_pages == 3
        assert store.match(keys, exact=True).num_pages == 1
        store.check()
