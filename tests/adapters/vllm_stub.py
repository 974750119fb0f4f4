"""Stand-ins for the few vLLM classes that the connector derives from, as in vLLM 0.32, to test it without vLLM."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
HOST: dict[str, Any] = {"host": {"capacity": 6 * 64, "pin": "never"}}
"""Settings of a store with six pages of 64 bytes in host memory."""


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """Stands in for ``KVConnectorBase_V1``."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self.role = role


class Plain:
    """Stands in for vLLM's metadata classes."""


class SupportsHMA:
    """Marks a connector that supports several KV groups."""


class KVConnectorFactory:
    """Stands in for vLLM's registry of connectors."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a connector. Like vLLM, refuse a name that is registered already."""
        assert name not in cls._registry
        cls._registry[name] = module_path, class_name


@dataclass
class TransferResults:
    """Stands in for ``KVConnectorTransferResults``."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclass
class FullAttentionSpec:
    """A group in which every token sees all tokens before it."""

    block_size: int
    head_size: int = 4
    dtype: torch.dtype = torch.float32
    head_size_v: int | None = None
    kv_quant_mode: int = 0
    state_content_bytes: int | None = None
    tokens_per_state: int = 1
    dcp_sharded: bool = True

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            self.head_size_v = self.head_size


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    """A group of full attention whose KV is the same on all tensor-parallel ranks."""


@dataclass
class SlidingWindowSpec:
    """A group in which a token sees ``sliding_window`` tokens, itself included."""

    block_size: int
    sliding_window: int
    dcp_sharded: bool = True


@dataclass
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A group of windows whose KV is the same on all tensor-parallel ranks."""


@dataclass
class ChunkedLocalAttentionSpec:
    """A group in which a token sees the tokens of its chunk."""

    block_size: int
    attention_chunk_size: int
    dcp_sharded: bool = True


@dataclass
class MambaSpec:
    """A group of recurrent states."""

    block_size: int
    mamba_cache_mode: str = "align"
    shapes: tuple[tuple[int, ...], ...] = ((4,),)
    dtypes: tuple[str, ...] = ("torch.float32",)
    dcp_sharded: bool = False


@dataclass
class CircularBufferSpec:
    """A group with one block per request, which no later request can reuse."""

    block_size: int
    prefix_cacheable: bool = False
    dcp_sharded: bool = False


@dataclass
class LoRARequest:
    """Stands in for vLLM's ``LoRARequest``."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    load_inplace: bool = False
    tensorizer_config_dict: dict[str, Any] | None = None


Spec = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec | CircularBufferSpec


def load_connector() -> ModuleType:
    """Import ``tierstore.adapters.vllm.connector`` with the stand-ins, which are then removed from ``sys.modules``."""
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
    stubs[FACTORY] = ModuleType(FACTORY)
    stubs[FACTORY].KVConnectorFactory = KVConnectorFactory  # type: ignore[attr-defined]
    return stubs


def vllm_config(
    extra: dict[str, Any],
    ranks: int = 1,
    *,
    events: bool = False,
    role: str = "kv_both",
    caching: bool = True,
    stages: int = 1,
    context_ranks: int = 1,
    interleave: int = 1,
) -> Any:
    """Return the part of ``VllmConfig`` that the connector reads."""
    hf = SimpleNamespace(to_dict=lambda: {"hidden_size": 8}, _commit_hash="abc")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, kv_role=role),
        model_config=SimpleNamespace(
            model="org/name", revision=None, hf_config=hf, quantization=None, dtype="float32"
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=caching
        ),
        load_config=SimpleNamespace(load_format="auto"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks // stages,
            pipeline_parallel_size=stages,
            world_size=ranks,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=context_ranks,
            cp_kv_cache_interleave_size=interleave,
            dcp_kv_cache_interleave_size=1,
        ),
    )


def kv_cache_config(num_blocks: int, *specs: Spec, hash_block_size: int | None = None) -> Any:
    """Return the part of ``KVCacheConfig`` that the connector reads, with one group for each spec."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"group.{number}"])
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups, hash_block_size=hash_block_size)
