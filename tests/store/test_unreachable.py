"""Tests of unreachable pages: they are evicted first, and become reachable when the missing pages are put again.

Also tests that a prompt longer than a tier keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.core.order_model import ORDERS
from tests.support import lanes
from tests.support import pages as support
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    counter,
    fill,
    page_tensor,
    read,
    same,
    tier_stats,
    tiers,
    where,
    write,
)
from tierstore.errors import StoreClosed
from tierstore.gpu.engine_pages import EnginePages
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, PageKey, Tier

LARGE = PageSpec(num_layers=2, page_size=16, num_kv_heads=8, head_dim=128, dtype="float16", model="test")
"""Pages so large that a few of them fill the smallest disk."""


def put_after(store: TierStore, key: PageKey, parent: PageKey | None, *, memory_only: bool = False) -> None:
    slots = store.allocate(1, PATIENCE_S)
    if page_tensor(store).shape[1:] == SPEC.shape:
        fill(store, [key], slots)
    store.put([key], slots, parent=parent, memory_only=memory_only)


def ask(store: TierStore, keys: Sequence[PageKey]) -> int:
    """Read the pages that match, and put the missing pages one by one, as a request does.

    Return the smallest number of matching pages that was found after a put.
    """
    with store.acquire(keys) as lease:
        lease.wait(PATIENCE_S)
        found = lease.num_pages
    shortest = len(keys)
    for i in range(found, len(keys)):
        put_after(store, keys[i], keys[i - 1] if i else None)
        shortest = min(shortest, store.match(keys).num_pages)
        store.check()
    assert store.drain(PATIENCE_S)
    store.check()
    return shortest


def state(store: TierStore, keys: Sequence[PageKey]) -> str:
    """Return one character per page: "x" if it is reachable, "o" if it is unreachable, "." if it is not readable."""
    pages = store.explain(keys)
    assert [store.has_prefix(key) for key in keys] == [
        page["readable"] and page["reachable"] for page in pages
    ]
    return "".join(("x" if page["reachable"] else "o") if page["readable"] else "." for page in pages)


class Engine:
    """An engine with 16 slots. ``ask`` puts the missing pages of a prompt, ``chunk`` pages at a time."""

    def __init__(self, store: TierStore, spec: PageSpec = SPEC) -> None:
        self.store = store
        self.whole = torch.zeros(16, *spec.shape, dtype=torch.float16, device=support.DEVICE)
        self.filled = spec == SPEC
        store.register(EnginePages([self.whole], "BLKNHD"))

    def ask(self, keys: Sequence[PageKey], chunk: int) -> None:
        at = self.store.match(keys).num_pages
        while at < len(keys):
            pages = keys[at : at + chunk]
            for slot, key in enumerate(pages if self.filled else ()):
                self.whole[slot].copy_(content(key))
            self.store.put(pages, list(range(len(pages))), parent=keys[at - 1] if at else None)
            assert self.store.drain(PATIENCE_S)
            self.store.poll()
            self.store.check()
            at += len(pages)


# -- a prompt longer than the tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ORDERS)
def test_a_prompt_longer_than_hbm_keeps_its_beginning_matchable_throughout(policy: str) -> None:
    with TierStore.open(tiers(2, None, hbm_more={"policy": policy}), SPEC) as store:
        keys = chain(24)
        for _ in range(3):
            assert ask(store, keys) >= 1
            assert store.match(keys).num_pages >= 1
            assert read(store, keys[:1]) == 1


@pytest.mark.parametrize("policy", ORDERS)
def test_a_prompt_longer_than_memory_fills_it_with_its_beginning(policy: str) -> None:
    config = tiers(4, 16, hbm_more={"policy": policy}, host_more={"policy": policy})
    with TierStore.open(config, SPEC) as store:
        keys = chain(60)
        for _ in range(3):
            ask(store, keys)
            assert store.match(keys).num_pages >= 17


@pytest.mark.parametrize("policy", ["lru", "fifo", "gdsf", "session", "adaptive"])
def test_long_prompts_in_turn_displace_each_other(policy: str) -> None:
    config = tiers(4, 16, hbm_more={"policy": policy}, host_more={"policy": policy})
    with TierStore.open(config, SPEC) as store:
        for _ in range(3):
            for name in ("one", "other"):
                keys = chain(40, name)
                ask(store, keys)
                assert store.match(keys).num_pages >= 17


def test_a_prompt_longer_than_memory_and_disk_fills_both_with_its_beginning(tmp_path: Path) -> None:
    nbytes = LARGE.page_nbytes
    config = tiers(4, 8, tmp_path, page_nbytes=nbytes, nvme_more={"capacity": 4 << 20})
    with TierStore.open(config, LARGE) as store:
        keys = chain(80)
        for _ in range(2):
            ask(store, keys)
            resident = tier_stats(store, Tier.NVME)["resident"]
            assert 0 < resident < len(keys) // 2
            assert store.match(keys).num_pages >= resident + 8


@pytest.mark.parametrize(
    ("policy", "chunk"),
    lanes.some(product(ORDERS, [1, 4, 16]), lambda policy, chunk: chunk == 4 or policy == ORDERS[0]),
)
def test_an_engines_prompt_longer_than_host_memory_fills_it_with_its_beginning(
    policy: str, chunk: int
) -> None:
    config = tiers(16, 32, hbm_more={"owner": "engine"}, host_more={"policy": policy})
    with TierStore.open(config, SPEC) as store:
        engine = Engine(store)
        for name in ("one", "one", "other", "other", "one"):
            keys = chain(100, name)
            engine.ask(keys, chunk)
            assert store.match(keys).num_pages == 32
        engine.whole.zero_()
        with store.acquire(keys[:16], into=list(range(16))) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert all(same(engine.whole[slot], key) for slot, key in enumerate(keys[:16]))


@pytest.mark.parametrize("chunk", [1, 16])
def test_an_engines_prompt_longer_than_host_memory_and_disk_fills_both(chunk: int, tmp_path: Path) -> None:
    nbytes = LARGE.page_nbytes
    more = {"capacity": 4 << 20}
    config = tiers(16, 16, tmp_path, page_nbytes=nbytes, hbm_more={"owner": "engine"}, nvme_more=more)
    with TierStore.open(config, LARGE) as store:
        engine = Engine(store, LARGE)
        for name in ("one", "one", "other", "one"):
            keys = chain(100, name)
            engine.ask(keys, chunk)
            resident = tier_stats(store, Tier.NVME)["resident"]
            assert store.match(keys).num_pages == resident + 16 < len(keys)


# -- eviction order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ORDERS)
def test_pages_below_a_gap_leave_before_every_reachable_page_the_deepest_first(policy: str) -> None:
    with TierStore.open(tiers(8, None, hbm_more={"policy": policy}), SPEC) as store:
        cut, whole = chain(5, "cut"), chain(3, "whole")
        write(store, cut)
        write(store, whole)
        for _ in range(3):
            read(store, cut)
        store.evict(cut[1:2])
        assert state(store, cut) == "x.ooo"
        store.check()
        for i, left in enumerate(("x.ooo", "x.oo.", "x.o..", "x....")):
            write(store, chain(1, f"new {i}"))
            assert state(store, cut) == left
            store.check()
        assert state(store, whole) == "xxx"


@pytest.mark.parametrize("policy", ORDERS)
def test_a_retained_page_below_a_gap_leaves_first_and_is_retained_again_once_the_gap_is_closed(
    policy: str,
) -> None:
    with TierStore.open(tiers(4, None, hbm_more={"policy": policy}), SPEC) as store:
        keys = chain(3)
        write(store, keys)
        store.hint(Hint("request", 1, tuple(keys), "retain"))
        store.evict(keys[1:2])
        store.check()
        put_after(store, keys[1], keys[0])
        assert state(store, keys) == "xxx"
        write(store, chain(1, "loner"))
        write(store, chain(1, "another"))
        assert state(store, keys) == "xxx"
        store.evict(keys[:1])
        write(store, chain(2, "pair"))
        assert state(store, keys) == ".o."
        store.check()


def test_a_leased_page_below_a_gap_stays_and_leaves_first_once_it_is_released() -> None:
    with TierStore.open(tiers(5, None), SPEC) as store:
        keys = chain(4)
        write(store, keys)
        with store.acquire(keys) as lease:
            store.evict(keys[1:2])
            write(store, chain(1, "later"))
            assert state(store, keys) == "x.oo"
            assert lease.num_pages == 4
            store.check()
        write(store, chain(3, "more"))
        assert state(store, keys) == "x..."
        assert state(store, chain(1, "later")) == "x"
        store.check()


def test_page_without_its_parent_is_unreachable_until_the_parent_arrives() -> None:
    with TierStore.open(tiers(4, 8), SPEC) as store:
        keys = chain(3)
        put_after(store, keys[1], keys[0])
        put_after(store, keys[2], keys[1])
        assert store.drain(PATIENCE_S)
        assert state(store, keys) == ".oo"
        assert store.stats()["unreachable"] == 2
        assert tier_stats(store, Tier.HOST)["resident"] == 0
        put_after(store, keys[0], None)
        assert store.drain(PATIENCE_S)
        assert state(store, keys) == "xxx"
        assert store.stats()["unreachable"] == 0
        assert tier_stats(store, Tier.HOST)["resident"] == 3
        store.check()


def test_a_sequence_has_its_prefix_unless_a_page_before_is_missing() -> None:
    with TierStore.open(tiers(16, None), SPEC) as store:
        keys = chain(5)
        assert not store.has_prefix(keys[0])
        write(store, keys)
        assert all(map(store.has_prefix, keys))
        for lost in range(4):
            store.evict([keys[lost]])
            assert [store.has_prefix(key) for key in keys] == [number < lost for number in range(5)]
            put_after(store, keys[lost], keys[lost - 1] if lost else None)
            assert all(map(store.has_prefix, keys))
    with pytest.raises(StoreClosed):
        store.has_prefix(keys[0])


def test_a_page_put_without_a_parent_begins_a_sequence() -> None:
    with TierStore.open(tiers(4, None), SPEC) as store:
        keys = chain(3)
        put_after(store, keys[1], None)
        put_after(store, keys[2], keys[1])
        assert state(store, keys) == ".xx"


def test_an_unreachable_page_is_counted_as_such_when_it_leaves() -> None:
    with TierStore.open(tiers(2, None), SPEC) as store:
        keys = chain(2)
        write(store, keys)
        store.evict(keys[:1])
        write(store, chain(2, "new"))
        assert store.explain(keys)[1]["lost"] == "unreachable"
        assert counter(store, "dropped_copies", "HBM,unreachable") == 1


# -- tiers below ------------------------------------------------------------------------------------------------------


def test_unreachable_page_displaces_no_reachable_page_below(tmp_path: Path) -> None:
    with TierStore.open(tiers(4, 4, tmp_path), SPEC) as store:
        held, cut = chain(4, "held"), chain(3, "cut")
        write(store, held)
        assert store.drain(PATIENCE_S)
        put_after(store, cut[2], cut[1])
        flushed = store.flush()
        assert (flushed.durable, flushed.failed) == (4, 0)
        assert store.drain(PATIENCE_S)
        assert all(Tier.HOST in where(store, key) for key in held)
        assert state(store, cut) == "..o"
        store.check()


def test_pages_below_a_gap_are_known_after_a_restart_and_leave_before_others(tmp_path: Path) -> None:
    cut, whole = chain(6, "cut"), chain(6, "whole")
    with TierStore.open(tiers(4, 8, tmp_path), SPEC) as store:
        for keys in (cut, whole):
            ask(store, keys)
        store.flush()
        store.evict(cut[2:3])
        store.flush()
    with TierStore.open(tiers(4, 8, tmp_path), SPEC) as store:
        store.check()
        assert state(store, cut) == "xx.ooo"
        assert state(store, whole) == "xxxxxx"
        assert store.match(cut).num_pages == 2
        put_after(store, cut[2], cut[1])
        assert state(store, cut) == "xxxxxx"
        assert read(store, cut[:4]) == 4
        store.check()


def test_a_damaged_record_cuts_off_what_follows_until_it_is_put_again(tmp_path: Path) -> None:
    keys = chain(6)
    config = tiers(4, 8, tmp_path, nvme_more={"payload": "lmdb"})
    with TierStore.open(config, SPEC) as store:
        ask(store, keys)
        store.flush()
    data = tmp_path.rglob("data.mdb")
    raw = content(keys[2]).numpy().tobytes()[:64]
    for path in data:
        found = bytearray(path.read_bytes())
        at = found.find(raw)
        assert at >= 0
        found[at] ^= 1
        path.write_bytes(found)
    with TierStore.open(config, SPEC) as store:
        with store.acquire(keys[:4]) as lease:
            lease.wait(PATIENCE_S)
            assert lease.num_pages == 2
        assert state(store, keys) == "xx.ooo"
        store.check()
        put_after(store, keys[2], keys[1])
        assert state(store, keys) == "xxxxxx"
        store.check()


def test_memory_only_pages_below_a_gap_leave_first_too() -> None:
    with TierStore.open(tiers(4, None), SPEC) as store:
        keys = chain(3)
        for parent, key in zip([None, *keys], keys, strict=False):
            put_after(store, key, parent, memory_only=True)
        write(store, chain(1, "first"))
        store.evict(keys[:1])
        write(store, chain(3, "more"))
        assert state(store, keys) == "..."
        assert state(store, chain(1, "first")) == "x"
        store.check()
