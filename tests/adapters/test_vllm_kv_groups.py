"""KV groups: what each must have for a hit, where its pages stand, and which models are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters import vllm_planted
from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_pool import BLOCK, Kind, Pool
from tierstore.adapters.vllm.hit import longest_hit, pages_to_load
from tierstore.adapters.vllm.kv_groups import Group, Groups, groups_of
from tierstore.errors import ConfigError
from tierstore.types import Match, PageKey, Tier

HASHES = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(24)])
ROOM: dict[str, Any] = {"host": {"capacity": 24 * 128, "pin": "never"}}
BESIDE = (Kind(), Kind(window=3))
NAMES = tuple(bytes([i]) * 32 for i in range(3))
SETS = st.sampled_from(
    [
        (Group(0, 2),),
        (Group(0, 2), Group(1, 2, window=5)),
        (Group(0, 2, window=3), Group(1, 4, 2)),
        (Group(0, 6, 3), Group(1, 4, 2, window=9), Group(2, 2, window=2)),
        (Group(0, 2, chunk=6), Group(1, 2), Group(2, 2)),
        (Group(0, 2, window=7),),
    ]
)


def some(keys: set[PageKey]) -> Any:
    """A store that holds these."""

    def match(asked: Sequence[PageKey]) -> Match:
        number = next((i for i, key in enumerate(asked) if key not in keys), len(asked))
        return Match(number, (Tier.HOST,) * number, True)

    return match


@given(SETS, st.integers(0, 4), st.integers(0, 24), st.data())
def test_a_hit_is_the_longest_at_whose_end_every_group_has_what_the_next_token_sees(
    kinds: tuple[Group, ...], start: int, limit: int, data: st.DataObject
) -> None:
    groups = Groups(kinds)
    start *= groups.unit
    chains = groups.chains(HASHES, NAMES[: len(groups.all)])
    pages = {(g.number, i): key for g in kinds for i, key in enumerate(chains[g.number].first(24))}
    missing = data.draw(st.lists(st.sampled_from(sorted(pages)), max_size=4))
    held = {key for page, key in pages.items() if page not in missing}

    def whole(end: int) -> bool:
        return all(
            pages[g.number, i] in held
            for g in kinds
            for i in range(max(start // g.block_size, g.first_needed(end)), end // g.block_size)
        )

    ends = [end for end in range(start, max(start, limit) + 1, groups.unit) if end == start or whole(end)]
    plan = longest_hit(groups, chains, start, limit, some(held))
    assert (plan.start, plan.end) == (start, ends[-1])
    wanted = {
        (end, pages[g.number, i])
        for g in kinds
        for i in range(max(start // g.block_size, g.first_needed(plan.end)), plan.end // g.block_size)
        for end in ((i + 1) * g.block_size,)
    }
    assert set(plan.keys) == wanted
    assert [end for end, _ in plan.keys] == sorted(end for end, _ in wanted)
    assert sum(plan.sources.values()) == plan.tokens


def test_what_a_window_has_given_back_is_neither_loaded_nor_missed() -> None:
    groups = Groups((Group(0, 4, 2), Group(1, 2, window=3)))
    chains = groups.chains(HASHES, NAMES[: len(groups.all)])
    tables = [[11, 12, 13], [0, 0, 0, 24, 25]]
    pages = pages_to_load(groups, chains, tables, 4, 8)
    assert [(start, block) for start, _, block in pages] == [(4, 12), (6, 24)]
    assert [key for _, key, _ in pages] == [chains[0].at(1), chains[1].at(3)]


def test_a_table_that_lacks_a_block_that_is_to_be_loaded_is_refused() -> None:
    groups = Groups((Group(0, 4, 2),))
    chains = groups.chains(HASHES, NAMES[:1])
    assert [block for _, _, block in pages_to_load(groups, chains, [[11, 12, 13]], 4, 8)] == [12]
    with pytest.raises(ValueError, match="shorter"):
        pages_to_load(groups, chains, [[11]], 4, 8)


@dataclass
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, stub.Spec]


@dataclass
class MLAAttentionSpec(stub.FullAttentionSpec):
    pass


@dataclass
class RSWASpec(stub.FullAttentionSpec):
    pass


def groups_out_of(*specs: Any, **more: Any) -> Groups:
    return groups_of(stub.kv_cache_config(9, *specs, **more))


def test_groups_are_those_of_vllm() -> None:
    window = stub.SlidingWindowSpec(4, 9)
    window.extra_retained_tokens = 2  # type: ignore[attr-defined]
    mixed = UniformTypeKVCacheSpecs(8, {"a": stub.SlidingWindowSpec(8, 5), "b": stub.SlidingWindowSpec(8, 5)})
    groups = groups_out_of(MLAAttentionSpec(8), window, mixed, stub.ChunkedLocalAttentionSpec(4, 12))
    seen = [(g.number, g.block_size, g.stride, g.window, g.chunk) for g in groups.all]
    assert seen == [(0, 8, 2, None, None), (1, 4, 1, 11, None), (2, 8, 2, 5, None), (3, 4, 1, None, 12)]
    assert groups.unit == 8
    assert not groups.whole
    assert groups_out_of(stub.FullAttentionSpec(4)).whole
    assert groups_out_of(stub.FullAttentionSpec(4), hash_block_size=2).all[0].stride == 2
    assert not groups_out_of(stub.SlidingWindowSpec(4, 9)).whole


@pytest.mark.parametrize(
    "spec",
    [
        stub.MambaSpec(2),
        RSWASpec(2),
        UniformTypeKVCacheSpecs(2, {"a": stub.SlidingWindowSpec(2, 5), "b": stub.SlidingWindowSpec(2, 6)}),
    ],
)
def test_layers_that_keep_their_kv_otherwise_are_refused_by_name(spec: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"group\.1 keep their KV as {type(spec).__name__}; TierStoreConnector supports"
    ):
        groups_out_of(stub.FullAttentionSpec(2), spec)


def test_a_group_that_vllm_does_not_have_moved_is_refused() -> None:
    config = stub.kv_cache_config(9, stub.FullAttentionSpec(2), stub.FullAttentionSpec(2))
    assert len(groups_of(config).all) == 2
    config.kv_cache_groups[1].enable_kv_transfer = False  # a copy that vLLM makes itself
    with pytest.raises(
        ConfigError, match=r"group\.1 keep their KV as FullAttentionSpec; TierStoreConnector supports"
    ):
        groups_of(config)


def test_no_group_has_a_key_of_another_and_one_alone_has_those_of_its_model() -> None:
    two, alone = Groups((Group(0, 2), Group(1, 2, window=3))), Groups((Group(0, 2),))
    other = Groups((Group(0, 2), Group(1, 2, window=5)))
    names = {*two.namespaces("m"), *other.namespaces("m"), *alone.namespaces("m"), *two.namespaces("n")}
    assert len(names) == 7
    assert alone.namespaces("m") == Groups((Group(0, 2, window=3),)).namespaces("m")


def asked_twice(engine: Engine) -> str:
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    return engine.add(DOCUMENT, 2)


def test_a_page_that_one_group_lacks_shortens_the_hit_of_all() -> None:
    # F067
    engine = Engine(ROOM, blocks=16, kinds=BESIDE)
    name = asked_twice(engine)
    whole, window = engine.half._known[name].chains
    engine.half._tiers.store.evict([window.at(3)])
    engine.run()
    assert engine.taken == 6
    assert engine.answers[name] == engine.answers["r1"]
    engine.forget()
    engine.half._tiers.store.evict([whole.at(2), *window.first(2)])
    engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.taken == 6
    engine.check()
    engine.close()


def require_window_alone_needed() -> None:
    engine = Engine(ROOM, blocks=16, kinds=BESIDE)
    name = asked_twice(engine)
    engine.half._tiers.store.evict(engine.half._known[name].chains[1].first(3))
    engine.run()
    assert engine.taken == 8
    engine.close()


def test_pages_of_a_window_that_nobody_sees_any_more_are_not_needed() -> None:
    # F065
    require_window_alone_needed()


@pytest.mark.deep
def test_taking_what_a_window_gave_back_for_needed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that the machine meets in some searches only."""
    vllm_planted.what_a_window_gave_back_is_stored(monkeypatch)
    with pytest.raises(AssertionError):
        require_window_alone_needed()


def test_a_page_of_a_window_stands_beside_the_page_of_full_attention_that_ends_with_it() -> None:
    engine = Engine(ROOM, blocks=16, kinds=(Kind(size=4), Kind(window=5)))
    name = asked_twice(engine)
    whole, window = engine.half._known[name].chains
    parent = engine.half._tiers.store._directory.residency.lineage.parent
    assert [parent(key) for key in whole.first(2)] == [None, whole.at(0)]
    assert [parent(key) for key in window.first(4)] == [None, whole.at(0), whole.at(0), whole.at(1)]
    engine.run()
    engine.close()


def test_a_request_of_several_groups_whose_load_failed_is_computed_and_offered_nothing_more() -> None:
    # F019
    engine = Engine(ROOM, blocks=16, kinds=BESIDE)
    name = asked_twice(engine)
    engine.copies[0].fail_next((Tier.HOST, Tier.HBM), 1)
    request = engine.requests[name]
    engine.run()
    assert engine.recomputed == 1
    assert request.cached == 0
    assert engine.answers[name] == engine.answers["r1"]
    assert len(engine.free) == 16
    engine.close()


def test_of_a_queued_request_only_those_pages_come_up_that_a_hit_takes(tmp_path: Path) -> None:
    config = {**ROOM, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config, blocks=16, kinds=BESIDE, put_off_s=60)
    engine.add(DOCUMENT, 1)
    engine.run()
    store, tables = engine.half._tiers.store, engine.half._tiers.store._directory.residency.tables
    stored = list(tables[Tier.NVME].copies)
    assert len(stored) == 8
    store.evict(stored, Tier.HOST)
    engine.forget()
    for gate in engine.copies:
        gate.hold((Tier.HOST, Tier.HBM))
    engine.pace = 0.0
    name = engine.add(DOCUMENT, 1)
    while engine.requests[name].status != "loading":
        engine.step()
        for records in engine.records:
            records.settle()
    whole, window = engine.half._known[name].chains
    assert set(tables[Tier.HOST].copies) == {*whole.first(4), window.at(3)}
    for gate in engine.copies:
        gate.open()
    engine.run()
    assert engine.taken == 8
    engine.close()


def test_blocks_of_two_sizes_overlay_the_same_bytes_and_each_is_a_page() -> None:
    engine = Engine(ROOM, blocks=16, kinds=(Kind(size=4), Kind(window=5)))
    name = asked_twice(engine)
    (spec,) = {worker.get_handshake_metadata().hello.spec for worker in engine.workers}
    assert spec.page_nbytes == 2 * 4 * 4 * 4
    engine.run()
    assert engine.taken == 8
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def test_events_name_the_group_and_the_size_of_its_blocks() -> None:
    engine = Engine(ROOM, blocks=16, events=True, kinds=(Kind(size=4), Kind(window=5)))
    engine.add(DOCUMENT, 1)
    engine.run()
    blocks = [change.block for change in engine.half.take_events()]
    assert [(b.group, len(b.tokens)) for b in blocks if b.group == 0] == [(0, 2 * BLOCK)] * 2
    assert [b.tokens for b in blocks if b.group == 1] == [tuple(DOCUMENT[i : i + 2]) for i in range(0, 8, 2)]
    engine.close()


def test_a_hit_that_needs_no_page_is_a_load_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local chunks alone, and an engine without prefix caching, which would find these tokens itself."""
    monkeypatch.setattr(Pool, "local", lambda self, hashes, tokens: (0, [[] for _ in self.kinds]))
    engine = Engine(ROOM, blocks=16, kinds=(Kind(chunk=4), Kind(chunk=8)))
    name = engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.taken == 8
    assert len(engine.answers[name]) == len(DOCUMENT) + 2
    engine.check()
    engine.close()
