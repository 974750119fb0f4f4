"""The connector without vLLM: stands in for the few classes that it derives from, as they are in vLLM 0.32."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
HOST: dict[str, Any] = {"host": {"capacity": 6 * 64, "pin": "never"}}
"""Settings of the store: six pages of 64 bytes in host memory."""


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """``KVConnectorBase_V1``, as far as it is used."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self.role = role


class Plain:
    """Any of the classes of metadata."""


class SupportsHMA:
    """A connector that takes several KV groups."""


@dataclass
class TransferResults:
    """``KVConnectorTransferResults``."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclass
class FullAttentionSpec:
    """A group in which every token sees all before it."""

    block_size: int


@dataclass
class SlidingWindowSpec:
    """A group in which a token sees so many, itself included."""

    block_size: int
    sliding_window: int


@dataclass
class ChunkedLocalAttentionSpec:
    """A group in which a token sees those of its chunk."""

    block_size: int
    attention_chunk_size: int


@dataclass
class MambaSpec:
    """A group of states."""

    block_size: int


@dataclass
class LoRARequest:
    """vLLM's, as far as it is used."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    load_inplace: bool = False
    tensorizer_config_dict: dict[str, Any] | None = None


Spec = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec


def load_connector() -> ModuleType:
    """``tierstore.adapters.vllm.connector`` over the stand-ins; vLLM is not left behind as imported."""
    name = "tierstore.adapters.vllm.connector"
    if name not in sys.modules:
        stubs = _stubs()
        sys.modules.update(stubs)
        try:
            importlib.import_module(name)
        finally:
            for stub in stubs:
                del sys.modules[stub]
    return sys.modules[name]


def _stubs() -> dict[str, ModuleType]:
    path = BASE.split(".")
    stubs = {".".join(path[: i + 1]): ModuleType(".".join(path[: i + 1])) for i in range(len(path))}
    base = stubs[BASE]
    for name, found in {
        "KVConnectorBase_V1": Base,
        "KVConnectorRole": Role,
        "KVConnectorTransferResults": TransferResults,
        "SupportsHMA": SupportsHMA,
        "KVConnectorMetadata": type("KVConnectorMetadata", (Plain,), {}),
        "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (Plain,), {}),
        "KVConnectorHandshakeMetadata": type("KVConnectorHandshakeMetadata", (Plain,), {}),
    }.items():
        setattr(base, name, found)
    stubs[BASE.rpartition(".")[0]].base = base  # type: ignore[attr-defined]
    return stubs


def vllm_config(extra: dict[str, Any], ranks: int = 1, *, events: bool = False) -> Any:
    """As much of ``VllmConfig`` as is read."""
    hf = SimpleNamespace(to_dict=lambda: {"hidden_size": 8}, _commit_hash="abc")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(
            model="org/name", revision=None, hf_config=hf, quantization=None, dtype="float32"
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, pipeline_parallel_size=1, world_size=ranks, data_parallel_size=1
        ),
    )


def kv_cache_config(num_blocks: int, *specs: Spec, hash_block_size: int | None = None) -> Any:
    """As much of ``KVCacheConfig`` as is read, with one group a spec."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"group.{number}"])
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups, hash_block_size=hash_block_size)
