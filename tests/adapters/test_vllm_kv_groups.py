"""Tests of KV groups: what a hit needs from each group, which parent each page has, and which models are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters import vllm_planted
from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_engine import DOCUMENT, Engine, Request
from tests.adapters.vllm_pool import BLOCK, Kind, Pool
from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.hit import longest_hit, pages_to_load
from tierstore.adapters.vllm.kv_groups import FULL, Chunk, Group, Groups, Prompt, State, Window, groups_of
from tierstore.adapters.vllm.messages import Orders
from tierstore.errors import ConfigError
from tierstore.types import Match, PageKey, Tier

HASHES = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(24)])
ROOM: dict[str, Any] = {"host": {"capacity": 24 * 128, "pin": "never"}}
BESIDE = (Kind(), Kind(window=3))
NAMES = tuple(bytes([i]) * 32 for i in range(4))
STATE = State((((3, 8), "float16"), ((2, 4), "float32")))
SETS = st.sampled_from(
    [
        (Group(0, 2),),
        (Group(0, 2), Group(1, 2, kind=Window(5))),
        (Group(0, 2, kind=Window(3)), Group(1, 4, 2)),
        (Group(0, 6, 3), Group(1, 4, 2, kind=Window(9)), Group(2, 2, kind=Window(2))),
        (Group(0, 2, kind=Chunk(6)), Group(1, 2), Group(2, 2)),
        (Group(0, 2, kind=Window(7)),),
        (Group(0, 2), Group(1, 2, kind=STATE)),
        (Group(1, 4, 2, kind=STATE), Group(2, 2, kind=Window(5)), Group(3, 4, 2), Group(4, 4, 2, kind=STATE)),
        (Group(0, 4, 2, kind=STATE),),
        (Group(0, 2, draft=True),),
        (Group(0, 4, 2), Group(1, 2, draft=True), Group(2, 2, kind=Window(3))),
        (Group(0, 4, 2), Group(1, 2, kind=Window(5), draft=True), Group(2, 2, kind=Window(3))),
    ]
)


def some(keys: set[PageKey]) -> Any:
    """Return a store that holds these keys."""

    def match(asked: Sequence[PageKey]) -> Match:
        number = next((i for i, key in enumerate(asked) if key not in keys), len(asked))
        return Match(number, (Tier.HOST,) * number, True)

    def locate(asked: Sequence[PageKey]) -> list[Tier | None]:
        return [Tier.HOST if key in keys else None for key in asked]

    return SimpleNamespace(match=match, locate=locate)


@given(SETS, st.integers(0, 4), st.integers(0, 24), st.data())
def test_hit_is_the_longest_whose_end_every_group_can_continue_from(
    kinds: tuple[Group, ...], start: int, limit: int, data: st.DataObject
) -> None:
    groups = Groups(kinds)
    start *= groups.unit
    chains = groups.chains(HASHES, NAMES[: len(groups.all)])
    pages = {(g.number, i): key for g in kinds for i, key in enumerate(chains[g.number].first(24))}
    missing = data.draw(st.lists(st.sampled_from(sorted(pages)), max_size=9))
    held = {key for page, key in pages.items() if page not in missing}

    def whole(end: int) -> bool:
        return all(
            pages.get((g.number, i)) in held
            for g in kinds
            for i in range(max(start // g.block_size, g.first_needed(end)), (end + g.proof) // g.block_size)
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


TAILS = st.sampled_from(
    [
        (Group(0, 6, 3), Group(1, 6, 3, kind=STATE)),
        (Group(0, 4, 2, kind=STATE), Group(1, 4, 2), Group(2, 4, 2, kind=STATE), Group(3, 4, 2)),
        (Group(0, 8, 4, kind=STATE),),
    ]
)


@given(TAILS, st.integers(0, 2), st.integers(0, 48), st.data())
def test_hit_inside_a_block_is_the_longest_that_every_group_can_continue_from(
    kinds: tuple[Group, ...], start: int, limit: int, data: st.DataObject
) -> None:
    groups = Groups(kinds)
    unit, step = groups.unit, groups.tail_unit
    assert step == 2
    start *= unit
    chains = groups.chains(HASHES, [bytes([64 * i]) * 32 for i in range(len(groups.all))])
    pages = {
        (g.number, i * step): key
        for g in kinds
        for i, key in enumerate(chains[g.number].ending(range(1, 25)), 1)
    }
    whole = {(g.number, i * unit) for g in kinds for i in range(1, 25) if i * unit <= 48}
    assert {pages[page] for page in whole} == {key for g in kinds for key in chains[g.number].first(24)}
    missing = data.draw(st.lists(st.sampled_from(sorted(pages)), max_size=12))
    inside = data.draw(st.lists(st.sampled_from(sorted(pages.keys() - whole)), max_size=20))
    missing += [page for page in pages.keys() - whole if page not in inside and data.draw(st.booleans())]
    held = {page: key for page, key in pages.items() if page not in missing}

    def needed(end: int) -> set[tuple[int, int]]:
        spine = {(g.number, at) for g in kinds if not g.partial for at in range(start + unit, end + 1, unit)}
        return spine | {(g.number, end) for g in kinds}

    ends = [end for end in range(start + step, limit + 1, step) if needed(end) <= held.keys()]
    plan = longest_hit(groups, chains, start, limit, some(set(held.values())))
    assert (plan.start, plan.end) == (start, max(ends, default=start))
    wanted = {(end, held[number, end]) for number, end in needed(plan.end)} if ends else set()
    assert set(plan.keys) == wanted
    assert sum(plan.sources.values()) == plan.tokens
    blocks = -(-plan.end // unit)
    tables = [
        [g.number * 100 + i + 1 if not g.partial or i == blocks - 1 else 0 for i in range(blocks)]
        for g in kinds
    ]
    loaded = [*zip(*pages_to_load(groups, chains, tables, plan.start, plan.end), strict=True)]
    assert (
        {(first, key, block) for first, key, block in loaded}
        == {
            ((end - 1) // unit * unit, held[number, end], number * 100 + -(-end // unit))
            for number, end in needed(plan.end)
        }
        if ends
        else not loaded
    )


@pytest.mark.parametrize(
    "groups",
    [
        Groups((Group(0, 4, 2),)),
        Groups((Group(0, 4), Group(1, 4, kind=STATE))),
        Groups((Group(0, 4, 2), Group(1, 8, 4, kind=STATE))),
        Groups((Group(0, 4, 2), Group(1, 4, 2, kind=Window(3)), Group(2, 4, 2, kind=STATE))),
        Groups((Group(0, 4, 2, draft=True), Group(1, 4, 2, kind=STATE))),
        Groups((Group(0, 4, 2), Group(1, 4, 2, kind=STATE)), skipped=("ring",)),
    ],
)
def test_other_groups_have_no_hits_inside_a_block(groups: Groups) -> None:
    assert groups.tail_unit == 0


def test_blocks_freed_by_a_window_are_neither_loaded_nor_missing() -> None:
    groups = Groups((Group(0, 4, 2), Group(1, 2, kind=Window(3))))
    chains = groups.chains(HASHES, NAMES[: len(groups.all)])
    tables = [[11, 12, 13], [0, 0, 0, 24, 25]]
    starts, keys, blocks = pages_to_load(groups, chains, tables, 4, 8)
    assert [*zip(starts, blocks, strict=True)] == [(4, 12), (6, 24)]
    assert [*keys] == [chains[0].at(1), chains[1].at(3)]


def test_block_table_shorter_than_the_load_is_refused() -> None:
    groups = Groups((Group(0, 4, 2),))
    chains = groups.chains(HASHES, NAMES[:1])
    assert pages_to_load(groups, chains, [[11, 12, 13]], 4, 8)[2] == [12]
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
    rswa_window: int = 5


@dataclass
class SinkFullAttentionSpec(stub.FullAttentionSpec):
    sink_len: int = 2


@dataclass
class HiddenStateCacheSpec(MLAAttentionSpec):
    pass


@dataclass
class CrossAttentionSpec:
    block_size: int


@dataclass
class HiSparseHotSpec:
    block_size: int
    prefix_cacheable: bool = False


def groups_out_of(*specs: Any, **more: Any) -> Groups:
    return groups_of(stub.kv_cache_config(9, *specs, **more))


def test_groups_are_those_of_vllm() -> None:
    window = stub.SlidingWindowSpec(4, 9)
    window.extra_retained_tokens = 2  # type: ignore[attr-defined]
    mixed = UniformTypeKVCacheSpecs(8, {"a": stub.SlidingWindowSpec(8, 5), "b": stub.SlidingWindowSpec(8, 5)})
    groups = groups_out_of(MLAAttentionSpec(8), window, mixed, stub.ChunkedLocalAttentionSpec(4, 12))
    seen = [(g.number, g.block_size, g.stride, g.kind) for g in groups.all]
    assert seen == [(0, 8, 2, FULL), (1, 4, 1, Window(11)), (2, 8, 2, Window(5)), (3, 4, 1, Chunk(12))]
    assert groups.unit == 8
    assert not groups.whole
    assert groups_out_of(stub.FullAttentionSpec(4)).whole
    assert groups_out_of(stub.FullAttentionSpec(4), hash_block_size=2).all[0].stride == 2
    assert not groups_out_of(stub.SlidingWindowSpec(4, 9)).whole


@pytest.mark.parametrize(
    "spec",
    [
        SimpleNamespace(block_size=2),
        UniformTypeKVCacheSpecs(2, {"a": stub.SlidingWindowSpec(2, 5), "b": stub.SlidingWindowSpec(2, 6)}),
    ],
)
def test_layers_with_unsupported_kv_specs_are_refused_by_name(spec: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"not support layers group\.1 with a {type(spec).__name__}: it supports"
    ):
        groups_out_of(stub.FullAttentionSpec(2), spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (HiddenStateCacheSpec(2), "extract_hidden_states"),
        (CrossAttentionSpec(2), "encoder's input"),
        (HiSparseHotSpec(2), "vLLM itself moves their KV to host memory"),
        (UniformTypeKVCacheSpecs(2, {"a": HiddenStateCacheSpec(2)}), "extract_hidden_states"),
    ],
)
def test_layers_that_cannot_be_stored_are_refused_with_the_reason(spec: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not support layers group\.1: .*{reason}"):
        groups_out_of(stub.FullAttentionSpec(2), spec)


def test_a_group_in_host_memory_is_refused() -> None:
    config = stub.kv_cache_config(9, stub.FullAttentionSpec(2), stub.FullAttentionSpec(2))
    config.kv_cache_groups[1].host_resident = True
    with pytest.raises(ConfigError, match=r"group\.1: with HiSparse"):
        groups_of(config)


def test_windows_over_mla_sinks_reference_windows_and_drafts_are_groups_of_their_kinds() -> None:
    config = stub.kv_cache_config(
        9, MLAAttentionSpec(8), SlidingWindowMLASpec(4, 9, prefix_cacheable=True), SinkFullAttentionSpec(4)
    )
    config.kv_cache_groups[1].is_eagle_group = True
    groups = groups_of(config)
    assert [group.kind for group in groups.all] == [FULL, Window(9), FULL]
    assert [group.draft for group in groups.all] == [False, True, False]
    assert not groups.prompts_only
    reference = groups_out_of(RSWASpec(4))
    assert reference.all[0].kind == Prompt(5)
    assert (reference.prompts_only, reference.whole) == (True, True)


def test_reference_windows_store_and_find_only_prompt_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A generated token does not see all earlier tokens, so its KV differs from that of the same token in a prompt."""
    monkeypatch.setattr(Kind, "spec", RSWASpec(BLOCK))
    monkeypatch.setattr(Request, "num_prompt_tokens", property(lambda self: len(DOCUMENT)), raising=False)
    engine = Engine(ROOM, blocks=24)
    first = engine.add(DOCUMENT, 6)
    engine.run()
    assert len(engine.half._tiers.store._directory.residency.tables[Tier.HOST].copies) == 4
    engine.forget()
    turn = [*engine.answers[first], 1]
    monkeypatch.setattr(Request, "num_prompt_tokens", property(lambda self: len(turn)))
    engine.add(turn, 2)
    engine.run()
    assert engine.taken == 8
    engine.forget()
    monkeypatch.setattr(Request, "num_prompt_tokens", property(lambda self: 6))
    engine.add(turn, 2)
    engine.run()
    assert engine.taken == 8 + 6
    engine.close()


def test_a_hit_of_a_draft_model_ends_one_block_before_the_pages_that_match() -> None:
    engine = Engine(ROOM, blocks=24, kinds=(Kind(), Kind(window=3)), interval=0, drafts=(1,))
    engine.add(DOCUMENT, 1)
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 6
    engine.check()
    engine.close()


@dataclass
class SlidingWindowMLASpec(stub.SlidingWindowSpec):
    prefix_cacheable: bool = False
    prefix_replay_tokens: int = 0


def test_state_group_is_identified_by_its_shapes_and_dtypes() -> None:
    def of(dtype: str) -> Groups:
        spec = stub.MambaSpec(2, shapes=((3, 8), (2, 4)), dtypes=("torch.float16", dtype))
        return groups_out_of(stub.FullAttentionSpec(2), spec)

    groups = of("torch.float32")
    assert [group.kind for group in groups.all] == [FULL, STATE]
    assert groups.states == groups.all[1:]
    assert not groups.whole
    one, other = of("torch.float16"), of("torch.bfloat16")
    assert set(one.namespaces("m")).isdisjoint(other.namespaces("m"))
    assert one.name != other.name  # the name is part of the pages' fingerprint too


def test_layers_whose_states_differ_may_share_a_block_table() -> None:
    one, other = stub.MambaSpec(2, shapes=((3,),)), stub.MambaSpec(2, shapes=((5,),))
    groups = groups_out_of(UniformTypeKVCacheSpecs(2, {"a": one, "b": other, "c": one}))
    assert groups.all[0].kind == State((((3,), "float32"), ((5,), "float32")))


def test_states_that_are_never_found_again_are_refused() -> None:
    said = r"mamba_cache_mode must be 'align' .* 'none' for layers group\.0; enable prefix caching"
    with pytest.raises(ConfigError, match=said):
        groups_out_of(stub.MambaSpec(2, mamba_cache_mode="none"))


def test_states_need_a_vllm_that_offers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = stub.load_connector()
    monkeypatch.setattr(connector, "TransferResults", None)
    monkeypatch.setattr("tierstore.adapters.vllm.compat.installed", lambda: "0.26.0")
    config = stub.vllm_config({"config": stub.HOST})
    kv = stub.kv_cache_config(9, stub.MambaSpec(2))
    with pytest.raises(
        ConfigError, match=r"needs vLLM 0\.32 or newer for models with recurrent states.*got 0\.26"
    ):
        connector.TierStoreConnector(config, stub.Role.SCHEDULER, kv)
    config.model_config.is_hybrid = True
    with pytest.raises(ConfigError, match="or remove the connector"):
        connector.TierStoreConnector.get_required_kvcache_layout(config)


def test_layers_that_share_kv_need_a_vllm_with_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all layers in one group, vLLM 0.26 itself fails on Gemma 3n: ``KeyError`` in ``init_attn_backend``."""
    connector = stub.load_connector()
    config = stub.vllm_config({"config": stub.HOST, "layout": "LBNHC"})
    config.model_config.hf_text_config = SimpleNamespace(num_kv_shared_layers=2)
    connector.TierStoreConnector.get_required_kvcache_layout(config)
    monkeypatch.setattr(connector, "TransferResults", None)
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 or newer for .* another layer's KV"):
        connector.TierStoreConnector.get_required_kvcache_layout(config)
    config.model_config.hf_text_config.num_kv_shared_layers = 0  # as Gemma 4 may have it
    connector.TierStoreConnector.get_required_kvcache_layout(config)


def test_skipped_groups_leave_the_numbers_of_other_groups_unchanged() -> None:
    config = stub.kv_cache_config(
        9,
        stub.CircularBufferSpec(7),
        stub.FullAttentionSpec(4),
        SlidingWindowMLASpec(2, 5),
        stub.FullAttentionSpec(2),
    )
    config.kv_cache_groups[3].enable_kv_transfer = False  # a copy that vLLM makes itself
    groups = groups_of(config)
    assert [(g.number, g.block_size, g.layers) for g in groups.all] == [(1, 4, ("group.1",))]
    assert groups.unit == 4
    assert not groups.whole
    assert groups.skipped == ("group.0", "group.2", "group.3")
    alone = groups_out_of(stub.FullAttentionSpec(4))
    assert set(groups.namespaces("m")).isdisjoint(alone.namespaces("m"))


def test_model_without_storable_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot store any layer of this model"):
        groups_out_of(stub.CircularBufferSpec(7))


def test_block_tables_and_keys_use_vllms_group_number() -> None:
    groups = groups_of(
        stub.kv_cache_config(9, stub.CircularBufferSpec(7), stub.FullAttentionSpec(4), hash_block_size=2)
    )
    chains = groups.chains(HASHES, NAMES[:1])
    pages = pages_to_load(groups, chains, [[7], [11, 12, 13]], 4, 8)
    assert [[*each] for each in pages] == [[4], [chains[1].at(1)], [12]]
    assert longest_hit(groups, chains, 4, 9, some(set(chains[1].first(2)))).keys == [(8, chains[1].at(1))]


def test_a_hit_that_vllm_would_compute_again_is_not_offered() -> None:
    taken = {}
    for replayed in (0, 7, 8):
        engine = Engine(ROOM, blocks=16)
        engine.half._terms = replace(
            engine.half._terms, groups=replace(engine.half.groups, replayed=replayed)
        )
        engine.half.meet([worker._worker.hello for worker in engine.workers])
        asked_twice(engine)
        engine.run()
        taken[replayed] = engine.taken
        engine.close()
    assert taken == {0: 8, 7: 8, 8: 0}


def test_groups_have_distinct_keys_and_a_single_group_has_those_of_its_model() -> None:
    two, alone = Groups((Group(0, 2), Group(1, 2, kind=Window(3)))), Groups((Group(0, 2),))
    other = Groups((Group(0, 2), Group(1, 2, kind=Window(5))))
    names = {*two.namespaces("m"), *other.namespaces("m"), *alone.namespaces("m"), *two.namespaces("n")}
    assert len(names) == 7
    assert alone.namespaces("m") == Groups((Group(0, 2, kind=Window(3)),)).namespaces("m")


class Always(random.Random):
    """A random generator that makes the engine offer every state for storing."""

    def random(self) -> float:
        """Return a number above the engine's probability of withholding a state, so that it withholds none."""
        return 0.99


def asked_twice(engine: Engine) -> str:
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    return engine.add(DOCUMENT, 2)


def test_page_missing_in_one_group_shortens_the_hit_of_all() -> None:
    # F067
    engine = Engine(ROOM, blocks=16, kinds=BESIDE)
    name = asked_twice(engine)
    whole, window = engine.half._known[name].chains.values()
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


def test_window_pages_behind_the_window_are_not_needed() -> None:
    # F065
    require_window_alone_needed()


@pytest.mark.deep
def test_requiring_blocks_freed_by_a_window_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug that the state machine does not always find. ``require_window_alone_needed`` must find it."""
    vllm_planted.what_a_window_gave_back_is_stored(monkeypatch)
    with pytest.raises(AssertionError):
        require_window_alone_needed()


def test_window_page_follows_the_last_full_attention_page_ending_with_or_before_it() -> None:
    engine = Engine(ROOM, blocks=16, kinds=(Kind(size=4), Kind(window=5)))
    name = asked_twice(engine)
    whole, window = engine.half._known[name].chains.values()
    parent = engine.half._tiers.store._directory.residency.lineage.parent
    assert [parent(key) for key in whole.first(2)] == [None, whole.at(0)]
    assert [parent(key) for key in window.first(4)] == [None, whole.at(0), whole.at(0), whole.at(1)]
    engine.run()
    engine.close()


def test_failed_load_of_several_groups_is_computed_and_not_offered_again() -> None:
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


def test_queued_request_promotes_only_pages_its_hit_needs(tmp_path: Path) -> None:
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
    whole, window = engine.half._known[name].chains.values()
    assert set(tables[Tier.HOST].copies) == {*whole.first(4), window.at(3)}
    for gate in engine.copies:
        gate.open()
    engine.run()
    assert engine.taken == 8
    engine.close()


def test_blocks_of_two_sizes_overlay_the_same_bytes_and_each_is_a_page() -> None:
    engine = Engine(ROOM, blocks=16, kinds=(Kind(size=4), Kind(window=5)))
    name = asked_twice(engine)
    (spec,) = {worker._worker.hello.spec for worker in engine.workers}
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


def test_hit_without_pages_is_a_completed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a request whose layers all have local chunks, so that TierStore reports a hit but no page is loaded.

    The engine does not find these tokens in its own prefix cache.
    """
    monkeypatch.setattr(Pool, "local", lambda self, hashes, tokens: (0, [[] for _ in self.kinds]))
    engine = Engine(ROOM, blocks=16, kinds=(Kind(chunk=4), Kind(chunk=8)))
    name = engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.taken == 8
    assert len(engine.answers[name]) == len(DOCUMENT) + 2
    engine.check()
    engine.close()


HYBRID = (Kind(size=4), Kind(size=4, state=True))


def test_a_hit_ends_at_the_last_boundary_at_which_every_state_is_stored() -> None:
    engine = Engine(ROOM, blocks=16, kinds=(*HYBRID, Kind(size=4, state=True)))
    engine.dice = Always()
    name = asked_twice(engine)
    chains = engine.half._known[name].chains
    engine.half._tiers.store.evict([chains[2].at(1)])
    engine.run()
    assert engine.taken == 4
    assert engine.answers[name] == engine.answers["r1"]
    engine.check()
    engine.close()


def test_states_are_stored_exactly_at_the_boundaries_vllm_offers() -> None:
    engine = Engine(ROOM, blocks=16, kinds=HYBRID)
    engine.dice = Always()
    name = engine.add(DOCUMENT, 4)
    stored: set[PageKey] = set()
    engine.half._tiers.store.watch(lambda change: stored.add(change.key))
    chain = engine.half._known[name].chains[1]
    engine.run()
    assert [chain.at(i) in stored for i in range(3)] == [True, True, True]
    assert not stored & set(chain.first(99)[3:])
    engine.close()


def test_state_not_offered_by_vllm_is_not_stored() -> None:
    engine = Engine(ROOM, blocks=16, kinds=HYBRID)
    engine._offers = lambda parts: {}  # type: ignore[method-assign]
    asked_twice(engine)
    engine.run()
    assert engine.taken == 0
    engine.close()


def test_a_longer_prompt_continues_from_the_state_at_the_end_of_the_one_before() -> None:
    engine = Engine(ROOM, blocks=16, kinds=HYBRID)
    engine.dice = Always()
    engine.add(DOCUMENT[:5], 1)
    engine.run()
    engine.forget()
    for tokens, taken in ((DOCUMENT, 4), ([*DOCUMENT, 1, 1, 2, 2], 4 + 8)):
        engine.add(list(tokens), 1)
        engine.run()
        engine.forget()
        assert engine.taken == taken
    engine.close()


def test_preempted_requests_offer_no_states_and_overwritten_blocks_are_listed() -> None:
    state = SimpleNamespace(boundary_state_offloads={"a": [(1, 7, 4)], "b": [(1, 8, 4)]})
    copies = [SimpleNamespace(src_block_id=3, dst_block_id=9)]
    output = SimpleNamespace(
        kv_connector_block_state=state,
        preempted_req_ids={"b"},
        kv_cache_block_copies=copies,
        new_block_ids_to_zero=[5],
    )
    assert compat.boundary_states(output) == {"a": [(1, 7, 4)]}
    assert compat.overwritten_blocks(output) == [9, 5]
    assert compat.boundary_states(SimpleNamespace()) == {}
    assert compat.overwritten_blocks(SimpleNamespace()) == []


def test_block_that_vllm_overwrites_is_not_stored_and_copies_reading_it_finish_first() -> None:
    engine = Engine(ROOM, blocks=16, kinds=HYBRID)
    stores = engine.half._tiers.stores
    stores.add([PageKey(b"a" * 36)], [9], [None])
    stores.add([PageKey(b"b" * 36)], [8], [None])
    orders = engine.half.orders([], [9])
    assert 9 not in stores._collected
    assert (orders.fence, stores.busy) == ((), {8})
    assert engine.half.orders([], [8]).fence == (8,)
    for worker in engine.workers:
        worker._worker.begin(Orders(after=orders.after))
        worker._worker.end()
    engine.close()
