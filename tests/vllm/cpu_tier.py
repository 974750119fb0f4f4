"""vLLM's CPU tier for engines without a GPU: the worker copies within host memory. Only vLLM imports this module."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """A worker that completes each job when it is submitted. A chunk is one block."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._tensors = kv_caches.tensors
        self._views = [region.create_next_worker_view(t.page_size_bytes) for t in self._tensors]
        self._done: list[Any] = []

    def submit_store(self, job_id: int, source: Any, target: Any, **more: Any) -> bool:
        for block, chunk in zip(source.block_ids, target.chunk_ids, strict=True):
            for tensor, view in zip(self._tensors, self._views, strict=True):
                view[chunk].copy_(tensor.tensor[block])
        return self._end(job_id)

    def submit_load(self, job_id: int, source: Any, target: Any, **more: Any) -> bool:
        for block, chunk in zip(target.block_ids, source.chunk_ids, strict=True):
            for tensor, view in zip(self._tensors, self._views, strict=True):
                tensor.tensor[block].copy_(view[chunk])
        return self._end(job_id)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        pass

    def shutdown(self) -> None:
        self._views.clear()
        self._region.cleanup()

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, True, 1, 1e-3))
        return True


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's ``TieringOffloadingSpec`` with a ``CpuWorker``."""

    def get_worker(self, kv_caches: Any) -> CpuWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CpuWorker(kv_caches, region)
