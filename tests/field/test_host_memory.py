"""Tests that host memory is as configured: not rounded up, not touched when a store opens, and reported by stats."""

from __future__ import annotations

import json

import pytest

from tests.support import forked
from tests.support.pages import SPEC, tier_stats, tiers
from tierstore.gpu.pool import CpuPool
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout, PageSpec
from tierstore.store import TierStore
from tierstore.types import Tier

COMMON = """
import gc, json, sys
from pathlib import Path
import torch
from tierstore.config import load_config
from tierstore.store import TierStore
from tierstore.types import Tier
from tierstore.page import PageSpec

def resident():
    # without file mappings, whose resident part depends on what other programs need
    lines = Path("/proc/self/status").read_text().splitlines()
    own = ("RssAnon:", "RssShmem:", "VmSwap:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(own))

def spec(tokens):
    return PageSpec(num_layers=4, page_size=tokens, num_kv_heads=4, head_dim=32, dtype="bfloat16", model="m")

def open_store(capacity, host):
    source = {"hbm": {"capacity": capacity, "device": "cpu"}, "host": {"capacity": host, "pin": "never"}}
    return TierStore.open(load_config(source), spec(16), pump=False)

def fill(store):
    pages = store._parts.pool.num_slots
    slots = store.allocate(pages)
    for slot in slots:
        store.pages[slot].fill_(1)
    keys = store.keys(range(16 * pages))
    store.put(keys, slots)
    assert store.drain(60)
    for slot in range(store._parts.arena.num_slots):
        store._parts.arena.view(slot).fill(1)

def sizes(store):
    tiers = store.stats()["tiers"]
    return {name: (figures["payload_nbytes"], figures["allocated_nbytes"]) for name, figures in tiers.items()}

open_store("1MiB", "1MiB").close()
torch.ones(1)
gc.collect()
"""

LARGEST = """
from tierstore.host.free_memory import available_nbytes
half = available_nbytes() // 3
before = resident()
store = open_store(half, half)
opened = resident() - before
keys = store.keys(range(16))
slots = store.allocate(1)
store.pages[slots[0]].fill_(1)
store.put(keys, slots)
assert store.match(keys).num_pages == 1
largest = {"asked": 2 * half, "opened": opened, "first_put": resident() - before}
store.close()
del store, slots, keys
gc.collect()
"""

FIVE_POOLS = """
asked = [(33 << 20) + i * 65536 for i in range(5)]
before = resident()
stores = [open_store(nbytes, 2 * nbytes) for nbytes in asked]
for store in stores:
    fill(store)
pools = {"asked": 3 * sum(asked), "grown": resident() - before, "sizes": [sizes(s) for s in stores]}
print(json.dumps({"largest": largest, "pools": pools}))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, object]]:
    """Return the measurements of a process that opens one very large store, and then fills five small ones."""
    child = forked.run(COMMON + LARGEST + FIVE_POOLS)
    assert child.returncode == 0, child.stderr
    found: dict[str, dict[str, object]] = json.loads(child.stdout.splitlines()[-1])
    return found


def test_five_pools_of_odd_sizes_allocate_what_stats_report(
    report: dict[str, dict[str, object]],
) -> None:
    # F094: five stores with slightly more than 33 MiB in HBM and twice that in HOST. An allocator that rounds up to
    # powers of two would take twice as much.
    asked, grown, sizes = (report["pools"][name] for name in ("asked", "grown", "sizes"))
    assert isinstance(asked, int)
    assert isinstance(grown, int)
    assert isinstance(sizes, list)
    told = sum(allocated for store in sizes for _, allocated in store.values())
    assert asked - 10 * 2 * 65536 <= told <= asked, (
        "the allocated size must be the capacity rounded down to whole pages"
    )
    assert 0.98 * told <= grown <= 1.05 * asked + (16 << 20), (
        "only Python's tables and thread stacks may add to the allocated size"
    )


def test_opening_a_store_of_most_of_the_memory_touches_none_of_it(
    report: dict[str, dict[str, object]],
) -> None:
    # F096: memory is touched when it is first used, so opening 300 GiB takes no longer than opening 1 GiB
    asked, opened, first_put = (report["largest"][name] for name in ("asked", "opened", "first_put"))
    assert isinstance(asked, int)
    assert isinstance(opened, int)
    assert isinstance(first_put, int)
    assert asked > 1 << 28, "this machine has too little memory for this test"
    assert opened < asked // 50
    assert first_put < asked // 50


@pytest.mark.parametrize("tokens", [1, 3, 4, 16, 64, 257])
def test_a_tier_allocates_whole_slots_and_at_most_one_alignment_more_for_each(tokens: int) -> None:
    # F094: not the next power of two
    spec = PageSpec(
        num_layers=3, page_size=tokens, num_kv_heads=2, head_dim=40, dtype="float16", model="test"
    )
    layout = PageLayout.of(spec)
    for tier in (HostArena(layout, 33), CpuPool(layout, 33)):
        assert tier.nbytes == 33 * layout.slot_nbytes
        assert 0 <= tier.nbytes - 33 * spec.page_nbytes < 33 * 4096
    with TierStore.open(tiers(33, 65, page_nbytes=spec.page_nbytes), spec) as store:
        for name, slots in ((Tier.HBM, 33), (Tier.HOST, 65)):
            figures = tier_stats(store, name)
            assert figures["payload_nbytes"] == slots * spec.page_nbytes
            assert figures["allocated_nbytes"] == slots * layout.slot_nbytes


@pytest.mark.parametrize("spare", [0, 1, SPEC.page_nbytes - 1])
def test_a_capacity_between_two_pages_is_rounded_down_never_up(spare: int) -> None:
    # F094
    capacity = {"capacity": 7 * SPEC.page_nbytes + spare}
    with TierStore.open(tiers(7, 7, hbm_more=capacity, host_more=capacity), SPEC) as store:
        assert [tier_stats(store, tier)["num_slots"] for tier in (Tier.HBM, Tier.HOST)] == [7, 7]
