"""What travels between vLLM's processes, in the wrappings that vLLM asks for."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierstore.adapters.vllm.messages import Hello, Orders, Report


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
