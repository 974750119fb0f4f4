"""Test that pages that are only on disk are promoted to memory while their request waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_pool import hashes_of
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm.hit import local_tokens
from tierstore.adapters.vllm.keys import KeyChain
from tierstore.adapters.vllm.kv_groups import Group, Groups
from tierstore.types import Tier


def test_pages_only_on_disk_are_promoted_while_their_request_is_queued(tmp_path: Path) -> None:
    config = {"host": {"capacity": 12 * 64, "pin": "never"}, "nvme": {"path": tmp_path, "capacity": 1 << 20}}
    engine = Engine(config)
    engine.add(DOCUMENT, 2)
    engine.run()
    store = engine.half._tiers.store
    keys = list(engine.half._tiers.store._directory.residency.tables[Tier.NVME].copies)
    assert len(keys) == 5
    store.evict(keys, Tier.HOST)
    engine.forget()
    long = engine.add([1, 2] * 7, 1)
    while engine.requests[long].status != "running":
        engine.step()
    name = engine.add(DOCUMENT, 2)
    waiting = engine.queue.pop()  # vLLM does not schedule it yet
    for _ in range(20):
        engine.step()
        for gate in engine.records:
            gate.settle()
    assert store.match(engine.half._known[name].chains[0].first(4)).tiers == (Tier.HOST,) * 4
    engine.queue.append(waiting)
    engine.run()
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def test_no_page_is_promoted_for_ended_requests_or_if_the_engine_holds_it(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config)
    engine.add(DOCUMENT, 2)
    engine.run()
    half = engine.half
    store, tables = half._tiers.store, half._tiers.store._directory.residency.tables
    store.evict(list(tables[Tier.NVME].copies), Tier.HOST)
    keys = KeyChain(SimpleNamespace(block_hashes=hashes_of(DOCUMENT)), half._namespaces[0]).first(4)
    ahead = half._tiers.disk_prefetch
    ahead.want("held", keys, 4)
    ahead.want("gone", keys, 0)
    ahead.over("gone")
    ahead.advance()
    assert not tables[Tier.HOST].copies
    ahead.want("queued", keys, 0)
    ahead.advance()
    assert 1 <= len(tables[Tier.HOST].copies) <= 4
    engine.run()
    engine.close()


def test_request_with_evicted_pages_does_not_block_other_promotions(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config)
    documents = [DOCUMENT, [2, *DOCUMENT[1:]]]
    for document in documents:
        engine.add(document, 2)
    engine.run()
    half = engine.half
    store, tables = half._tiers.store, half._tiers.store._directory.residency.tables
    store.evict(list(tables[Tier.NVME].copies), Tier.HOST)
    chains = [
        KeyChain(SimpleNamespace(block_hashes=hashes_of(document)), half._namespaces[0])
        for document in documents
    ]
    first, second = (chain.first(4) for chain in chains)
    half._tiers.disk_prefetch.want("first", first, 0)
    half._tiers.disk_prefetch.want("second", second, 0)
    store.evict(first)
    half._tiers.disk_prefetch.advance()
    assert set(tables[Tier.HOST].copies) <= set(second)
    assert tables[Tier.HOST].copies
    engine.run()
    engine.close()


def test_pages_in_flight_stay_within_the_budget_over_many_steps(tmp_path: Path) -> None:
    config = {
        "host": {"capacity": 12 * 64, "pin": "never"},
        "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"},
        "prefetch": {"max_in_flight": 2 * 64, "share_of_host": 1.0},
    }
    engine = Engine(config)
    only_on_disk(engine, DOCUMENT)
    for records in engine.records:
        records.hold((Tier.NVME, Tier.HOST))
    engine.pace = 0.0
    name = engine.add(DOCUMENT, 2)
    waiting = engine.queue.pop()  # vLLM does not schedule it yet
    for _ in range(4):
        engine.step()
    copies = engine.half._tiers.store._directory.residency.tables[Tier.HOST].copies
    keys = engine.half._known[name].chains[0].first(4)
    assert list(copies) == keys[:2]
    for records in engine.records:
        records.open()
    engine.queue.append(waiting)
    engine.run()
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def only_on_disk(engine: Engine, document: list[int]) -> None:
    """Answer a request for this document, and then evict its pages from all tiers except the disk."""
    engine.add(document, 2)
    engine.run()
    engine.half._tiers.store.evict(
        list(engine.half._tiers.store._directory.residency.tables[Tier.NVME].copies), Tier.HOST
    )
    engine.forget()


def test_request_is_postponed_during_its_promotion_while_others_run(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config, put_off_s=60)
    only_on_disk(engine, DOCUMENT)
    for records in engine.records:
        records.hold((Tier.NVME, Tier.HOST))
    engine.pace = 0.0
    name = engine.add(DOCUMENT, 2)
    other = engine.add([1, 2] * 2, 2)
    for _ in range(10):
        engine.step()
    assert engine.requests[name].status == "waiting"
    assert not engine.requests[name].tables
    assert other in engine.answers
    assert engine.half.orders([]).idle
    for records in engine.records:
        records.open()
    engine.run()
    assert engine.taken == 8
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def test_postponed_request_loads_from_the_lower_tier_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config, put_off_s=2)
    only_on_disk(engine, DOCUMENT)
    for records in engine.records:
        records.hold((Tier.NVME, Tier.HOST))
    engine.pace = 0.0
    now = 1000.0
    monkeypatch.setattr(engine.half._tiers.hits, "_clock", lambda: now)
    request = engine.requests[engine.add(DOCUMENT, 2)]
    offer = engine.scheduler.get_num_new_matched_tokens
    assert offer(request, 0) == (None, False)
    now += 1.9
    assert offer(request, 0) == (None, False)
    now += 0.2
    assert offer(request, 0) == (8, True)
    assert offer(request, 0) == (8, True)
    for records in engine.records:
        records.open()
    engine.run()
    assert engine.taken == 8
    engine.close()


def test_request_with_pages_in_memory_is_never_postponed(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config, put_off_s=60)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    request = engine.requests[engine.add(DOCUMENT, 2)]
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    engine.run()
    engine.close()


def test_request_with_more_disk_pages_than_memory_slots_does_not_wait_for_all(
    tmp_path: Path,
) -> None:
    config = {
        "host": {"capacity": 3 * 64, "pin": "never"},
        "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"},
    }
    engine = Engine(config, put_off_s=3600)
    only_on_disk(engine, DOCUMENT)
    name = engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.taken == 8
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


class Looked:
    """A block pool that counts the lookups of cached blocks."""

    def __init__(self, held: set[bytes]) -> None:
        self.held = held
        self.asked = 0

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[int] | None:
        self.asked += 1
        return [1] if block_hash in self.held and groups == [0] else None


@pytest.mark.parametrize("local", [0, 1, 700, 4095, 4096])
def test_local_tokens_of_a_long_prompt_are_found_in_few_lookups(local: int) -> None:
    hashes = [bytes([i % 256, i // 256]) * 16 for i in range(4096)]
    pool = Looked(set(hashes[:local]))
    assert local_tokens(pool, Groups((Group(0, 2),)), hashes) == 2 * local
    assert pool.asked <= 13


def test_with_a_disk_local_blocks_are_looked_up_when_a_request_is_queued(tmp_path: Path) -> None:
    engine = Engine({**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20}})
    pool = Looked(set())
    engine.scheduler.bind_gpu_block_pool(pool)
    engine.add(DOCUMENT, 2)
    assert pool.asked > 0
    engine.run()
    engine.close()


def test_without_a_disk_local_blocks_are_not_looked_up() -> None:
    engine = Engine(HOST)
    pool = Looked(set())
    engine.scheduler.bind_gpu_block_pool(pool)
    engine.add(DOCUMENT, 2)
    engine.run()
    assert pool.asked == 0
    engine.close()


def test_left_pages_are_promoted_after_awaited_pages_and_their_hint_ends(tmp_path: Path) -> None:
    config = {
        "host": {"capacity": 12 * 64, "pin": "never"},
        "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"},
        "prefetch": {"max_in_flight": 4 * 64, "share_of_host": 1.0},
    }
    engine = Engine(config)
    documents = [DOCUMENT, [2, *DOCUMENT[1:]]]
    for document in documents:
        engine.add(document, 2)
    engine.run()
    half = engine.half
    store, tables = half._tiers.store, half._tiers.store._directory.residency.tables
    store.evict(list(tables[Tier.NVME].copies), Tier.HOST)
    first, second = (
        KeyChain(SimpleNamespace(block_hashes=hashes_of(document)), half._namespaces[0]).first(4)
        for document in documents
    )
    ahead = half._tiers.disk_prefetch
    ahead.want("computes", first, 0)
    ahead.behind("computes")
    ahead.behind("never heard of")
    ahead.want("waits", second, 0)
    assert ahead.waits
    ahead.advance()
    assert set(tables[Tier.HOST].copies) == set(second)
    ahead.over("waits")
    assert half.pending
    engine.run()
    assert set(tables[Tier.HOST].copies) >= {*first, *second}
    assert not ahead.waits
    assert not half.pending
    engine.close()


def test_left_pages_are_promoted_for_few_requests_only(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config)
    engine.add(DOCUMENT, 2)
    engine.run()
    half = engine.half
    half._tiers.store.evict(list(half._tiers.store._directory.residency.tables[Tier.NVME].copies), Tier.HOST)
    keys = KeyChain(SimpleNamespace(block_hashes=hashes_of(DOCUMENT)), half._namespaces[0]).first(4)
    for number in range(9):
        half._tiers.disk_prefetch.want(f"r{number}", keys, 0)
        half._tiers.disk_prefetch.behind(f"r{number}")
    assert list(half._tiers.disk_prefetch._queue) == ["r5", "r6", "r7", "r8"]
    engine.close()
