"""What the connector is told at the start, and what it refuses by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_engine import Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm import config as served
from tierstore.adapters.vllm.config import Deployment, Settings
from tierstore.errors import ConfigError


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "config must be .*, got None"),
        ({"confg": "x"}, "did you mean 'config'"),
        ({"config": {"nvme": {"path": "x", "capacity": "1GiB"}}}, "host is missing"),
        ({"config": {**HOST, "hbm": {"capacity": 1, "device": "cpu"}}}, "hbm.owner"),
        (
            {"config": {"host": {**HOST["host"], "codec": "int8"}}},
            "host.codec must be none under vLLM, .*, got 'int8'$",
        ),
        (
            {"config": {**HOST, "nvme": {"path": "/d", "capacity": 1 << 20, "codec": "int8"}}},
            "nvme.codec must be none or exp under vLLM, .*, got 'int8'$",
        ),
        ({"config": HOST, "load_timeout_s": 0}, "load_timeout_s must be .*, got 0"),
        ({"config": HOST, "put_off_s": -1}, "put_off_s must be seconds from 0 to 3600, got -1"),
        ({"config": HOST, "layout": 3}, "layout must be a string, got 3"),
        ({"config": HOST, "load": "never"}, "load must be one of always, if_faster, got 'never'"),
        ({"config": HOST, "load": []}, "load must be one of"),
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


def test_a_policy_that_ends_requests_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    connector = stub.load_connector()
    config = stub.vllm_config({"config": HOST})
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    connector.TierStoreConnector(
        config, stub.Role.SCHEDULER, stub.kv_cache_config(8, stub.FullAttentionSpec(2))
    )
    assert "kv_load_failure_policy is 'fail'" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda c, kv: setattr(c.parallel_config, "pipeline_parallel_size", 2),
            "pipeline_parallel_size must be 1 with TierStoreConnector, got 2",
        ),
        (
            lambda c, kv: setattr(kv.kv_cache_groups[0], "kv_cache_spec", stub.MambaSpec(2)),
            "layers group.0 keep their KV as MambaSpec; .* supports full attention, sliding windows and",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(change: Any, said: str) -> None:
    connector = stub.load_connector()
    config, kv = stub.vllm_config({"config": HOST}), stub.kv_cache_config(8, stub.FullAttentionSpec(2))
    change(config, kv)
    with pytest.raises(ConfigError, match=said):
        connector.TierStoreConnector(config, stub.Role.SCHEDULER, kv)


def test_hellos_of_workers_that_opened_different_pages_are_refused() -> None:
    engine = Engine(HOST, ranks=2)
    hellos = [worker.get_handshake_metadata().hello for worker in engine.workers]
    other = replace(hellos[1], host_slots=7)
    with pytest.raises(ConfigError, match="every rank must open the same number of slots"):
        engine.half.meet([hellos[0], other])
    with pytest.raises(ConfigError, match="only 1 of 2 workers have started"):
        engine.scheduler.set_xfer_handshake_metadata({0: engine.workers[0].get_handshake_metadata()})
    engine.close()


@pytest.mark.parametrize(
    ("utils", "seed", "last"),
    [
        ({}, None, False),  # vLLM 0.26
        ({}, "0", True),
        ({"resolve_none_hash_seed": None}, None, False),
        ({"resolve_none_hash_seed": len}, None, True),  # vLLM 0.32
    ],
)
def test_hashes_that_the_next_process_would_not_have_are_told_of(
    utils: dict[str, object],
    seed: str | None,
    last: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # F071
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found = ModuleType("vllm.v1.core.kv_cache_utils")
    vars(found).update(utils)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    setattr(sys.modules["vllm.v1.core"], "kv_cache_utils", found)  # noqa: B010
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert compat.hashes_last() is last
    served.tell_of_hashes(compat.hashes_last())
    assert ("PYTHONHASHSEED" in caplog.text) is not last


@pytest.mark.parametrize("name", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_an_engine_that_may_sleep_may_lose_the_memory_of_its_cache(name: str) -> None:
    config, kv = stub.vllm_config({"config": HOST}), stub.kv_cache_config(8, stub.FullAttentionSpec(2))
    assert not Deployment.of(config, config.kv_transfer_config, kv).memory_may_go
    setattr(config.model_config, name, True)
    assert Deployment.of(config, config.kv_transfer_config, kv).memory_may_go
