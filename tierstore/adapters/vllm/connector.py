"""``TierStoreConnector``: implements vLLM's connector interface by delegating to the two halves.

This module also defines the wrappers that carry ``messages`` between vLLM's processes. vLLM marks its connector
interface as experimental; ``compat`` defines the range of tested versions.
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
from tierstore.adapters.vllm.config import Deployment, caching_is_on, tell_of_no_caching
from tierstore.adapters.vllm.hit import local_tokens
from tierstore.adapters.vllm.messages import Orders, Report
from tierstore.adapters.vllm.replicas import VllmPeers, shared_memory
from tierstore.adapters.vllm.requests import StepReader
from tierstore.adapters.vllm.scheduler import SchedulerHalf
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.build import host_nbytes
from tierstore.errors import ConfigError
from tierstore.page import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from tierstore.adapters.vllm.messages import Hello
    from tierstore.host.shared_memory import SharedMemory

TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""vLLM's class for reporting loaded and failed requests. None before vLLM 0.32."""

Hybrid: Any = object if TransferResults is None else base.SupportsHMA
"""Base class that declares support for several KV groups.

It is ``object`` before vLLM 0.32, where a failed load cannot be reported if there are several groups.
"""


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries the scheduler's orders for one step to the workers."""

    orders: Orders


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries the reports of one or more workers to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine two messages from different ranks into one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.merged(other.report))


class TierStoreConnector(KVConnectorBase_V1, Hybrid):  # type: ignore[misc]
    """vLLM connector that stores KV blocks in host memory and on NVMe.

    Blocks on disk are checksummed, and are found again after a restart. ``kv_connector_extra_config`` contains
    ``config`` (the path of a YAML file, or a mapping with the same contents) and the other fields of
    ``config.Settings``. While a request waits for its load, other requests run. Pages that cannot be loaded are
    computed.

    From vLLM 0.32 on, layers with full attention, sliding windows and local chunks are in separate KV groups
    (``SupportsHMA``), because failed loads can be reported per request. Earlier versions use a single group
    for all of them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Create the half of the connector for ``role``. A worker opens its tiers in ``register_kv_caches``.

        Raises:
            ConfigError: The connector does not support the configuration or this version of vLLM.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._deployment = Deployment.of(vllm_config, self._kv_transfer_config, kv_cache_config)
        self._vllm_config = vllm_config
        if TransferResults is None and self._deployment.groups.states:
            raise compat.too_old_for(compat.RECURRENT)
        if TransferResults is None and self._deployment.pins:
            raise ConfigError(
                "this model's layers keep KV in several precisions, so vLLM's model runner V2 clears blocks that are "
                "still being stored; set VLLM_USE_V2_MODEL_RUNNER=0, or leave kv_cache_dtype_skip_layers empty"
            )
        if TransferResults is None and self._deployment.heads is not None:
            raise compat.no_codec()
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
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Return False, so that hits may start before the last attention block that vLLM has cached.

        With True, vLLM would only ask for tokens after that block. Most states are stored for earlier boundaries,
        and would not be found. With False, attention blocks that vLLM has cached may be loaded again.
        """
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Return True: vLLM should store all layers of a block together, if the attention backend can.

        Only vLLM before 0.32 reads this property.
        """
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the KV layout to request from vLLM. None lets vLLM choose.

        The user's setting ``layout`` takes precedence. Without it, the result is the layout that stores all
        layers of a block together, or None without a GPU or before vLLM 0.32.

        Raises:
            ConfigError: The model has recurrent states or layers that share KV, and this version of vLLM is too old.
        """
        if TransferResults is None:
            compat.require_new_enough(vllm_config)  # vLLM's own error, raised later, names no remedy
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        layout: str | None = extra.get("layout")
        return layout or compat.preferred_layout()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False, because the connector does nothing between layers."""
        return False

    # -- scheduler ----------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Do nothing: the workers' first messages come with the first step.

        vLLM's handshake has one message per worker, which another connector under ``MultiConnector`` may need.
        """

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Do nothing. See ``set_xfer_handshake_metadata``."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep a reference to vLLM's block pool, to look up cached block hashes and to pin blocks if necessary."""
        self._pool = gpu_block_pool
        if self._deployment.pins:
            self._scheduler.pins = compat.BlockPins(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Register a queued request, and start to prefetch those of its pages that are only on disk."""
        local = 0
        if self._scheduler.looks_ahead and self._pool is not None:
            local = local_tokens(self._pool, self._deployment.groups, request.block_hashes)
        self._scheduler.arrived(request, local)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` can be loaded, and whether there are any.

        vLLM takes the second element as "load asynchronously". The first element is None if vLLM should ask again
        later: pages are being read from disk, or the workers have not sent their first messages.
        """
        tokens = self._scheduler.offer(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Queue the load of ``num_external_tokens`` tokens into the request's blocks.

        If the number is 0, only record the blocks: the request fills them itself, or another connector under
        ``MultiConnector`` does.
        """
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        else:
            self._scheduler.granted(request.request_id, blocks)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return how many of the tokens being loaded come from memory and how many from disk."""
        return compat.hit_sources(self._scheduler.sources(request, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the workers' orders for the step that is about to run."""
        overwritten = compat.overwritten_blocks(scheduler_output)
        return Metadata(self._scheduler.orders(self._steps.of(scheduler_output), overwritten))

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' reports. Add the requests whose loads succeeded to ``finished_recving``.

        Raises:
            ConfigError: After the first step, some workers have not reported, or the workers' pages differ.
        """
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, WorkerMetadata) else None
        if report is not None and report.hellos:
            self._meet(report.hellos)
        loaded = self._scheduler.heard(report)
        if loaded:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | loaded

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request if there is one KV group. See ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request. vLLM may free its blocks immediately.

        Blocks that are yet to be stored stay tracked. If vLLM reuses such a block before its copy has started, the
        block is not stored. If the copy is in flight, it completes before the block is overwritten.
        """
        self._steps.forget(request.request_id)
        self._scheduler.finished(request.request_id, block_ids, request.num_computed_tokens)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Return whether the engine should keep stepping although there are no requests.

        It should do so while transfers are in flight or the workers' first messages are expected.
        """
        return self._scheduler.pending

    def take_events(self) -> Iterable[Any]:
        """Return one event per block that memory (CPU) or disk (STORAGE) has gained or lost since the last call."""
        changes = self._scheduler.take_events()
        return compat.kv_events(changes) if changes else ()

    def get_kv_connector_stats(self) -> Any:
        """Return the metrics collected since the previous call, or None if nothing is new. Always None in workers."""
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        found = self._scheduler.figures()
        return None if found is None else self.build_kv_connector_stats(found)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Return ``data``, metrics by name, as an object of the class that vLLM expects."""
        from tierstore.adapters.vllm.prometheus import TierStoreStats

        return TierStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """Return the Prometheus metrics ``vllm:tierstore_*``."""
        from tierstore.adapters.vllm.prometheus import TierStorePrometheus

        return TierStorePrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Forget all pages stored so far, in host memory and on disk.

        vLLM calls this before it sleeps. Return False if a copy may still access KV memory that vLLM is about to
        free. In this case, vLLM must call again before it frees the memory.
        """
        if self.role != KVConnectorRole.SCHEDULER:
            return True
        self._scheduler.reset()
        here = self._workers_here()
        if here:
            return all(worker.rest() for worker in here)
        # The workers are in other processes, as in a served engine, which keeps stepping until no copy is in
        # flight. An engine in its caller's process does not step by itself, so its workers waited above.
        return self._scheduler.at_rest or not self._deployment.memory_may_go

    # -- worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]) -> None:
        """Open the tiers with the engine's tensors: one per layer, or one per part of a layer's state.

        Raises:
            ConfigError: See ``TierStore.open``.
        """
        parts = (found if isinstance(found, list | tuple) else [found] for found in kv_caches.values())
        self._open([tensor for found in parts for tensor in found])

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Open the tiers with a single tensor for all layers (vLLM before 0.32)."""
        self._open([kv_cache])

    def unregister_kv_caches(self) -> None:
        """Wait until no copy accesses the engine's KV memory. vLLM 0.33 then frees the memory and goes to sleep.

        Raises:
            TimeoutError: A copy still accesses the memory after 30 s.
        """
        if self._worker is not None and not self._worker.rest():
            raise TimeoutError(
                "copies from or to the engine's KV memory are still in flight; call unregister_kv_caches again before "
                "you free that memory"
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return None. See ``set_xfer_handshake_metadata``."""
        return None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for copies that read blocks which the step will overwrite. vLLM calls this before each step."""
        assert isinstance(kv_connector_metadata, Metadata)
        self._orders = kv_connector_metadata.orders
        if self._worker is not None:
            self._worker.begin(self._orders)
            self._failed |= self._orders.failed

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads. They run concurrently with the step."""
        if self._worker is not None:
            self._worker.go()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request only runs once all of its pages are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        """Queue copies of the blocks that the launched step fills. Despite its name, the method does not wait."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose sends have finished, and those whose loads have failed since the last call.

        The first result is None, because nothing is sent. ``get_block_ids_with_load_errors`` then returns the blocks of
        the failed loads. The scheduler half reports the successful loads.
        """
        self._bad = {block for blocks in self._failed.values() for block in blocks}
        failed, self._failed = set(self._failed), {}
        return None, failed or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads have failed since the last call, for vLLM 0.32 and later.

        Unless the only group has full attention, vLLM computes these requests from the start.
        """
        _, failed = self.get_finished(finished_req_ids)
        failed = failed or set()
        return TransferResults(set(), failed, set() if self._deployment.groups.whole else failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads did not fill.

        The result is empty unless the only group has full attention.
        """
        bad, self._bad = self._bad, set()
        return bad if self._deployment.groups.whole else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this worker's report on the step, or None if there is nothing to report."""
        if self._worker is None:
            return None
        report = self._worker.report()
        if report is None and (self._orders.answer or self._orders.hello):
            report = self._worker.empty_report()
        if report is None:
            return None
        hellos = (self._worker.hello,) if self._orders.hello else ()
        return WorkerMetadata(replace(report, number=self._orders.number, hellos=hellos))

    # -- both ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all invariants. Raises AssertionError for the first violation."""
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.check()
        elif self._worker is not None:
            self._worker.check()

    def shutdown(self) -> None:
        """Close this half. Disk writes in flight are completed."""
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        elif self._worker is not None:
            self._worker.close()

    # -- inside -------------------------------------------------------------------------------------------------

    _open_half = staticmethod(WorkerHalf.open)

    def _meet(self, hellos: Sequence[Hello]) -> None:
        ranks = self._deployment.world_size
        if len(hellos) != ranks:
            raise ConfigError(
                f"only {len(hellos)} of {ranks} workers have started; see the logs of the others"
            )
        if self._deployment.caching and not all(hello.caching for hello in hellos):
            tell_of_no_caching()
        self._scheduler.meet(sorted(hellos, key=lambda hello: hello.rank))

    def _workers_here(self) -> list[WorkerHalf]:
        """Return the worker halves in this process: all of them, or none."""
        found = compat.connectors_here()
        return [c._worker for c in found if isinstance(c, TierStoreConnector) and c._worker is not None]

    def _rank(self) -> int:
        return compat.worker_rank(self._stage())

    def _stage(self) -> int:
        from vllm.distributed.parallel_state import get_pp_group

        stage: int = get_pp_group().rank_in_group
        return stage

    def _shared_memory(self, nbytes: Callable[[], int]) -> SharedMemory | None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return shared_memory(VllmPeers(get_tp_group(), get_pp_group()), nbytes)

    def _open(self, tensors: list[torch.Tensor]) -> None:
        rank = self._rank()
        replicas, shared = self._deployment.replicas, None
        config, kv_layout = self._deployment.of_rank(tensors, rank, replicas)
        if replicas > 1:
            layout, once = PageLayout.of(kv_layout.spec), config
            shared = self._shared_memory(lambda: host_nbytes(once, layout))
        if shared is None and replicas > 1:
            replicas = 1
            config, kv_layout = self._deployment.of_rank(tensors, rank)
        self._worker = self._open_half(config, kv_layout, rank, replicas, shared)
        caching = caching_is_on(self._vllm_config)
        self._worker.hello = replace(self._worker.hello, stage=self._stage(), caching=caching)
        if self._deployment.replica is not None:
            # Data-parallel engines step together, so a wait in one of them would delay the others.
            self._worker.idle_s = 0.0


compat.register("TierStoreConnector", "tierstore.adapters.vllm")
