"""Test ``TierStoreTier`` without vLLM, with stand-ins for the few classes that it uses, as in vLLM 0.32."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.nvme.rig import change, find, on_disk
from tierstore.errors import ConfigError

ROWS = 16
NBYTES = 32 << 10
CAPACITY = 2 << 20


class Result(Enum):
    MISS = 1
    HIT = 2


class Medium(Enum):
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"


@dataclass
class Event:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class Policy:
    policy: str = "chunk_level"


class Manager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        self.tier_type = tier_type


@dataclass
class Job:
    job_id: int
    keys: list[bytes]
    chunk_ids: Any = field(default_factory=list)


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    base = ModuleType("vllm.v1.kv_offload.base")
    for name, found in {
        "Locality": Locality,
        "LookupResult": Result,
        "Medium": Medium,
        "OffloadingEvent": Event,
        "RequestOffloadingContext": Policy,
    }.items():
        setattr(base, name, found)
    tiering = ModuleType("vllm.v1.kv_offload.tiering.base")
    tiering.JobResult, tiering.SecondaryTierManager = JobResult, Manager  # type: ignore[attr-defined]
    packages = ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering")
    stubs = {m.__name__: m for m in (*map(ModuleType, packages), base, tiering)}
    sys.modules.update(stubs)
    try:
        yield importlib.import_module("tierstore.adapters.vllm_tier")
    finally:
        for name in (*stubs, "tierstore.adapters.vllm_tier"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a cache of the Hugging Face hub that has two models."""
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for model in ("org/name", "org/other"):
        publish(cache, model, "1" * 40)
    return cache


def publish(cache: Path, model: str, commit: str) -> None:
    """Add a commit to a model in the cache, and move the branch main to it."""
    home = cache / f"models--{model.replace('/', '--')}"
    (home / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    (home / "snapshots" / commit / "config.json").write_text("{}")
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)


LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def spec(
    dtype: str = "float32",
    model: str = "org/name",
    replica: int = 0,
    layers: tuple[str, ...] = LAYERS,
    **more: Any,
) -> Any:
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, world_size=1, data_parallel_index=replica
    )
    config = SimpleNamespace(
        model=SimpleNamespace(name=model, dtype=dtype),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=layers),),
        parallel=parallel,
        kv_cache_layout="LBHNC",
        **more,
    )
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=True))


@contextmanager
def opened(module: ModuleType, home: Path, described: Any = None, **more: Any) -> Iterator[Any]:
    """Yield a tier and the memory of a simulated vLLM above it. At the end, that memory is released."""
    memory = np.zeros((ROWS, NBYTES), dtype=np.int8)
    view = memoryview(memory)  # type: ignore[arg-type]
    more.setdefault("config", {"nvme": {"path": str(home), "capacity": CAPACITY}})
    tier = module.TierStoreTier(described or spec(), view, "TierStoreTier", **more)
    try:
        yield SimpleNamespace(tier=tier, memory=memory.view(np.uint8))
    finally:
        tier.shutdown()
        view.release()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


def content(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, NBYTES, dtype=np.uint8)


def store(at: Any, job: int, numbers: range) -> JobResult:
    for row, number in enumerate(numbers):
        at.memory[row] = content(number)
    at.tier.submit_store(Job(job, [key(n) for n in numbers], np.arange(len(numbers), dtype=np.int32)))
    return ended(at)


def load(at: Any, job: int, numbers: range) -> JobResult:
    at.memory[:] = 0
    at.tier.submit_load(Job(job, [key(n) for n in numbers], np.arange(len(numbers), dtype=np.int32)))
    return ended(at)


def ended(at: Any) -> JobResult:
    at.tier.drain_jobs()
    (result,) = at.tier.get_finished_jobs()
    assert isinstance(result, JobResult)
    return result


def found(at: Any, numbers: range) -> list[int]:
    return [n for n in numbers if at.tier.lookup(key(n), None) is Result.HIT]


def test_chunks_are_stored_found_loaded_and_published_as_events(module: ModuleType, tmp_path: Path) -> None:
    with opened(module, tmp_path, enable_kv_events=True, locality="LOCAL") as at:
        assert at.tier.on_new_request(None).policy == "chunk_level"
        result = store(at, 1, range(5))
        assert (result.job_id, result.success, result.transfer_bytes) == (1, True, 5 * NBYTES)
        assert found(at, range(7)) == list(range(5))
        assert load(at, 2, range(5)).success
        for number in range(5):
            np.testing.assert_array_equal(at.memory[number], content(number))
        assert at.tier.take_events() == [
            Event([key(n) for n in range(5)], Medium.STORAGE, False, Locality.LOCAL)
        ]
        at.tier.touch([key(0)], None)
        stored = set(range(5))
        removed: set[int] = set()
        for start in range(5, 205, 10):
            store(at, start, range(start, start + 10))
            for event in at.tier.take_events():
                numbers = {int.from_bytes(name[:32], "big") for name in event.keys}
                (removed if event.removed else stored).update(numbers)
        assert removed
        assert found(at, range(205)) == sorted(stored - removed)
        assert on_disk(tmp_path) <= CAPACITY


def test_a_damaged_chunk_is_reported_and_the_others_kept(module: ModuleType, tmp_path: Path) -> None:
    with opened(module, tmp_path) as at:
        store(at, 1, range(4))
        path, position = find_one(tmp_path, content(2).tobytes())
        change(path, position, bytes([content(2)[0] ^ 1]))
        result = load(at, 2, range(4))
        assert (result.success, result.successful_keys) == (False, tuple(key(n) for n in (0, 1, 3)))
        assert found(at, range(4)) == [0, 1, 3]
        assert at.tier.take_events() == []


def find_one(home: Path, needle: bytes) -> tuple[Path, int]:
    (shard,) = (path for path in home.iterdir() if path.is_dir())
    return find(home, needle, shard.name.removesuffix("-0"))


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16"])
def test_exp_stores_16_bit_pages_losslessly_in_less_space(
    module: ModuleType, tmp_path: Path, dtype: str
) -> None:
    config = {"nvme": {"path": str(tmp_path), "capacity": CAPACITY, "codec": "exp"}}
    numbers = torch.randn(NBYTES // 2, generator=torch.Generator().manual_seed(0))
    page = numbers.to(getattr(torch, dtype.removeprefix("torch."))).view(torch.uint8).numpy()
    with opened(module, tmp_path, spec(dtype), config=config) as at:
        at.memory[0] = page
        at.tier.submit_store(Job(1, [key(1)], [0]))
        assert ended(at).success
        at.tier.submit_load(Job(2, [key(1)], [1]))
        assert ended(at).success
        np.testing.assert_array_equal(at.memory[1], page)
        figures = at.tier._chunks.stats()
        assert figures["codec"] == "exp"
        assert figures["bytes_stored"] <= figures["record_nbytes"] - (4096 if dtype == "bfloat16" else 0)


@pytest.mark.parametrize(
    "other",
    [
        spec(dtype="bfloat16"),
        spec(model="org/other"),
        spec(canonical_layout=True),
        spec(replica=1),
    ],
    ids=["dtype", "model", "canonical", "replica"],
)
def test_chunks_of_another_identity_are_not_found(module: ModuleType, tmp_path: Path, other: Any) -> None:
    with opened(module, tmp_path) as at:
        store(at, 1, range(3))
    with opened(module, tmp_path, other) as at:
        assert found(at, range(3)) == []
    with opened(module, tmp_path) as at:
        assert found(at, range(3)) == [0, 1, 2]


def test_two_8_bit_dtypes_are_distinguished(module: ModuleType, tmp_path: Path) -> None:
    one, other = spec(dtype="fp8_e4m3"), spec(dtype="fp8_e5m2")  # as named in vLLM's --kv-cache-dtype
    with opened(module, tmp_path, one) as at:
        store(at, 1, range(3))
    with opened(module, tmp_path, other) as at:
        assert found(at, range(3)) == []
    with opened(module, tmp_path, one) as at:
        assert found(at, range(3)) == [0, 1, 2]


def test_other_weights_in_the_same_folder_find_nothing_unless_named(
    module: ModuleType, tmp_path: Path
) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"before")
    here = spec(model=str(weights.parent))
    with opened(module, tmp_path / "a", here) as at:
        store(at, 1, range(3))
    weights.write_bytes(b"after!")
    with opened(module, tmp_path / "a", here) as at:
        assert found(at, range(3)) == []
    with opened(module, tmp_path / "b", here, model="mine@1") as at:
        store(at, 1, range(3))
    weights.write_bytes(b"later.")
    with opened(module, tmp_path / "b", spec(model="elsewhere"), model="mine@1") as at:
        assert found(at, range(3)) == [0, 1, 2]


def test_another_configuration_of_the_same_weights_finds_nothing(module: ModuleType, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    here = spec(model=str(model))
    with opened(module, tmp_path / "home", here) as at:
        store(at, 1, range(3))
    (model / "config.json").write_text('{"rope_scaling": {"type": "yarn", "factor": 4.0}}')
    with opened(module, tmp_path / "home", here) as at:
        assert found(at, range(3)) == []
    (model / "config.json").write_text("{}")
    with opened(module, tmp_path / "home", here) as at:
        assert found(at, range(3)) == [0, 1, 2]


def test_another_commit_of_a_hub_model_finds_nothing(module: ModuleType, tmp_path: Path, hub: Path) -> None:
    with opened(module, tmp_path) as at:
        store(at, 1, range(3))
    publish(hub, "org/name", "2" * 40)
    with opened(module, tmp_path) as at:
        assert found(at, range(3)) == []
    publish(hub, "org/name", "1" * 40)
    with opened(module, tmp_path) as at:
        assert found(at, range(3)) == [0, 1, 2]


def test_a_model_that_cannot_be_identified_needs_a_name(module: ModuleType, tmp_path: Path) -> None:
    for name in ("org/absent", "s3://bucket/model", str(tmp_path / "absent")):
        absent = spec(model=name)
        with (
            pytest.raises(ConfigError, match=rf"the weights of '{name}' cannot be identified: .* give model"),
            opened(module, tmp_path / "home", absent),
        ):
            pass
        assert not (tmp_path / "home").exists()
    with opened(module, tmp_path / "home", absent, model="name@1") as at:
        store(at, 1, range(3))
        assert found(at, range(3)) == [0, 1, 2]


def test_states_of_another_dtype_are_not_found(module: ModuleType, tmp_path: Path) -> None:
    with opened(module, tmp_path, state_dtypes=["float16", "float32"]) as at:
        store(at, 1, range(3))
    for other in ([], ["bfloat16", "float32"], ["float32", "float16"]):
        with opened(module, tmp_path, state_dtypes=other) as at:
            assert found(at, range(3)) == []
    with opened(module, tmp_path, state_dtypes=["float16", "float32"]) as at:
        assert found(at, range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    "layer",
    [
        "backbone.layers.0.mixer",  # Nemotron-H
        "model.layers.0.linear_attn",  # Qwen3-Next
        "model.layers.0.short_conv",  # LFM2
        "model.layers.0.mamba.mixer",  # Falcon-H1
    ],
)
def test_layers_with_states_need_the_dtypes_of_states(layer: str, module: ModuleType, tmp_path: Path) -> None:
    hybrid = spec(layers=(*LAYERS, layer))
    with (
        pytest.raises(ConfigError, match=rf"state_dtypes is missing, but layers {layer} seem"),
        opened(module, tmp_path, hybrid),
    ):
        pass
    assert not list(tmp_path.iterdir())
    for listed in (["bfloat16", "auto", "float32"], []):
        with opened(module, tmp_path, hybrid, state_dtypes=listed) as at:
            store(at, 1, range(3))
            assert found(at, range(3)) == [0, 1, 2]


@pytest.mark.parametrize("size", [None, 0, "1", True])
def test_context_parallelism_needs_the_size_of_its_pieces(
    size: Any, module: ModuleType, tmp_path: Path
) -> None:
    divided = spec()
    divided.config.parallel.dcp_size = 2
    with (
        pytest.raises(ConfigError, match=f"with decode_context_parallel_size 2, .* got {size!r}: "),
        opened(module, tmp_path, divided, cp_kv_cache_interleave_size=size),
    ):
        pass
    assert not list(tmp_path.iterdir())
    with opened(module, tmp_path, divided, cp_kv_cache_interleave_size=1) as at:
        store(at, 1, range(3))
    with opened(module, tmp_path, divided, cp_kv_cache_interleave_size=2) as at:
        assert found(at, range(3)) == []
    with opened(module, tmp_path, divided, cp_kv_cache_interleave_size=1) as at:
        assert found(at, range(3)) == [0, 1, 2]


def test_layers_of_attention_need_no_dtypes_of_states(module: ModuleType, tmp_path: Path) -> None:
    names = (
        "layers.0.self_attn.attn",
        "model.decoder.5.attn.12",
        "layers.0.self_attn.indexer.k_cache",
        "3.attn",
    )
    with opened(module, tmp_path, spec(layers=names)) as at:
        store(at, 1, range(3))
        assert found(at, range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"admission": "second_hit"}, "nvme.admission"),
        ({"policy": "fifo"}, "nvme.policy"),
        ({"daily_writes": "1GiB"}, "nvme.daily_writes"),
        ({"codec": "int8"}, "nvme.codec"),
        ({"codec": "exp"}, "nvme.codec must be none if the KV dtype is float32"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(
    module: ModuleType, tmp_path: Path, section: dict[str, str], named: str
) -> None:
    config = {"nvme": {"path": str(tmp_path / "new"), "capacity": CAPACITY, **section}}
    with pytest.raises(ConfigError, match=named), opened(module, tmp_path, config=config):
        pass
    assert not (tmp_path / "new").exists()


def test_unknown_or_missing_settings_are_named(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown keys root_dir; known keys are config, model, adapters"):
        module.TierStoreTier(spec(), memoryview(b""), "TierStoreTier", config={}, root_dir="x")
    with pytest.raises(
        ConfigError, match=r"model must be a non-blank name for the weights, got ' '; leave it out"
    ):
        module.TierStoreTier(spec(), memoryview(b""), "TierStoreTier", config={}, model=" ")
    with pytest.raises(ConfigError, match=r"state_dtypes must be a list of names .* got 'float16'"):
        module.TierStoreTier(spec(), memoryview(b""), "TierStoreTier", config={}, state_dtypes="float16")
    with pytest.raises(ConfigError, match="nvme is missing"), opened(module, tmp_path, config={}):
        pass


def test_a_second_engine_is_refused(module: ModuleType, tmp_path: Path) -> None:
    with opened(module, tmp_path) as at:
        store(at, 1, range(3))
        with pytest.raises(ConfigError, match="in use"), opened(module, tmp_path):
            pass
        assert load(at, 2, range(3)).success
