"""Tests of several ranks of one model: ranks share a path but not records, and find no pages of another split."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import forked, lanes
from tests.support.pages import PATIENCE_S, SPEC, fill, read, tiers, write
from tierstore.nvme import directory_layout
from tierstore.store import TierStore

TOKENS = range(16)
RANK = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.support.pages import SPEC, content, fill, read, tiers
from tierstore.store import TierStore

home, rank = Path(sys.argv[1]), int(sys.argv[2])
spec = replace(SPEC, shard=rank)
with TierStore.open(tiers(8, 8, home), spec) as store:
    keys = store.keys(range(16))
    print("open", flush=True)
    sys.stdin.readline()
    slots = store.allocate(4)
    fill(store, keys, slots)  # what a page holds follows from its key, which ends in the rank
    store.put(keys, slots)
    store.flush()
    print("written", flush=True)
    sys.stdin.readline()
    print(read(store, keys), keys[-1].hex(), flush=True)
"""


def test_ranks_in_separate_processes_write_the_same_tokens_to_one_path_at_once(tmp_path: Path) -> None:
    # F070
    lines: list[list[str]] = []
    with ExitStack() as stack:
        ranks = [stack.enter_context(forked.running(RANK, tmp_path / "disk", str(rank))) for rank in range(2)]
        for word in ("open", "written", "4"):
            lines = [rank.stdout.readline().split() for rank in ranks]
            assert [line[0] for line in lines] == [word] * 2
            if word != "4":
                for rank in ranks:
                    rank.stdin.write("go\n")
                    rank.stdin.flush()
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]
    keys = [bytes.fromhex(line[1]) for line in lines]
    assert len({key[:32] for key in keys}) == 1
    assert [key[32:] for key in keys] == [bytes((0, 0, 0, rank)) for rank in range(2)]
    names = [path.name for path, _, _ in directory_layout.shard_directories(tmp_path / "disk")]
    assert names == [f"{SPEC.fingerprint}-{rank}" for rank in range(2)]
    for shard in range(2):
        spec = replace(SPEC, shard=shard)
        with TierStore.open(tiers(8, 8, tmp_path / "disk"), spec) as store:
            assert read(store, store.keys(TOKENS), spec) == 4


def test_two_ranks_in_one_process_do_not_see_each_others_pages(tmp_path: Path) -> None:
    # F070
    one, two = SPEC, replace(SPEC, shard=1)
    config = tiers(8, 8, tmp_path)
    with TierStore.open(config, one) as first, TierStore.open(config, two) as second:
        write(first, first.keys(TOKENS))
        first.flush()
        assert second.match(second.keys(TOKENS)).num_pages == 0
        assert second.match(first.keys(TOKENS)).num_pages == 0
        write(second, second.keys(TOKENS[:8]))
        assert first.match(first.keys(TOKENS)).num_pages == 4
        assert second.match(second.keys(TOKENS)).num_pages == 2


SPLITS = {
    "tp=1": replace(SPEC, num_kv_heads=4),
    "tp=2": replace(SPEC, num_kv_heads=2),
    "tp=4": replace(SPEC, num_kv_heads=1),
    "pp=2": replace(SPEC, num_kv_heads=4, num_layers=SPEC.num_layers // 2),
    "tp=4, heads repeated": replace(SPEC, num_kv_heads=1, model="test tp=4 of 2 heads"),
    "cp=2": replace(SPEC, num_kv_heads=4, model="test cp=2"),
    "cp=4": replace(SPEC, num_kv_heads=4, model="test cp=4"),
}


@pytest.mark.parametrize("before", lanes.some(SPLITS, ("tp=2", "tp=4, heads repeated", "cp=2").__contains__))
def test_after_a_change_of_the_split_every_page_is_a_miss(tmp_path: Path, before: str) -> None:
    # F070: the splits differ in shape, or else in the model's name, as PageSpec requires
    largest = max(spec.page_nbytes for spec in SPLITS.values())
    config = tiers(8, 8, tmp_path, page_nbytes=largest)

    with TierStore.open(config, SPLITS[before]) as store:
        seen = store.keys(TOKENS)
        store.put(seen, store.allocate(4))
        store.flush()
        assert store.match(seen).num_pages == 4
    for after, spec in SPLITS.items():
        with TierStore.open(config, spec) as store:
            found = store.match(store.keys(TOKENS)).num_pages
            assert found == (4 if after == before else 0), f"{after} after {before}"
            assert (store.keys(TOKENS) == seen) == (after == before)


def test_a_prefix_that_all_ranks_have_is_the_shortest_of_their_matches(tmp_path: Path) -> None:
    # F068: the ranks lost different pages. The scheduler takes the shortest match, which every rank can serve.
    specs = [replace(SPEC, shard=rank) for rank in range(4)]
    stores = [TierStore.open(tiers(8, 8, tmp_path), spec) for spec in specs]
    for store in stores:
        write(store, store.keys(TOKENS))
        store.flush()
    stores[2].evict(stores[2].keys(TOKENS)[3:])
    stores[1].evict(stores[1].keys(TOKENS)[:1])
    stores[1].put(stores[1].keys(TOKENS)[:1], refilled(stores[1]))
    agreed = min(store.match(store.keys(TOKENS)).num_pages for store in stores)
    assert agreed == 3
    for store, spec in zip(stores, specs, strict=True):
        assert read(store, store.keys(TOKENS)[:agreed], spec) == agreed
        store.close()


def refilled(store: TierStore) -> list[int]:
    slots = store.allocate(1)
    fill(store, store.keys(TOKENS)[:1], slots)
    return slots


def test_keys_of_two_ranks_differ_only_in_their_last_bytes() -> None:
    # F068: all ranks get the same transfer from the scheduler, and each puts its own shard into the keys
    with (
        TierStore.open(tiers(4, None), SPEC) as first,
        TierStore.open(tiers(4, None), replace(SPEC, shard=7)) as other,
    ):
        pairs = list(zip(first.keys(TOKENS), other.keys(TOKENS), strict=True))
        assert all(mine[:34] == theirs[:34] and mine != theirs for mine, theirs in pairs)
        assert {theirs[34:] for _, theirs in pairs} == {b"\x00\x07"}
