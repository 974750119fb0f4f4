"""Test context parallelism: each rank stores its tokens of a block, and reuses pages only of the same distribution."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters import vllm_stub as stub
from tests.adapters.test_vllm_disk_prefetch import only_on_disk
from tests.adapters.vllm_engine import DOCUMENT, IN, Engine
from tests.adapters.vllm_pool import Kind, over_ranks
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm import config as served
from tierstore.adapters.vllm.config import Deployment
from tierstore.adapters.vllm.kv_groups import FULL, Group, Groups, State, groups_of
from tierstore.errors import ConfigError

PAGE = 64
LONG = DOCUMENT * 2
DRAFTED = (Kind(size=4, ranks=2), Kind())
"""A group whose tokens are distributed over two ranks, and a draft model's group, whose tokens are all on each rank."""


def engine(path: Path, kinds: tuple[Kind, ...], *, ranks: int = 2, **more: Any) -> Engine:
    return Engine(
        {
            "host": {"capacity": ranks * 24 * PAGE, "pin": "never"},
            "nvme": {"path": path, "capacity": ranks << 20, "flush": "10ms"},
        },
        blocks=16 * len(kinds),
        ranks=ranks,
        kinds=kinds,
        context_ranks=max(kind.ranks for kind in kinds),
        **more,
    )


@pytest.mark.parametrize(
    ("kinds", "ranks", "more"),
    [
        (over_ranks((Kind(),), 2), 2, {}),
        (over_ranks((Kind(),), 2), 4, {"interleave": 2}),
        (over_ranks((Kind(),), 4), 4, {"stages": 1}),
        (over_ranks((Kind(),), 2), 4, {"stages": 2}),
        (over_ranks((Kind(), Kind(state=True)), 2), 2, {}),
        (DRAFTED, 2, {"drafts": (1,)}),
        (over_ranks((Kind(),), 2), 2, {"clears": True}),
    ],
    ids=["two ranks", "two of four", "four", "two stages", "states", "a draft of its own", "pinned blocks"],
)
def test_pages_of_all_ranks_return_from_memory_and_disk_and_after_a_restart(
    kinds: tuple[Kind, ...], ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    first = engine(tmp_path, kinds, ranks=ranks, **more)
    first.add(LONG, 2)
    first.run()
    assert first.taken == 0
    first.forget()
    name = first.add(LONG, 2)
    first.run()
    assert first.taken == 16
    assert first.answers[name] == first.answers["r1"]
    first.check()
    first.close()

    again = engine(tmp_path, kinds, ranks=ranks, **more)
    name = again.add(LONG, 2)
    again.run()
    assert again.taken == 16
    assert again.answers[name] == first.answers["r1"]
    again.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed(rank: int, tmp_path: Path) -> None:
    found = engine(tmp_path, over_ranks((Kind(),), 2))
    only_on_disk(found, DOCUMENT)
    found.copies[rank].fail_next(IN, 1)
    name = found.add(DOCUMENT, 2)
    found.run()
    assert found.recomputed == 1
    assert found.answers[name] == found.answers["r1"]
    found.close()


@pytest.mark.parametrize("told", [True, False], ids=["as built", "with a planted bug"])
def test_pages_distributed_in_other_pieces_are_not_found(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not told:
        monkeypatch.setattr(served, "distribution", lambda vllm_config: "")
    kinds = over_ranks((Kind(),), 2)
    first = engine(tmp_path, kinds, interleave=1)
    first.add(LONG, 2)
    first.run()
    first.close()
    again = engine(tmp_path, kinds, interleave=2)
    name = again.add(LONG, 2)
    if told:
        again.run()
        assert again.taken == 0
        assert again.answers[name] == first.answers["r1"]
    else:
        with pytest.raises(AssertionError, match="reads another's token"):
            again.run()
    again.close()


def deployment(*, codec: str = "none", **parallel: int) -> Deployment:
    config = stub.vllm_config({"config": {"host": {**HOST["host"], "codec": codec}}}, 4)
    vars(config.parallel_config).update(parallel)
    return Deployment.of(
        config, config.kv_transfer_config, stub.kv_cache_config(4, stub.FullAttentionSpec(2))
    )


def test_every_size_of_context_parallelism_is_part_of_the_identity_of_pages() -> None:
    decode = {"decode_context_parallel_size": 2}
    divisions: list[dict[str, Any]] = [
        {},
        {"prefill_context_parallel_size": 2},
        decode,
        {"decode_context_parallel_size": 4},
        {**decode, "prefill_context_parallel_size": 2},
        {**decode, "cp_kv_cache_interleave_size": 2},
        {**decode, "dcp_kv_cache_interleave_size": 2},
    ]
    found = [deployment(**each) for each in divisions]
    layer = [torch.zeros(4, 1, 2, 8)]
    specs = [each.of_rank(layer, rank)[1].spec for each in found for rank in range(4)]
    assert len({(spec.fingerprint, spec.shard) for spec in specs}) == 4 * len(divisions)
    keys = {name for each in found for name in each.groups.namespaces(each.identity)}
    assert len(keys) == len(divisions) - 2  # workers alone know the size of the pieces
    assert deployment(cp_kv_cache_interleave_size=2).distribution == "", "it has no effect on one rank"


def test_codec_encodes_the_tokens_that_a_rank_has() -> None:
    coded = deployment(codec="int8", decode_context_parallel_size=2)
    assert coded.groups.all[0].block_size == 4
    _, layout = coded.of_rank([torch.zeros(4, 3, 2, 8)], 1)
    spec = layout.spec
    assert (spec.kind, spec.page_size, spec.num_kv_heads, spec.head_dim) == ("mha", 2, 3, 4)


@pytest.mark.parametrize("hash_size", [None, 4])
def test_blocks_cover_the_tokens_of_all_ranks_only_if_vllm_distributes_the_group(
    hash_size: int | None,
) -> None:
    replicated = stub.FullAttentionSpec(4, dcp_sharded=False)
    specs = (stub.FullAttentionSpec(4), stub.MambaSpec(4), replicated)
    groups = groups_of(stub.kv_cache_config(9, *specs, hash_block_size=hash_size), 2)
    kinds = (FULL, State((((4,), "float32"),)), FULL)
    sizes = ((8, 2, 2), (4, 1, 1), (4, 1, 1))
    assert groups.all == tuple(
        Group(number, size, stride, kind, (f"group.{number}",), ranks=ranks)
        for number, ((size, stride, ranks), kind) in enumerate(zip(sizes, kinds, strict=True))
    )
    assert [group.tokens_per_rank for group in groups.all] == [4, 4, 4]
    assert groups.unit == 8
    assert groups.tail_unit == 0


def test_a_vllm_whose_specs_do_not_say_distributes_all_groups() -> None:
    config = stub.kv_cache_config(9, stub.FullAttentionSpec(4))
    config.kv_cache_groups[0].kv_cache_spec = old = stub.FullAttentionSpec(4)
    del old.dcp_sharded
    old.__class__ = type("FullAttentionSpec", (), {})
    assert groups_of(config, 2).all[0].block_size == 8


@pytest.mark.parametrize("spec", [stub.SlidingWindowSpec(4, 9), stub.ChunkedLocalAttentionSpec(4, 8)])
def test_distributed_windows_and_chunks_are_refused_by_name(spec: Any) -> None:
    def found() -> Groups:
        return groups_of(stub.kv_cache_config(9, stub.FullAttentionSpec(4), spec), 2)

    with pytest.raises(
        ConfigError,
        match=rf"decode_context_parallel_size must be 1 for layers group\.1 with a {type(spec).__name__}, got 2",
    ):
        found()
    spec.dcp_sharded = False
    assert [group.block_size for group in found().all] == [8, 4]


def members(tp: int, pcp: int, dcp: int, pp: int = 1) -> list[SimpleNamespace]:
    """Return the process groups of each worker as vLLM builds them, in the order of vLLM's global ranks."""
    ranks = torch.arange(pp * pcp * tp).reshape(pp, pcp, tp)
    split = {
        "tp": ranks.reshape(-1, tp),
        "pcp": ranks.transpose(1, 2).reshape(-1, pcp),
        "dcp": ranks.transpose(1, 2).reshape(-1, dcp),
        "pp": ranks.permute(1, 2, 0).reshape(-1, pp),
    }
    found = [SimpleNamespace() for _ in range(ranks.numel())]
    for name, groups in split.items():
        for group in groups.tolist():
            for place, rank in enumerate(group):
                one = SimpleNamespace(world_size=len(group), rank_in_group=place)
                setattr(found[rank], f"get_{name}_group", lambda one=one: one)
    return found


def rank_of(worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the rank that the connector assigns to this worker."""
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    state = ModuleType("vllm.distributed.parallel_state")
    vars(state).update(vars(worker))
    monkeypatch.setitem(sys.modules, state.__name__, state)
    return compat.worker_rank(worker.get_pp_group().rank_in_group)


SIZES = [
    (tp, pcp, dcp, pp)
    for tp, pcp, pp in product((1, 2, 4), (1, 2, 3), (1, 2))
    for dcp in (1, 2, 3, 4, 6, 8, 12)
    if (tp % dcp == 0 if pcp == 1 else dcp in (1, pcp, tp * pcp))
]
"""Combinations of parallel sizes that vLLM allows."""


def test_workers_are_numbered_as_vllm_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in SIZES:
        found = [rank_of(worker, monkeypatch) for worker in members(*sizes)]
        assert found == list(range(len(found)))


def test_an_unknown_order_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = members(2, 1, 2)
    first.get_dcp_group, second.get_dcp_group = second.get_dcp_group, first.get_dcp_group
    with pytest.raises(
        ConfigError,
        match="tensor parallel rank 0 and prefill context parallel rank 0 must have decode context parallel rank 0, "
        r"got 1: .* set decode_context_parallel_size to 1",
    ):
        rank_of(first, monkeypatch)
