"""What travels between vLLM's processes, in the wrappings that vLLM asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierstore.adapters.vllm.messages import Hello, Orders, Report

TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""How vLLM is told by request what has come and what has failed; None before 0.32."""

Hybrid: Any = object if TransferResults is None else base.SupportsHMA
"""Claims several KV groups, where a failed load can be told in spite of them."""


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What travels to the workers with each step."""

    orders: Orders


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What travels back."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two ranks."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merged(other.report))


@dataclass
class HelloMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker says once."""

    hello: Hello
