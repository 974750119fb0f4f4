"""Test the connector's settings: which it accepts, and which it rejects with an error that names them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_engine import Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm import config as served
from tierstore.adapters.vllm.config import Deployment, Settings
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.errors import ConfigError


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "config must be .*, got None"),
        ({"confg": "x"}, "did you mean 'config'"),
        ({"config": {"nvme": {"path": "x", "capacity": "1GiB"}}}, "host is missing"),
        ({"config": {**HOST, "hbm": {"capacity": 1, "device": "cpu"}}}, "hbm.owner"),
        (
            {"config": {"host": {**HOST["host"], "codec": "k8v4"}}},
            "host.codec must be none or int8 under vLLM, got 'k8v4': ",
        ),
        (
            {"config": {**HOST, "nvme": {"path": "/d", "capacity": 1 << 20, "codec": "int8"}}},
            "nvme.codec must be none or exp under vLLM without a host.codec, got 'int8': .* set host.codec to int8",
        ),
        (
            {
                "config": {
                    "host": {**HOST["host"], "codec": "int8"},
                    "nvme": {"path": "/d", "capacity": 1 << 20, "codec": "exp"},
                }
            },
            r"nvme.codec must be one of none, int8, int8\+zstd if host.codec is 'int8', got 'exp': ",
        ),
        ({"config": HOST, "load_timeout_s": 0}, "load_timeout_s must be .*, got 0"),
        ({"config": HOST, "put_off_s": -1}, "put_off_s must be a number of seconds from 0 to 3600, got -1"),
        ({"config": HOST, "layout": 3}, "layout must be a string, got 3"),
        (
            {"config": HOST, "model_id": ""},
            "model_id must not be blank, got ''; give the weights a name",
        ),
        ({"config": HOST, "model_id": " "}, "model_id must not be blank"),
        ({"config": HOST, "load": "never"}, "load must be one of always, if_faster, got 'never'"),
        ({"config": HOST, "load": []}, "load must be one of"),
    ],
)
def test_unusable_settings_are_refused_by_name(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of(extra)


def test_ranks_share_capacities_and_engines_have_separate_directories(tmp_path: Path) -> None:
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


def test_load_failure_policy_fail_is_warned_about_at_start(caplog: pytest.LogCaptureFixture) -> None:
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
            lambda c, kv: setattr(c.parallel_config, "decode_context_parallel_size", 2),
            "decode_context_parallel_size must be 1 for layers group.0 with a SlidingWindowSpec, got 2",
        ),
        (
            lambda c, kv: setattr(kv.kv_cache_groups[0], "kv_cache_spec", SimpleNamespace(block_size=2)),
            "does not support layers group.0 with a SimpleNamespace: it supports full attention, sliding windows",
        ),
    ],
)
def test_unsupported_deployments_are_refused_by_name(change: Any, said: str) -> None:
    connector = stub.load_connector()
    config, kv = stub.vllm_config({"config": HOST}), stub.kv_cache_config(8, stub.SlidingWindowSpec(2, 5))
    change(config, kv)
    with pytest.raises(ConfigError, match=said):
        connector.TierStoreConnector(config, stub.Role.SCHEDULER, kv)


@pytest.mark.parametrize(("clears", "version_2"), [(True, False), (False, True)])
def test_one_precision_or_the_runner_that_asks_first_is_served(clears: bool, version_2: bool) -> None:
    connector = stub.load_connector()
    config, kv = stub.vllm_config({"config": HOST}), stub.kv_cache_config(8, stub.FullAttentionSpec(2))
    kv.needs_kv_cache_zeroing, config.use_v2_model_runner = clears, version_2
    connector.TierStoreConnector(config, stub.Role.SCHEDULER, kv)


def test_hellos_of_workers_that_opened_different_pages_are_refused() -> None:
    engine = Engine(HOST, ranks=2)
    hellos = [worker._worker.hello for worker in engine.workers]
    other = replace(hellos[1], host_slots=7)
    with pytest.raises(
        ConfigError, match="every rank must open the same tiers with the same number of slots"
    ):
        engine.half.meet([hellos[0], other])
    with pytest.raises(ConfigError, match="only 1 of 2 workers have started"):
        engine.scheduler._meet(hellos[:1])
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
def test_hashes_that_change_between_processes_are_warned_about(
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


def test_a_vllm_that_clears_blocks_early_must_let_them_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOST, clears=True)
    assert isinstance(engine.half.pins, compat.BlockPins)
    engine.close()
    monkeypatch.setattr(engine.connector.TierStoreConnector, "bind_gpu_block_pool", lambda self, pool: None)
    engine = Engine(HOST, clears=True)
    engine.add([1, 2] * 4, 1)
    engine.run()
    engine.forget()
    engine.add([1, 2] * 4, 1)
    engine.run()
    assert engine.taken == 0  # nothing was stored
    engine.close()
    monkeypatch.setattr(engine.connector, "TransferResults", None)
    said = "several precisions, .* clears blocks that are still being stored; set VLLM_USE_V2_MODEL_RUNNER=0"
    with pytest.raises(ConfigError, match=said):
        Engine(HOST, clears=True)


# -- host.codec -------------------------------------------------------------------------------------------------


def deployment(host: dict[str, Any], *specs: Any, disk: dict[str, Any] | None = None) -> Deployment:
    tiers = {"host": {**HOST["host"], **host}, **({} if disk is None else {"nvme": disk})}
    config = stub.vllm_config({"config": tiers})
    return Deployment.of(config, config.kv_transfer_config, stub.kv_cache_config(4, *specs))


@pytest.mark.parametrize("disk", [None, "none", "int8", "int8+zstd"])
def test_loss_class_is_part_of_keys_and_pages(disk: str | None, tmp_path: Path) -> None:
    nvme = None if disk is None else {"path": tmp_path, "capacity": 1 << 20, "codec": disk}
    exact, coded = (deployment({"codec": c}, stub.FullAttentionSpec(2)) for c in ("none", "int8"))
    with_disk = deployment({"codec": "int8"}, stub.FullAttentionSpec(2), disk=nvme)
    assert exact.identity == deployment({}, stub.FullAttentionSpec(2)).identity  # the default
    assert "loss_class" not in exact.identity  # so pages of earlier versions are found
    assert with_disk.identity == coded.identity != exact.identity
    assert not set(exact.groups.namespaces(exact.identity)) & set(coded.groups.namespaces(coded.identity))
    layer = [torch.zeros(4, 1, 2, 8)]
    specs = [each.of_rank(layer, 0)[1].spec for each in (exact, coded)]
    assert [spec.kind for spec in specs] == ["state", "mha"]
    assert len({spec.fingerprint for spec in specs}) == 2
    assert specs[0].model != specs[1].model


class MLAAttentionSpec(stub.FullAttentionSpec):
    """MLA: one latent vector per token."""


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("specs", "heads"),
    [
        ([stub.FullAttentionSpec(2, 64, BF16)] * 2, Heads(2, 64, "bfloat16")),
        ([stub.FullAttentionSpec(2, 192, torch.float16, 128)], Heads(1, 320, "float16")),
        ([MLAAttentionSpec(2, 576, BF16, 0)], Heads(1, 576, "bfloat16")),
    ],
)
def test_heads_of_attention_are_encoded(specs: list[Any], heads: Heads) -> None:
    assert deployment({"codec": "int8"}, *specs).heads == heads
    assert deployment({}, *specs).heads is None


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([stub.FullAttentionSpec(2, 64, FP8)], "layers group.0 keep KV in float8_e4m3fn"),
        ([stub.FullAttentionSpec(2, 64, BF16, kv_quant_mode=1)], "keep KV in bfloat16, quantized by vLLM"),
        ([MLAAttentionSpec(2, 512, BF16, 0, state_content_bytes=656)], "layers group.0 keep packed KV"),
        ([MLAAttentionSpec(2, 512, BF16, 0, tokens_per_state=4)], "layers group.0 keep packed KV"),
        (
            [stub.FullAttentionSpec(2), stub.MambaSpec(2)],
            r"cannot encode recurrent states \(layers group\.1\)",
        ),
        (
            [stub.FullAttentionSpec(2), stub.CircularBufferSpec(2)],
            "cannot encode KV of type CircularBufferSpec",
        ),
        (
            [stub.FullAttentionSpec(2, 64, BF16), stub.FullAttentionSpec(2, 128, BF16)],
            "2 x 64 elements of bfloat16 .*layers group.0.* and 2 x 128 elements of bfloat16 .*layers group.1",
        ),
    ],
)
def test_layers_that_the_codec_cannot_encode_are_refused_by_name(specs: list[Any], said: str) -> None:
    assert deployment({}, *specs).heads is None
    with pytest.raises(
        ConfigError, match=f"host.codec must be none .*got 'int8': .*{said}.*; set host.codec to none"
    ):
        deployment({"codec": "int8"}, *specs)


def test_codec_needs_a_vllm_whose_layouts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = stub.load_connector()
    monkeypatch.setattr(connector, "TransferResults", None)
    kv = stub.kv_cache_config(8, stub.FullAttentionSpec(2))
    coded = {"config": {"host": {**HOST["host"], "codec": "int8"}}}
    connector.TierStoreConnector(stub.vllm_config({"config": HOST}), stub.Role.SCHEDULER, kv)
    with pytest.raises(
        ConfigError, match=r"host\.codec needs vLLM 0\.32 or newer, got .*; install a newer vLLM"
    ):
        connector.TierStoreConnector(stub.vllm_config(coded), stub.Role.SCHEDULER, kv)
