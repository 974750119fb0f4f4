"""``TierStoreConnector``: vLLM's interface to the two halves. It only translates.

Also defines the wrappers in which vLLM sends ``messages`` between its processes. Tested with vLLM 0.32; vLLM
calls its connector interface experimental.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.config import Deployment
from tierstore.adapters.vllm.hit import local_tokens
from tierstore.adapters.vllm.messages import Hello, Orders, Report
from tierstore.adapters.vllm.requests import StepReader
from tierstore.adapters.vllm.scheduler import SchedulerHalf
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""vLLM's class to report loaded and failed requests; None before 0.32."""

Hybrid: Any = object if TransferResults is None else base.SupportsHMA
"""Base class that declares support for several KV groups, if failed loads can be reported with several."""


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """The message to the workers in each step."""

    orders: Orders


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The message of the workers to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine the messages of two ranks."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merged(other.report))


@dataclass
class HelloMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The first message of a worker."""

    hello: Hello


class TierStoreConnector(KVConnectorBase_V1, Hybrid):  # type: ignore[misc]
    """KV blocks in host memory and on NVMe: checked, bounded, and available after a restart.

    ``kv_connector_extra_config`` has ``config``, the path of a YAML file or its content as a mapping, and the
    fields of ``config.Settings``. Requests wait for their loads while others run; pages that cannot be loaded
    are computed.

    Layers with full attention, sliding windows and local chunks have KV groups of their own (``SupportsHMA``)
    from vLLM 0.32 on, where a failed load can be reported per request. Earlier versions put them into one
    group.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Open one half. ConfigError if the connector does not support the configuration or this vLLM."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._deployment = Deployment.of(vllm_config, self._kv_transfer_config, kv_cache_config)
        self._worker: WorkerHalf | None = None
        self._failed: dict[str, tuple[int, ...]] = {}
        self._bad: set[int] = set()
        self._orders = Orders()
        if role == KVConnectorRole.SCHEDULER:
            self._deployment.tell(self._kv_transfer_config)
            self._steps = StepReader(self._deployment.groups)
            self._pool: Any = None
            self._scheduler = SchedulerHalf.of(self._deployment)

    # -- about this connector -----------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a cache may lose pages."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Ask vLLM before 0.32 to keep all layers of a block together, if attention allows."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the KV layout to use: the user's choice, or on a GPU all layers of a block together (vLLM 0.32 and
        later).
        """
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        layout: str | None = extra.get("layout")
        return layout or compat.preferred_layout()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, because the connector does nothing between layers."""
        return False

    # -- scheduler ----------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Process the workers' first messages. ConfigError unless all of them sent one."""
        hellos = [m.hello for m in metadata.values() if isinstance(m, HelloMetadata)]
        ranks = self._deployment.world_size
        if len(hellos) != ranks:
            raise ConfigError(f"only {len(hellos)} of {ranks} workers have started")
        self._scheduler.meet(sorted(hellos, key=lambda hello: hello.rank))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Remember vLLM's block pool, which is only asked which hashes it holds."""
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Start to prefetch the pages of a queued request that only the disk holds."""
        local = 0
        if self._scheduler.looks_ahead and self._pool is not None:
            local = local_tokens(self._pool, self._deployment.groups, request.block_hashes)
        self._scheduler.arrived(request, local)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens that can be loaded asynchronously; None: ask again, pages are being read
        from disk.
        """
        tokens = self._scheduler.offer(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the request's blocks, into which ``num_external_tokens`` tokens are to be loaded."""
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return how many of the tokens being loaded come from memory, and how many from disk."""
        return compat.hit_sources(self._scheduler.sources(request, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the orders of one step."""
        return Metadata(self._scheduler.orders(self._steps.of(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' reports. Successfully loaded requests are added to ``finished_recving``."""
        meta = connector_output.kv_connector_worker_meta
        loaded = self._scheduler.heard(meta.report if isinstance(meta, WorkerMetadata) else None)
        if loaded:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | loaded

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Like ``request_finished_all_groups``, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that the request has ended. Its blocks may be freed at once.

        Blocks that are stored later are protected from being reused before.
        """
        self._steps.forget(request.request_id)
        self._scheduler.finished(request.request_id, block_ids, request.num_computed_tokens)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Return whether the engine should keep stepping without a request, because pages are being written."""
        return self._scheduler.pending

    def take_events(self) -> Iterable[Any]:
        """Return events of blocks that were added to or removed from memory (CPU) or disk (STORAGE)."""
        changes = self._scheduler.take_events()
        return compat.kv_events(changes) if changes else ()

    def get_kv_connector_stats(self) -> Any:
        """Return recent counts; None if there are none, and on workers."""
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        found = self._scheduler.figures()
        return None if found is None else self.build_kv_connector_stats(found)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Return the same counts in vLLM's form."""
        from tierstore.adapters.vllm.prometheus import TierStoreStats

        return TierStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """Return the metrics ``vllm:tierstore_*``."""
        from tierstore.adapters.vllm.prometheus import TierStorePrometheus

        return TierStorePrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Forget everything stored so far, for this process and the next.

        vLLM calls it before it sleeps. Returns False while a copy may access KV memory, which is about to be freed;
        call it again.
        """
        if self.role != KVConnectorRole.SCHEDULER:
            return True
        self._scheduler.reset()
        here = self._workers_here()
        if here:
            return all(worker.rest() for worker in here)
        # A served engine has stepped until no copy was in flight; one in its caller's process has not.
        return self._scheduler.at_rest or not self._deployment.memory_may_go

    # -- worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the tiers with the engine's tensors by layer. ConfigError as for ``TierStore.open``."""
        self._open(list(kv_caches.values()))

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Open the tiers with all layers in one tensor (vLLM before 0.32)."""
        self._open([kv_cache])

    def unregister_kv_caches(self) -> None:
        """Release the engine's memory until it wakes up (vLLM 0.33). TimeoutError while a copy accesses it."""
        if self._worker is not None and not self._worker.rest():
            raise TimeoutError(
                "copies out of the engine's KV memory have not ended, so it cannot go away yet"
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what this worker has opened."""
        return None if self._worker is None else HelloMetadata(self._worker.hello)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """End copies out of the blocks that the step writes, before it may write any."""
        assert isinstance(kv_connector_metadata, Metadata)
        self._orders = kv_connector_metadata.orders
        if self._worker is not None:
            self._worker.begin(self._orders)
            self._failed |= self._orders.failed

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads, which run in parallel with it."""
        if self._worker is not None:
            self._worker.go()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs once all of it is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored as a whole, after the step."""

    def wait_for_save(self) -> None:
        """Queue copies of the blocks that the launched step fills. Does not wait."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose loads have failed. The scheduler's half reports those that succeeded."""
        self._bad = {block for blocks in self._failed.values() for block in blocks}
        failed, self._failed = set(self._failed), {}
        return None, failed or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return failed loads in the form of vLLM 0.32 and later.

        With several groups vLLM computes such a request from its beginning.
        """
        _, failed = self.get_finished(finished_req_ids)
        failed = failed or set()
        return TransferResults(set(), failed, set() if self._deployment.groups.whole else failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads left unfilled, if there is one group with full attention."""
        bad, self._bad = self._bad, set()
        return bad if self._deployment.groups.whole else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the report of this worker."""
        if self._worker is None:
            return None
        report = self._worker.report()
        if report is None and self._orders.answer:
            report = self._worker.empty_report()
        return None if report is None else WorkerMetadata(replace(report, number=self._orders.number))

    # -- both ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check every invariant. AssertionError names the first violation."""
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.check()
        elif self._worker is not None:
            self._worker.check()

    def shutdown(self) -> None:
        """Close this half. Writes to disk in flight are completed."""
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        elif self._worker is not None:
            self._worker.close()

    # -- inside -------------------------------------------------------------------------------------------------

    _open_half = staticmethod(WorkerHalf.open)

    def _workers_here(self) -> list[WorkerHalf]:
        """Return the workers' halves in this process: all of them, or none."""
        found = compat.connectors_here()
        return [c._worker for c in found if isinstance(c, TierStoreConnector) and c._worker is not None]

    def _rank(self) -> int:
        from vllm.distributed.parallel_state import get_tp_group

        rank: int = get_tp_group().rank_in_group
        return rank

    def _open(self, tensors: list[torch.Tensor]) -> None:
        rank = self._rank()
        config, kv_layout = self._deployment.of_rank(tensors, rank)
        self._worker = self._open_half(config, kv_layout, rank)
        if self._deployment.replica is not None:
            self._worker.idle_s = 0.0  # steps of the other engines wait for this one
