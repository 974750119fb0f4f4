"""Test the worker side of the connector: when it waits for copies, and when it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_engine import DOCUMENT, IN, OUT, Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.compute_rate import ComputeRate
from tierstore.adapters.vllm import worker as working
from tierstore.adapters.vllm.config import Settings
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.adapters.vllm.kv_layout import kv_layout
from tierstore.adapters.vllm.messages import Orders, Report
from tierstore.adapters.vllm.requests import Step
from tierstore.adapters.vllm.scheduler import measured
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.nvme.disk_probe import Rates
from tierstore.types import Tier


def _loading() -> Engine:
    """Return an engine that is loading a document. The copy is held back."""
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.pace = 0.0
    engine.copies[0].hold(IN)
    engine.add(DOCUMENT, 2)
    engine.step()
    return engine


def _half(engine: Engine) -> WorkerHalf:
    half: WorkerHalf = engine.workers[0]._worker
    return half


@pytest.mark.parametrize("idle", [True, False])
def test_report_waits_for_completions_only_in_idle_steps(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _loading()
    half, waits = _half(engine), 0

    def wait(*_: Any) -> None:
        nonlocal waits
        waits += 1
        engine.copies[0].let_go(IN)
        engine.copies[0].settle()

    monkeypatch.setattr(half._wakeup, "wait", wait)
    half.idle_s = 60.0
    half.begin(Orders(idle=idle))
    report = half.report()
    assert (waits, isinstance(report, Report)) == ((1, True) if idle else (0, False))
    monkeypatch.undo()
    engine.close()


def test_report_does_not_wait_when_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOST)
    half = _half(engine)
    monkeypatch.setattr(half._wakeup, "wait", lambda *_: pytest.fail("it waits"))
    half.idle_s = 60.0
    half.begin(Orders(idle=True))
    assert half.report() is None
    monkeypatch.undo()
    engine.close()


@pytest.mark.parametrize("lane", [OUT, IN])
def test_step_is_idle_only_if_it_computes_nothing_and_transfers_are_in_flight(
    lane: tuple[Tier, Tier],
) -> None:
    engine = _loading() if lane == IN else _storing()
    half = engine.half
    assert half.orders([]).idle
    assert not half.orders([Step("other", 0, 16, [], [], first=False)]).idle
    engine.copies[0].open()
    engine.pace = 1.0
    engine.run()
    assert not half.orders([]).idle
    engine.close()


@pytest.mark.parametrize("lane", [OUT, IN])
def test_nothing_touches_the_engines_memory_while_it_sleeps(lane: tuple[Tier, Tier]) -> None:
    engine = _loading() if lane == IN else _storing()
    assert engine.copies[0].waiting(lane)
    engine.sleep()
    engine.copies[0].open()
    engine.pace = 1.0
    name = engine.add(DOCUMENT, 2)
    taken = engine.taken
    engine.run()
    assert engine.taken == taken, "nothing that was stored before is offered"
    assert len(engine.answers[name]) == len(DOCUMENT) + 2
    engine.close()


def test_a_copy_that_does_not_end_keeps_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _storing()
    half = _half(engine)
    half.rest_s = 0.0
    monkeypatch.setattr(engine.scheduler, "_workers_here", lambda: [half])
    assert engine.scheduler.reset_cache() is False
    with pytest.raises(TimeoutError, match="are still in flight; call unregister_kv_caches again"):
        engine.workers[0].unregister_kv_caches()
    engine.copies[0].open()
    half.rest_s = 60.0
    assert engine.scheduler.reset_cache() is True
    engine.workers[0].unregister_kv_caches()
    engine.close()


@pytest.mark.parametrize("may_sleep", [True, False])
def test_cache_reset_waits_for_remote_workers_if_their_memory_may_go_away(may_sleep: bool) -> None:
    engine = _storing()
    engine.scheduler._deployment = replace(engine.scheduler._deployment, memory_may_go=may_sleep)
    assert engine.scheduler.reset_cache() is not may_sleep
    engine.copies[0].open()
    engine.pace = 1.0
    engine.run()
    assert engine.scheduler.reset_cache() is True
    engine.close()


def _storing() -> Engine:
    """Return an engine that is storing a document. The copy is held back."""
    engine = Engine(HOST)
    engine.pace = 0.0
    engine.copies[0].hold(OUT)
    engine.add(DOCUMENT, 2)
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize("engines", [1, 2])
def test_data_parallel_engines_do_not_wait_for_copies(engines: int) -> None:
    config = stub.vllm_config({"config": HOST})
    config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_index = engines, 0
    kv = stub.kv_cache_config(4, stub.FullAttentionSpec(2))
    worker = stub.load_connector().TierStoreConnector(config, stub.Role.WORKER, kv)
    worker._rank = worker._stage = lambda: 0
    worker.register_kv_caches({"layer": torch.zeros(4, 1, 2, 8)})
    assert (worker._worker.idle_s > 0) is (engines == 1)
    worker.shutdown()


def _hello_of(tiers: dict[str, object]) -> Any:
    found = kv_layout([torch.zeros(2, 4, 1, 8)], num_blocks=2, block_size=4, identity="m", shard=0)
    config = {"host": {"capacity": 1 << 20, "pin": "never"}, **tiers}
    half = WorkerHalf.open(Settings.of({"config": config}).of_rank(1, None, "cpu"), found, 0)
    half.close()
    return half.hello


def test_worker_reports_its_disk_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(directory: Path, page_nbytes: int) -> Rates:
        asked.append(page_nbytes)
        assert directory == tmp_path
        if len(asked) > 1:
            raise OSError("No space left on device")
        return Rates(1.0, {1: 5e9, 2: 8e9, 4: 8.1e9})

    monkeypatch.setattr(working, "disk_probe", SimpleNamespace(ask=ask))
    disk: dict[str, object] = {"nvme": {"path": str(tmp_path), "capacity": 4 << 20}}
    assert _hello_of({}).read_rate is None
    assert asked == []
    assert _hello_of(disk).read_rate == 8e9
    assert _hello_of(disk).read_rate is None
    assert asked == [128, 128]


def test_disk_rate_of_encoded_pages_is_in_bytes_of_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ask(directory: Path, page_nbytes: int) -> Rates:
        asked.append(page_nbytes)
        return Rates(1.0, {1: 1e9})

    monkeypatch.setattr(working, "disk_probe", SimpleNamespace(ask=ask))
    heads = Heads(2, 64, "bfloat16")
    tensors = [torch.zeros(2, 4, 32, 128, dtype=torch.bfloat16)] * 1
    found = kv_layout(tensors, num_blocks=2, block_size=32, identity="m", shard=0, heads=heads)
    tiers = {"host": {"capacity": 1 << 20, "codec": "int8"}, "nvme": {"path": tmp_path, "capacity": 4 << 20}}
    half = WorkerHalf.open(Settings.of({"config": tiers}).of_rank(1, None, "cpu"), found, 0)
    half.close()
    assert found.spec.page_nbytes == 32768
    assert asked == [20480]  # the payload has 16,896 bytes, and the disk reads whole blocks
    assert half.hello.read_rate == 1e9 * 32768 / 20480
    assert half.hello.host_slots == (1 << 20) // 16896 == 62  # 32 without a codec


def test_slowest_disk_of_several_workers_counts(tmp_path: Path) -> None:
    disk = {"path": tmp_path, "capacity": 1 << 20}
    for load, seconds in (("if_faster", 3.0), ("always", None)):
        engine = Engine({**HOST, "nvme": disk}, load=load)
        hello = _half(engine).hello
        hellos = [replace(hello, rank=rank, read_rate=rate) for rank, rate in enumerate((256.0, 64.0, None))]
        tiers = engine.half._tiers
        costs = measured(engine.half._terms, hellos, tiers.store, ComputeRate(), tiers.loads, float)
        assert (None if costs is None else costs.queues().load_s(3, 3)) == seconds
        engine.close()
