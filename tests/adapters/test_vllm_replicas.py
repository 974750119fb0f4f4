"""Tests of ranks with the same KV (MLA): they store each page once, in host memory that all of them map."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.adapters import vllm_stub as stub
from tests.adapters.rank_process import require_shared
from tests.adapters.test_vllm_disk_prefetch import only_on_disk
from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_pool import Kind
from tests.nvme.rig import change
from tests.support.stalls import UP
from tierstore.adapters.vllm.config import replicas_of
from tierstore.adapters.vllm.kv_groups import groups_of
from tierstore.nvme.inspection import inspect
from tierstore.ranks import owner
from tierstore.types import Tier

ROOT = Path(__file__).resolve().parents[2]
PAGE = 64
MLA = (Kind(mla=True),)


def engine(path: Path, *, ranks: int = 2, stages: int = 1, apart: bool = False) -> Engine:
    return Engine(
        {
            "host": {"capacity": ranks * 8 * PAGE * (1 + stages) // 2, "pin": "never"},
            "nvme": {"path": path, "capacity": ranks << 20, "flush": "10ms"},
        },
        ranks=ranks,
        stages=stages,
        kinds=MLA,
        apart=apart,
    )


def stored(path: Path) -> Counter[int]:
    """Return the number of records of each rank."""
    found: Counter[int] = Counter()
    for each in inspect(path).shards:
        found[int(each.name.rpartition("-")[2])] += each.records or 0
    return +found


@pytest.mark.parametrize(
    ("ranks", "stages", "apart", "copies"),
    [(2, 1, False, 1), (3, 1, False, 1), (4, 2, False, 2), (2, 1, True, 2)],
    ids=["two ranks", "three ranks", "two stages of two ranks", "ranks on two machines"],
)
def test_each_page_is_stored_once_per_stage_and_found_after_a_restart(
    ranks: int, stages: int, apart: bool, copies: int, tmp_path: Path
) -> None:
    first = engine(tmp_path, ranks=ranks, stages=stages, apart=apart)
    hellos = [worker._worker.hello for worker in first.workers]
    replicas = 1 if apart else ranks // stages
    assert {hello.replicas for hello in hellos} == {replicas}
    assert hellos[-1].host_slots == 8 * replicas
    first.add(DOCUMENT, 2)
    first.run()
    first.forget()
    name = first.add(DOCUMENT, 2)
    first.run()
    assert first.taken == 8
    assert first.answers[name] == first.answers["r1"]
    first.check()
    first.close()

    found = stored(tmp_path)
    pages = 5  # ten tokens
    assert sum(found.values()) == pages * copies
    assert apart or len(found) > stages, "one rank stores everything"

    again = engine(tmp_path, ranks=ranks, stages=stages, apart=apart)
    name = again.add(DOCUMENT, 2)
    again.run()
    assert again.taken == 8
    assert again.answers[name] == first.answers["r1"]
    again.close()


def test_pages_stored_on_every_rank_are_not_found_by_ranks_that_share_memory(tmp_path: Path) -> None:
    for apart in (True, False, True):
        found = engine(tmp_path, apart=apart)
        found.add(DOCUMENT, 2)
        found.run()
        taken = found.taken
        found.close()
    assert taken == 8, "the pages of the first engine are still there for one like it"
    assert sum(stored(tmp_path).values()) == 5 + 2 * 5


def test_request_waits_for_the_rank_with_the_slow_disk(tmp_path: Path) -> None:
    found = engine(tmp_path)
    only_on_disk(found, DOCUMENT)
    slow = owner(next(iter(found.half._tiers.store._directory.residency.tables[Tier.NVME].copies)), 2)
    found.records[slow].hold(UP)
    found.pace = 0.0
    name = found.add(DOCUMENT, 2)
    for _ in range(50):
        found.step()
    assert name in found.requests
    assert found.records[slow].waiting(UP)
    assert not found.records[1 - slow].waiting(UP)
    found.pace = 1.0
    found.run()
    assert found.taken == 8
    assert found.answers[name] == found.answers["r1"]
    found.close()


def test_page_damaged_on_its_owners_disk_is_computed(tmp_path: Path) -> None:
    first = engine(tmp_path)
    first.add(DOCUMENT, 2)
    first.run()
    tables = first.half._tiers.store._directory.residency.tables
    key, copy = next(iter(tables[Tier.HOST].copies.items()))
    assert key in tables[Tier.NVME].copies
    pages = [worker._worker._arena.view(copy.slot).tobytes() for worker in first.workers]
    assert pages[0] == pages[1]
    first.close()
    (path,) = tmp_path.rglob(f"*-{owner(key, 2)}/data.mdb")
    place = path.read_bytes().index(pages[0])
    change(path, place, bytes([pages[0][0] ^ 0x04]))

    again = engine(tmp_path)
    name = again.add(DOCUMENT, 2)
    again.run()
    assert again.recomputed == 1
    assert again.answers[name] == first.answers["r1"]
    again.check()
    again.close()
    assert sum(stored(tmp_path).values()) == 5, "the damaged record was not replaced"


def test_kv_is_the_same_on_all_ranks_only_if_all_layers_have_mla() -> None:
    def replicas(*specs: Any, **parallel: int) -> int:
        found = SimpleNamespace(tensor_parallel_size=8, **parallel)
        return replicas_of(found, groups_of(stub.kv_cache_config(3, *specs)))

    mla, window = stub.MLAAttentionSpec(2), stub.SlidingWindowMLASpec(2, 4)
    assert replicas(mla) == replicas(mla, window) == 8
    assert replicas(stub.FullAttentionSpec(2)) == 1
    assert replicas(mla, stub.MambaSpec(2)) == 1, "states are split by heads"
    assert replicas(mla, stub.SlidingWindowSpec(2, 4)) == 1
    assert replicas(mla, stub.CircularBufferSpec(2)) == 1, (
        "a block of a ring may have different bytes on each rank"
    )
    assert replicas(mla, decode_context_parallel_size=2) == 1, "ranks have different tokens"
    assert replicas(mla, prefill_context_parallel_size=2) == 1


_RANK = """
import json, logging, resource, sys
from types import SimpleNamespace
import torch
from tierstore.adapters.vllm.replicas import VllmPeers, shared_memory
from tierstore.host.shared_memory import SharedMemory

rank, folder, apart = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "apart"
fails = sys.argv[3] == "fails"
logging.basicConfig(stream=sys.stderr)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
groups = {ranks: torch.distributed.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}

def group(ranks):
    return SimpleNamespace(cpu_group=groups[ranks], world_size=2, rank_in_group=ranks.index(rank))

stage, column = rank // 2, rank % 2
peers = VllmPeers(group((2 * stage, 2 * stage + 1)), group((column, column + 2)))
if apart and rank == 3:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # it cannot open any file


def fail(*_):
    raise MemoryError(f"no memory on rank {rank}")


if fails and rank == 3:
    SharedMemory.open = fail
try:
    found = shared_memory(peers, fail if fails and rank == 0 else lambda: 3 << 20)
except MemoryError as error:
    print(error, file=sys.stderr)
    found = None
if apart and rank == 3:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
if found is not None:
    found.bytes[column] = rank + 1
torch.distributed.barrier()
print(json.dumps(None if found is None else [len(found.bytes), *found.bytes[:2].tolist()]))
"""


@pytest.mark.parametrize("place", ["here", "apart", "fails"])
def test_stages_share_memory_or_no_rank_shares_any(place: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path), place],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    ended = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, ended[0][1]
    found = [json.loads(said) for said, _ in ended]
    warnings = ["every rank stores its own copy of each page" in log for _, log in ended]
    if place == "here":
        assert found == [[3 << 20, 1, 2]] * 2 + [[3 << 20, 3, 4]] * 2
        assert not any(warnings)
    elif place == "fails":  # the first rank of the first stage, and the second rank of the other stage
        assert found == [None] * 4
        assert warnings == [False, False, True, False]
        for rank in (0, 3):
            assert f"no memory on rank {rank}" in ended[rank][1]
    else:
        assert found == [None] * 4
        assert warnings == [
            True,
            False,
            True,
            True,
        ]  # the first rank of each stage, and the one that knows why
        assert "Too many open files" in ended[3][1]


@pytest.mark.parametrize("codec", ["none", pytest.param("int8", marks=pytest.mark.deep)])
def test_ranks_in_two_processes_load_what_either_has_stored(codec: str) -> None:
    require_shared(["cpu", "cpu"], 6, {"capacity": "40MiB", "codec": codec})
