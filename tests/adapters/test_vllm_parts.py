"""The connector's parts by themselves: keys, settings, tensors of any layout, block tables, and a feed that waits."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierstore.adapters.vllm as adapter
from tests.adapters import vllm_planted as planted
from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_engine import OUT, Engine
from tests.adapters.vllm_engine import Request as SimRequest
from tests.support.events import ManualEvent
from tests.support.pages import chain
from tierstore.adapters.vllm import figures
from tierstore.adapters.vllm import storing as storing_module
from tierstore.adapters.vllm.feed import Feed
from tierstore.adapters.vllm.geometry import geometry
from tierstore.adapters.vllm.identity import identity, weights_digest
from tierstore.adapters.vllm.keys import KeyChain, namespace
from tierstore.adapters.vllm.messages import Catalogue, Report
from tierstore.adapters.vllm.settings import Settings
from tierstore.adapters.vllm.steps import Steps
from tierstore.adapters.vllm.storing import Storing
from tierstore.errors import ConfigError
from tierstore.gpu.pool import EnginePool
from tierstore.layout import PageLayout
from tierstore.mover import Mover
from tierstore.types import Ack, Erase, Match, PageKey, Tier, Transfer
from tierstore.wakeup import Wakeup

HOST: dict[str, Any] = {"host": {"capacity": 6 * 64, "pin": "never"}}
DOCUMENT = [0, 1, 2, 0, 1, 2, 0, 1, 2]


class Hashes:
    def __init__(self, number: int) -> None:
        self.block_hashes = [bytes([i]) * 32 for i in range(number)]


# -- keys and whose they are ---------------------------------------------------------------------------------------


def test_keys_follow_the_hashes_of_whole_blocks_as_they_come() -> None:
    request = Hashes(3)
    keys = KeyChain(request, namespace("model"))
    first = keys.first(9)
    assert len(first) == len(set(first)) == 3
    assert all(len(key) == 36 for key in first)
    request.block_hashes.append(b"more")
    assert keys.first(9)[:3] == first
    assert len(keys.first(9)) == 4
    assert keys.first(2) == first[:2]


def test_a_block_of_several_hashes_has_the_key_of_its_last() -> None:
    fine, coarse = Hashes(7), Hashes(0)
    coarse.block_hashes = fine.block_hashes[1::2]
    assert KeyChain(fine, namespace("m"), 2).first(9) == KeyChain(coarse, namespace("m")).first(9)


def test_equal_hashes_of_two_models_have_no_key_in_common() -> None:
    # F010
    one, other = (KeyChain(Hashes(4), namespace(name)).first(4) for name in ("a", "b"))
    assert not set(one) & set(other)


def test_everything_that_changes_kv_changes_the_identity() -> None:
    # F009, F010
    def of(**changes: Any) -> str:
        config = stub.vllm_config({}, changes.pop("ranks", 1))
        for path, value in changes.items():
            section, name = path.split("__")
            setattr(getattr(config, section), name, value)
        return identity(config, "")

    found = [
        of(),
        of(model_config__dtype="float16"),
        of(model_config__quantization="fp8"),
        of(model_config__model="other/name"),
        of(model_config__hf_config=SimpleNamespace(to_dict=dict, _commit_hash="abc")),
        of(cache_config__cache_dtype="fp8"),
        of(load_config__load_format="dummy"),
        of(ranks=2),
        identity(stub.vllm_config({}), "epoch 2"),
    ]
    assert len(set(found)) == len(found)
    assert of() == of()


def test_a_folders_weights_are_told_apart_by_any_sampled_byte_and_not_by_its_name(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1 << 20) + name[0].encode() * (name == "c"))
    digests = [weights_digest(tmp_path / name) for name in ("a", "b", "c")]
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "b" / "more.safetensors").write_bytes(b"")
    assert weights_digest(tmp_path / "b") != digests[0]


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "config is None"),
        ({"confg": "x"}, "did you mean 'config'"),
        ({"config": {"nvme": {"path": "x", "capacity": "1GiB"}}}, "host is missing"),
        ({"config": {**HOST, "hbm": {"capacity": 1, "device": "cpu"}}}, "hbm.owner"),
        (
            {"config": {"host": {**HOST["host"], "codec": "int8"}}},
            "host.codec is 'int8'; allowed under vLLM, whose pages are stored byte by byte: none$",
        ),
        (
            {"config": {**HOST, "nvme": {"path": "/d", "capacity": 1 << 20, "codec": "int8"}}},
            "nvme.codec is 'int8'; allowed under vLLM, whose pages are stored byte by byte: none, exp$",
        ),
        ({"config": HOST, "load_timeout_s": 0}, "load_timeout_s is 0"),
        ({"config": HOST, "layout": 3}, "layout is 3"),
    ],
)
def test_settings_that_cannot_be_used_are_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of(extra)


def test_ranks_share_the_capacities_and_engines_have_directories_of_their_own(tmp_path: Path) -> None:
    nvme = {"path": tmp_path, "capacity": 1 << 30, "daily_writes": 1 << 20}
    settings = Settings.of({"config": {"host": {"capacity": 1 << 20}, "nvme": nvme}})
    rank = settings.of_rank(4, 1, "cuda:2")
    assert rank.host is not None
    assert rank.nvme is not None
    assert rank.hbm is not None
    assert (rank.host.capacity, rank.nvme.capacity, rank.nvme.daily_writes) == (1 << 18, 1 << 28, 1 << 18)
    assert rank.nvme.path == tmp_path / "engine-1"
    assert (rank.hbm.owner, rank.hbm.device) == ("engine", "cuda:2")
    alone = settings.of_rank(1, None, "cpu")
    assert alone.nvme is not None
    assert alone.nvme.path == tmp_path


# -- tensors -------------------------------------------------------------------------------------------------------

B, L, H, N, C = 5, 3, 2, 4, 6


def _layers(order: str) -> list[torch.Tensor]:
    """One logical ``[B, H, N, C]`` view a layer of memory in this order."""
    sizes = {"B": B, "L": L, "H": H, "N": N, "C": C}
    whole = torch.arange(B * L * H * N * C, dtype=torch.float32).view([sizes[x] for x in order])
    logical = whole.permute([order.index(x) for x in "LBHNC"])
    return list(logical)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_of_any_layout_come_back_bit_by_bit(order: str) -> None:
    # F074
    layers = _layers(order)
    found = geometry(layers, num_blocks=B, block_size=N, identity="m", shard=0)
    pool = EnginePool(PageLayout.of(found.spec), (found.pages,))
    assert pool.num_slots == B
    assert found.spec.page_nbytes == L * H * N * C * 4
    page = torch.empty(found.spec.page_nbytes, dtype=torch.uint8).numpy()
    before = [layer.clone() for layer in layers]
    pool.read(2, page)
    for layer in layers:
        layer[4] = -1
    pool.write(4, page)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[4], old[2])
        assert torch.equal(layer[:4], old[:4])


def test_layouts_are_told_apart_and_equal_ones_are_not() -> None:
    # F009
    models = {
        order: geometry(_layers(order), num_blocks=B, block_size=N, identity="m", shard=0).spec.fingerprint
        for order in ("LBHNC", "LBNHC", "BLHNC")
    }
    assert models["LBHNC"] == models["BLHNC"]  # the bytes of a block are in the same order
    assert models["LBHNC"] != models["LBNHC"]


def test_layers_that_share_a_tensor_are_stored_once() -> None:
    layers = _layers("LBHNC")
    found = geometry([*layers, layers[0]], num_blocks=B, block_size=N, identity="m", shard=0)
    assert found.spec.num_layers == L


def test_one_tensor_of_all_layers_is_one_piece() -> None:
    whole = torch.zeros(B, L, 2, N, H, 3)
    found = geometry([whole], num_blocks=B, block_size=N, identity="m", shard=0)
    assert found.spec.shape == (1, 1, 1, 1, L * 2 * N * H * 3)


def test_planes_before_blocks_and_smaller_kernel_blocks_are_understood() -> None:
    planes = geometry([torch.zeros(2, B, N, H, 3)], num_blocks=B, block_size=N, identity="m", shard=0)
    assert planes.spec.shape == (1, 1, 1, 2, N * H * 3)
    halves = geometry([torch.zeros(2 * B, H, N // 2, C)], num_blocks=B, block_size=N, identity="m", shard=0)
    assert halves.spec.shape == (1, 1, 1, 1, H * N * C)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(3, 7)],
        [torch.zeros(B, 4), torch.zeros(B, 6)],
        [torch.zeros(B, 4, dtype=torch.int32)],
        [torch.zeros(4, B, 3, 8)[:, :, :, ::2]],
    ],
)
def test_tensors_that_are_no_blocks_are_refused(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        geometry(tensors, num_blocks=B, block_size=N, identity="m", shard=0)


# -- messages and tables -------------------------------------------------------------------------------------------


def test_a_catalogue_is_unpacked_as_it_was() -> None:
    keys = chain(3)
    records = [(keys[0], None, 10), (keys[1], keys[0], 1 << 40), (keys[2], keys[1], 0)]
    packed: Catalogue = pickle.loads(pickle.dumps(Catalogue.of(5, 6, iter(records))))
    disk = packed.unpacked()
    assert (disk.record_nbytes, disk.budget_nbytes) == (5, 6)
    assert list(disk.records()) == records


def test_reports_of_ranks_and_of_steps_come_together() -> None:
    one, two = Ack(1, True, 1, 1), Ack(2, True, 1, 1)
    both = Report({0: (one,)}).merged(Report({1: (two,)})).merged(Report({0: (two,)}))
    assert both.acks == {0: (one, two), 1: (two,)}


def test_block_tables_grow_and_start_anew_after_a_preemption() -> None:
    steps = Steps(4)
    new = SimpleNamespace(req_id="a", block_ids=([7, 8],), num_computed_tokens=4)

    def output(cached: list[tuple[str, list[int] | None, int]], resumed: set[str], **scheduled: int) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=[new] if not cached else [],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in cached],
                new_block_ids=[None if more is None else (more,) for _, more, _ in cached],
                num_computed_tokens=[computed for _, _, computed in cached],
                resumed_req_ids=resumed,
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=set(),
        )

    (first,) = steps.of(output([], set(), a=4))
    assert (first.blocks, first.fresh, first.first) == ([7, 8], [8], True)
    (second,) = steps.of(output([("a", [9], 8)], set(), a=1))
    assert (second.blocks, second.fresh, second.first) == ([7, 8, 9], [9], False)
    (third,) = steps.of(output([("a", None, 9)], set(), a=1))
    assert (list(third.blocks), third.fresh) == ([7, 8, 9], [])
    (again,) = steps.of(output([("a", [1, 2, 3], 4)], {"a"}, a=6))
    assert (again.blocks, again.fresh, again.first) == ([1, 2, 3], [2, 3], True)


# -- the feed ------------------------------------------------------------------------------------------------------


class FakeMover(Mover):
    """Ends what a test says."""

    def __init__(self, polled: bool = False) -> None:
        super().__init__({}, None, None)
        self.got: list[Transfer | Erase] = []
        self.acks: list[Ack] = []
        self.asks = polled

    def submit(self, command: Transfer | Erase) -> None:
        self.got.append(command)

    def poll(self) -> list[Ack]:
        acks, self.acks = self.acks, []
        return acks

    @property
    def polled(self) -> bool:
        return self.asks


def copy_out(number: int, slot: int) -> Transfer:
    return Transfer(number, (PageKey(bytes(36)),), Tier.HBM, (slot,), Tier.HOST, (0,), 0, (None,))


def test_what_waits_for_the_engine_starts_in_order_and_lets_the_rest_pass() -> None:
    mover, wakeup = FakeMover(), Wakeup()
    feed = Feed(mover, wakeup)
    first, second = ManualEvent(), ManualEvent()
    second.happen()
    feed.submit(copy_out(1, 5), first)
    feed.submit(copy_out(2, 6), second)
    feed.submit(Erase(Tier.NVME, ()))
    feed.submit(copy_out(3, 7))
    assert [c.id for c in mover.got if isinstance(c, Transfer)] == [3]
    assert feed.reads({5})
    assert feed.reads({6})
    feed.check()
    first.happen()
    feed.advance()
    assert [c.id for c in mover.got if isinstance(c, Transfer)] == [3, 1, 2]
    mover.acks = [Ack(1, True, 1, 1)]
    assert [ack.transfer_id for ack in feed.take()] == [1]
    assert not feed.reads({5})
    assert feed.reads({6})
    assert feed.close(1.0)


def test_a_device_that_tells_only_when_asked_is_asked_between_steps() -> None:
    mover, wakeup = FakeMover(polled=True), Wakeup()
    feed = Feed(mover, wakeup)
    seen = wakeup.count
    feed.submit(copy_out(1, 5))
    mover.acks = [Ack(1, True, 1, 1)]
    wakeup.wait(seen, None, 60.0)
    assert not feed.reads({5})
    mover.asks = False
    assert [ack.transfer_id for ack in feed.take()] == [1]
    assert feed.close(60.0)


# -- through the whole connector -----------------------------------------------------------------------------------


def test_the_package_names_only_the_connector_and_imports_no_vllm_for_its_parts() -> None:
    assert adapter.__all__ == ["TierStoreConnector"]
    with pytest.raises(AttributeError, match="Nothing"):
        adapter.Nothing  # noqa: B018


def test_a_document_is_loaded_after_the_engine_has_forgotten_it() -> None:
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.taken == 8
    assert engine.answers["r1"] == engine.answers["r2"]
    engine.close()


def test_a_request_whose_load_failed_is_not_offered_the_same_again() -> None:
    # F019
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.copies[0].fail_next((Tier.HOST, Tier.HBM), 1)
    engine.copies[0].fail_next((Tier.HOST, Tier.HBM), 0)
    name = engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.recomputed == 1
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def test_what_an_aborted_load_was_to_bring_is_not_stored_as_if_it_had_come() -> None:
    # F037
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.pace = 0.0
    for gate in engine.copies:
        gate.hold((Tier.HOST, Tier.HBM))
    name = engine.add(DOCUMENT, 2)
    engine.step()
    engine.step()
    assert engine.requests[name].status == "loading"
    store, keys = engine.half._store, engine.half._known[name].chain.first(4)
    store.evict(keys)
    engine.abort(name)
    engine.step()
    assert name in engine.requests  # its blocks are held while the copy may write them
    for gate in engine.copies:
        gate.open()
    engine.run()
    assert store.match(keys).num_pages == 0
    assert len(engine.free) == 8
    engine.close()


def test_pages_on_their_way_out_when_the_weights_change_are_never_offered() -> None:
    # F015
    engine = Engine(HOST)
    for gate in engine.copies:
        gate.hold(OUT)
    engine.pace = 0.0
    engine.add(DOCUMENT, 2)
    for _ in range(3):
        engine.step()
    engine.change_weights()
    for gate in engine.copies:
        gate.open()
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 2)
    engine.run()  # every cell that it reads is checked
    engine.check()
    engine.close()


def test_a_verdict_is_looked_up_once_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    asked: list[int] = []
    store = engine.half._store
    match = store.match

    def counted(keys: list[PageKey]) -> Match:
        asked.append(len(keys))
        found: Match = match(keys)
        return found

    monkeypatch.setattr(store, "match", counted)
    request = engine.requests[engine.add(DOCUMENT, 2)]
    for _ in range(20):
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    assert len(asked) == 1
    engine.run()
    engine.close()


# -- figures -------------------------------------------------------------------------------------------------------


def test_figures_are_what_was_added_and_add_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(figures, "monotonic", lambda: now[0])
    total: dict[str, dict[str, float]] = {"hits_pages": {"HOST": 3.0}, "pages": {"HOST,free": 5.0}}
    taker = figures.Figures(lambda: total)
    first = taker.take()
    assert first == total
    total = {"hits_pages": {"HOST": 4.0, "NVME": 2.0}, "pages": {"HOST,free": 1.0}, "lock": {"x": 1.0}}
    assert taker.take() is None  # too early
    now[0] = 1.5
    second = taker.take()
    assert second == {"hits_pages": {"HOST": 1.0, "NVME": 2.0}, "pages": {"HOST,free": 1.0}}
    assert first is not None
    both = figures.summed(first, second)
    assert both == {"hits_pages": {"HOST": 4.0, "NVME": 2.0}, "pages": {"HOST,free": 1.0}}
    now[0] = 3.0
    assert taker.take() is None  # nothing new


def test_a_line_of_the_log_says_what_moved_and_how_fast() -> None:
    words = figures.in_words(
        {
            "hits_pages": {"NVME": 7.0},
            "transfer_bytes": {"HBM,HOST": 2e9},
            "transfer_seconds": {"HBM,HOST": 0.5},
            "failed_pages": {"NVME,HOST,integrity": 2.0},
        }
    )
    assert words == {
        "Pages loaded from NVME": 7,
        "HBM->HOST (MB)": 2000.0,
        "HBM->HOST (GB/s)": 4.0,
        "Pages not moved": 2,
    }


def test_what_an_engine_moved_is_told_by_its_connector() -> None:
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    found = engine.half.figures()
    assert found["transfer_bytes"] == {"HBM,HOST": 4 * 64 + 64}
    assert found["pages"]["HOST,resident"] == 5
    engine.close()


# -- ahead of need -------------------------------------------------------------------------------------------------


def test_what_only_the_disk_holds_comes_up_while_its_request_waits_in_the_queue(tmp_path: Path) -> None:
    config = {"host": {"capacity": 12 * 64, "pin": "never"}, "nvme": {"path": tmp_path, "capacity": 1 << 20}}
    engine = Engine(config)
    engine.add(DOCUMENT, 2)
    engine.run()
    store = engine.half._store
    keys = list(engine.half._parts.directory.residency.tables[Tier.NVME].copies)
    assert len(keys) == 5
    store.evict(keys, Tier.HOST)
    engine.forget()
    long = engine.add([1, 2] * 7, 1)
    while engine.requests[long].status != "running":
        engine.step()
    name = engine.add(DOCUMENT, 2)
    waiting = engine.queue.pop()  # vLLM does not come to it
    for _ in range(20):
        engine.step()
        for gate in engine.records:
            gate.settle()
    assert store.match(engine.half._known[name].chain.first(4)).tiers == (Tier.HOST,) * 4
    engine.queue.append(waiting)
    engine.run()
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def test_nothing_comes_up_for_a_request_that_has_gone_or_that_the_engine_holds(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config)
    engine.add(DOCUMENT, 2)
    engine.run()
    half = engine.half
    store, tables = half._store, half._parts.directory.residency.tables
    store.evict(list(tables[Tier.NVME].copies), Tier.HOST)
    keys = KeyChain(SimpleNamespace(block_hashes=hashes_of(DOCUMENT)), half._namespace).first(4)
    ahead = half._ahead
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


def test_a_request_whose_pages_have_gone_keeps_no_other_from_being_brought_up(tmp_path: Path) -> None:
    config = {**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}}
    engine = Engine(config)
    documents = [DOCUMENT, [2, *DOCUMENT[1:]]]
    for document in documents:
        engine.add(document, 2)
    engine.run()
    half = engine.half
    store, tables = half._store, half._parts.directory.residency.tables
    store.evict(list(tables[Tier.NVME].copies), Tier.HOST)
    chains = [
        KeyChain(SimpleNamespace(block_hashes=hashes_of(document)), half._namespace) for document in documents
    ]
    first, second = (chain.first(4) for chain in chains)
    half._ahead.want("first", first, 0)
    half._ahead.want("second", second, 0)
    store.evict(first)
    half._ahead.advance()
    assert set(tables[Tier.HOST].copies) <= set(second)
    assert tables[Tier.HOST].copies
    engine.run()
    engine.close()


def hashes_of(tokens: list[int]) -> list[bytes]:
    return SimRequest("x", tokens, 0).block_hashes


# -- events --------------------------------------------------------------------------------------------------------


def test_events_tell_each_copy_that_came_and_went_and_of_a_move_down_the_new_place_first(
    tmp_path: Path,
) -> None:
    engine = Engine({**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20}}, events=True)
    engine.add(DOCUMENT, 2)
    engine.run()
    half = engine.half
    first = [(c.block.block_hash, c.tier, c.stored) for c in half.events.take()]
    want = hashes_of(engine.answers["r1"])[:5]
    assert [x for x in first if x[1] is Tier.HOST] == [(h, Tier.HOST, True) for h in want]
    assert {x for x in first if x[1] is Tier.NVME} == {(h, Tier.NVME, True) for h in want}
    half._store.demote(list(half._parts.directory.residency.tables[Tier.HOST].copies), Tier.NVME)
    engine.step()
    assert {(c.tier, c.stored) for c in half.events.take()} == {(Tier.HOST, False)}
    engine.scheduler.reset_cache()
    assert {(c.tier, c.stored) for c in half.events.take()} == {(Tier.NVME, False)}
    assert half.events.take() == []
    engine.close()


def test_an_event_names_the_block_before_and_its_tokens() -> None:
    engine = Engine(HOST, events=True)
    engine.add(DOCUMENT, 1)
    engine.run()
    blocks = [change.block for change in engine.half.events.take()]
    hashes = hashes_of(DOCUMENT)
    assert [block.block_hash for block in blocks] == hashes
    assert [block.parent for block in blocks] == [None, *hashes[:-1]]
    assert [block.tokens for block in blocks] == [(0, 1), (2, 0), (1, 2), (0, 1)]
    engine.close()


def test_without_a_taker_no_event_is_kept() -> None:
    engine = Engine(HOST)
    assert engine.half.events is None
    assert list(engine.scheduler.take_events()) == []
    engine.close()


# -- blocks that are reused while they are copied out --------------------------------------------------------------


def reuse_blocks_under_slow_copies() -> Engine:
    engine = Engine({"host": {"capacity": 20 * 64, "pin": "never"}})
    for gate in engine.copies:
        gate.hold(OUT)
    engine.pace = 0.0
    engine.add(DOCUMENT, 1)
    while engine.requests:
        engine.step()
    engine.add([1, 2] * 7, 1)  # needs all blocks but one
    while engine.requests:
        engine.step()
    for gate in engine.copies:
        gate.open()
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 1)
    engine.run()
    return engine


def test_blocks_are_overwritten_only_when_what_they_held_is_saved() -> None:
    # F022, F041
    engine = reuse_blocks_under_slow_copies()
    assert engine.taken == 8
    engine.check()
    engine.close()


@pytest.mark.parametrize("plant", [planted.no_fence, planted.worker_does_not_wait])
def test_without_a_fence_that_would_be_noticed(plant: planted.Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="another's token"):
        reuse_blocks_under_slow_copies()


# -- what is said at the start -------------------------------------------------------------------------------------


def test_an_object_in_a_models_config_has_the_same_name_in_every_process() -> None:
    def of() -> str:
        config = stub.vllm_config({})
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"x": object(), "y": torch.float16})
        return identity(config, "")

    assert of() == of()
    assert "torch.float16" in of()


def test_a_policy_that_ends_requests_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    connector = stub.load_connector()
    config = stub.vllm_config({"config": HOST})
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    connector.TierStoreConnector(config, stub.Role.SCHEDULER, stub.kv_cache_config(8, 2))
    assert "kv_load_failure_policy is 'fail'" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda c, kv: setattr(c.parallel_config, "pipeline_parallel_size", 2),
            "pipeline_parallel_size is 2",
        ),
        (lambda c, kv: kv.kv_cache_groups.append(kv.kv_cache_groups[0]), "2 KV cache groups"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: Any, said: str) -> None:
    connector = stub.load_connector()
    config, kv = stub.vllm_config({"config": HOST}), stub.kv_cache_config(8, 2)
    change(config, kv)
    with pytest.raises(ConfigError, match=said):
        connector.TierStoreConnector(config, stub.Role.SCHEDULER, kv)


def test_hellos_of_workers_that_opened_different_pages_are_refused() -> None:
    engine = Engine(HOST, ranks=2)
    hellos = [worker.get_handshake_metadata().hello for worker in engine.workers]
    other = replace(hellos[1], host_slots=7)
    with pytest.raises(ConfigError, match="ranks have opened"):
        engine.half.meet([hellos[0], other])
    with pytest.raises(ConfigError, match="1 workers said hello"):
        engine.scheduler.set_xfer_handshake_metadata({0: engine.workers[0].get_handshake_metadata()})
    engine.close()


# -- what waits to be stored ---------------------------------------------------------------------------------------


class FakeStore:
    """Keeps what it was given; ``reading``: blocks that a copy reads."""

    def __init__(self) -> None:
        self.puts: list[tuple[list[PageKey], list[int], PageKey | None]] = []
        self.reading: set[int] = set()

    def put(self, keys: list[PageKey], blocks: list[int], parent: PageKey | None) -> None:
        self.puts.append((keys, blocks, parent))

    def withdraw(self, blocks: list[int]) -> list[int]:
        return [block for block in blocks if block in self.reading]


def test_a_block_that_was_given_away_is_not_stored_as_what_it_held() -> None:
    store: Any = FakeStore()
    storing = Storing(store)
    one, two, three = chain(3)
    storing.add([one, two, three], [5, 6, 7], None)
    assert storing.reused([6]) == ()
    storing.put(set())
    assert store.puts == [([one], [5], None), ([three], [7], two)]
    assert storing.busy == {5, 7}


def test_a_block_given_away_is_fenced_only_while_a_copy_reads_it() -> None:
    store: Any = FakeStore()
    storing = Storing(store)
    storing.add(chain(2), [5, 6], None)
    storing.put(set())
    store.reading = {6}
    assert storing.reused([5, 6, 9]) == (6,)
    assert storing.busy == {6}
    storing.add(chain(1, "new"), [6], None)
    storing.put(set())
    assert len(store.puts) == 1  # not before the old copy has ended
    storing.returned([6])
    storing.put(set())
    assert store.puts[1:] == [(chain(1, "new"), [6], None)]


def test_a_bounded_number_is_stored_in_a_step_and_nothing_out_of_blocks_being_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing_module, "MOST_A_STEP", 2)
    store: Any = FakeStore()
    storing = Storing(store)
    keys = chain(5)
    storing.add(keys, [1, 2, 3, 4, 5], None)
    storing.put({1})
    assert [blocks for _, blocks, _ in store.puts] == [[2, 3]]
    assert storing.waiting
    storing.put({1})
    storing.put(set())
    assert [blocks for _, blocks, _ in store.puts] == [[2, 3], [4, 5], [1]]
    storing.forget()
    assert not storing.waiting
